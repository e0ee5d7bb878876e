"""Commands that are killed while they write leave no part of a result, and the next one clears what they left."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from echograph.ir import serde
from echograph.ir.chakra.writer import write_chakra

pytestmark = pytest.mark.torch

COMMAND = """
import os, signal, sys
from echograph.cli.app import run
from echograph.cli.echoc import app
from echograph.ir import files
from echograph.ir.chakra import writer as chakra
def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "kill":
    files._bytes = kill  # the first piece of a file
    chakra._Writer._groups = kill  # after the traces of all ranks
sys.argv = ["echoc", *sys.argv[2:]]
run(app, "echoc")
"""
SOURCES = {
    "export chakra": ("export", "{job}", "--to", "chakra"),
    "export svg": ("export", "{job}", "--to", "svg"),
    "import": ("import", "chakra", "{traces}"),
    "annotate": ("annotate", "{job}"),
    "lower": ("lower", "{step}", "--gpus", "8"),
    "compile": ("compile", "--model", "gpt2", "--batch-size", "1", "--seq-len", "8"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "compile" else name for name in SOURCES]
)
def test_a_killed_command_leaves_no_part(
    name: str, job_graph: Path, graph: Path, tmp_path: Path, warm: Path
) -> None:
    places = {"job": job_graph, "step": graph, "traces": tmp_path / "traces"}
    if name == "import":
        write_chakra(serde.load(job_graph), places["traces"], device="h100-sxm")
    (tmp_path / "made").mkdir()
    words = [word.format(**places) for word in SOURCES[name]]
    command = [*words, "-o", str(tmp_path / "made" / "out")]
    killed = subprocess.run([warm / "python", "-c", COMMAND, "kill", *command], check=False, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    (left,) = (tmp_path / "made").iterdir()
    assert left.name.startswith(".out.echograph-")
    subprocess.run([warm / "python", "-c", COMMAND, "", *command], check=True, capture_output=True)
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["out"]

"""The lines of the README's section on use run in order as they stand, in a folder of the examples alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from echograph.models import model_names

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TIMEOUT_S = 600
MADE = re.compile(r"(?:-o|--dir|--html) (\S+)|model\.py (\S+\.onnx)")
READ = re.compile(r"(?<![\w./-])[\w./-]+\.(?:pb|json|toml|csv|py|onnx|log|html)\b")


def lines(block: int = 0) -> list[str]:
    """The commands of one block of the section, without what is said of them."""
    section = README[README.index("\n## Use\n") :]
    text = re.findall(r"```sh\n(.*?)\n```", section, re.DOTALL)[block]
    return [re.split(r"\s+# ", line)[0] for line in text.splitlines()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def test_each_file_is_an_example_or_made_by_an_earlier_line(folder: Path) -> None:
    made: set[str] = {"profiles/ours.toml"}
    for line in lines():
        now = {name for found in MADE.findall(line) for name in found if name}
        for name in READ.findall(line):
            assert name in made | now or (folder / name).exists(), f"{line}: {name} is made by no earlier line"
        made |= now
    assert len(lines()) > 25


def test_the_zoo_is_as_large_as_is_said() -> None:
    assert f"# {len(model_names())} models, none needs a download" in README


CHEAP = ("echoc models", "echosim clusters", "echoprof fit --nccl-tests")


@pytest.mark.parametrize("line", [line for line in lines() if line.startswith(CHEAP)])
def test_a_cheap_line_runs(line: str, folder: Path, warm: Path) -> None:
    run(line, folder, warm)


@pytest.mark.slow
def test_the_lines_run_in_order(folder: Path, warm: Path) -> None:
    for line in lines():
        run(line, folder, warm)
    assert (folder / "page.html").exists() and (folder / "report.html").exists()


@pytest.mark.slow
def test_the_lines_of_onnx_run(folder: Path, warm: Path) -> None:
    pytest.importorskip("onnxscript", reason="needs the [onnx] extra")
    onnx = [line for line in lines(1) if "onnx" in line]
    assert len(onnx) == 2
    for line in onnx:
        run(line, folder, warm)


def run(line: str, folder: Path, programs: Path) -> None:
    # torchrun lies beside the interpreter, whether or not its environment is activated.
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {line}"],
        cwd=folder, env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{line}: {done.stderr}"

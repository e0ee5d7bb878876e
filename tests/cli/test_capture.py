"""`echoc capture`: from a script to a job that verifies, simulates and exports."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = Path(__file__).parents[1] / "frontend" / "scripts" / "programs"
pytestmark = pytest.mark.torch


def test_a_script_becomes_a_job(cli: Any, warm: Path, tmp_path: Path) -> None:
    job = tmp_path / "job.pb"
    asked = ("--script", PROGRAMS / "ddp.py", "--world-size", "8", "-o", job, "--json")
    made = subprocess.run(
        [warm / "echoc", "capture", "torch", *asked, "--", "--width", "64", "--depth", "2"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    told = json.loads(made.stdout)
    assert told["mesh"] == {"dp": 8}
    assert any("ddp.py" in note and "1 stands for it" in note for note in told["notes"])
    assert "step 0 loss 1.000" in made.stderr
    assert cli("echoc", "check", job).status == 0
    assert cli("echoc", "show", job).status == 0
    assert cli("echosim", "run", job, "--json").json()["step_time_s"] > 0
    assert cli("echoc", "export", job, "--to", "chakra", "-o", tmp_path / "traces").status == 0


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("torch", "--script", "none.py"), "echoc: none.py: no such file: give a Python script"),
        (("jax", "--script", "none.py"), "echoc: unknown framework 'jax'"),
        (("torch", "--script", "none.py", "--ranks", "x"), "echoc: --ranks x: give ranks with commas"),
        (("torch", "--script", "none.py", "--ranks", "9"), "echoc: --ranks 9: the world has ranks 0 to 7"),
        (("torch", "--script", "none.py", "--config", "a.json"), "echoc: --config is for DeepSpeed"),
    ],
)
def test_wrong_use_is_one_line(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    refused = cli("echoc", "capture", *arguments)
    assert refused.status in (1, 2)
    assert refused.err.startswith(line)
    assert refused.err.count("\n") == 1

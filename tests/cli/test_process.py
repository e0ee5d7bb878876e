"""The installed commands as processes: pipes, and what only a real exit shows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
pytestmark = pytest.mark.skipif(not (BIN / "echosim").exists(), reason="the commands are not installed")


def shell(command: str, programs: Path = BIN) -> subprocess.CompletedProcess[str]:
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    script = f"set -o pipefail; {command}"
    # Without a buffer nothing is left to fail at exit.
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, check=False, env={**buffered, "PATH": path}
    )


@pytest.mark.parametrize("command", ["echoc models", "echosim clusters --json"])
def test_a_reader_that_leaves_early_is_no_error(command: str) -> None:
    done = shell(f"{command} | head -1")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 1


def test_a_reader_that_leaves_a_long_text_early_is_no_error(graph: Path) -> None:
    done = shell(f"echoc text --unfold {graph} | head -1")
    assert (done.returncode, done.stderr) == (0, "")
    done = shell(f"echosim run {graph} | true")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_full_disk_is_one_line(graph: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    done = shell(f"echosim run {graph} --json -o /dev/full")
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["echosim: cannot write /dev/full: No space left on device"]
    done = shell(f"echosim run {graph} > /dev/full")
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["echosim: cannot write the result: no space left"]


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    plain, debug = shell(f"echosim run {tmp_path}/no.pb"), shell(f"echosim --debug run {tmp_path}/no.pb")
    assert plain.returncode == debug.returncode == 1
    assert "Traceback" not in plain.stderr
    assert "Traceback" in debug.stderr


def test_an_interrupt_ends_with_130(tmp_path: Path, warm: Path) -> None:
    (tmp_path / "slow.py").write_text("def build():\n    raise KeyboardInterrupt\n")
    done = shell(f"echoc compile -m {tmp_path}/slow.py:build -o {tmp_path}/graph.pb", warm)
    # On a busy machine the stages that it came through stand before.
    assert (done.returncode, done.stderr.splitlines()[-1]) == (130, "echoc: interrupted")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "graph.pb").exists()


@pytest.mark.skipif(os.name != "posix", reason="signals are POSIX's")
@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("echosim clusters >&-", "echosim: cannot write the result: the standard output is closed"),
        ("echosim clusters --json >&-", "echosim: cannot write the result: the standard output is closed"),
    ],
)
def test_a_closed_output_is_one_line(command: str, line: str) -> None:
    done = shell(command)
    assert (done.returncode, done.stderr.splitlines()) == (1, [line])


def test_a_closed_error_stream_is_no_error(graph: Path) -> None:
    done = shell(f"echosim run {graph} --gpus 8 2>&-")
    assert done.returncode == 0
    assert "step time" in done.stdout
    assert shell("echosim run no.pb 2>&-").returncode == 1

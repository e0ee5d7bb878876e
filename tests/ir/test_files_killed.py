"""Files and folders appear whole or not at all, and what a killed process leaves is cleared by the next one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from echograph.errors import OutputError
from echograph.ir.files import whole_folder, write_whole

KILLED = """
import os, signal, sys
from pathlib import Path
from echograph.ir.files import whole_folder, write_whole
target = Path(sys.argv[2])
def pieces():
    yield b"one"
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "file":
    write_whole(target, pieces())
with whole_folder(target, "mark" if sys.argv[1] == "marked" else "") as folder:
    for number in range(300):
        (folder / str(number)).write_text("x")
    write_whole(folder / "mark", pieces())
"""


def killed(kind: str, target: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, kind, str(target)], check=False)
    assert done.returncode == -signal.SIGKILL


def write(kind: str, target: Path) -> None:
    if kind == "file":
        write_whole(target, ["whole"])
        return
    with whole_folder(target, "mark" if kind == "marked" else "") as folder:
        (folder / "mark").write_text("whole")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("kind", ["file", "marked", "added"])
def test_a_killed_process_leaves_one_thing_and_the_next_takes_it_away(kind: str, tmp_path: Path) -> None:
    target = tmp_path / "out"
    killed(kind, target)
    assert not target.exists()
    (left,) = names(tmp_path)
    assert left.startswith(".out.echograph-")
    write(kind, target)
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("kind", ["file", "marked", "added"])
def test_a_killed_process_leaves_an_earlier_result_alone(kind: str, tmp_path: Path) -> None:
    target = tmp_path / "out"
    write(kind, target)
    killed(kind, target)
    assert (target if kind == "file" else target / "mark").read_text() == "whole"
    if kind != "file":
        assert names(target) == ["mark"]


def test_what_is_being_written_and_what_others_have_is_left_alone(tmp_path: Path) -> None:
    """Another process at the same target, and files that only look like what is left."""
    target = tmp_path / "out"
    (tmp_path / ".out.echograph-mine").mkdir()
    (tmp_path / ".out.echograph-mine" / "notes").write_text("mine")
    with whole_folder(target, "mark") as first, whole_folder(target, "mark") as second:
        (first / "mark").write_text("1")
        (second / "mark").write_text("2")
    assert (target / "mark").read_text() == "1", "the outer one ends last"
    assert names(tmp_path) == [".out.echograph-mine", "out"]


def test_a_folder_that_was_moved_aside_comes_back(tmp_path: Path) -> None:
    """Killed between the two renames of a system that cannot exchange names."""
    left = tmp_path / ".out.echograph-x"
    (left / "old").mkdir(parents=True)
    (left / "old" / "mark").write_text("old")
    (left / "lock").touch()
    with pytest.raises(ValueError, match="no"), whole_folder(tmp_path / "out", "mark"):
        raise ValueError("no")
    assert (tmp_path / "out" / "mark").read_text() == "old"
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_folder_is_replaced(exchanges: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not exchanges:
        monkeypatch.setattr("echograph.ir.files._exchange", lambda *_: False)
    for text in ("1", "2"):
        with whole_folder(tmp_path / "out", "mark") as folder:
            (folder / "mark").write_text(text)
            (folder / text).touch()
    assert names(tmp_path / "out") == ["2", "mark"]
    assert names(tmp_path) == ["out"]


def test_what_is_no_earlier_result_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis").touch()
    with pytest.raises(OutputError, match="it is not empty"), whole_folder(tmp_path / "out", "mark"):
        pass
    with whole_folder(tmp_path / "out") as folder:
        (folder / "deep").mkdir()
        (folder / "deep" / "er").write_text("x")
    assert names(tmp_path / "out") == ["deep", "thesis"]
    assert names(tmp_path) == ["out"]
    assert not os.path.lexists(tmp_path / "new")

"""Commands that run as forks of a process that has imported what they do."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from benchmarks import forked

from echograph import __version__

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork")


def run(*arguments: str, folder: Path, patience_s: float = 600.0, limit_s: float = 600.0) -> forked.Ended:
    return forked.run(
        arguments, folder=folder, environment=dict(os.environ), bytecode=folder / "bytecode", limit_s=limit_s,
        patience_s=patience_s,
    )  # fmt: skip


def test_a_command_ends_as_in_a_process_of_its_own(tmp_path: Path) -> None:
    ended = run("--version", folder=tmp_path)
    assert (ended.status, ended.errors) == (0, "") and ended.out.startswith(f"echograph {__version__}\n")
    ended = run("echoc", "show", "there.pb", folder=tmp_path)
    assert ended.status == 1 and ended.errors.startswith("echoc: there.pb") and ended.cpu_s > 0


def test_a_command_runs_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "there.pb").write_bytes(b"no graph")
    before = Path.cwd()
    ended = run("echoc", "show", "there.pb", folder=tmp_path)
    assert ended.status == 1 and "no such file" not in ended.errors and Path.cwd() == before


def test_a_command_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    assert run("--version", folder=tmp_path, patience_s=0.0).status is None


def test_folders_of_the_process_are_left_to_it(tmp_path: Path) -> None:
    """A command that ends as an interpreter does would remove what this process made for its own time."""
    with tempfile.TemporaryDirectory() as folder:
        assert run("--version", folder=tmp_path).status == 0
        assert Path(folder).is_dir()

"""Compiled code is kept where it can be, and the answer is the same where it cannot."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from echograph.simulator.engine.machine_code import kept, temporary_cache

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.skipif(not hasattr(os, "getuid"), reason="folders of users are POSIX's")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the temporary cache is made; no other can be, not even by root."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setenv("HOME", os.devnull)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    return tmp_path / "temporary" / f"echograph-{os.getuid()}"


def read_only(folder: Path) -> None:
    """A file where Python would make its cache."""
    (folder / "__pycache__").write_text("")


def twice(folder: Path) -> Any:
    """A function of a module in a folder that cannot hold a cache."""
    (folder / "doubled.py").write_text("def twice(x):\n    return 2 * x\n")
    read_only(folder)
    spec = importlib.util.spec_from_file_location("doubled", folder / "doubled.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.twice


def test_what_cannot_be_kept_beside_the_sources_or_at_home_is_kept_for_a_while(
    temporary: Path, tmp_path: Path
) -> None:
    function = twice(tmp_path)
    assert kept(function)(4) == 8
    assert list(temporary.rglob("*.nbi"))
    again = kept(function)
    assert again(4) == 8
    assert sum(again.stats.cache_hits.values()) == 1


def test_what_another_version_kept_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its argument's type has another name since, at the same line."""
    monkeypatch.syspath_prepend(tmp_path)
    source = "from typing import NamedTuple\nclass {0}(NamedTuple):\n    x: int\ndef twice(of): return 2 * of.x\n"
    for name in ("Before", "After"):
        (tmp_path / "versions.py").write_text(source.format(name))
        sys.modules.pop("versions", None)
        importlib.invalidate_caches()
        module = importlib.import_module("versions")
        assert kept(module.twice)(getattr(module, name)(4)) == 8
    assert len(list(tmp_path.rglob("*.nbi"))) == 2


def test_without_a_place_it_is_compiled_and_not_kept(temporary: Path, tmp_path: Path) -> None:
    temporary.write_text("taken")
    assert kept(twice(tmp_path))(4) == 8
    assert not list(tmp_path.rglob("*.nbi"))


def test_a_folder_that_others_can_write_to_is_not_trusted(temporary: Path, tmp_path: Path) -> None:
    assert temporary_cache() == temporary
    assert temporary.stat().st_mode & 0o777 == 0o700
    temporary.chmod(0o777)
    assert temporary_cache() is None
    temporary.rmdir()
    (tmp_path / "other").mkdir(mode=0o700)
    temporary.symlink_to(tmp_path / "other")
    assert temporary_cache() is None


@pytest.mark.slow
@pytest.mark.parametrize("place", ["temporary", "none"])
def test_a_read_only_installation_answers_as_any(temporary: Path, tmp_path: Path, place: str) -> None:
    unwanted = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=unwanted)
    read_only(tmp_path / "src" / "echograph" / "simulator" / "engine")
    if place == "none":
        temporary.write_text("taken")
    words = ["run", ROOT / "examples" / "gpt2.pb", "--gpus", "16", "--ranks", "all", "--jitter", "0.05", "--json"]

    def step_time(sources: Path) -> float:
        done = subprocess.run(
            [sys.executable, "-m", "echograph", "echosim", *words],
            env={**os.environ, "PYTHONPATH": str(sources)}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return float(json.loads(done.stdout)["step_time_s"])

    assert step_time(tmp_path / "src") == step_time(ROOT / "src")
    assert bool(list(tmp_path.rglob("*.nbi"))) == (place == "temporary")

"""Makes the helper beside these tests importable, and lends them jobs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def worker(tmp_path: Path) -> Path:
    """A worker of two GPUs."""
    from profiled_jobs import byteprofile

    return byteprofile(tmp_path / "worker")


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Two workers of two GPUs; the clock of the second is 5,000 us ahead, FW.a on its second GPU 40 us slower."""
    from profiled_jobs import byteprofile

    byteprofile(tmp_path / "job" / "worker0")
    byteprofile(tmp_path / "job" / "worker1", clock=5000, slower=40, worker=1)
    return tmp_path / "job"

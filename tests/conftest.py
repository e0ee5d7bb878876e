"""What all tests share."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Test helpers are plain modules beside the tests that use them.
sys.path.insert(0, str(ROOT / "tests" / "simulator"))


@pytest.fixture(scope="session")
def measured_data() -> Path:
    """The folder of published measurements; not part of the project, so absent on most machines."""
    folder = Path(os.environ.get("ECHOGRAPH_DATA", ROOT.parent / "shared" / "data"))
    if not (folder / "kernels.csv.gz").exists():
        pytest.skip(f"no measured tables at {folder}: set ECHOGRAPH_DATA to check fits against them")
    return folder

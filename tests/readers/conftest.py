"""What the tests of readers in other languages share: the reader, installed beside what it reads."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS / "golden"), str(TESTS / "properties"), str(TESTS / "readers")]

from js import CONFORMANCE, OFFLINE, READER, ROOT, npm  # noqa: E402


@pytest.fixture(scope="session")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the reader with its packages installed and its messages made, beside copies of what it reads."""
    root = tmp_path_factory.mktemp("checkout")
    unwanted = shutil.ignore_patterns("node_modules", "generated", "__pycache__")
    for folder in (READER, CONFORMANCE, Path("proto")):
        shutil.copytree(ROOT / folder, root / folder, ignore=unwanted)
    installed = npm(root / READER, "ci", "--no-audit", "--no-fund")
    if installed.returncode and OFFLINE.search(installed.stderr):
        pytest.skip("the npm registry cannot be reached")
    assert installed.returncode == 0, installed.stderr
    made = npm(root / READER, "run", "generate")
    assert made.returncode == 0, made.stderr
    return root / READER

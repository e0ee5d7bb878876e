"""The reader in JavaScript: where it is, and how its packages are installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
READER = Path("examples", "reader-js")
CONFORMANCE = Path("tests", "golden", "conformance")
OFFLINE = re.compile(r"\b(ENOTFOUND|ECONNREFUSED|ECONNRESET|ETIMEDOUT|EAI_AGAIN)\b")

needs_npm = pytest.mark.skipif(shutil.which("npm") is None, reason="needs Node with npm")


def npm(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["npm", *arguments], cwd=folder, capture_output=True, text=True, check=False, timeout=300
    )

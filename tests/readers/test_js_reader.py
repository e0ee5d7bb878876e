"""A reader in another language, generated from the .proto alone, finds in the conformance files what they hold."""

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

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("npm") is None, reason="needs Node with npm"),
]


def npm(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["npm", *arguments], cwd=folder, capture_output=True, text=True, check=False, timeout=300
    )


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the reader with its packages installed, beside copies of what it reads."""
    root = tmp_path_factory.mktemp("checkout")
    unwanted = shutil.ignore_patterns("node_modules", "generated", "__pycache__")
    for folder in (READER, CONFORMANCE, Path("proto")):
        shutil.copytree(ROOT / folder, root / folder, ignore=unwanted)
    installed = npm(root / READER, "ci", "--no-audit", "--no-fund")
    if installed.returncode and OFFLINE.search(installed.stderr):
        pytest.skip("the npm registry cannot be reached")
    assert installed.returncode == 0, installed.stderr
    return root / READER


def test_the_reader_finds_what_the_conformance_files_hold(reader: Path) -> None:
    checked = npm(reader, "run", "check")
    assert checked.returncode == 0, checked.stderr
    count = len(list((ROOT / CONFORMANCE).glob("*.pb")))
    assert f"{count} conformance files read as expected" in checked.stdout


def test_the_check_can_fail(reader: Path) -> None:
    expectation = reader.parents[1] / CONFORMANCE / "job.json"
    text = expectation.read_text(encoding="utf-8")
    expectation.write_text(text.replace('"ranks": [4, 5, 6, 7]', '"ranks": [4, 5, 7, 6]'), encoding="utf-8")
    try:
        checked = npm(reader, "run", "check")
    finally:
        expectation.write_text(text, encoding="utf-8")
    assert checked.returncode != 0
    assert "job.pb" in checked.stderr


def test_the_lock_file_names_no_registry() -> None:
    assert "://" not in (ROOT / READER / "package-lock.json").read_text(encoding="utf-8")

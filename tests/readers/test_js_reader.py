"""A reader in another language, generated from the .proto alone, finds in the conformance files what they hold."""

from __future__ import annotations

from pathlib import Path

import pytest
from js import CONFORMANCE, READER, ROOT, needs_npm, npm

pytestmark = [pytest.mark.slow, needs_npm]


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

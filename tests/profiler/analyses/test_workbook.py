"""Answers as a workbook: a sheet each, and what is missing from them on one of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from workbooks import sheets

from echograph.errors import OutputError
from echograph.profiler.analyses import workbook
from echograph.profiler.analyses.table import from_rows

pytest.importorskip("xlsxwriter", reason="needs the [report] extra")


def test_a_workbook_holds_the_tables(tmp_path: Path) -> None:
    tables = {
        "stats1": from_rows(("name", "count", "avg_ms"), [("=1+1", 2, 0.25), ("http://a", 3, None)]),
        "diff": from_rows(("name",), [("x",)]),
    }
    workbook.write_workbook(tmp_path / "a.xlsx", tables)
    workbook.write_workbook(tmp_path / "b.xlsx", tables)
    assert (tmp_path / "a.xlsx").read_bytes() == (tmp_path / "b.xlsx").read_bytes()
    assert sheets(tmp_path / "a.xlsx") == {
        "stats1": [["name", "count", "avg_ms"], ["=1+1", "2", "0.25"], ["http://a", "3"]],
        "diff": [["name"], ["x"]],
    }
    with pytest.raises(OutputError, match=r"the ending of a workbook is \.xlsx"):
        workbook.write_workbook(tmp_path / "a.csv", tables)


def test_what_a_sheet_cannot_hold_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workbook, "MAX_ROWS", 3)
    long, other = "a" * 40, "a" * 35 + "B" * 5
    tables = {
        long: from_rows(("x",), [(1,), (2,), (3,), (4,)], ["rank 0: nothing"]),
        other: from_rows(("x",), [("t" * 40_000,)]),
        "in/valid": from_rows(("x",), []),
    }
    workbook.write_workbook(tmp_path / "a.xlsx", tables)
    found = sheets(tmp_path / "a.xlsx")
    assert list(found) == ["a" * 31, "a" * 29 + " 2", "in-valid", "notes"]
    assert found["a" * 31] == [["x"], ["1"], ["2"], ["3"]]
    assert len(found["a" * 29 + " 2"][1][0]) == 32_767
    assert found["notes"][1:] == [
        [long, "rank 0: nothing"],
        [long, "the first 3 of 4 rows"],
        [other, "1 texts are cut to the 32,767 characters of a cell"],
    ]

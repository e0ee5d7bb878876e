"""Answers as a workbook, a sheet each, for spreadsheets."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from datetime import datetime
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from echograph.errors import MissingExtraError, OutputError
from echograph.ir.files import check_writable, write_whole
from echograph.profiler.analyses.table import AnswerTable, from_rows

MAX_ROWS = (1 << 20) - 1
"""Rows of a sheet below its titles."""
# The same tables give the same bytes.
_CREATED = datetime(2000, 1, 1)
_MAX_TEXT, _MAX_NAME, _WIDEST = 32_767, 31, 60
_NO_NAME = re.compile(r"[\[\]:*?/\\]")


def check_workbook(path: Path | None) -> None:
    """Fails before any work where a workbook is asked for that cannot be made.

    Raises:
        MissingExtraError: XlsxWriter is not installed.
        OutputError: the file's ending is another, or it cannot be written.
    """
    if path is None:
        return
    if find_spec("xlsxwriter") is None:
        raise MissingExtraError("XlsxWriter", "report", "a workbook (--xlsx)")
    if path.suffix.lower() != ".xlsx":
        raise OutputError(f"cannot write {path}: the ending of a workbook is .xlsx")
    check_writable(path)


def write_workbook(path: Path | None, sheets: Mapping[str, AnswerTable]) -> None:
    """Writes a workbook with a sheet a table, titles in its first row; and one of notes where tables have any.

    A table without columns has no sheet, only its notes. A table with more rows than a sheet has is written as far
    as that goes, and longer texts than a cell takes are cut there; the notes say both.

    Args:
        path: the file; None where none is asked for.
        sheets: by name, of which 31 characters show.

    Raises:
        MissingExtraError: XlsxWriter is not installed.
        OutputError: the file cannot be written.
    """
    check_workbook(path)
    if path is None:
        return
    from xlsxwriter import Workbook

    content = io.BytesIO()
    notes: list[tuple[str, str]] = []
    # Names are text, whatever they look like: no formulas, no links.
    # Rows go to the disk as they come: a large table needs no memory.
    options = {"constant_memory": True, "strings_to_formulas": False, "strings_to_urls": False}
    with Workbook(content, options) as workbook:
        workbook.set_properties({"created": _CREATED})
        taken: set[str] = set()
        bold = workbook.add_format({"bold": True})
        for name, table in sheets.items():
            missing: list[str] = []
            if table.columns:
                missing = _fill(workbook.add_worksheet(_sheet_name(name, taken)), table, bold)
            notes += [(name, note) for note in (*table.notes, *missing)]
        if notes:
            _fill(
                workbook.add_worksheet(_sheet_name("notes", taken)), from_rows(("analysis", "note"), notes), bold
            )
    write_whole(path, [content.getvalue()])


def _fill(sheet: Any, table: AnswerTable, bold: Any) -> list[str]:
    """Writes a table into a sheet; what is missing there."""
    widths = [len(title) for title in table.columns]
    cut = 0
    for column, title in enumerate(table.columns):
        sheet.write_string(0, column, title, bold)
    for place, row in enumerate(islice(table.rows(), MAX_ROWS), start=1):
        for column, value in enumerate(row):
            if value is None:
                continue
            if isinstance(value, str):
                cut += len(value) > _MAX_TEXT
                value = value[:_MAX_TEXT]
            widths[column] = max(widths[column], len(str(value)))
            sheet.write(place, column, value)
    for column, width in enumerate(widths):
        sheet.set_column(column, column, min(width + 1, _WIDEST))
    sheet.freeze_panes(1, 0)
    missing = [f"the first {MAX_ROWS:,} of {len(table):,} rows"] if len(table) > MAX_ROWS else []
    return missing + ([f"{cut} texts are cut to the {_MAX_TEXT:,} characters of a cell"] if cut else [])


def _sheet_name(name: str, taken: set[str]) -> str:
    """What a sheet may be called: no longer than 31 characters, unlike any other whatever the case."""
    short = _NO_NAME.sub("-", name).strip("'")[:_MAX_NAME] or "sheet"
    number = 1
    while short.lower() in taken:
        number += 1
        ending = f" {number}"
        short = short[: _MAX_NAME - len(ending)] + ending
    taken.add(short.lower())
    return short

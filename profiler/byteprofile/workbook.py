"""Tables as sheets of an XLSX file."""

from __future__ import annotations

import io
from collections.abc import Mapping
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path

from echograph.errors import DataError, MissingExtraError, OutputError
from echograph.ir.files import write_whole
from echograph.profiler.analyses.table import Table

_MAX_ROWS = 1 << 20
# The same tables give the same bytes.
_CREATED = datetime(2000, 1, 1)


def check_workbook(path: Path) -> None:
    """Fails before any work where a workbook cannot be made.

    Raises:
        MissingExtraError: XlsxWriter is not installed.
        OutputError: the file's ending is another.
    """
    if find_spec("xlsxwriter") is None:
        raise MissingExtraError("XlsxWriter", "report", "a workbook (--xlsx)")
    if path.suffix.lower() != ".xlsx":
        raise OutputError(f"cannot write {path}: the ending of a workbook is .xlsx")


def write_workbook(path: Path, sheets: Mapping[str, Table]) -> None:
    """Writes a workbook with a sheet a table, titles in its first row.

    Args:
        path: the file.
        sheets: by name.

    Raises:
        MissingExtraError: XlsxWriter is not installed.
        DataError: a table has more rows than a sheet.
        OutputError: the file cannot be written.
    """
    check_workbook(path)
    from xlsxwriter import Workbook

    content = io.BytesIO()
    # Names are text, whatever they look like: no formulas, no links.
    options = {"in_memory": True, "strings_to_formulas": False, "strings_to_urls": False}
    with Workbook(content, options) as workbook:
        workbook.set_properties({"created": _CREATED})
        for name, table in sheets.items():
            if len(table) >= _MAX_ROWS:
                raise DataError(
                    f"{path}: a sheet holds {_MAX_ROWS - 1} rows and '{name}' has {len(table)}: use --head"
                )
            sheet = workbook.add_worksheet(name)
            for column, title in enumerate(table.columns):
                sheet.write_string(0, column, title)
            for place, row in enumerate(table.rows(), start=1):
                for column, value in enumerate(row):
                    if value is not None:
                        sheet.write(place, column, value)
    write_whole(path, [content.getvalue()])

"""Tables as sheets of an XLSX file, and settings side by side as a chart of bars in three dimensions."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path

from echograph.errors import DataError, MissingExtraError, OutputError
from echograph.ir.files import write_whole
from echograph.profiler.analyses.table import AnswerTable
from echograph.profiler.byteprofile.statistics import Setting

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


def write_workbook(path: Path, sheets: Mapping[str, AnswerTable]) -> None:
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


FORMATS = ("png", "svg", "pdf")


def check_plot(path: Path) -> None:
    """Fails before any work where a chart cannot be drawn.

    Raises:
        MissingExtraError: matplotlib is not installed.
        OutputError: the file's ending is none of `FORMATS`.
    """
    if path.suffix.removeprefix(".").lower() not in FORMATS:
        raise OutputError(f"cannot write {path}: the ending is the format: give one of .{', .'.join(FORMATS)}")
    if find_spec("matplotlib") is None:
        raise MissingExtraError("matplotlib", "report", "a chart (--plot)")


def draw_settings(settings: Sequence[Setting], output: Path) -> None:
    """Draws the average of every operation (x, a colour a category) in every setting (y).

    Args:
        settings: one a row of bars.
        output: the picture.

    Raises:
        MissingExtraError: matplotlib is not installed.
        OutputError: the file cannot be written.
    """
    check_plot(output)
    import matplotlib
    from matplotlib.figure import Figure

    places: dict[tuple[str, str], int] = {}
    keys = {(category, name) for one in settings for category, names in one.averages.items() for name in names}
    for key in sorted(keys):
        places[key] = len(places)
    categories = sorted({category for category, _ in keys})
    figure = Figure(figsize=(10, 7), layout="constrained")
    axes = figure.add_subplot(projection="3d")
    for row, one in enumerate(settings):
        for number, category in enumerate(categories):
            averages = one.averages.get(category, {})
            x = [places[category, name] for name in averages]
            first = all(category not in other.averages for other in settings[:row])
            label = category if averages and first else None
            axes.bar(x, list(averages.values()), zs=row, zdir="y", color=f"C{number % 10}", alpha=0.8, label=label)
    axes.set_xlabel("operation")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_zlabel("average, ms")
    several = len({one.worker for one in settings}) > 1
    names = [f"{Path(one.name).name} wk{one.worker}" if several else Path(one.name).name for one in settings]
    axes.set_yticks(range(len(settings)), names)
    figure.legend(loc="upper left")
    content = io.BytesIO()
    kind = output.suffix.removeprefix(".").lower()
    # No dates and no random identifiers: the same settings give the same bytes.
    undated = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[kind]
    with matplotlib.rc_context({"svg.hashsalt": "echograph"}):
        figure.savefig(content, format=kind, metadata=undated)
    write_whole(output, [content.getvalue()])

"""`echoprof stats | compare | compare3d | mapping`: what operations take, in ByteProfile's and other traces."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from echograph.cli.output import print_error, print_json, print_line, print_table, progress
from echograph.errors import UsageError
from echograph.ir.files import check_writable
from echograph.units import PS_PER_US

if TYPE_CHECKING:
    from echograph.profiler.analyses.table import AnswerTable
    from echograph.profiler.byteprofile.statistics import Statistics

_WIDEST = 72

TracePath = Annotated[Path, typer.Argument(help="A trace; or the folder of a GPU, a worker or a job.")]
Sort = Annotated[bool, typer.Option("--sort", help="The largest first, rather than as in the trace.")]
Head = Annotated[int | None, typer.Option(min=1, help="Only the first N rows.")]
Xlsx = Annotated[Path | None, typer.Option(help="Write the whole tables to this workbook.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def show(tables: Mapping[str, AnswerTable], *, as_json: bool) -> None:
    """Prints tables one below the other, or as one JSON object by their names; notes on stderr."""
    notes = dict.fromkeys(note for table in tables.values() for note in table.notes)
    if as_json:
        print_json({name: table.records() for name, table in tables.items()} | {"notes": list(notes)})
        return
    for number, (name, table) in enumerate(tables.items()):
        if len(tables) > 1:
            if number:
                print_line()
            print_line(name)
        print_table(list(table.columns), ([_short(cell) for cell in row] for row in table.rows()))
    for note in notes:
        print_error(f"note: {note}")


def _short(cell: object) -> object:
    """A cell as wide as it is worth: milliseconds to a tenth of a microsecond; names of kernels cut."""
    if isinstance(cell, str) and len(cell) > _WIDEST:
        return cell[: _WIDEST - 3] + "..."
    return f"{cell:.4f}" if isinstance(cell, float) else cell


def _statistics(path: Path) -> Statistics:
    from echograph.profiler.byteprofile.layout import find_job
    from echograph.profiler.byteprofile.statistics import statistics

    with progress(f"reading {path}"):
        return statistics(find_job(path).events())


def _check_workbook(xlsx: Path | None) -> None:
    if xlsx is not None:
        from echograph.profiler.byteprofile.output import check_workbook

        check_workbook(xlsx)
        check_writable(xlsx)


def stats_command(
    traces: TracePath,
    sort: Sort = False,
    head: Head = None,
    xlsx: Xlsx = None,
    as_json: AsJson = False,
) -> None:
    """How often each operation ran and what it took; of each category, the one that takes longest."""
    from echograph.profiler.byteprofile.statistics import category_table, statistics_table

    _check_workbook(xlsx)
    found = _statistics(traces)
    if xlsx is not None:
        from echograph.profiler.byteprofile.output import write_workbook

        write_workbook(xlsx, {"stats": statistics_table(found, sort=sort)})
    show(
        {"stats": statistics_table(found, sort=sort, head=head), "categories": category_table(found)},
        as_json=as_json,
    )


def compare_command(
    first: TracePath,
    second: TracePath,
    sort: Sort = False,
    head: Head = None,
    xlsx: Xlsx = None,
    as_json: AsJson = False,
) -> None:
    """What the operations of two runs took: the difference of their averages, and that over the first's."""
    from echograph.profiler.byteprofile.statistics import comparison, statistics_table

    _check_workbook(xlsx)
    one, two = _statistics(first), _statistics(second)
    compared = comparison(one, two, sort=sort, head=head)
    if xlsx is not None:
        from echograph.profiler.byteprofile.output import write_workbook

        sheets = {"stats1": statistics_table(one), "stats2": statistics_table(two)}
        write_workbook(xlsx, sheets | {"diff": comparison(one, two, sort=sort)})
    show({"compare": compared}, as_json=as_json)


def compare3d_command(
    settings: Annotated[list[Path], typer.Argument(help="A folder of a worker or a job for each setting.")],
    plot: Annotated[
        Path | None, typer.Option(help="Draw the bars in three dimensions there (.png, .svg, .pdf).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Settings side by side: on the first GPU of each worker, the mean of averages of each category."""
    from echograph.profiler.byteprofile.layout import find_job
    from echograph.profiler.byteprofile.output import check_plot, draw_settings
    from echograph.profiler.byteprofile.statistics import settings_of, settings_table

    if plot is not None:
        check_plot(plot)
        check_writable(plot)
    with progress(f"reading {len(settings)} settings"):
        found = settings_of(find_job(path) for path in settings)
    if plot is not None:
        draw_settings(found, plot)
    show({"compare3d": settings_table(found)}, as_json=as_json)


def mapping_command(
    operators: Annotated[Path, typer.Argument(help="Trace of operators (FW., BW.); or a PyTorch trace, alone.")],
    kernels: Annotated[Path | None, typer.Argument(help="Trace of kernels.")] = None,
    offset_us: Annotated[
        float, typer.Option(help="Microseconds to add to the kernels' times, where clocks differ.")
    ] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Which kernels each operator ran: by time from two traces; by launches from a PyTorch trace."""
    from echograph.profiler.byteprofile.layout import find_job
    from echograph.profiler.byteprofile.statistics import mapping

    if kernels is None:
        if offset_us:
            raise UsageError("--offset-us: is for a trace of kernels: give one after that of the operators")
        show({"mapping": _launched(operators)}, as_json=as_json)
        return
    if not abs(offset_us) <= 1e12:
        raise UsageError(f"--offset-us {offset_us:g}: give at most 1e12")
    with progress(f"reading {operators} and {kernels}"):
        found = mapping(
            find_job(operators).events(), find_job(kernels).events(), offset=round(offset_us * PS_PER_US)
        )
    show({"mapping": found}, as_json=as_json)


def _launched(path: Path) -> AnswerTable:
    from echograph.profiler.analyses.operators import operator_kernels
    from echograph.profiler.byteprofile.events import is_kineto
    from echograph.profiler.traces import read_traces

    if path.is_file() and not is_kineto(path):
        raise UsageError(f"{path}: has operators alone: give the trace of their kernels after it")
    with progress(f"reading {path}"):
        return operator_kernels(read_traces(path))

"""`echoprof analyze`: tables from profiler traces."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from echograph.cli.app import print_error, print_line, print_table, print_text, progress
from echograph.cli.options import parse_ranks
from echograph.errors import UsageError
from echograph.ir.files import check_writable, write_whole
from echograph.workflow.analyze import OVERVIEW, parse_options, read_folder

if TYPE_CHECKING:
    from echograph.profiler.analyses.table import AnswerTable
    from echograph.profiler.traces import TraceSet

_WIDEST = 72
# What zlib takes for a gzip header, which then has no time in it: the same trace gives the same bytes.
_GZIP_WINDOW = 31


def analyze_command(
    traces: Annotated[Path, typer.Argument(help="Folder with one profiler trace a rank, or one trace.")],
    name: Annotated[
        str, typer.Argument(help="Which analysis (a wrong name lists them); without one, an overview.")
    ] = "",
    option: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE, an option of the analysis (may be given again).")
    ] = None,
    ranks: Annotated[str, typer.Option(help="Only these ranks, for instance 0,1 or 0-7.")] = "",
    last_step: Annotated[
        bool, typer.Option("--last-step", help="Keep the last profiler step, which is often cut off.")
    ] = False,
    jobs: Annotated[int, typer.Option(help="Processes that read; 0 takes one a core.")] = 0,
    engine: Annotated[
        str, typer.Option(help="What reads: local (processes here), or ray (a Ray cluster, a task a rank).")
    ] = "local",
    cache: Annotated[bool, typer.Option(help="Keep what was read, so that a second look is quick.")] = True,
    html: Annotated[
        Path | None,
        typer.Option(help="Write a page that a browser shows: the whole picture, or one analysis with its plot."),
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the CSV or JSON there; of counters, the trace with them."),
    ] = None,
) -> None:
    """Answer a question about measured traces: where the time goes, what waits, what is launched."""
    import json

    from echograph.profiler.analyses import ANALYSES, COPIES

    if as_csv and as_json:
        raise UsageError("--csv and --json: give one of them")
    if html and (as_csv or as_json or output):
        raise UsageError("--html: a page is written alone; leave out --csv, --json and --output")
    if (as_csv or output) and not name and not as_json:
        raise UsageError("the overview is several tables: name one analysis, or ask for --json")
    if option and not name:
        raise UsageError("--option: name the analysis that it is for")
    if name:
        ANALYSES[name]

    def read(path: Path, wanted: list[int] | None = None) -> TraceSet:
        with progress(f"reading {path}") as say:
            return read_folder(path, wanted, last_step=last_step, jobs=jobs, cache=cache, engine=engine, say=say)

    options = parse_options(name, option or (), read) if name else {}
    wanted = sorted(parse_ranks("--ranks", ranks)) if ranks else None
    for target in filter(None, (output, html)):
        check_writable(target)
    found = read(traces, wanted)
    if html is not None:
        _write_page(html, found, traces.resolve().name, name, options)
        return
    if output is not None and name in COPIES and not (as_csv or as_json):
        for note in found.notes:
            print_error(f"note: {note}")
        pieces = COPIES[name](found, **options)
        write_whole(output, _gzipped(pieces) if output.suffix == ".gz" else pieces)
        return
    asked = {name: options} if name else {each: {} for each in OVERVIEW}
    tables: dict[str, AnswerTable] = {each: ANALYSES[each](found, **chosen) for each, chosen in asked.items()}
    for note in dict.fromkeys(note for table in tables.values() for note in table.notes):
        print_error(f"note: {note}")
    if as_csv:
        _put(tables[name].csv(), output)
    elif as_json or output is not None:
        answer = [{"analysis": n, "rows": t.records(), "notes": list(t.notes)} for n, t in tables.items()]
        document: Any = answer[0] if name else answer
        _put(json.dumps(document, indent=2, allow_nan=False) + "\n", output)
    else:
        _show(tables)


def _put(text: str, output: Path | None) -> None:
    if output is None:
        print_text(text)
    else:
        write_whole(output, [text])


def _write_page(target: Path, traces: TraceSet, folder: str, name: str, options: dict[str, Any]) -> None:
    from echograph.profiler.analyses import ANALYSES
    from echograph.profiler.page.report import page_of, report

    with progress("analysing") as say:
        if name:
            page = page_of(name, ANALYSES[name](traces, **options), f"{name} of {folder}")
        else:
            page = report(traces, f"Traces of {folder}", say)
    write_whole(target, [page])


def _gzipped(pieces: Iterable[bytes]) -> Iterator[bytes]:
    compress = zlib.compressobj(wbits=_GZIP_WINDOW)
    for piece in pieces:
        yield compress.compress(piece)
    yield compress.flush()


def _show(tables: dict[str, AnswerTable]) -> None:
    for number, (name, table) in enumerate(tables.items()):
        if len(tables) > 1:
            if number:
                print_line()
            print_line(name)
        rows = ([_short(value) for value in row] for row in table.rows())
        print_table(list(table.columns), rows)


def _short(value: object) -> object:
    """A cell that fits: names of kernels are templates of hundreds of characters."""
    if isinstance(value, str) and len(value) > _WIDEST:
        return value[: _WIDEST - 3] + "..."
    return round(value, 3) if isinstance(value, float) else value

"""`echoprof comms` and `record`: run a job with its collectives traced or its steps recorded, and look at that."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from echograph.cli.app import require_torch
from echograph.cli.options import Json
from echograph.cli.output import PAGE, print_error, print_json, print_line, print_table, show_progress, write_text
from echograph.errors import UsageError
from echograph.ir.graph import JobGraph
from echograph.units import format_bytes

if TYPE_CHECKING:
    from echograph.profiler.comms.report import Report
    from echograph.profiler.record.compare import Comparison


class RunByDefault(TyperGroup):
    """`comms [options] -- PROGRAM ...` is `comms run [options] -- PROGRAM ...`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Puts the command's name in front, where it was left out."""
        if "--" in args and args[0] not in self.commands:
            args = ["run", *args]
        return super().parse_args(ctx, args)


def _group(summary: str) -> typer.Typer:
    return typer.Typer(cls=RunByDefault, help=summary, no_args_is_help=True, rich_markup_mode=None)


comms = _group(
    "Trace a job's collectives: echoprof comms -- torchrun ... train.py; then: echoprof comms report DIR."
)
record = _group("Record steps of a job: echoprof record --dir DIR -- torchrun ... train.py.")
ProgramWords = Annotated[list[str], typer.Argument(help="Program and its arguments, after --.")]


@comms.command("run")
def trace_command(
    command: ProgramWords,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Where the traces go; the rank is put before the ending.")
    ] = Path("trace.jsonl"),
    timeout: Annotated[float, typer.Option(help="Seconds after which a collective is reported as stuck.")] = 480.0,
) -> None:
    """Run a program with the tracer on in every Python process that it starts."""
    require_torch("tracing collectives")
    from echograph.profiler.comms.launch import run_traced

    status, traces = run_traced(command, output, timeout)
    if traces:
        print_error(f"traced into {traces[0].parent}: echoprof comms report {traces[0].parent}")
    else:
        print_error("nothing traced: no process began a collective")
    raise typer.Exit(status)


@comms.command("report")
def report_command(
    path: Annotated[Path, typer.Argument(help="Folder of traces, or one file.")],
    as_csv: Annotated[Path | None, typer.Option("--csv", help="Write the table of operations.")] = None,
    chrome: Annotated[Path | None, typer.Option(help="Write every call as a Chrome trace.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write one page.")] = None,
    as_json: Json = False,
) -> None:
    """Report on traces: ours, collective_trace's logs, dumps of PyTorch's flight recorder."""
    from echograph.profiler.comms.report import report_on
    from echograph.profiler.comms.views import ChromeTrace, collectives_page

    with ExitStack() as stack, show_progress(f"reading {path}"):
        report = report_on(path, [] if chrome is None else [stack.enter_context(ChromeTrace(chrome))])
    if as_csv is not None:
        write_text(as_csv, report.operations_csv(), "table of operations")
    if html is not None:
        write_text(html, collectives_page(report, f"Collectives of {path.name}"), PAGE)
    print_json(asdict(report)) if as_json else _print_report(report)


def _print_report(report: Report) -> None:
    ranks = len({rank["rank"] for rank in report.ranks})
    many = "" if len(report.groups) == 1 else "s"
    print_line(
        f"{report.calls} calls on {ranks} ranks in {len(report.groups)} group{many}; times in ms, of all ranks"
    )
    times = ("calls", "total", "average", "wait", "transfer", "exposed", "hidden")
    print_line()
    print_table(
        ("operation", "shape", "dtype", "size", *times, "algbw GB/s", "busbw GB/s"),
        [
            (
                *(row["operation"], row["shape"] or "-", row["dtype"] or "-", format_bytes(row["bytes"])),
                *(_times(row)),
                *(f"{row[rate]:.3g}" if row[rate] else "-" for rate in ("algbw_GBps", "busbw_GBps")),
            )
            for row in sorted(report.operations, key=lambda row: -row["total_s"])
        ],
    )
    for title, sums in (("group", report.groups), ("phase", report.phases)):
        print_line()
        print_table((title, *times), [(row["name"], *_times(row)) for row in sums])
    print_line()
    print_table(
        ("rank", *times, "times last", "late by"),
        [(row["rank"], *_times(row), row["times_last"], _ms(row["lateness_s"])) for row in report.ranks],
    )
    for line in report.troubles():
        print_line(line)


def _times(row: dict[str, Any]) -> tuple[object, ...]:
    known = row["exposed_s"] + row["hidden_s"] > 0
    shown = {"total": True, "mean": True, "wait": row["merged"], "transfer": row["merged"]}
    shown |= {"exposed": known, "hidden": known}
    return (row["calls"], *(_ms(row[f"{name}_s"]) if there else "-" for name, there in shown.items()))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"


@record.command("run")
def record_command(
    command: ProgramWords,
    start_step: Annotated[
        int | None, typer.Option(help="First step that is recorded; as many have ended before it (usual: 10).")
    ] = None,
    end_step: Annotated[
        int | None, typer.Option(help="The step before which recording ends (usual: three steps).")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--dir", help="Where the ranks' folders go (usual: recording).")
    ] = None,
    shapes: Annotated[
        bool | None,
        typer.Option("--shapes/--no-shapes", help="Shapes in the trace: they cost time (usual: shapes)."),
    ] = None,
) -> None:
    """Run a program and record a window of its steps, on every rank.

    What is not given comes from ECHOGRAPH_RECORD_DIR, _START_STEP, _END_STEP, or from BYTEPS_TRACE_* where
    BYTEPS_TRACE_ON is 1.
    """
    require_torch("recording a job")
    from echograph.profiler.comms.launch import run_started
    from echograph.profiler.record.recorder import choose_window

    window = choose_window(folder, start_step, end_step, shapes)
    status = run_started(command, window.environment())
    if window.folder.is_dir():
        print_error(f"recorded into {window.folder}: echoc import kineto {window.folder} -o job.pb")
    else:
        print_error(f"nothing recorded: no process came to step {window.start - 1} (see --start-step)")
    raise typer.Exit(status)


@record.command("compare")
def compare_command(
    job: Annotated[Path, typer.Argument(help="Job graph of echoc capture.")],
    recording: Annotated[Path, typer.Argument(help="Folder of echoprof record.")],
    whole: Annotated[bool, typer.Option("--all", help="Print what is the same, too.")] = False,
    as_json: Json = False,
) -> None:
    """Hold a captured job graph against a recorded job: collectives and operators of a step, rank by rank."""
    from echograph.ir import serde
    from echograph.profiler.record.compare import compare_recording

    with show_progress(f"reading {recording}"):
        graph = serde.load(job)
        if not isinstance(graph, JobGraph):
            raise UsageError(f"{job}: a step graph has no ranks: give a job of echoc capture")
        compared = compare_recording(graph, recording)
    if as_json:
        rows = [asdict(row) | {"same": row.same} for row in compared.rows]
        print_json({"same_collectives": compared.same_collectives, "order": compared.order, "rows": rows})
    else:
        _print_comparison(compared, whole=whole)


def _print_comparison(compared: Comparison, *, whole: bool) -> None:
    for what in ("collective", "operator"):
        rows = [row for row in compared.rows if row.what == what]
        captured, recorded = sum(row.captured for row in rows), sum(row.recorded for row in rows)
        different = sum(not row.same for row in rows)
        print_line(f"{what}s: {captured} captured, {recorded:g} recorded a step; {different} rows differ")
    for rank, place in compared.order.items():
        if place >= 0:
            print_line(f"rank {rank}: collectives differ from number {place} on, in order, bytes or phase")
    shown = [row for row in compared.rows if whole or not row.same]
    if shown:
        print_line()
        titles = ("rank", "what", "phase", "name", "captured", "recorded")
        print_table(titles, [(r.rank, r.what, r.phase, r.name, r.captured, f"{r.recorded:g}") for r in shown])

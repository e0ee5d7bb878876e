"""`echoprof comms`: trace the collectives of a running job, and report on traces."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from echograph.cli.app import print_json, print_line, print_table, progress, require_torch
from echograph.errors import UsageError
from echograph.ir.csv_table import csv_text

if TYPE_CHECKING:
    from echograph.profiler.comms.report import Report


class RunByDefault(TyperGroup):
    """`comms [options] -- PROGRAM ...` is `comms run [options] -- PROGRAM ...`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Puts the command's name in front, where it was left out."""
        if "--" in args and args[0] not in self.commands:
            args = ["run", *args]
        return super().parse_args(ctx, args)


comms = typer.Typer(
    cls=RunByDefault,
    help="Trace a job's collectives: echoprof comms -- torchrun ... train.py; then: echoprof comms report DIR.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@comms.command("run")
def run_command(
    command: Annotated[list[str], typer.Argument(help="Program and its arguments, after --.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Where the traces go; the rank is put before the ending.")
    ] = Path("trace.jsonl"),
    timeout: Annotated[float, typer.Option(help="Seconds after which a collective is reported as stuck.")] = 480.0,
) -> None:
    """Run a program with the tracer on in every Python process that it starts."""
    require_torch("tracing collectives")
    if not timeout > 0:
        raise UsageError(f"--timeout: {timeout:g}: give seconds above 0")
    from echograph.profiler.comms.launch import run_traced

    raise typer.Exit(run_traced(command, output, timeout))


@comms.command("report")
def report_command(
    path: Annotated[Path, typer.Argument(help="Folder of traces, or one file.")],
    as_csv: Annotated[Path | None, typer.Option("--csv", help="Write the table of operations.")] = None,
    chrome: Annotated[Path | None, typer.Option(help="Write every call as a Chrome trace.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write one page.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Report on traces: ours, collective_trace's logs, dumps of PyTorch's flight recorder."""
    from echograph.ir.files import write_whole
    from echograph.profiler.comms.report import Sink, report_on

    with ExitStack() as stack, progress(f"reading {path}"):
        sinks: list[Sink] = []
        if chrome is not None:
            from echograph.profiler.comms.views import ChromeTrace

            sinks.append(stack.enter_context(ChromeTrace(chrome)))
        report = report_on(path, sinks)
    if as_csv is not None:
        write_whole(as_csv, [_csv(report.operations)])
    if html is not None:
        from echograph.profiler.comms.views import page

        write_whole(html, [page(report, f"Collectives of {path.name}")])
    if as_json:
        print_json(asdict(report))
    else:
        print_report(report)


def _csv(rows: list[dict[str, Any]]) -> str:
    titles = list(rows[0]) if rows else ["operation"]
    return csv_text(titles, ([row[title] for title in titles] for row in rows))


def print_report(report: Report) -> None:
    """The report as text."""
    from echograph.profiler.comms.views import size

    ranks = len({rank["rank"] for rank in report.ranks})
    many = "" if len(report.groups) == 1 else "s"
    print_line(
        f"{report.calls} calls on {ranks} ranks in {len(report.groups)} group{many}; times in ms, of all ranks"
    )
    titles = ("calls", "total", "average", "wait", "transfer", "exposed", "hidden")
    print_line()
    rows = sorted(report.operations, key=lambda row: -row["total_s"])
    print_table(
        ("operation", "shape", "dtype", "size", *titles, "algbw GB/s", "busbw GB/s"),
        [
            (
                *(row["operation"], row["shape"] or "-", row["dtype"] or "-", size(row["bytes"])),
                *(_times(row)),
                *(_rounded(row["algbw_GBps"]), _rounded(row["busbw_GBps"])),
            )
            for row in rows
        ],
    )
    for title, sums in (("group", report.groups), ("phase", report.phases)):
        print_line()
        print_table((title, *titles), [(row["name"], *_times(row)) for row in sums])
    print_line()
    print_table(
        ("rank", *titles, "times last", "late by"),
        [(row["rank"], *_times(row), row["times_last"], _ms(row["lateness_s"])) for row in report.ranks],
    )
    print_troubles(report)


def print_troubles(report: Report) -> None:
    """What did not end, and what could not be read."""
    for stuck in report.stuck:
        missing = ", ".join(map(str, stuck["missing"])) or "nobody"
        print_line(
            f"stuck: rank {stuck['rank']}, {stuck['operation']} {stuck['sequence']} of {stuck['channel']}, "
            f"{stuck['seconds']:g} s; not arrived: {missing}"
        )
    for call in report.unfinished:
        where = f" ({call['site']})" if call["site"] else ""
        print_line(
            f"no end: rank {call['rank']}, {call['operation']} {call['sequence']} of {call['channel']}{where}"
        )
    for host, offset in report.clock_offsets.items():
        print_line(f"clock of {host}: {offset * 1e3:+.3f} ms, taken off")
    for problem, count in report.problems.items():
        print_line(f"note: {count} {problem}")
    for line in report.skipped:
        print_line(f"passed over: {line}")


def _times(row: dict[str, Any]) -> tuple[object, ...]:
    merged = row["merged"]
    known = row["exposed_s"] + row["hidden_s"] > 0
    return (
        row["calls"],
        _ms(row["total_s"]),
        _ms(row["mean_s"]),
        _ms(row["wait_s"]) if merged else "-",
        _ms(row["transfer_s"]) if merged else "-",
        _ms(row["exposed_s"]) if known else "-",
        _ms(row["hidden_s"]) if known else "-",
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"


def _rounded(value: float) -> str:
    return f"{value:.3g}" if value else "-"

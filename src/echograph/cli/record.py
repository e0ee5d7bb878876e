"""`echoprof record`: capture a window of steps of a running job, and hold it against a captured graph."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from echograph.cli.app import print_error, print_json, print_line, print_table, progress, require_torch
from echograph.cli.comms import RunByDefault
from echograph.errors import UsageError

if TYPE_CHECKING:
    from echograph.profiler.record.compare import Comparison

record = typer.Typer(
    cls=RunByDefault,
    help="Record steps of a job: echoprof record --dir DIR -- torchrun ... train.py.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@record.command("run")
def run_command(
    command: Annotated[list[str], typer.Argument(help="Program and its arguments, after --.")],
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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Hold a captured job graph against a recorded job: collectives and operators of a step, rank by rank."""
    from echograph.ir import serde
    from echograph.ir.graph import JobGraph
    from echograph.profiler.record.compare import compare_recording

    with progress(f"reading {recording}"):
        graph = serde.load(job)
        if not isinstance(graph, JobGraph):
            raise UsageError(f"{job}: a step graph has no ranks: give a job of echoc capture")
        compared = compare_recording(graph, recording)
    if as_json:
        rows = [asdict(row) | {"same": row.same} for row in compared.rows]
        print_json({"same_collectives": compared.same_collectives, "order": compared.order, "rows": rows})
    else:
        _print(compared, whole=whole)


def _print(compared: Comparison, *, whole: bool) -> None:
    for what in ("collective", "operator"):
        rows = [row for row in compared.rows if row.what == what]
        captured, recorded = sum(row.captured for row in rows), sum(row.recorded for row in rows)
        different = [row for row in rows if not row.same]
        print_line(f"{what}s: {captured} captured, {recorded:g} recorded a step; {len(different)} rows differ")
    for rank, place in compared.order.items():
        if place >= 0:
            print_line(f"rank {rank}: collectives differ from number {place} on, in order, bytes or phase")
    shown = [row for row in compared.rows if whole or not row.same]
    if shown:
        print_line()
        titles = ("rank", "what", "phase", "name", "captured", "recorded")
        print_table(titles, [(r.rank, r.what, r.phase, r.name, r.captured, f"{r.recorded:g}") for r in shown])

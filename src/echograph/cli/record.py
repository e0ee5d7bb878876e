"""`echoprof record`: capture a window of steps of a running job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from echograph.cli.app import print_error, require_torch
from echograph.cli.comms import RunByDefault

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
) -> None:
    """Run a program and record a window of its steps, on every rank.

    What is not given comes from ECHOGRAPH_RECORD_DIR, _START_STEP, _END_STEP, or from BYTEPS_TRACE_* where
    BYTEPS_TRACE_ON is 1.
    """
    require_torch("recording a job")
    from echograph.profiler.comms.launch import run_started
    from echograph.profiler.record.window import choose_window

    window = choose_window(folder, start_step, end_step)
    status = run_started(command, window.environment())
    if window.folder.is_dir():
        print_error(f"recorded into {window.folder}: echoc import kineto {window.folder} -o job.pb")
    else:
        print_error(f"nothing recorded: no process came to step {window.start - 1} (see --start-step)")
    raise typer.Exit(status)

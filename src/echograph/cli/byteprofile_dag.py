"""`echoprof dag`: what a step's operations wait for, in an order in which they can run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from echograph.cli.byteprofile import AsJson, Head, show
from echograph.cli.byteprofile_replay import Folder, Queues, RunOrder
from echograph.cli.output import print_json, print_line, progress
from echograph.errors import UsageError
from echograph.ir.files import check_writable, write_whole
from echograph.profiler.byteprofile.dependencies import prepare


def dag_command(
    traces: Folder,
    del_queue: Queues = False,
    run_time: RunOrder = False,
    head: Head = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the graph there; its ending says how: .dot, .gml.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What a step's operations wait for, in an order in which they can run; draw it with --output."""
    from echograph.profiler.byteprofile.dag import FORMS, table

    form = output.suffix.removeprefix(".").lower() if output else ""
    if output is not None:
        if form not in FORMS:
            raise UsageError(f"--output {output.name}: the ending is the format: give one of .{', .'.join(FORMS)}")
        check_writable(output)
    with progress(f"reading {traces}"):
        prepared = prepare(traces, queues=del_queue, run_time=run_time)
        found = table(prepared.all)
    if output is not None:
        write_whole(output, FORMS[form](prepared.all))
    if as_json:
        print_json({"parallelism": prepared.parallelism, "dag": found.records(), "notes": list(prepared.notes)})
        return
    for of, parallelism in prepared.parallelism.items():
        print_line(f"{of}: at most {parallelism} operators at once")
    show({"dag": table(prepared.all, head)}, as_json=False)

"""`echoprof combine | collect`: traces of ByteProfile and dPRO made from others."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from echograph.cli.byteprofile import AsJson, TracePath, show
from echograph.cli.output import print_error, print_json, print_line, progress
from echograph.errors import UnknownNameError, UsageError
from echograph.ir.files import check_writable, write_whole
from echograph.units import PS_PER_US, format_bytes

if TYPE_CHECKING:
    pass


def combine_command(
    traces: Annotated[
        list[Path], typer.Argument(help="Traces, or folders of workers; each is a worker of its own.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The combined trace.")] = Path("combined.json"),
    only: Annotated[
        str, typer.Option("--filter", help="Of communications, keep these alone: Comm.a,Comm.b.")
    ] = "",
    align: Annotated[
        bool, typer.Option(help="Align the workers' clocks at the end of their first common pull.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Combine traces into one, ranks and workers before the names, all on the first worker's clock."""
    from echograph.profiler.byteprofile import combine
    from echograph.profiler.byteprofile.layout import find_job

    check_writable(output)
    names = [name.strip() for name in only.split(",") if name.strip()]
    with progress("aligning clocks") as say:
        sources = combine.sources_of([find_job(path) for path in traces])
        if any(output.resolve() == file.resolve() for source in sources for file in source.gpu.files):
            raise UsageError(f"--output {output}: is one of the traces: give the combined one a file of its own")
        known = combine.communications(sources) if names else set()
        for name in names:
            if name not in known:
                raise UnknownNameError("communication", name, known)
        combined = combine.aligned(sources, keep=not align)
        say(f"writing {output}")
        size = write_whole(output, combine.as_trace(combine.combined_events(combined, names)))
    shift_us = {worker: shift / PS_PER_US for worker, shift in combined.shift.items()}
    if as_json:
        said = {"output": str(output), "traces": len(sources), "shift_us": shift_us, "aligned_by": combined.by}
        print_json(said)
        return
    print_line(f"{output}: {len(sources)} traces, {format_bytes(size)}")
    for worker, shift in shift_us.items():
        if combined.by and worker:
            print_line(f"worker {worker}: its clock was {shift:g} us ahead (by {combined.by})")


def collect_command(
    traces: TracePath,
    sub_option: Annotated[
        Literal["iter_time", "operator"] | None,
        typer.Option(help="iter_time: only tell what iterations take; operator: make only computation anew."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for the traces, rather than each GPU's own.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make final traces anew from what the profilers wrote; say what forward, backward and iterations take."""
    from echograph.profiler.byteprofile.combine import iteration_table, write_collected
    from echograph.profiler.byteprofile.layout import find_job

    if sub_option == "iter_time" and output is not None:
        raise UsageError("--output: --sub-option iter_time writes nothing")
    job = find_job(traces)
    with progress(f"reading {traces}"):
        if sub_option != "iter_time":
            job, notes = write_collected(job, output, operators_only=sub_option == "operator")
            for note in notes:
                print_error(f"note: {note}")
        table = iteration_table(job)
    if sub_option != "iter_time" and not as_json:
        for gpu in job.gpus:
            print_line(str(gpu.files[0]))
    show({"iterations": table}, as_json=as_json)

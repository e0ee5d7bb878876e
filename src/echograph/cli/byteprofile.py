"""`echoprof stats | compare | compare3d | mapping | dag | critical | replay | combine | collect`.

What ByteProfile's and dPRO's analyzer answers, of their traces and of others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from echograph.cli.options import Json
from echograph.cli.output import print_json, print_line, print_notes, print_tables, show_progress
from echograph.errors import UsageError
from echograph.ir.files import check_writable, write_whole
from echograph.units import PS_PER_MS, PS_PER_US, format_bytes, format_time

if TYPE_CHECKING:
    from echograph.profiler.analyses.table import AnswerTable

TracePath = Annotated[Path, typer.Argument(help="A trace; or the folder of a GPU, a worker or a job.")]
Folder = Annotated[Path, typer.Argument(help="Folder of a worker or a job: traces with their dag.gml.")]
Sort = Annotated[bool, typer.Option("--sort", help="The largest first, rather than as in the trace.")]
Head = Annotated[int | None, typer.Option(min=1, help="Only the first N rows.")]
Xlsx = Annotated[Path | None, typer.Option(help="Write the whole tables to this workbook.")]
DelQueue = Annotated[
    bool, typer.Option("--del-queue", help="Take communications apart, a chain a partition, without queueing.")
]
RunOrder = Annotated[
    bool, typer.Option("--run-time", help="Operators in the order in which they ran, not as the model demands.")
]


def _show(
    tables: Mapping[str, AnswerTable],
    as_json: bool,
    notes: Sequence[str] = (),
    rest: Mapping[str, Any] | None = None,
) -> None:
    """Prints tables, or as JSON by their names, with what else JSON holds; notes on stderr."""
    said = list(dict.fromkeys([*notes, *(note for table in tables.values() for note in table.notes)]))
    if as_json:
        records = {name: table.records() for name, table in tables.items()}
        print_json({**(rest or {}), **records, "notes": said})
        return
    print_tables(tables, number=lambda value: f"{value:.4f}")
    print_notes(said)


def stats_command(
    traces: TracePath, sort: Sort = False, head: Head = None, xlsx: Xlsx = None, as_json: Json = False
) -> None:
    """How often each operation ran and what it took; of each category, the one that takes longest."""
    from echograph.profiler.analyses import workbook
    from echograph.profiler.byteprofile import report

    workbook.check_workbook(xlsx)
    with show_progress(f"reading {traces}"):
        found = report.statistics_of(traces)
    workbook.write_workbook(xlsx, {"stats": report.statistics_table(found, sort=sort)})
    shown = report.statistics_table(found, sort=sort, head=head)
    _show({"stats": shown, "categories": report.category_table(found)}, as_json)


def compare_command(
    first: TracePath,
    second: TracePath,
    sort: Sort = False,
    head: Head = None,
    xlsx: Xlsx = None,
    as_json: Json = False,
) -> None:
    """What the operations of two runs took: the difference of their averages, and that over the first's."""
    from echograph.profiler.analyses import workbook
    from echograph.profiler.byteprofile import report

    workbook.check_workbook(xlsx)
    with show_progress(f"reading {first} and {second}"):
        one, two = report.statistics_of(first), report.statistics_of(second)
    compared = report.compared_operations(one, two, sort=sort, head=head)
    sheets = {"stats1": report.statistics_table(one), "stats2": report.statistics_table(two)}
    workbook.write_workbook(xlsx, sheets | {"diff": report.compared_operations(one, two, sort=sort)})
    _show({"compare": compared}, as_json)


def compare3d_command(
    settings: Annotated[list[Path], typer.Argument(help="A folder of a worker or a job for each setting.")],
    plot: Annotated[
        Path | None, typer.Option(help="Draw the bars in three dimensions there (.png, .svg, .pdf).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Settings side by side: on the first GPU of each worker, the mean of averages of each category."""
    from echograph.profiler.byteprofile import report
    from echograph.profiler.byteprofile.reader import find_job

    report.check_plot(plot)
    with show_progress(f"reading {len(settings)} settings"):
        found = report.settings_of(find_job(path) for path in settings)
    report.draw_settings(found, plot)
    _show({"compare3d": report.settings_table(found)}, as_json)


def mapping_command(
    operators: Annotated[Path, typer.Argument(help="Trace of operators (FW., BW.); or a PyTorch trace, alone.")],
    kernels: Annotated[Path | None, typer.Argument(help="Trace of kernels.")] = None,
    offset_us: Annotated[
        float, typer.Option(help="Microseconds to add to the kernels' times, where clocks differ.")
    ] = 0.0,
    as_json: Json = False,
) -> None:
    """Which kernels each operator ran: by time from two traces; by launches from a PyTorch trace."""
    from echograph.profiler.byteprofile.report import mapping_of

    with show_progress(f"reading {operators}"):
        found = mapping_of(operators, kernels, offset_us)
    _show({"mapping": found}, as_json)


def dag_command(
    traces: Folder,
    del_queue: DelQueue = False,
    run_time: RunOrder = False,
    head: Head = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the graph there; its ending says how: .dot, .gml.")
    ] = None,
    as_json: Json = False,
) -> None:
    """What a step's operations wait for, in an order in which they can run; draw it with --output."""
    from echograph.profiler.byteprofile import dag
    from echograph.profiler.byteprofile.dependencies import prepare

    form = output.suffix.removeprefix(".").lower() if output else ""
    if output is not None:
        if form not in dag.FORMS:
            raise UsageError(
                f"--output {output.name}: the ending is the format: give one of .{', .'.join(dag.FORMS)}"
            )
        check_writable(output)
    with show_progress(f"reading {traces}"):
        prepared = prepare(traces, queues=del_queue, run_time=run_time)
        found = dag.dag_table(prepared.all, None if as_json else head)
    if output is not None:
        write_whole(output, dag.FORMS[form](prepared.all))
    for of, most in () if as_json else prepared.parallelism.items():
        print_line(f"{of}: at most {most} operators at once")
    _show({"dag": found}, as_json, prepared.notes, {"parallelism": prepared.parallelism})


def critical_command(
    traces: Folder,
    del_queue: DelQueue = False,
    run_time: RunOrder = False,
    head: Head = None,
    as_json: Json = False,
) -> None:
    """The longest path through a step's dependencies: of each GPU, then of all together."""
    from echograph.profiler.byteprofile.dag import path_table
    from echograph.profiler.byteprofile.dependencies import prepare

    with show_progress(f"reading {traces}"):
        prepared = prepare(traces, queues=del_queue, run_time=run_time)
        paths = prepared.paths()
    if as_json:
        lengths = {of: path.length / PS_PER_MS for of, path in paths}
        _show({"paths": path_table(paths)}, as_json, prepared.notes, {"length_ms": lengths})
        return
    for number, (of, path) in enumerate(paths):
        if number:
            print_line()
        print_line(f"{of}: {format_time(path.length)}")
        longest = sorted(path.nodes, key=lambda node: -node.duration)[: head or len(path.nodes)]
        for node in path.nodes:
            if node in longest:
                print_line(f"  {node.duration / PS_PER_MS:12.4f} ms  {node.name}")


def replay_command(
    traces: Folder,
    step_num: Annotated[int, typer.Option(min=1, help="How many steps to run.")] = 1,
    del_queue: DelQueue = False,
    pretty: Annotated[bool, typer.Option("--pretty", help="Only the steps: no paths, no parallelism.")] = False,
    delay: Annotated[
        str,
        typer.Option(
            help="What-if: communication, computation, a node, or each:N (every N-th node of the critical path)."
        ),
    ] = "",
    delay_ratio: Annotated[float, typer.Option(help="What is delayed takes so many times as long.")] = 1.0,
    delay_ms: Annotated[float, typer.Option(help="What is delayed takes so much longer, before the ratio.")] = 0.0,
    output: Annotated[Path, typer.Option("--output", "-o", help="The replay as a Chrome trace.")] = Path(
        "replay.json"
    ),
    as_json: Json = False,
) -> None:
    """Run a step again from its measured durations and dependencies, as it was or with some of it slower."""
    from echograph.profiler.byteprofile.combine import as_trace
    from echograph.profiler.byteprofile.dag import Change, as_events, step_table
    from echograph.profiler.byteprofile.dependencies import prepare, rerun

    change = Change.asked(delay, delay_ratio, delay_ms)
    check_writable(output)
    with show_progress(f"reading {traces}") as progress:
        prepared = prepare(traces, queues=del_queue, run_time=True)
        progress("replaying")
        done, before, delays = rerun(prepared, steps=step_num, delay=delay, change=change)
        write_whole(output, as_trace(as_events(done)))
    tables = {"steps": step_table(done)} | ({} if delays is None else {"delays": delays})
    lengths = {} if pretty else {of: path.length / PS_PER_MS for of, path in prepared.paths()}
    record: dict[str, Any] = {"step_ms": done.step / PS_PER_MS, "output": str(output)}
    record |= {} if before is None else {"step_ms_before": before / PS_PER_MS}
    record |= {} if pretty else {"parallelism": prepared.parallelism, "critical_ms": lengths}
    if not as_json:
        print_line(f"step: {format_time(done.step)}" + (f", {step_num} steps" if step_num > 1 else ""))
        if before is not None:
            print_line(f"before the delay: {before / PS_PER_MS:.4f} ms")
        for of, most in () if pretty else prepared.parallelism.items():
            print_line(f"{of}: at most {most} operators at once")
        for of, length in lengths.items():
            print_line(f"{of}: critical path {length:.4f} ms")
    _show(tables, as_json, prepared.notes, record)
    if not as_json:
        print_line(f"{output}: the replay as a trace")


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
    as_json: Json = False,
) -> None:
    """Combine traces into one, ranks and workers before the names, all on the first worker's clock."""
    from echograph.profiler.byteprofile.combine import combine

    with show_progress("aligning clocks") as progress:
        names = [name.strip() for name in only.split(",") if name.strip()]
        combined, size = combine(traces, output, only=names, align=align, progress=progress)
    shift_us = {worker: shift / PS_PER_US for worker, shift in combined.shift.items()}
    if as_json:
        said = {"output": str(output), "traces": len(combined.sources), "shift_us": shift_us}
        print_json(said | {"aligned_by": combined.by})
        return
    print_line(f"{output}: {len(combined.sources)} traces, {format_bytes(size)}")
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
    as_json: Json = False,
) -> None:
    """Make final traces anew from what the profilers wrote; say what forward, backward and iterations take."""
    from echograph.profiler.byteprofile.combine import iteration_table, write_collected
    from echograph.profiler.byteprofile.reader import find_job

    made = sub_option != "iter_time"
    if output is not None and not made:
        raise UsageError("--output: --sub-option iter_time writes nothing")
    job = find_job(traces)
    with show_progress(f"reading {traces}"):
        if made:
            job, notes = write_collected(job, output, operators_only=sub_option == "operator")
            print_notes(notes)
        table = iteration_table(job)
    for gpu in job.gpus if made and not as_json else ():
        print_line(str(gpu.files[0]))
    _show({"iterations": table}, as_json)


COMMANDS: Mapping[str, Callable[..., None]] = {
    "stats": stats_command,
    "combine": combine_command,
    "compare": compare_command,
    "critical": critical_command,
    "replay": replay_command,
    "collect": collect_command,
    "compare3d": compare3d_command,
    "mapping": mapping_command,
    "dag": dag_command,
}

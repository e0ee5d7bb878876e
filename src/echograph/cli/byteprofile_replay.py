"""`echoprof critical | replay`: the longest path of a step, and the step run again, from measured durations."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from echograph.cli.byteprofile import AsJson, Head, show
from echograph.cli.output import print_json, print_line, progress
from echograph.errors import UsageError
from echograph.ir.files import check_writable, write_whole
from echograph.profiler.byteprofile.dependencies import JobDependencies, prepare
from echograph.units import PS_PER_MS, format_time

if TYPE_CHECKING:
    from echograph.profiler.byteprofile.dag import Change, Replay

Folder = Annotated[Path, typer.Argument(help="Folder of a worker or a job: traces with their dag.gml.")]
Queues = Annotated[
    bool, typer.Option("--del-queue", help="Take communications apart, a chain a partition, without queueing.")
]
RunOrder = Annotated[
    bool, typer.Option("--run-time", help="Operators in the order in which they ran, not as the model demands.")
]


def critical_command(
    traces: Folder,
    del_queue: Queues = False,
    run_time: RunOrder = False,
    head: Head = None,
    as_json: AsJson = False,
) -> None:
    """The longest path through a step's dependencies: of each GPU, then of all together."""
    from echograph.profiler.byteprofile.dag import path_table

    with progress(f"reading {traces}"):
        prepared = prepare(traces, queues=del_queue, run_time=run_time)
        paths = prepared.paths()
    if as_json:
        lengths = {of: path.length / PS_PER_MS for of, path in paths}
        print_json({"length_ms": lengths, "paths": path_table(paths).records(), "notes": list(prepared.notes)})
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
    del_queue: Queues = False,
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
    as_json: AsJson = False,
) -> None:
    """Run a step again from its measured durations and dependencies, as it was or with some of it slower."""
    from echograph.profiler.byteprofile import dag
    from echograph.profiler.byteprofile.combine import as_trace

    change = _change(delay, delay_ratio, delay_ms)
    check_writable(output)
    with progress(f"reading {traces}") as say:
        prepared = prepare(traces, queues=del_queue, run_time=True)
        say("replaying")
        each = delay.startswith(dag.EACH)
        durations = dag.delayed(prepared.all, delay, change) if delay and not each else None
        done = dag.replay(prepared.all, steps=step_num, durations=durations)
        tables = {"steps": dag.step_table(done, prepared.names)}
        if each:
            every = _every(delay)
            path = prepared.all.longest_path()
            tables["delays"] = dag.sensitivity(prepared.all, path, every, change, steps=step_num)
        write_whole(output, as_trace(dag.as_events(done, prepared.names)))
    record = _summary(prepared, done, durations is not None, pretty=pretty)
    if as_json:
        rest = {name: table.records() for name, table in tables.items()}
        print_json(record | rest | {"output": str(output), "notes": list(prepared.notes)})
        return
    print_line(f"step: {format_time(done.step)}" + (f", {step_num} steps" if step_num > 1 else ""))
    if "step_ms_before" in record:
        print_line(f"before the delay: {record['step_ms_before']:.4f} ms")
    if not pretty:
        for of, most in record["parallelism"].items():
            print_line(f"{of}: at most {most} operators at once")
        for of, length in record["critical_ms"].items():
            print_line(f"{of}: critical path {length:.4f} ms")
    show(tables, as_json=False)
    print_line(f"{output}: the replay as a trace")


def _summary(prepared: JobDependencies, done: Replay, delayed: bool, *, pretty: bool) -> dict[str, Any]:
    from echograph.profiler.byteprofile.dag import replay

    record: dict[str, Any] = {"step_ms": done.step / PS_PER_MS}
    if delayed:
        record["step_ms_before"] = replay(prepared.all, steps=len(done.ends)).step / PS_PER_MS
    if not pretty:
        lengths = {of: path.length / PS_PER_MS for of, path in prepared.paths()}
        record |= {"parallelism": prepared.parallelism, "critical_ms": lengths}
    return record


def _change(delay: str, ratio: float, added_ms: float) -> Change:
    from echograph.profiler.byteprofile.dag import Change

    if not delay and (ratio != 1.0 or added_ms):
        raise UsageError("--delay-ratio and --delay-ms: say what is delayed with --delay")
    if delay and ratio == 1.0 and not added_ms:
        raise UsageError(f"--delay {delay}: say by how much with --delay-ratio or --delay-ms")
    if not (0 <= ratio <= 1e6 and abs(added_ms) <= 1e6):
        raise UsageError(
            f"--delay-ratio {ratio:g} --delay-ms {added_ms:g}: give a ratio from 0 to 1e6 and at most 1e6 ms"
        )
    return Change(ratio, round(added_ms * PS_PER_MS))


def _every(delay: str) -> int:
    count = delay.partition(":")[2]
    if not count.isdigit() or not int(count):
        raise UsageError(f"--delay {delay}: write each:N with N from 1 up: every N-th node of the critical path")
    return int(count)

"""`echosim replay`: a traced job again, with its own measured durations, and what would be if it were changed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from echograph.cli.app import print_json, print_line, print_table, progress
from echograph.cli.output import Json, Output, Trace, check_outputs, write_json, write_trace
from echograph.errors import UsageError
from echograph.ir.graph import JobGraph
from echograph.simulator.limits import parse_scale
from echograph.simulator.result import Result
from echograph.units import format_bytes, format_time
from echograph.workflow.predict import (
    TRACE,
    StepTime,
    is_traced,
    replay,
    replay_record,
    shown_steps,
    step_medians,
    steps,
)
from echograph.workflow.system import System


def replay_command(
    job: Annotated[Path, typer.Argument(help="A job graph of echoc import kineto.")],
    gpus: Annotated[
        int | None, typer.Option(help="Other ranks of a data-parallel job; the cluster's network then counts.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Whose network carries the communication: a preset or a TOML file.")
    ] = None,
    scale: Annotated[
        list[str] | None, typer.Option(help="What if WHAT=FACTOR, as compute=0.9, host=0.5, op:aten.mm=0.5.")
    ] = None,
    without: Annotated[list[str] | None, typer.Option(help="What if this took no time, as comm.")] = None,
    trace: Trace = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Run a traced job again with its measured durations: step time, where it goes, error against the measured."""
    from echograph.ir import serde

    check_outputs({"the job": job}, {"--output": output, "--trace": trace})
    scales = [parse_scale(text) for text in (*(scale or ()), *(f"{what}=0" for what in without or ()))]
    system = None if cluster is None else System(cluster)
    with progress(f"reading {job}") as say:
        loaded = serde.load(job, say)
        if not is_traced(loaded):
            raise UsageError(
                f"{job}: holds no measured step: echosim run it, or give a job of echoc import kineto"
            )
        assert isinstance(loaded, JobGraph)
        say("replaying")
        result = replay(loaded, system=system, gpus=gpus, scales=scales)
        found = steps(result)
    changed = bool(cluster or gpus or scale or without)
    record = replay_record(result, found, changed=changed)
    print_json(record) if as_json else _print(result, found, changed=changed)
    write_json(output, record, "result")
    write_trace(trace, result)


def _print(result: Result, found: Sequence[StepTime], *, changed: bool) -> None:
    shown, record = shown_steps(found), replay_record(result, found, changed=changed)
    what = "step" if shown[0].name != TRACE else "trace"
    print_line(f"{result.model} on {result.gpus} ranks ({result.device})")
    replayed, measured = (round(record[f"{word}_step_s"] * 1e12) for word in ("replayed", "measured"))
    ratio = replayed / measured - 1 if measured else 0.0
    said = "measured, other" if changed else "measured"
    print_line(f"  {what:<14}{format_time(replayed)}   ({said}: {format_time(measured)}, {ratio:+.2%})")
    if free := step_medians(found):
        ratio = free[1] / free[2] - 1
        print_line(f"  not recorded  {free[2] * 1e3:.4g} ms   (median of the free steps; replayed: {ratio:+.2%})")
    parts = record["breakdown_s"]
    flat = {"compute": parts["compute"], "host": parts["host"], "wait": parts["wait"] + parts["bubble"]}
    flat |= {f"{axis} communication": value for axis, value in parts["exposed_communication"].items()}
    times = ", ".join(f"{name} {format_time(round(value * 1e12))}" for name, value in flat.items() if value)
    whose = f"rank {result.ends_last.rank}"
    print_line(f"  where it goes {times} (all of the trace, {whose}, which ends last)")
    limits = ", ".join(f"{name} {value / record['trace_s']:.0%}" for name, value in record["limits_s"].items())
    print_line(f"  limited by    {limits} (of the critical path)")
    for axis, entry in result.collectives.items():
        print_line(
            f"  collectives   {axis}: {entry['calls']} calls, {format_bytes(entry['bytes_per_rank'])} per rank, "
            f"{entry['busy_s'] * 1e3:.4g} ms busy"
        )
    if len(shown) > 1:
        rows = [
            (s.role, s.name, *(f"{t * 1e3:.4g}" for t in (s.measured_s, s.replayed_s)), f"{s.error:+.2%}")
            for s in shown
        ]
        print_table(("rank", "step", "measured ms", "replayed ms", "difference"), rows)

"""`echoprof ops`: the operations of a training step, measured one by one on the device at hand."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from echograph.cli.app import print_error, print_json, print_line, print_table, progress, require_torch
from echograph.cli.step_options import (
    Attention,
    BatchSize,
    Clock,
    DeviceName,
    DType,
    Json,
    Model,
    Optimizer,
    SeqLen,
)
from echograph.units import format_bytes, format_time
from echograph.workflow.measure import (
    capture_invocations,
    device_and_spec,
    measure_invocations,
    start_profile,
    summarize_measured,
)

if TYPE_CHECKING:
    from echograph.profiler.measure.ops import OpTiming

_SHOWN = 12


def ops_command(
    model: Model,
    batch_size: BatchSize = None,
    seq_len: SeqLen = None,
    dtype: DType = "",
    optimizer: Optimizer = "adamw",
    attention: Attention = None,
    device: DeviceName = "",
    clock: Clock = "wall",
    name: Annotated[
        str, typer.Option(help="Device name for the durations [default: the hardware's]", show_default=False)
    ] = "",
    repeats: Annotated[int, typer.Option(min=1, help="Samples of an operation at most.")] = 200,
    budget: Annotated[float, typer.Option(min=0, help="Seconds for all operations.")] = 300.0,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the profile goes.")] = Path("profile.pb"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the profile at --output.")] = False,
    graph: Annotated[Path | None, typer.Option(help="Write the step's graph, too.")] = None,
    echo_json: Annotated[
        Path | None, typer.Option("--echo-json", help="Folder for JSON files in the layout of Echo's tracer.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure each distinct operation of a training step on the device at hand, and write a profile."""
    from echograph.ir import files, serde

    for path in (output, graph):
        if path is not None:
            files.check_writable(path)
    require_torch("measuring operations")
    from echograph.profiler.measure.ops import Options

    here, spec = device_and_spec(device, dtype, optimizer, clock)
    sizes = {"batch_size": batch_size, "seq_len": seq_len, "attention": attention}
    with progress("starting") as say:
        captured = capture_invocations(model, spec, here.cache_bytes, say, **sizes)
        profile = start_profile(here, output, name, resume, say)
        outcome = measure_invocations(
            captured.invocations, here, profile, Options(repeats=repeats, budget_s=budget), output, say
        )
        if graph is not None:
            serde.save(captured.graph, graph)
    if echo_json is not None:
        from echograph.ir.exporters.echo import export_echo
        from echograph.ir.passes.annotate import join

        export_echo(join(captured.flat, outcome.profile)[0](captured.flat), echo_json)
    _report(summarize_measured(captured, outcome, here), outcome, output, as_json)


def _report(summary: dict[str, Any], outcome: OpTiming, output: Path, as_json: bool) -> None:
    if as_json:
        print_json({"output": str(output), **summary})
    else:
        _print(summary, outcome)
    for text, why in outcome.refused:
        print_error(f"not measured: {text[:120]}: {why}")
    if outcome.left:
        print_error(f"{len(outcome.left)} operations are left, the time is up: --resume goes on")
    print_error(f"wrote {output} (profile of {outcome.profile.environment.device})")


def _print(summary: dict[str, Any], outcome: OpTiming) -> None:
    counts = summary["operations"]
    print_line(f"{summary['hardware']} as '{summary['device']}', torch {summary['torch']}")
    print_line(
        f"{summary['distinct_invocations']} distinct invocations; operations of the step: "
        f"{counts['measured']} measured, {counts['free']} free, {counts['missing']} missing"
    )
    print_line(
        f"sum {format_time(summary['sum_s'] * 1e12)}; the host adds {format_time(summary['host_op_s'] * 1e12)} "
        f"an operation, {format_time(summary['host_view_s'] * 1e12)} a view"
    )
    if summary["utilisation"] is not None:
        print_line(f"the device was busy {summary['utilisation']:.0%} of the last second, says NVML")
    longest = sorted(outcome.profile.measurements, key=lambda m: -m.median_picoseconds * m.runs)
    print_table(
        ("operator", "invocations", "median us", "spread %", "samples", "memory", "invocation"),
        (
            (
                m.operator,
                str(m.runs),
                round(m.median_picoseconds * 1e-6, 2),
                round(m.spread * 100, 2),
                str(m.samples),
                format_bytes(m.peak_bytes),
                m.arguments.partition("(")[2][:60],
            )
            for m in longest[:_SHOWN]
        ),
    )

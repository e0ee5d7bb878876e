"""`echoprof ops`: the operations of a training step, measured one by one on the device at hand."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
    device_and_spec,
)
from echograph.errors import UsageError
from echograph.progress import Progress
from echograph.units import format_bytes, format_time

if TYPE_CHECKING:
    from echograph.frontend.pytorch.step import StepSpec
    from echograph.ir.graph import StepGraph
    from echograph.ir.invocations import Invocation
    from echograph.ir.profile import Environment, Profile
    from echograph.profiler.measure.device import Device
    from echograph.profiler.measure.ops import Outcome

_SHOWN = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A step as graph and as invocations.

    Attributes:
        graph: folded.
        flat: as it ran.
        invocations: the distinct invocations that do work.
    """

    graph: StepGraph
    flat: StepGraph
    invocations: list[Invocation]


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
        profile = _start(here, output, name, resume, say)
        outcome = measure_invocations(
            captured.invocations, here, profile, Options(repeats=repeats, budget_s=budget), output, say
        )
        if graph is not None:
            serde.save(captured.graph, graph)
    if echo_json is not None:
        from echograph.ir.exporters.echo import export_echo
        from echograph.ir.passes.annotate import join

        export_echo(join(captured.flat, outcome.profile)[0](captured.flat), echo_json)
    _report(_summary(captured, outcome, here), outcome, output, as_json)


def _report(summary: dict[str, Any], outcome: Outcome, output: Path, as_json: bool) -> None:
    if as_json:
        print_json({"output": str(output), **summary})
    else:
        _print(summary, outcome)
    for text, why in outcome.refused:
        print_error(f"not measured: {text[:120]}: {why}")
    if outcome.left:
        print_error(f"{len(outcome.left)} operations are left, the time is up: --resume goes on")
    print_error(f"wrote {output} (profile of {outcome.profile.environment.device})")


def capture_invocations(model: str, spec: StepSpec, cache_bytes: int, say: Progress, **sizes: Any) -> Captured:
    """Captures a step as graph and as the invocations that it is made of."""
    from echograph.cli.compose import build_model
    from echograph.frontend.pytorch.capture import capture, capture_mode
    from echograph.frontend.pytorch.invocations import invocations_of
    from echograph.frontend.pytorch.lower import lower_nodes, workload_of
    from echograph.ir.passes.fold import fold

    with capture_mode():
        name, built = build_model(model, spec, say=say, **sizes)
    say(f"capturing one training step of {name}")
    nodes = capture(*built, spec)
    flat, made = lower_nodes(nodes, workload_of(nodes, spec, name))
    return Captured(graph=fold(flat), flat=flat, invocations=invocations_of(nodes, flat, made, cache_bytes))


def measure_invocations(
    invocations: list[Invocation],
    device: Device,
    profile: Profile,
    options: Any,
    output: Path,
    say: Progress,
) -> Outcome:
    """Measures invocations, and writes the profile as it grows."""
    from echograph.ir.profile import save_profile
    from echograph.profiler.measure.device import keep_freed_memory
    from echograph.profiler.measure.ops import measure

    if device.name == "cpu":
        keep_freed_memory()

    def save(grown: Profile) -> None:
        save_profile(grown, output)

    return measure(invocations, device, profile, options, save=save, say=say)


def _start(device: Device, output: Path, name: str, resume: bool, say: Progress) -> Profile:
    """The profile to begin with: the one that there is, or an empty one with the host's times."""
    from echograph.ir.profile import Profile, load_profile
    from echograph.profiler.measure.ops import continued

    if resume:
        if not output.exists():
            raise UsageError(f"--resume: there is no {output} to go on with: leave --resume out")
        return continued(load_profile(output), device.environment(name), str(output))
    say("measuring the host")
    return Profile(environment=with_host(device, name))


def with_host(device: Device, name: str = "") -> Environment:
    """A device's environment with the host's times, measured now."""
    from echograph.profiler.measure.host import measure_host
    from echograph.units import to_ps

    host = measure_host(device)
    return replace(
        device.environment(name), host_op_picoseconds=to_ps(host.op_s), host_view_picoseconds=to_ps(host.view_s)
    )


def _summary(captured: Captured, outcome: Outcome, device: Device) -> dict[str, Any]:
    from echograph.ir.passes.annotate import join

    _, coverage = join(captured.graph, outcome.profile)
    environment = outcome.profile.environment
    measurements = outcome.profile.measurements
    return {
        "device": environment.device,
        "hardware": environment.hardware,
        "driver": environment.driver,
        "torch": environment.torch,
        "cuda": environment.cuda,
        "threads": environment.threads,
        "utilisation": device.utilisation(),
        "distinct_invocations": len(captured.invocations),
        "measurements": len(measurements),
        "operations": {
            "measured": coverage.measured,
            "free": coverage.free,
            "missing": coverage.missing,
        },
        "unmatched": len(coverage.unmatched),
        "not_measured": [{"invocation": text, "reason": why} for text, why in outcome.refused],
        "left": len(outcome.left),
        "sum_s": coverage.busy_ps * 1e-12,
        "host_op_s": environment.host_op_picoseconds * 1e-12,
        "host_view_s": environment.host_view_picoseconds * 1e-12,
        "largest_peak_bytes": max((m.peak_bytes for m in measurements), default=0),
    }


def _print(summary: dict[str, Any], outcome: Outcome) -> None:
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

"""`echoprof step`: whole training steps, end to end, beside the sum of their operations and a simulation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from echograph.cli.app import print_error, print_json, print_line, progress, require_torch
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
from echograph.units import format_time, to_s

_TITLES = {"sum": "operations", "simulated": "simulated"}


def step_command(
    model: Model,
    batch_size: BatchSize = None,
    seq_len: SeqLen = None,
    dtype: DType = "",
    optimizer: Optimizer = "adamw",
    attention: Attention = None,
    device: DeviceName = "",
    clock: Clock = "wall",
    steps: Annotated[int, typer.Option(min=1, help="Steps that are timed.")] = 10,
    warm_up: Annotated[int, typer.Option(min=0, help="Steps before them.")] = 3,
    allocator: Annotated[
        str, typer.Option(help="Of the CPU: keep (freed memory stays, as on CUDA) or system.")
    ] = "keep",
    profile: Annotated[
        Path | None, typer.Option(help="Of echoprof ops: print the sum of its operations and a simulation, too.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Time whole training steps end to end; beside a profile's sum of operations and its simulation."""
    if allocator not in ("keep", "system"):
        raise UsageError(f"--allocator {allocator}: give keep or system")
    require_torch("running a training step")
    here, spec = device_and_spec(device, dtype, optimizer, clock)
    sizes = {"batch_size": batch_size, "seq_len": seq_len, "attention": attention}
    with progress("starting") as say:
        predicted = {} if profile is None else _predicted(model, spec, profile, here.cache_bytes, say, **sizes)
        samples = measure_step(model, spec, here, steps, warm_up, allocator == "keep", say, **sizes)
    record = {
        "model": model,
        "device": here.environment().hardware,
        "steps": len(samples.seconds),
        "step_s": samples.median,
        "mean_s": samples.mean,
        "spread": samples.spread,
        "seconds": list(samples.seconds),
        **predicted,
        **{f"{name}_error": predicted[f"{name}_s"] / samples.median - 1 for name in _predictions(predicted)},
    }
    if as_json:
        print_json(record)
    else:
        _print(record)
    if predicted.get("missing"):
        print_error(f"note: {predicted['missing']} operations of the step are not in {profile}")


def _predictions(record: dict[str, Any]) -> list[str]:
    return [name for name in _TITLES if f"{name}_s" in record]


def _print(record: dict[str, Any]) -> None:
    print_line(
        f"measured   {format_time(record['step_s'] * 1e12):>10}  median of {record['steps']} steps, "
        f"mean {format_time(record['mean_s'] * 1e12)} +- {record['spread']:.1%}"
    )
    for name in _predictions(record):
        time, error = record[f"{name}_s"], record[f"{name}_error"]
        print_line(f"{_TITLES[name]:<10} {format_time(time * 1e12):>10}  {error:+.1%}")


def measure_step(
    model: str, spec: Any, device: Any, steps: int, warm_up: int, keep: bool, say: Any, **sizes: Any
) -> Any:
    """Times real steps of a model on a device."""
    import torch

    from echograph.cli.compose import build_model
    from echograph.frontend.pytorch.real_step import real_step
    from echograph.profiler.measure.device import keep_freed_memory
    from echograph.profiler.measure.steps import time_steps

    if keep and device.name == "cpu":
        keep_freed_memory()
    with torch.device(device.name):
        _, built = build_model(model, spec, say=say, **sizes)
    return time_steps(real_step(*built, spec, device.name), device, steps, warm_up, say)


def _predicted(model: str, spec: Any, profile: Path, cache_bytes: int, say: Any, **sizes: Any) -> dict[str, Any]:
    """The sum of a step's operations, and the step simulated, from a profile; None where it lacks operations."""
    from echograph.cli.measured import predict_measured
    from echograph.cli.ops import capture_invocations
    from echograph.cli.plan import Plan
    from echograph.ir.passes.annotate import join
    from echograph.ir.profile import load_profile

    graph = capture_invocations(model, spec, cache_bytes, say, **sizes).graph
    _, coverage = join(graph, load_profile(profile))
    found: dict[str, Any] = {"sum_s": to_s(coverage.busy_ps), "missing": coverage.missing}
    if not coverage.missing:
        say("simulating")
        result, _ = predict_measured(graph, Plan(cluster=str(profile)))
        found["simulated_s"] = to_s(result.step_ps)
    return found

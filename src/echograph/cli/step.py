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
)
from echograph.errors import UsageError
from echograph.units import format_time
from echograph.workflow.measure import device_and_spec, measure_step, predicted_step

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
        predicted = {} if profile is None else predicted_step(model, spec, profile, here.cache_bytes, say, **sizes)
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

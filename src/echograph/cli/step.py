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
from echograph.workflow.measure import device_and_spec, time_step

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
    with progress("starting") as say:
        record = time_step(
            model, spec, here, steps=steps, warm_up=warm_up, keep=allocator == "keep", profile=profile, say=say,
            batch_size=batch_size, seq_len=seq_len, attention=attention,
        )  # fmt: skip
    if as_json:
        print_json(record)
    else:
        _print(record)
    if record.get("missing"):
        print_error(f"note: {record['missing']} operations of the step are not in {profile}")


def _print(record: dict[str, Any]) -> None:
    print_line(
        f"measured   {format_time(record['step_s'] * 1e12):>10}  median of {record['steps']} steps, "
        f"mean {format_time(record['mean_s'] * 1e12)} +- {record['spread']:.1%}"
    )
    for name, title in _TITLES.items():
        if f"{name}_s" not in record:
            continue
        time, error = record[f"{name}_s"], record[f"{name}_error"]
        print_line(f"{title:<10} {format_time(time * 1e12):>10}  {error:+.1%}")

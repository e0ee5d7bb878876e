"""Options that commands share which run a training step on the machine at hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from echograph.errors import UsageError

if TYPE_CHECKING:
    from echograph.frontend.pytorch.step import StepSpec

DEVICES = ("cuda", "cpu")
CLOCKS = ("wall", "cpu")

Model = Annotated[
    str, typer.Option("--model", "-m", help="Zoo name, Hugging Face config folder or JSON, or file.py:function.")
]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Samples of one micro-batch.")]
SeqLen = Annotated[int | None, typer.Option(min=1, help="Tokens of a sample, or pixels of an image's side.")]
DType = Annotated[
    str, typer.Option(help="bf16, fp16 or fp32 [default: bf16, on the CPU fp32]", show_default=False)
]
Optimizer = Annotated[str, typer.Option(help="adamw, adam or sgd.")]
Attention = Annotated[str | None, typer.Option(help="sdpa (fused), eager, or fused-softmax (Megatron-LM's).")]
DeviceName = Annotated[
    str, typer.Option(help="cuda or cpu [default: cuda where there is one]", show_default=False)
]
Clock = Annotated[str, typer.Option(help="Of the CPU: wall, or cpu (time of this process; one thread only).")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def device_and_spec(device: str, dtype: str, optimizer: str, clock: str) -> tuple[Any, StepSpec]:
    """The device to measure on, and what the step is captured with for it.

    Raises:
        UsageError: there is no such device, clock, type or optimizer.
    """
    import torch

    from echograph.frontend.pytorch.step import StepSpec
    from echograph.profiler.measure.device import open_device

    for option, value, choices in (("--device", device or "cpu", DEVICES), ("--clock", clock, CLOCKS)):
        if value not in choices:
            raise UsageError(f"{option} {value}: give one of {', '.join(choices)}")
    name: Any = device or ("cuda" if torch.cuda.is_available() else "cpu")
    kind: Any = dtype or ("bf16" if name == "cuda" else "fp32")
    chosen: Any = optimizer
    ticks: Any = clock
    return open_device(name, ticks), StepSpec(dtype=kind, optimizer=chosen, kernels=name)

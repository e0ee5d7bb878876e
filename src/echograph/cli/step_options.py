"""Options that commands share which run a training step on the machine at hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    pass


Model = Annotated[
    str, typer.Option("--model", "-m", help="Zoo name, Hugging Face config folder or JSON, or file.py:function.")
]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Samples of one micro-batch.")]
SeqLen = Annotated[int | None, typer.Option(min=1, help="Tokens of a sample, or pixels of an image's side.")]
DType = Annotated[
    str, typer.Option(help="bf16, fp16 or fp32 [default: bf16, on the CPU fp32]", show_default=False)
]
Optimizer = Annotated[str, typer.Option(help="adamw, adam or sgd.")]
Attention = Annotated[str | None, typer.Option(help="sdpa, fused, eager, or fused-softmax (Megatron-LM's).")]
DeviceName = Annotated[
    str, typer.Option(help="cuda or cpu [default: cuda where there is one]", show_default=False)
]
Clock = Annotated[str, typer.Option(help="Of the CPU: wall, or cpu (time of this process; one thread only).")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

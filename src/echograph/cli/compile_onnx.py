"""Which options of `echoc compile` go with which source."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from echograph.errors import UsageError

if TYPE_CHECKING:
    pass


def check_source(model: str | None, onnx: Path | None, *, zoo: Sequence[object], own: Sequence[object]) -> None:
    """Refuses options that the other kind of source has; None is an option not given.

    Args:
        model: what `--model` says.
        onnx: what `--onnx` says.
        zoo: options of models that are captured.
        own: options of ONNX files.

    Raises:
        UsageError: both sources or none, or an option of the other.
    """
    if (model is None) == (onnx is None):
        raise UsageError("give what to compile: --model NAME or --onnx FILE, one of them")
    if onnx is not None and any(option is not None for option in zoo):
        raise UsageError("--batch-size, --seq-len, --attention, --recompute, --capture: not for an ONNX file")
    if onnx is None and any(option is not None for option in own):
        raise UsageError("--dim, --train, --loss and --branch are for an ONNX file: give it by --onnx")

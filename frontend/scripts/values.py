"""What a script reads from a tensor that has no data.

A number that is read (a loss for the log) is answered by one that stands for it: 1. It may be printed, added and
averaged, but not compared, and no tensor is true or false: a script that goes one way or another by it would be
captured going one of them. What libraries do with values is answered likewise, and not refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from echograph.errors import CaptureError

_TORCH = str(Path(torch.__file__).parent)
_OWN = str(Path(__file__).parent)
# Where PyTorch itself passes a question to a tensor on.
_THROUGH = ("torch/_tensor.py", "torch/_ops.py", "torch/overrides.py", "torch/utils/_device.py",
            "torch/_subclasses/fake_tensor.py", "torch/utils/_python_dispatch.py")  # fmt: skip


Note = Callable[[str], None]


def answer(tensor: Tensor, note: Note) -> Any:
    """The number that stands for the one element of a tensor.

    Args:
        tensor: of one element.
        note: is told which line of the script read it.
    """
    line = caller()
    if line is not None:
        note(f"{line} reads a tensor's value, which a capture does not have: 1 stands for it")
    if tensor.dtype == torch.bool:
        return True
    return Value(1.0) if tensor.is_floating_point() else 1


def caller() -> str | None:
    """`file:line` of the script, where it was its own code that asked a tensor; None where a library did."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_OWN, "<")) and not name.endswith(_THROUGH):
            library = name.startswith(_TORCH) or "site-packages" in name
            return None if library else f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return None


class Value(float):
    """A number that stands for one that is not known."""

    def _unknown(self, other: Any) -> Any:
        del other
        where = caller()
        if where is None:
            return NotImplemented
        raise CaptureError(
            f"{where}: a comparison with a tensor's value decides what the script does, and a capture has no "
            "values: decide on steps or settings instead"
        )


def _arithmetic(name: str) -> Any:
    plain = getattr(float, name)

    def operate(self: Value, *others: Any) -> Any:
        made = plain(self, *others)
        return Value(made) if isinstance(made, float) else made

    return operate


for _name in ("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__",
              "__neg__", "__abs__"):  # fmt: skip
    setattr(Value, _name, _arithmetic(_name))


def _compare(name: str) -> Any:
    plain = getattr(float, name)

    def compare(self: Value, other: Any) -> Any:
        made = self._unknown(other)
        return plain(self, other) if made is NotImplemented else made

    return compare


for _name in ("__lt__", "__le__", "__gt__", "__ge__"):
    setattr(Value, _name, _compare(_name))


def _item(note: Note, tensor: Tensor) -> Any:
    return answer(tensor, note)


def _list(note: Note, tensor: Tensor) -> Any:
    return [_list(note, row) for row in tensor] if tensor.dim() else answer(tensor, note)


def _true(note: Note, tensor: Tensor) -> bool:
    where = caller()
    if where is not None:
        raise CaptureError(
            f"{where}: whether a tensor is true decides what the script does, and a capture has no values: decide "
            "on steps or settings instead"
        )
    return bool(answer(tensor, note))


def _format(note: Note, tensor: Tensor, form: str) -> str:
    return format(answer(tensor, note), form) if tensor.dim() == 0 else object.__format__(tensor, form)


QUESTIONS: dict[Any, Callable[..., Any]] = {
    Tensor.item: _item,
    Tensor.tolist: _list,
    Tensor.__bool__: _true,
    Tensor.__float__: lambda note, tensor: float(answer(tensor, note)),
    Tensor.__int__: lambda note, tensor: int(answer(tensor, note)),
    Tensor.__format__: _format,
}
"""Methods that read values, and what stands in for each: takes where notes go, and the method's arguments."""

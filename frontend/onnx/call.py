"""One ONNX node being run: what its operator sees of its operands and attributes, in a step's element types."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from echograph.errors import CaptureError, InputError
from echograph.frontend.onnx.model import OnnxModel, OnnxNode
from echograph.frontend.pytorch.spec import StepDType

# Numbers of TensorProto.DataType.
TYPES = {
    1: torch.float32, 2: torch.uint8, 3: torch.int8, 4: torch.uint16, 5: torch.int16, 6: torch.int32,
    7: torch.int64, 9: torch.bool, 10: torch.float16, 11: torch.float64, 12: torch.uint32, 13: torch.uint64,
    14: torch.complex64, 16: torch.bfloat16, 17: torch.float8_e4m3fn, 19: torch.float8_e5m2,
}  # fmt: skip
_STEP_TYPES: dict[torch.dtype, StepDType] = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class DTypes:
    """The types of a file in a step: its main type is the step's, the rest stay.

    Attributes:
        main: type of most of the file's weights.
        step: what stands for it in the step.
    """

    main: torch.dtype
    step: torch.dtype

    def of(self, number: int, source: str) -> torch.dtype:
        """The type that stands for an ONNX element type.

        Raises:
            InputError: a step graph has no such type.
        """
        known = TYPES.get(number)
        if known is None:
            raise InputError(f"{source}: the element type {number} (text or 4 bits) is not one that a graph knows")
        return self.to_step(known)

    def to_step(self, dtype: torch.dtype) -> torch.dtype:
        """What a type of the file is in the step."""
        return self.step if dtype == self.main else dtype


def main_type(model: OnnxModel) -> torch.dtype:
    """The floating-point type of most of the weights, or else of the inputs; fp32 where there is none."""
    for values in (model.weights, model.inputs):
        sizes: Counter[torch.dtype] = Counter()
        for value in values:
            dtype = TYPES.get(value.dtype)
            if dtype in _STEP_TYPES:
                sizes[dtype] += prod(value.shape)
        if sizes:
            return max(sizes, key=lambda d: sizes[d])
    return torch.float32


def step_type(model: OnnxModel) -> StepDType:
    """The step's type that keeps the file's types as they are."""
    return _STEP_TYPES[main_type(model)]


Operator = Callable[["NodeCall"], Any]
"""What an operator's row in a table is: a call -> its result, or a tuple of its results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCall:
    """Operands and attributes of a node.

    An operand of which the numbers are known (a constant, or computed from shapes) is a tensor with data; the
    rest are fake tensors. Operators run on either; what they need as numbers they ask of `known`, since under
    fake tensors no tensor tells its own.

    Attributes:
        node: the node.
        operands: value of each input, None for one left out.
        known: its numbers where they are known, else None.
        dtypes: what the file's element types are in this step.
        opset: version of ONNX's own operators.
        training: whether the step trains: running statistics are updated, dropout drops.
    """

    node: OnnxNode
    operands: Sequence[Any]
    known: Sequence[np.ndarray[Any, Any] | None]
    dtypes: DTypes
    opset: int
    training: bool

    def __getitem__(self, position: int) -> Any:
        """An operand that must be there.

        Raises:
            CaptureError: it is left out.
        """
        value = self.get(position)
        if value is None:
            raise CaptureError(f"its input {position} is left out, and has no default")
        return value

    def get(self, position: int) -> Any:
        """An operand, or None."""
        return self.operands[position] if position < len(self.operands) else None

    def constant(self, position: int) -> np.ndarray[Any, Any] | None:
        """An operand with its numbers; None if it is left out.

        Raises:
            CaptureError: its numbers depend on data that a step without values does not have.
        """
        if self.get(position) is None:
            return None
        known = self.known[position]
        if known is None:
            raise CaptureError(
                f"its input '{self.node.inputs[position]}' must be a constant or follow from shapes, "
                "since it decides on a shape or a form"
            )
        return known

    def number(self, position: int) -> Any:
        """An operand as a Python number where it is known and has one element, so that it takes no memory."""
        known = self.known[position] if position < len(self.known) else None
        if known is not None and known.size == 1 and known.dtype.kind != "c":
            return known.item()
        return self[position]

    def ints(self, name: str, position: int | None = None, default: Sequence[int] | None = None) -> list[int]:
        """A list of integers: an attribute, or in later versions of ONNX an input."""
        value = self.optional_ints(name, position)
        if value is None:
            if default is None:
                raise CaptureError(f"it says no '{name}'")
            return list(default)
        return value

    def optional_ints(self, name: str, position: int | None = None) -> list[int] | None:
        """As `ints`; None where it is not said."""
        value = self.node.attributes.get(name)
        if value is None and position is not None:
            known = self.constant(position)
            value = None if known is None else known.reshape(-1).tolist()
        if value is None:
            return None
        return [int(item) for item in (value if isinstance(value, list) else [value])]

    def integer(self, name: str, default: int = 0) -> int:
        """An integer attribute."""
        return int(self.node.attributes.get(name, default))

    def real(self, name: str, default: float) -> float:
        """A floating-point attribute."""
        return float(self.node.attributes.get(name, default))

    def text(self, name: str, default: str = "") -> str:
        """A text attribute."""
        return str(self.node.attributes.get(name, default))

    def axis(self, default: int, rank: int) -> int:
        """The attribute `axis`, counted from the front."""
        axis = self.integer("axis", default)
        if not -rank <= axis < max(rank, 1):
            raise CaptureError(f"its axis {axis} is outside of a tensor of {rank} dimensions")
        return axis % max(rank, 1)


def extents(tensor: Tensor) -> list[int]:
    """The shape as a list."""
    return [int(extent) for extent in tensor.shape]


def shapes(values: Sequence[Any]) -> str:
    """Shapes of operands, for messages."""
    return ", ".join(str(list(v.shape)) if isinstance(v, torch.Tensor) else type(v).__name__ for v in values)

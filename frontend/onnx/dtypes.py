"""Element types of ONNX as types of a step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod

import torch

from echograph.errors import InputError
from echograph.frontend.onnx.model import OnnxModel
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

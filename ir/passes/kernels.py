"""Which library's kernels run: attention by a kernel that the costs know by name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from echograph.ir import types as t
from echograph.ir.graph import StepGraph
from echograph.ir.passes.rewrite import StepWriter

SUFFIX = ".attention"
PADDED = ".padded"
"""Behind the name of a product whose operands are padded where their rows are no multiples of 16 bytes."""
"""What follows a kernel's name in the operator of its forward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKernel:
    """The step with fused attention by a kernel, as `cudnn.attention` and `cudnn.attention_backward`.

    It comes after the passes that know attention by the operator that was captured.

    Attributes:
        kernel: "cudnn", "flash1", "flash2", "flash3" or another that a device's profile has a model of.
    """

    name: ClassVar[str] = "attention_kernel"

    kernel: str

    def __call__(self, graph: StepGraph) -> StepGraph:
        """The step graph."""
        return _Writer(graph, self.kernel).write()


class _Writer(StepWriter):
    def __init__(self, graph: StepGraph, kernel: str) -> None:
        super().__init__(graph)
        self.kernel = kernel

    def operation(self, op: t.Op) -> None:
        if isinstance(op, t.Compute) and isinstance(op.attributes, t.Attention):
            backward = "_backward" if "backward" in op.name else ""
            self.copy(replace(op, name=f"{self.kernel}{SUFFIX}{backward}", durations=()))
        else:
            self.copy(op)

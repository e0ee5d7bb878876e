"""AdamW as PyTorch runs it where it is not asked for a fused kernel: one for each step of its arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from echograph.ir import types as t
from echograph.ir.graph import StepGraph
from echograph.ir.passes.rewrite import StepWriter

FUSED = ("aten._fused_adamw_", "aten._fused_adam_")
FOREACH = "aten._foreach_adamw_"

READ, WRITTEN = 12, 8
"""Elements that the kernels of a parameter read and write (torch/optim/adam.py, _multi_tensor_adam, without
amsgrad or capturable): mul_ of the parameter by its decay, lerp_ of the first average with the gradient, mul_ and
addcmul_ of the second, sqrt, div_, add_, and addcdiv_ of the parameter. addcmul_ reads the gradient once."""
FUSED_READ, FUSED_WRITTEN = 4, 3
"""Of the fused one: parameter, gradient and both averages; all but the gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeachOptimizer:
    """The step with Adam's update in a kernel for each step of its arithmetic; it moves three times the bytes."""

    name: ClassVar[str] = "foreach_optimizer"

    def __call__(self, graph: StepGraph) -> StepGraph:
        """The step graph."""
        return _Writer(graph).write()


class _Writer(StepWriter):
    def operation(self, op: t.Op) -> None:
        if isinstance(op, t.Compute) and op.name in FUSED:
            op = replace(
                op,
                name=FOREACH,
                bytes_read=op.bytes_read * READ // FUSED_READ,
                bytes_written=op.bytes_written * WRITTEN // FUSED_WRITTEN,
                durations=(),
            )
        self.copy(op)

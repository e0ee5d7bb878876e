"""The types that a step computes in: FP8 products, fp32 gradients.

FP8 as torchao's `float8` training and Transformer Engine do it. The products of the linear layers within the
model's layers are `_scaled_mm` on 8-bit operands with 16-bit results; everything else (attention, norms,
embeddings, the head, experts' grouped products) stays as it is, parameters and their gradients too. A linear layer
whose tokens or features are no multiples of 16 (32 for mxfp8) stays as well. Recipes:

- "fp8": one scale a tensor, found before the cast (dynamic scaling) in a pass of its own; a cast kernel then
  writes the copies that the phase needs, transposed or not, at once. Output gradients are e5m2 (the hybrid
  format), all else is e4m3.
- "fp8-rowwise": one scale a row of each operand, e4m3. A row's maximum is found by the kernel that casts it; along
  columns it is a pass of its own.
- "mxfp8": one power of two for each 32 elements of a row, e4m3; one kernel a copy (Blackwell and later).

Between forward and backward an input and a weight are kept in 16 bit and cast again, as torchao does by default;
with `kept="fp8"` forward writes both copies and the 8-bit ones are kept, as Transformer Engine does. Casts of a
tensor that several products read are shared, as `torch.compile` shares them. Weights are cast for each
micro-batch, and every rank scales by its own maxima.

The pass works on local shapes: it comes after those that divide a step (tensor, context and expert parallelism),
which do not know 8-bit operands, and before those that lower it to a job.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from echograph.errors import PlanError, UnavailableError, UnknownNameError
from echograph.ir import types as t
from echograph.ir.graph import StepGraph
from echograph.ir.passes.precision_fp8 import Recipe, to_fp8
from echograph.ir.passes.precision_gradients import to_main_gradients

RECIPES = {
    "fp8": Recipe(scales="tensor", gradients=t.DType.FP8_E5M2, kept="bf16"),
    "fp8-rowwise": Recipe(scales="row", gradients=t.DType.FP8_E4M3, kept="bf16"),
    "mxfp8": Recipe(scales="block", gradients=t.DType.FP8_E4M3, kept="bf16"),
}
_STEPS = {"bf16": t.DType.BF16, "fp16": t.DType.FP16, "fp32": t.DType.FP32}
_TYPES = {"tf32", *(dtype.text for dtype in t.DType)} - {*_STEPS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """The step in other types.

    Attributes:
        dtype: a recipe for products in FP8 ("fp8", "fp8-rowwise", "mxfp8"), or the type that the step has already
            ("bf16", "fp16", "fp32"): another one is other kernels, which only a capture shows. None: as it is.
        grad_dtype: type in which gradients add up; "fp32" gives a 16-bit step main gradients. None: their own.
        kept: of inputs and weights, for backward: the 16-bit tensors ("bf16"), or 8-bit copies ("fp8").
        delayed: scales of "fp8" come from earlier steps' maxima, which the casts note on their way (delayed
            scaling); updating the histories is not counted.
    """

    dtype: str | None = None
    grad_dtype: str | None = None
    kept: Literal["bf16", "fp8"] = "bf16"
    delayed: bool = False

    def __call__(self, graph: StepGraph) -> StepGraph:
        """The step graph.

        Raises:
            PlanError: the step has another type, or no linear layer can have products in FP8.
            UnknownNameError: no such type or recipe.
            UnavailableError: a type in which no step computes, or no gradients add up.
        """
        return self._gradients(self._products(graph))

    def _products(self, graph: StepGraph) -> StepGraph:
        if self.dtype is None:
            return graph
        own = graph.workload.dtype
        if self.dtype in _STEPS:
            if own == _STEPS[self.dtype]:
                return graph
            raise PlanError(
                f"precision {self.dtype}: the step was captured in {own.text}, and its kernels are of that type: "
                f"compile the model with --dtype {self.dtype}"
            )
        if self.dtype not in RECIPES:
            if self.dtype in _TYPES:
                raise UnavailableError(f"precision {self.dtype}: no step computes in it", (*RECIPES, *_STEPS))
            raise UnknownNameError("precision", self.dtype, (*RECIPES, *_STEPS))
        if own != t.DType.BF16:
            raise PlanError(
                f"precision {self.dtype}: its products give bf16, and the step was captured in {own.text}: "
                "compile the model with --dtype bf16"
            )
        if self.delayed and self.dtype != "fp8":
            raise PlanError(
                f"precision {self.dtype} with delayed scaling: only fp8, with a scale a tensor, has it"
            )
        return to_fp8(graph, replace(RECIPES[self.dtype], kept=self.kept, delayed=self.delayed))

    def _gradients(self, graph: StepGraph) -> StepGraph:
        if self.grad_dtype is None:
            return graph
        if self.grad_dtype not in _STEPS:
            if self.grad_dtype in (*_TYPES, *RECIPES):
                raise UnavailableError(f"gradients do not add up in {self.grad_dtype}", _STEPS)
            raise UnknownNameError("type of gradients", self.grad_dtype, _STEPS)
        wanted, own = _STEPS[self.grad_dtype], graph.workload.dtype
        if wanted == own:
            return graph
        if wanted != t.DType.FP32:
            raise PlanError(
                f"gradients in {self.grad_dtype}: those of a step in {own.text} add up in {own.text} or fp32: "
                "choose one of these"
            )
        return to_main_gradients(graph)

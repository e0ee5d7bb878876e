"""Tensor-parallel collectives that communicate along the first dimension alone, as PyTorch's functional ones do.

`all_gather_tensor` and `reduce_scatter_tensor` of `torch.distributed._functional_collectives`, which DTensor runs,
know the first dimension of a tensor. Where ranks share another, such as the sequence of [batch, sequence, hidden],
the parts that arrive lie one behind the other, and a kernel puts them into their places (`torch.cat`); before a
reduction a kernel takes them apart. Each is the whole tensor read and written once. Where the dimensions before
it are of one element the two layouts are the same, and nothing is copied. Megatron-LM, whose sequence comes first,
has no such copy, nor have those collectives of asynchronous tensor parallelism that run beside products, for which
ranks read each other's parts where they lie.

It comes after the passes that choose types and kernels, since what is gathered in 8 bit is copied in 8 bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar

from echograph.ir import types as t
from echograph.ir.graph import StepGraph
from echograph.ir.passes.rewrite import StepWriter
from echograph.ir.passes.tensor_parallel.overlap import SYMMETRIC

AXIS = "tp"


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstDim:
    """The step with the copies around what tensor-parallel ranks gather and scatter along another dimension."""

    name: ClassVar[str] = "tp_first_dim"

    def __call__(self, graph: StepGraph) -> StepGraph:
        """The step graph."""
        return _Copies(graph).write()


class _Copies(StepWriter):
    def operation(self, op: t.Op) -> None:
        if (
            not isinstance(op, t.Collective)
            or self.graph.groups[op.group].axes != (AXIS,)
            or op.name.startswith(SYMMETRIC)
        ):
            self.copy(op)
        elif op.collective == t.CollectiveKind.ALL_GATHER and self._is_inside(op.inputs[0], op.outputs[0]):
            (whole,) = (self.graph.tensors[i] for i in op.outputs)
            parts = self.builder.tensor(whole.name, whole.shape, whole.dtype, whole.role)
            self.copy(op, outputs=[parts])
            self._cat(op, parts, self.tensor(whole.id), whole.nbytes)
        elif op.collective == t.CollectiveKind.REDUCE_SCATTER and self._is_inside(op.outputs[0], op.inputs[0]):
            (whole,) = (self.graph.tensors[i] for i in op.inputs)
            parts = self.builder.tensor(whole.name, whole.shape, whole.dtype, whole.role)
            self._cat(op, self.tensor(whole.id), parts, whole.nbytes)
            self.copy(op, inputs=[parts])
        else:
            self.copy(op)

    def _is_inside(self, part: int, whole: int) -> bool:
        """Whether a rank's part is cut from the whole along a dimension that others of several elements precede.

        A dimension of all tokens is samples and their sequences, of which the latter are cut.
        """
        shapes = (self.graph.tensors.shape.row(i) for i in (part, whole))
        pairs = list(zip(*shapes, strict=True))
        cut = next((dim for dim, (mine, all_) in enumerate(pairs) if mine != all_), 0)
        samples, positions = self.graph.workload.batch_size, self.graph.workload.sequence_length or 0
        tokens = cut == 0 and pairs[0][1] == samples * positions
        return (samples if tokens else prod(mine for mine, _ in pairs[:cut])) > 1

    def _cat(self, op: t.Collective, source: int, made: int, nbytes: int) -> None:
        self.builder.compute(
            "aten.cat", phase=op.phase, module=op.module, inputs=(source,), outputs=(made,),
            bytes_read=nbytes, bytes_written=nbytes,
        )  # fmt: skip

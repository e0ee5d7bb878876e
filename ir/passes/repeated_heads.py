"""Keys and values that are copied for every query head that reads them, where attention has no groups of its own.

Models of grouped queries share a head of keys and values among several of queries. Kernels read it where it lies,
if the code asks for that (`enable_gqa`); code that repeats heads before (`repeat_kv` of Llama's) writes as many
heads as there are queries', reads them, and adds up as many gradients.

It comes before the passes that choose kernels and fuse elementwise operations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from echograph.ir import types as t
from echograph.ir.graph import StepGraph
from echograph.ir.passes.rewrite import StepWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedHeads:
    """The step in which attention has as many heads of keys and values as of queries."""

    name: ClassVar[str] = "repeated_heads"

    def __call__(self, graph: StepGraph) -> StepGraph:
        """The step graph."""
        return _Writer(graph).write()


class _Writer(StepWriter):
    def __init__(self, graph: StepGraph) -> None:
        super().__init__(graph)
        self.repeated: dict[tuple[int, int], int] = {}

    def operation(self, op: t.Op) -> None:
        if isinstance(op, t.Compute) and isinstance(op.attributes, t.Attention):
            self._attend(op, op.attributes)
        else:
            self.copy(op)

    def _attend(self, op: t.Compute, attributes: t.Attention) -> None:
        backward, times = "backward" in op.name, attributes.heads // attributes.kv_heads
        if times == 1:
            self.copy(op)
            return
        first = 2 if backward else 1
        inputs = [
            self._copies(op, index, times) if place in (first, first + 1) else self.tensor(index)
            for place, index in enumerate(op.inputs)
        ]
        grown = sum(self.graph.tensors[i].nbytes for i in op.inputs[first : first + 2]) * (times - 1)
        own = replace(op, attributes=replace(attributes, kv_heads=attributes.heads), durations=())
        if not backward:
            self.copy(own, inputs=inputs, bytes_read=op.bytes_read + grown)
            return
        query, *shared = op.outputs
        wide = [self._wide(index, times) for index in shared]
        self.copy(
            own, inputs=inputs, outputs=[self.tensor(query), *wide],
            bytes_read=op.bytes_read + grown, bytes_written=op.bytes_written + grown,
        )  # fmt: skip
        for index, parts in zip(shared, wide, strict=True):
            self._moves(op, "aten.sum", parts, self.tensor(index), times, 1, index)

    def _copies(self, op: t.Compute, index: int, times: int) -> int:
        """A tensor with each head as often as queries read it, made where it is wanted first."""
        key = id(self.part), index
        if key not in self.repeated:
            self.repeated[key] = self._wide(index, times)
            self._moves(op, "aten.clone", self.tensor(index), self.repeated[key], 1, times, index)
        return self.repeated[key]

    def _wide(self, index: int, times: int) -> int:
        """A new tensor, of so many times the heads."""
        one = self.graph.tensors[index]
        shape = (*one.shape[:-3], one.shape[-3] * times, *one.shape[-2:])
        return self.builder.tensor(one.name, shape, one.dtype, one.role)

    def _moves(
        self, op: t.Compute, name: str, source: int, made: int, read: int, written: int, index: int
    ) -> None:
        """A kernel that reads and writes so many times a tensor's bytes."""
        nbytes = self.graph.tensors[index].nbytes
        self.builder.compute(
            name, phase=op.phase, module=op.module, stream=op.stream, inputs=(source,), outputs=(made,),
            bytes_read=read * nbytes, bytes_written=written * nbytes,
        )  # fmt: skip

"""The same step with another number of samples in a micro-batch.

All extents, FLOPs and bytes that carry the batch scale; operations stay what they were. Where the inputs' batch
goes is found by following it (`extent`), which takes two samples: in a capture of one, a dim of 1 may be that one
or a dim that broadcasts over samples, and what autograd sums over the batch is not there.

A step of one sample does less: autograd sums no gradient over the batch of what was broadcast, and what is copied
only to merge the batch with another dim is a view. These operations are left out. (Products of unfused attention
keep the layout of the copies that they would read of several samples.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from echograph.errors import PlanError
from echograph.ir import types as t
from echograph.ir.columns import NONE
from echograph.ir.graph import StepGraph
from echograph.ir.passes.extent import Carriers, Extent, ExtentWriter

MAX_SIZE = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The step with another batch.

    Attributes:
        size: samples of a micro-batch.
    """

    name: ClassVar[str] = "micro_batch"

    size: int

    def __call__(self, graph: StepGraph) -> StepGraph:
        """The step with `size` samples.

        Raises:
            PlanError: the size is out of range, the capture has one sample or a batch that cannot be told from
                other extents (says which capture would do), or a share of the batch does not scale.
        """
        now = graph.workload.batch_size
        if not 1 <= self.size <= MAX_SIZE:
            raise PlanError(f"a micro-batch of {self.size}: choose 1 to {MAX_SIZE:,} samples")
        if self.size == now:
            return graph
        if now == 1:
            raise PlanError(
                "a capture of one sample does not show what broadcasts over samples: "
                f"capture with --batch-size 2, or with {self.size}"
            )
        advice = f"capture with --batch-size {self.size}"
        carriers = Carriers(graph, Extent(name="batch", size=now, dim=0, advice=advice))
        writer = (_OneSample if self.size == 1 else ExtentWriter)(graph, carriers, self.size)
        writer.builder.workload = replace(graph.workload, batch_size=self.size)
        return writer.write()


class _OneSample(ExtentWriter):
    """Leaves out what one sample does not need."""

    def operation(self, op: t.Op) -> None:
        """Writes an operation, or lets its input stand for its output."""
        match op.name:
            case "aten.sum" if self._sums_the_batch_alone(op):
                if self.graph.tensors.role[op.outputs[0]] == t.TensorRole.GRADIENT:
                    self.copy(replace(op, name="aten.copy_"), **self.work(op))
                else:
                    self._pass_on(op)
            case "aten.clone" if self._merges_the_batch(op):
                self._pass_on(op)
            case "aten.expand" if self._alike(op) and not self._readers(op.outputs[0]):
                self._pass_on(op)
            case "aten._unsafe_view" if self._maker(op.inputs[0]) == "aten.clone" and self._alike(op):
                self.tensor(op.outputs[0], name="view")
                self.copy(replace(op, name="aten.view"))
            case _:
                super().operation(op)

    def _pass_on(self, op: t.Op) -> None:
        self.part.tensors[op.outputs[0]] = self.tensor(op.inputs[0])
        maker = int(self.graph.maker[op.inputs[0]])
        if maker in self.part.ops:
            self.part.ops[op.id] = self.part.ops[maker]

    def _sums_the_batch_alone(self, op: t.Op) -> bool:
        """Whether it sums a gradient to the shape of what broadcast over the batch, and not to fewer dims."""
        shapes = [self.carriers.resized(i, 1) for i in (op.inputs[0], op.outputs[0])]
        carry = [i in self.carriers.places for i in (op.inputs[0], op.outputs[0])]
        if op.phase != t.Phase.BACKWARD or carry != [True, False] or shapes[0] != shapes[1]:
            return False
        then = [x for x in self._readers(op.outputs[0]) if x.name == "aten.view"]
        return not any(len(self.graph.tensors.shape.row(x.outputs[0])) < len(shapes[1]) for x in then)

    def _merges_the_batch(self, op: t.Op) -> bool:
        """Whether it copies only for a view that merges the batch with another dim.

        `reshape` copies and then takes an `_unsafe_view`; `contiguous` copies what is cut, here a row of labels.
        """
        if op.inputs[0] not in self.carriers.places:
            return False
        readers = self._readers(op.outputs[0])
        cut = self._maker(op.inputs[0]) == "aten.slice" and len(self.graph.tensors.shape.row(op.inputs[0])) == 2
        return len(readers) == 1 and (
            (readers[0].name == "aten._unsafe_view" and self._alike(readers[0]))
            or (readers[0].name == "aten.view" and cut)
        )

    def _alike(self, op: t.Op) -> bool:
        """Whether a view of one sample drops or adds dims of 1 alone, which any layout allows."""
        source, made = (self.carriers.resized(i, 1) for i in (op.inputs[0], op.outputs[0]))
        return [e for e in source if e != 1] == [e for e in made if e != 1]

    def _readers(self, row: int) -> list[t.Op]:
        reads = self.graph.ops.inputs
        return [self.graph.ops[op] for op in reads.rows[reads.values == row].tolist()]

    def _maker(self, row: int) -> str:
        maker = int(self.graph.maker[row])
        return "" if maker == NONE else str(self.graph.ops[maker].name)

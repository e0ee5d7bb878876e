"""What is recomputed of a layer: the operations, what backward needs of them, and where they are run again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from echograph.ir import types as t
from echograph.ir.columns import NONE, Int64
from echograph.ir.graph import StepGraph
from echograph.ir.passes.layers import Layer

_PRODUCTS = ("aten.mm", "aten.addmm")
_BATCHED = ("aten.bmm", "aten.baddbmm")
_KEPT_COLLECTIVES = (t.CollectiveKind.REDUCE_SCATTER, t.CollectiveKind.ALL_TO_ALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Operations that are recomputed together.

    Attributes:
        rows: all forward operations of the region.
        exposed: tensors of the region that forward operations outside of it read; they are kept for these.
        again: those that are run once more, in order.
        before: the backward operation that they stand in front of.
    """

    rows: frozenset[int]
    exposed: frozenset[int]
    again: tuple[int, ...] = ()
    before: int = NONE

    def renews(self, op: t.Op, tensor: int) -> bool:
        """Whether a backward operation reads the recomputed tensor, and not the one that is kept for others."""
        return tensor not in self.exposed or (isinstance(op, t.Compute) and op.forward_op in self.rows)


class Regions:
    """Finds what is recomputed of a layer.

    Args:
        graph: the step.
        early_stop: recomputation ends with the last operation that saved something for backward.
    """

    def __init__(self, graph: StepGraph, *, early_stop: bool) -> None:
        self.graph, self.early_stop = graph, early_stop
        self.made = _makers(graph)
        self.backward: dict[int, list[tuple[t.Compute, int]]] = {}

    def whole_layer(self, layer: Layer, *, keep_products: bool) -> list[Region]:
        """The region of a whole layer, which keeps nothing, or the results of some operations."""
        kept: set[int] = set()
        if keep_products:
            kept = {row for row in layer.rows if _is_kept(self.graph.ops[row])}
            kept.update([row for row in layer.rows if self._named(row, _PRODUCTS)][::2])
        return self._region(layer, layer.rows, frozenset(kept))

    def core_attention(self, layer: Layer) -> list[Region]:
        """The regions of a layer's attentions: fused kernels, and what is between scores and weighted values."""
        regions = []
        for row in layer.rows:
            op = self.graph.ops[row]
            if isinstance(op, t.Compute) and isinstance(op.attributes, t.Attention):
                regions += self._region(layer, (row,), frozenset())
            elif "softmax" in op.name:
                regions += self._region(layer, self._around_softmax(layer.rows, row), frozenset())
        return regions

    def _around_softmax(self, rows: tuple[int, ...], softmax: int) -> tuple[int, ...]:
        """The operations from the product that a softmax normalises to the one that weighs with it.

        What leads in from aside (a mask, a bias) is none of them. Empty where a softmax is not between two batched
        products, such as a router's.
        """
        inside = set(rows)
        readers: dict[int, list[int]] = {row: [] for row in rows}
        makers: dict[int, list[int]] = {}
        for row in rows:
            makers[row] = [m for i in self.graph.ops.inputs.row(row) if (m := int(self.made[i])) in inside]
            for maker in makers[row]:
                readers[maker].append(row)
        before, after = self._reached(softmax, makers), self._reached(softmax, readers)
        scores = [row for row in before if self._named(row, _BATCHED)]
        values = [row for row in after if self._named(row, _BATCHED)]
        if not scores or not values:
            return ()
        leading = before & _all_reached(scores, readers)
        trailing = after & _all_reached(values, makers)
        return tuple(sorted(leading | {softmax} | trailing))

    def _reached(self, start: int, following: dict[int, list[int]]) -> set[int]:
        """What is reached from an operation, batched products included, and not through them."""
        stops = {row: [] if self._named(row, _BATCHED) else rows for row, rows in following.items()}
        return _all_reached(following[start], stops)

    def _named(self, row: int, names: tuple[str, ...]) -> bool:
        return self.graph.strings[self.graph.ops.name[row]] in names

    def _region(self, layer: Layer, rows: tuple[int, ...], kept: frozenset[int]) -> list[Region]:
        """Operations with what of them is run once more, and where; nothing where backward needs none of it."""
        inside = frozenset(rows)
        region = Region(rows=inside, exposed=self._exposed(layer.block, inside))
        last, before, anything = NONE, NONE, False
        for op, begin in self._backward(layer.block):
            for tensor in op.inputs:
                saver = int(self.made[tensor])
                saved = saver in inside and region.renews(op, tensor)
                anything |= saved and saver not in kept
                if op.forward_op in inside and self._is_forwards(layer, tensor):
                    # An operator saves its arguments before it runs, and its results after.
                    saved, results = True, self.graph.ops.outputs.row(op.forward_op)
                    saver = op.forward_op if tensor in results else op.forward_op - 1
                if saved:
                    last = max(last, saver)
                    before = begin if before == NONE else before
        if not anything:
            return []
        again = tuple(row for row in rows if row not in kept and (row <= last or not self.early_stop))
        return [replace(region, again=again, before=before)]

    def _backward(self, block: int) -> list[tuple[t.Compute, int]]:
        """The backward operations of a block, each with where the backward of its operator begins.

        That is when what the operator saved is asked for. The sum of its gradients comes before; it is recorded
        with the module that gave the last of them.
        """
        if block not in self.backward:
            graph, begins = self.graph, dict[int, int]()
            found = self.backward[block] = list[tuple[t.Compute, int]]()
            for row in self.graph.blocks[block].ops:
                op, forward = graph.ops[row], int(graph.ops.forward_op[row])
                if isinstance(op, t.Compute) and op.phase == t.Phase.BACKWARD:
                    own = forward >= 0 and graph.ops.module[forward] == graph.ops.module[row]
                    found.append((op, begins.setdefault(forward, row) if own else row))
        return self.backward[block]

    def _is_forwards(self, layer: Layer, tensor: int) -> bool:
        """Whether a tensor is there after the forward pass: what backward reads of these was saved."""
        source = self.graph.source(layer.block, layer.instance, tensor)
        return source is None or self.graph.ops.phase[source[2]] == t.Phase.FORWARD

    def _exposed(self, block: int, inside: frozenset[int]) -> frozenset[int]:
        """Tensors made in a region that forward operations outside of it read, also through ports."""
        graph, outside = self.graph, set[int]()
        for row in graph.blocks[block].ops:
            if row not in inside and graph.ops.phase[row] == t.Phase.FORWARD:
                outside.update(i for i in graph.ops.inputs.row(row) if int(self.made[i]) in inside)
        for other in graph.blocks:
            for instance in other.instances:
                bound = (graph.locate_tensor(identity) for identity in instance.bindings)
                outside.update(i for its, _, i in bound if its == block and int(self.made[i]) in inside)
        return frozenset(outside)


def is_allocation(tensor: t.Tensor, made: bool) -> bool:
    """Whether a tensor stands for memory that is written part by part, so that no one operation makes it."""
    own = not made and not tensor.port and tensor.alias_of is None
    return own and tensor.role == t.TensorRole.ACTIVATION


def _makers(graph: StepGraph) -> Int64:
    """For every tensor what makes it, or for memory written part by part the first operation to touch it."""
    made = graph.maker.copy()
    inputs = graph.ops.inputs
    for tensor in np.flatnonzero(made == NONE).tolist():
        if is_allocation(graph.tensors[tensor], made=False):
            made[tensor] = min(inputs.rows[inputs.values == tensor].tolist(), default=NONE)
    return made


def _all_reached(starts: Iterable[int], following: dict[int, list[int]]) -> set[int]:
    """What is reached from operations, those themselves included."""
    found: set[int] = set()
    left = list(starts)
    while left:
        row = left.pop()
        if row not in found:
            found.add(row)
            left += following[row]
    return found


def _is_kept(op: t.Op) -> bool:
    match op:
        case t.Compute():
            return isinstance(op.attributes, t.Attention)
        case t.Collective():
            return op.collective in _KEPT_COLLECTIVES
    return False

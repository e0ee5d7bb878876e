"""Activation recomputation: what backward needs of a layer's forward pass is computed again instead of kept.

The layers are the repeated blocks of the step, and in the main block what stands under one numbered module. The
operations that are recomputed stand once more, in the phase RECOMPUTE, before the first backward operation of the
layer that reads what forward left; backward reads the new tensors, and those of the forward pass die after their
last forward reader. So memory and time follow from the graph. Policies:

- "full": a layer keeps what it reads from outside (Chen et al., "Training deep nets with sublinear memory cost",
  2016).
- "selective": only the core of the attention is recomputed, from queries, keys and values: scores, softmax,
  dropout, weighted values (Korthikanti et al., "Reducing activation recomputation in large transformer models",
  2022, section 5; Megatron-LM's `--recompute-granularity selective`). With fused attention that is the fused
  kernel once more, which saves next to nothing.
- "selective_op": as torchtitan's selective checkpointing by operation: results of fused attention, of every
  second matrix product (the first, third, ... of a layer), of reduce-scatters and of all-to-alls are kept, all
  else is recomputed. torchtitan lists `aten.mm` alone, its layers having no biases; `aten.addmm` is taken for the
  same. The result of a layer's last product, if its turn is to be kept, is held by PyTorch though backward
  does not read it; here it is not.

Collectives are recomputed with the rest. Passes that add them later (tensor parallelism) add them to what is
recomputed as well, as Megatron-LM runs them again; so "selective_op" keeps a reduce-scatter's result only
where the step has one already.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

import numpy as np

from echograph.errors import PlanError, UnknownNameError
from echograph.ir import types as t
from echograph.ir.columns import NONE, Int64
from echograph.ir.graph import StepGraph
from echograph.ir.passes.model import Layer, find_layers
from echograph.ir.passes.rewrite import StepWriter

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
        return source is None or self.graph.ops.phases[source[2]] == t.Phase.FORWARD

    def _exposed(self, block: int, inside: frozenset[int]) -> frozenset[int]:
        """Tensors made in a region that forward operations outside of it read, also through ports."""
        graph, outside = self.graph, set[int]()
        for row in graph.blocks[block].ops:
            if row not in inside and graph.ops.phases[row] == t.Phase.FORWARD:
                outside.update(i for i in graph.ops.inputs.row(row) if int(self.made[i]) in inside)
        for other in graph.blocks:
            for instance in other.instances:
                bound = (graph.locate_tensor(identity) for identity in instance.bindings)
                outside.update(i for its, _, i in bound if its == block and int(self.made[i]) in inside)
        return frozenset(outside)


def is_written_in_parts(tensor: t.Tensor, made: bool) -> bool:
    """Whether a tensor stands for memory that is written part by part, so that no one operation makes it."""
    own = not made and not tensor.port and tensor.alias_of is None
    return own and tensor.role == t.TensorRole.ACTIVATION


def _makers(graph: StepGraph) -> Int64:
    """For every tensor what makes it, or for memory written part by part the first operation to touch it."""
    made = graph.maker.copy()
    inputs = graph.ops.inputs
    for tensor in np.flatnonzero(made == NONE).tolist():
        if is_written_in_parts(graph.tensors[tensor], made=False):
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


Policy = Literal["none", "selective", "selective_op", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """The step with recomputation.

    Attributes:
        policy: what is recomputed.
        every: of this many layers, in the order of the model, the last one is recomputed (torchtitan's selective
            checkpointing by layer: "full" with its `ac_freq`); 1: all.
        early_stop: recomputation ends with the last operation that saved something for backward, as
            `torch.utils.checkpoint` without reentry does; not early, all is run once more, as reentrant
            checkpointing and Megatron-LM do. None: as who the policy is named after, early but for "selective".
    """

    name: ClassVar[str] = "recompute"

    policy: Policy
    every: int = 1
    early_stop: bool | None = None

    def __call__(self, graph: StepGraph) -> StepGraph:
        """The step graph with the recomputation; folded as it was, but for `every`, which splits blocks.

        Raises:
            PlanError: the step recomputes already, has no layers, or no attention to be selective with.
            UnknownNameError: no such policy.
        """
        if self.policy not in get_args(Policy):
            raise UnknownNameError("recomputation policy", self.policy, get_args(Policy))
        if self.every < 1:
            raise PlanError(
                f"recomputation of every {self.every} layers: give 1 for every layer, 2 for half of them"
            )
        if self.policy == "none":
            return graph
        if np.any(graph.ops.phase == t.Phase.RECOMPUTE):
            raise PlanError("the step recomputes already: start from a graph captured without recomputation")
        layers = find_layers(graph)
        if len(layers) < self.every:
            raise PlanError(
                f"recomputation of one in {self.every} layers, but the model has {len(layers)}, which are modules "
                "with numbered names: " + (f"choose 1 to {len(layers)}" if layers else "leave recomputation out")
            )
        parts = _parts(graph, layers[self.every - 1 :: self.every])
        early = self.policy != "selective" if self.early_stop is None else self.early_stop
        regions = Regions(graph, early_stop=early)
        found = [[r for layer in its for r in self._of_layer(regions, layer)] for _, _, its in parts]
        if not any(found):
            raise PlanError(
                f"recomputation ({self.policy}): no layer has anything to recompute: choose another policy"
            )
        return _Writer(regions, [(block, instances) for block, instances, _ in parts], found).write()

    def _of_layer(self, regions: Regions, layer: Layer) -> list[Region]:
        if self.policy == "selective":
            return regions.core_attention(layer)
        return regions.whole_layer(layer, keep_products=self.policy == "selective_op")


def _parts(graph: StepGraph, chosen: list[Layer]) -> list[tuple[int, tuple[int, ...], list[Layer]]]:
    """Blocks to be: (block, instances, a layer of each kind that is recomputed there)."""
    parts: list[tuple[int, tuple[int, ...], list[Layer]]]
    parts = [(0, (0,), [layer for layer in chosen if layer.block == 0])]
    for number, block in enumerate(graph.blocks[1:], 1):
        of_block = [layer for layer in chosen if layer.block == number]
        again = tuple(sorted(layer.instance for layer in of_block))
        rest = tuple(i for i in range(len(block.instances)) if i not in set(again))
        if again:
            parts.append((number, again, of_block[:1]))
        if rest:
            parts.append((number, rest, []))
    return parts


class _Writer(StepWriter):
    """Writes recomputed operations before the backward operation that needs them first.

    `fresh` has what a recomputed operation makes in place of an old tensor, `again` the operation itself.
    """

    def __init__(
        self, regions: Regions, parts: list[tuple[int, tuple[int, ...]]], found: list[list[Region]]
    ) -> None:
        super().__init__(regions.graph, parts)
        self.made = regions.made
        self.found = {id(part): its for part, its in zip(self.parts, found, strict=True)}
        self.fresh: dict[int, int] = {}
        self.again: dict[int, int] = {}
        self.region_of: dict[int, Region] = {}

    def operation(self, op: t.Op) -> None:
        regions = self.found[id(self.part)]
        if op.id == self.graph.blocks[self.part.block].ops.start:
            self.fresh, self.again = {}, {}
            self.region_of = {row: region for region in regions for row in region.again}
        for region in regions:
            if region.before == op.id:
                for row in region.again:
                    self._again(self.graph.ops[row], region)
        if op.phase != t.Phase.BACKWARD:
            self.copy(op)
            return
        for index in op.outputs:
            tensor = self.graph.tensors[index]
            if tensor.alias_of is not None:
                self.part.tensors[index] = self.add_tensor(tensor, self._read(op, tensor.alias_of))
        self.copy(
            op,
            inputs=[self._read(op, i) for i in op.inputs],
            deps=[self.again.get(before, self.part.ops[before]) for before in op.deps],
        )

    def _again(self, op: t.Op, region: Region) -> None:
        """Writes an operation of the forward pass once more."""
        changes: dict[str, object] = {
            "phase": t.Phase.RECOMPUTE,
            "inputs": [self._newest(i, region) for i in op.inputs],
            "deps": [self.again.get(before, self.part.ops[before]) for before in op.deps],
        }
        for index in op.outputs:
            tensor = self.graph.tensors[index]
            alias = None if tensor.alias_of is None else self._newest(tensor.alias_of, region)
            self.fresh[index] = self.add_tensor(tensor, alias)
        changes["outputs"] = [self.fresh[i] for i in op.outputs]
        if isinstance(op, t.Compute):
            changes["forward_op"] = self.part.ops[op.id]
        self.again[op.id] = self.builder.add(op, **changes)

    def _newest(self, index: int, region: Region) -> int:
        """What a recomputed operation reads, or writes into."""
        if int(self.made[index]) not in region.rows:
            return self.tensor(index)
        tensor = self.graph.tensors[index]
        if index not in self.fresh and is_written_in_parts(tensor, bool(self.graph.maker[index] != NONE)):
            self.fresh[index] = self.add_tensor(tensor, None)
        return self.fresh[index] if index in self.fresh else self.tensor(index)

    def _read(self, op: t.Op, index: int) -> int:
        """What a backward operation reads: the recomputed tensor, where its layer recomputes it."""
        region = self.region_of.get(int(self.made[index]))
        return self.fresh[index] if region is not None and region.renews(op, index) else self.tensor(index)

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

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from echograph.errors import PlanError, UnknownNameError
from echograph.ir import types as t
from echograph.ir.columns import NONE
from echograph.ir.graph import StepGraph
from echograph.ir.passes.layers import Layer, find_layers
from echograph.ir.passes.recompute_regions import Region, Regions, is_allocation
from echograph.ir.passes.rewrite_step import StepWriter

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
        if index not in self.fresh and is_allocation(tensor, bool(self.graph.maker[index] != NONE)):
            self.fresh[index] = self.add_tensor(tensor, None)
        return self.fresh[index] if index in self.fresh else self.tensor(index)

    def _read(self, op: t.Op, index: int) -> int:
        """What a backward operation reads: the recomputed tensor, where its layer recomputes it."""
        region = self.region_of.get(int(self.made[index]))
        return self.fresh[index] if region is not None and region.renews(op, index) else self.tensor(index)

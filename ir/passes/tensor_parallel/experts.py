"""Experts that tensor-parallel ranks leave whole, each having tokens of its own for them.

Megatron-Core's expert tensor parallelism of 1, which takes sequence parallelism: between the norm before a
mixture-of-experts layer and the residual addition after it, everything (router, order of the rows, products) is of
the rank's own share of the sequence, so nothing is gathered but what shared experts read, which are cut like any
feed-forward part. The experts are then divided over the tensor-parallel ranks as over others, by
`expert_parallel` across "tp", which exchanges the rows; so their gradients are no summands. The router's are.
"""

from __future__ import annotations

from collections.abc import Mapping

from echograph.errors import PlanError
from echograph.ir.columns import NONE
from echograph.ir.graph import StepGraph
from echograph.ir.passes.extent import Carriers, Extent, ExtentDim
from echograph.ir.passes.tensor_parallel.plan import Style, style_of
from echograph.ir.passes.tensor_parallel.rules import PARTIAL, WHOLE, Decision, Placement, Shard, operator
from echograph.ir.types import Phase, TensorRole

GROUPED = "_grouped_mm"


def whole_experts(graph: StepGraph) -> dict[str, Style]:
    """Styles of the experts' parameters, which come before those of any plan.

    Raises:
        PlanError: the step has no experts.
    """
    modules = {_module(graph, row) for row in _products(graph)}
    if not modules:
        raise PlanError("experts whole on tensor-parallel ranks: the step has no grouped products of experts")
    return {f"{module}.*": "whole" for module in modules}


class OwnTokens:
    """What a rank does with its own share of the sequence in the mixture-of-experts layers of a step.

    Args:
        graph: the step.
        plan: module pattern -> style; a part of such a layer with a parameter that is cut is not of it.

    Raises:
        PlanError: where the sequence is in a tensor cannot be told.
    """

    def __init__(self, graph: StepGraph, plan: Mapping[str, Style]) -> None:
        self.graph = graph
        self.experts = {_module(graph, row) for row in _products(graph)}
        self.rows = self._operations(plan)
        length = graph.workload.sequence_length
        sequence = Extent(name="sequence", size=length, dim=1, advice="capture another sequence length")
        self.places = Carriers(graph, sequence, self._tokens(), self.rows).places

    def decision(self, row: int) -> Decision | None:
        """Placements of an operation in a mixture-of-experts layer; None for any other."""
        if row not in self.rows:
            return None
        ops, theirs = self.graph.ops, _within(_module(self.graph, row), self.experts)
        return Decision(
            tuple(self._placement(index, WHOLE) for index in ops.inputs.row(row)),
            tuple(self._placement(index, WHOLE if theirs else PARTIAL) for index in ops.outputs.row(row)),
        )

    def _operations(self, plan: Mapping[str, Style]) -> frozenset[int]:
        """Those of the layers, but for parts that are cut; others may have modules of the same name."""
        graph = self.graph
        layers = {module.rpartition(".")[0] for module in self.experts}
        parameters = (tensor.name for tensor in graph.tensors if tensor.role == TensorRole.PARAMETER)
        cut = {
            ".".join(name.split(".")[: layer.count(".") + 2])
            for name in parameters
            for layer in layers
            if name.startswith(f"{layer}.") and style_of(plan, name) not in (None, "whole")
        }
        blocks = {int(graph.block_of_op[row]) for row in _products(graph)}
        return frozenset(
            row
            for block in blocks
            for row in graph.blocks[block].ops
            if graph.ops.phases[row] != Phase.OPTIMIZER
            and _within(module := _module(graph, row), layers)
            and not _within(module, cut)
        )

    def _tokens(self) -> dict[int, ExtentDim]:
        """What layers read and make: [samples, positions, channels]; what rows of products are copies of."""
        graph, ops = self.graph, self.graph.ops
        batch, length = graph.workload.batch_size, graph.workload.sequence_length
        touched = {i for row in self.rows for i in (*ops.inputs.row(row), *ops.outputs.row(row))}
        found = {}
        for index in touched:
            shape = graph.tensors.shape.row(index)
            if len(shape) == 3 and shape[:2] == (batch, length):
                found[index] = ExtentDim(1)
        for row in _products(graph):
            maker = int(graph.maker[ops.inputs.row(row)[0]])
            if maker != NONE and operator(graph, maker) == "index":
                found[ops.inputs.row(maker)[0]] = ExtentDim(0, batch)
        return found

    def _placement(self, index: int, gradient: Placement) -> Placement:
        place = self.places.get(index)
        if place is not None:
            return Shard(place.dim, place.before)
        return gradient if self.graph.tensors.roles[index] == TensorRole.GRADIENT else WHOLE


def _products(graph: StepGraph) -> list[int]:
    return [row for row in range(len(graph.ops)) if operator(graph, row) == GROUPED]


def _module(graph: StepGraph, row: int) -> str:
    return str(graph.strings[graph.ops.module[row]])


def _within(module: str, any_of: set[str]) -> bool:
    return any(module == other or module.startswith(f"{other}.") for other in any_of)

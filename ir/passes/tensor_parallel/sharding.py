"""The placement of every tensor of a step under tensor parallelism, propagated through all operations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil

from echograph.errors import PlanError
from echograph.ir import types as t
from echograph.ir.columns import NONE
from echograph.ir.graph import StepGraph
from echograph.ir.passes.dims import Ambiguous, Shape
from echograph.ir.passes.gradients import NORMS, overflow_flags, total_norms
from echograph.ir.passes.tensor_parallel.plan import Style, given_placements
from echograph.ir.passes.tensor_parallel.rules import (
    PARTIAL,
    VIEWS,
    WHOLE,
    Decision,
    OpSchema,
    Partial,
    Placement,
    Shard,
    decide,
)


class Indivisible(PlanError):
    """An extent that the ranks cannot share evenly.

    Args:
        where: the tensor or operation.
        extent: what they would share.
        size: number of ranks.
    """

    def __init__(self, where: str, extent: int, size: int) -> None:
        super().__init__(f"{where} has an extent of {extent}, which {size} ranks do not share")
        self.extent = extent


class Sharding:
    """Placements and decisions, once per row of the tables.

    Operations run in program order; a block's ports have the placement of what its instances bind, which must be
    the same for all. A summand is passed on through views and through sums with other summands; where anything
    else reads it, it is summed over the ranks as soon as it is made. That is found by repetition: each round
    learns which summands to reduce at once.

    Args:
        graph: the step.
        size: ranks that share it.
        plan: module pattern -> style.
        vocab_multiple: each rank's rows of the vocabulary are a multiple of it.
        sequence_parallel: reduce into shares of the sequence, not to whole tensors.

    Raises:
        PlanError: an extent does not divide, or the step has what cannot be shared.
    """

    def __init__(
        self,
        graph: StepGraph,
        *,
        size: int,
        plan: Mapping[str, Style],
        vocab_multiple: int = 128,
        sequence_parallel: bool = False,
    ) -> None:
        self.graph, self.size, self.vocab_multiple = graph, size, vocab_multiple
        self.sequence_parallel = sequence_parallel
        self.given = given_placements(graph, plan)
        self.norms, flags = total_norms(graph), overflow_flags(graph)
        self._of_all_gradients = {graph.ops.outputs.row(row)[-1] for row in (*self.norms, *flags)}
        self.reduced: set[int] = set(self._of_all_gradients)
        self.placement: dict[int, Placement] = {}
        self.decisions: dict[int, Decision] = {}
        self._demanded: set[int] = set()
        while not self._round():
            pass
        self._check_ports()
        self.shapes = {index: self.local_shape(index, p) for index, p in self.placement.items()}
        for row, decision in self.decisions.items():
            for index, wanted in zip(graph.ops.inputs.row(row), decision.inputs, strict=True):
                self.local_shape(index, wanted)

    def local_shape(self, index: int, placement: Placement) -> Shape:
        """Shape of what one rank holds of a tensor.

        Raises:
            PlanError: the sharded extent does not divide.
        """
        shape: Shape = self.graph.tensors.shape.row(index)
        if not isinstance(placement, Shard):
            return shape
        part, shares = placement.extent(shape), placement.shares or self.size
        if placement.vocab:
            rows = self.vocab_multiple * ceil(part / shares / self.vocab_multiple)
        elif part % shares:
            raise Indivisible(self._where(index), part, self.size)
        else:
            rows = part // shares
        return (*shape[: placement.dim], placement.before * rows, *shape[placement.dim + 1 :])

    def is_partial(self, index: int) -> bool:
        """Whether the operation that makes the tensor leaves summands, which are then reduced."""
        maker = int(self.graph.maker[index])
        if maker == NONE or maker not in self.decisions:
            return False
        at = self.graph.ops.outputs.row(maker).index(index)
        return isinstance(self.decisions[maker].outputs[at], Partial)

    def reduction_target(self, index: int) -> Placement:
        """What summands are reduced to: whole, or with sequence parallelism a share of the positions."""
        workload, shape = self.graph.workload, self.graph.tensors.shape.row(index)
        batch, positions = workload.batch_size, workload.sequence_length
        shared = self.sequence_parallel and positions and positions % self.size == 0
        if not shared or self.graph.tensors.role[index] != t.TensorRole.ACTIVATION:
            return WHOLE
        if len(shape) == 3 and shape[:2] == (batch, positions):
            return Shard(1)
        return Shard(0, batch) if len(shape) == 2 and shape[0] == batch * positions else WHOLE

    def _round(self) -> bool:
        """Propagates once; whether nothing more has to be reduced than was known."""
        self.placement, self.decisions, self._demanded = dict(self.given), {}, set()
        for block, begin, end, instance, _ in self.graph.programs[0].calls.tolist():
            for row in range(begin, end):
                if row not in self.decisions:
                    self._decide(block, instance, row)
        new = self._demanded - self.reduced
        self.reduced |= new
        return not new

    def _decide(self, block: int, instance: int, row: int) -> None:
        graph = self.graph
        inputs, outputs = graph.ops.inputs.row(row), graph.ops.outputs.row(row)
        name = operator(graph, row)
        site = OpSchema(
            name=name.removesuffix("_"),
            inputs=tuple(graph.tensors.shape.row(i) for i in inputs),
            placements=tuple(self._placement(block, instance, i) for i in inputs),
            outputs=tuple(graph.tensors.shape.row(i) for i in outputs),
            in_place=self._in_place(name, outputs, block, instance),
            forward=self._forward(block, instance, row),
            phase=t.Phase(int(graph.ops.phase[row])),
            size=self.size,
        )
        try:
            decision = self._at_gradients(site, row)
        except Ambiguous:
            raise PlanError(
                f"{graph.strings[graph.ops.module[row]]} (aten.{name}) {site.inputs[0]} -> {site.outputs[0]}: "
                "dims of equal extent cannot be told apart: take another batch size or sequence length"
            ) from None
        self.decisions[row] = decision
        for index, has, wanted in zip(inputs, site.placements, decision.inputs, strict=True):
            if isinstance(has, Partial) and not isinstance(wanted, Partial):
                self._demanded.add(self._first_summand(index))
        for index, made in zip(outputs, decision.outputs, strict=True):
            at_once = site.name in ("addmm", "baddbmm") or graph.tensors.role[index] == t.TensorRole.GRADIENT
            if isinstance(made, Partial) and (at_once or index in self.reduced):
                self.reduced.add(index)
                made = self.reduction_target(index)
            self.placement[index] = made

    def _at_gradients(self, site: OpSchema, row: int) -> Decision:
        """The decision; norms for clipping and overflow flags are first those of a rank, then of all."""
        outputs = self.graph.ops.outputs.row(row)
        local = decide(site)
        if (
            self.norms
            and site.phase == t.Phase.OPTIMIZER
            and self.graph.strings[self.graph.ops.name[row]] in NORMS
        ):
            local = Decision(site.placements, (WHOLE,) * len(outputs))
        made = (PARTIAL if i in self._of_all_gradients else p for i, p in zip(outputs, local.outputs, strict=True))
        return replace(local, outputs=tuple(made))

    def _placement(self, block: int, instance: int, index: int) -> Placement:
        graph = self.graph
        if index not in self.placement:
            placement: Placement = WHOLE
            if graph.tensors.port[index]:
                bound = graph.locate_tensor(graph.tensor_id(block, instance, index))
                placement = self._placement(*bound)
                if isinstance(placement, Partial):  # what crosses a block's border is never a summand
                    self._demanded.add(self._first_summand(bound[2]))
                    placement = WHOLE
            elif (alias := int(graph.tensors.alias_of[index])) != NONE:
                placement = self._placement(block, instance, alias)
            self.placement[index] = placement
        return self.placement[index]

    def _first_summand(self, index: int) -> int:
        """The tensor that a summand is a view of: reducing that one at once hides more of the reduction."""
        while True:
            maker = int(self.graph.maker[index])
            reads = self.graph.ops.inputs.row(maker)
            if operator(self.graph, maker) not in VIEWS or not isinstance(self.placement.get(reads[0]), Partial):
                return index
            index = reads[0]

    def _in_place(self, name: str, outputs: tuple[int, ...], block: int, instance: int) -> Placement | None:
        if not name.endswith("_") or not outputs:
            return None
        alias = int(self.graph.tensors.alias_of[outputs[0]])
        placement = self._placement(block, instance, alias) if alias != NONE else None
        return WHOLE if isinstance(placement, Partial) else placement

    def _forward(self, block: int, instance: int, row: int) -> tuple[Placement, ...]:
        forward = int(self.graph.ops.forward_op[row])
        if forward < NONE:
            bound = self.graph.blocks[block].instances[instance].op_bindings[-2 - forward]
            forward = self.graph.locate_op(bound)[2]
        return self.decisions[forward].inputs if forward in self.decisions else ()

    def _check_ports(self) -> None:
        """All instances of a block must bind a port to tensors of one placement."""
        for number, instance, port, where in self.graph.bindings():
            if self._placement(*where) != self._placement(number, instance, port):
                raise PlanError(
                    f"{self._where(where[2])} is shared otherwise than what instance 0 of block "
                    f"'{self.graph.blocks[number].name}' takes in its place: leave it out of the plan"
                )

    def _where(self, index: int) -> str:
        graph, maker = self.graph, int(self.graph.maker[index])
        if maker == NONE:
            return graph.tensors[index].name
        return f"{graph.strings[graph.ops.module[maker]]} ({graph.strings[graph.ops.name[maker]]})"


def operator(graph: StepGraph, row: int) -> str:
    """An operation's operator without its namespace."""
    name: str = graph.strings[graph.ops.name[row]]
    return name.rpartition(".")[2]

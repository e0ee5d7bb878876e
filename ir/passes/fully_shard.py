"""Fully sharded data parallelism (ZeRO-3) as PyTorch's FSDP2 does it.

Parameters, gradients and optimizer state are cut along their first dimension over the ranks. A *unit* is what is
gathered and reduced at once: each block instance (a layer), and the rest of the model (the root). A unit's
parameters are all-gathered before its forward pass and, unless it is the root, dropped after it and gathered
again before its backward pass; its gradients are reduce-scattered after it. Gathers run ahead by one unit, so they
overlap the computation before; one reduction is in flight at a time. The optimizer works on the shards. With
replicas of the sharding group (HSDP), the gradients' shards are then all-reduced among them.
(Zhao et al., "PyTorch FSDP", VLDB 2023; the order of operations is that of torch.distributed.fsdp.fully_shard.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from echograph.errors import PlanError
from echograph.ir import types as t
from echograph.ir.builder import GraphBuilder
from echograph.ir.graph import Axis, JobGraph, StepGraph
from echograph.ir.passes.data_parallel import MAX_MICRO_BATCHES, MAX_REPLICAS
from echograph.ir.passes.fully_shard_block import GATHERED, REDUCED, REGATHERED, Shard, Unit, phase_of, write_block
from echograph.ir.passes.rewrite import Call, empty_copy

SHARD, REPLICATE = "dp_shard", "dp_replicate"
Place = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class FullyShard:
    """Lowers a step graph to a job whose ranks hold shards of the model.

    Attributes:
        replicas: number of ranks, each with its own micro-batches.
        shard: ranks that share one copy of the model; None: all of them. Fewer make copies (HSDP).
        micro_batches: forward and backward passes before the optimizer; each gathers and reduces, as FSDP2 does
            by default. Adding up the shards of the gradients is not counted.
        reshard_after_forward: drop a layer's parameters after its forward pass and gather them again.
        reduce_dtype: type in which gradients are reduced; None: their own.
    """

    replicas: int
    shard: int | None = None
    micro_batches: int = 1
    reshard_after_forward: bool = True
    reduce_dtype: t.DType | None = None

    def __call__(self, graph: StepGraph) -> JobGraph:
        """The job graph.

        Raises:
            PlanError: a number is out of range, or the sharding group does not divide the ranks.
        """
        shard = self.replicas if self.shard is None else self.shard
        if not 1 <= self.replicas <= MAX_REPLICAS or not 1 <= self.micro_batches <= MAX_MICRO_BATCHES:
            raise PlanError(
                f"{self.replicas} ranks with {self.micro_batches} micro-batches: choose 1 to {MAX_REPLICAS:,} and "
                f"1 to {MAX_MICRO_BATCHES:,}"
            )
        if shard < 1 or self.replicas % shard:
            raise PlanError(f"sharding over {shard} ranks does not divide {self.replicas}: choose a divisor")
        builder = empty_copy(graph)
        copies = self.replicas // shard
        replicate = (Axis(name=REPLICATE, size=copies),) if copies > 1 else ()
        # What shares a replica (tensor parallelism) is inside: its ranks are neighbours.
        builder.mesh = (*replicate, Axis(name=SHARD, size=shard), *graph.mesh)
        how = Shard(
            ranks=shard,
            axis=SHARD,
            copies=copies,
            group=builder.group(SHARD, axes=(SHARD,)),
            replicate_group=builder.group(REPLICATE, axes=(REPLICATE,)) if copies > 1 else 0,
            stream=builder.stream(f"comm.{SHARD}"),
            replicate_stream=builder.stream(f"comm.{REPLICATE}") if copies > 1 else 0,
            reshard=self.reshard_after_forward,
            reduce_dtype=self.reduce_dtype,
        )
        ops: dict[int, int] = {}
        units = []
        for number, block in enumerate(graph.blocks):
            if number:
                builder.begin_block(block.name)
            units.append(write_block(graph, builder, number, how, ops))
        schedule = _Schedule(graph, units, ops)
        _bind_instances(graph, builder, units, schedule, ops)
        builder.program(schedule.program(self.micro_batches), role="replica")
        return builder.build(JobGraph)


class _Schedule:
    """In which order units are gathered, run and reduced."""

    def __init__(self, graph: StepGraph, units: list[Unit], ops: dict[int, int]) -> None:
        self.graph, self.units, self.ops = graph, units, ops
        self.pieces = [piece for call in graph.programs[0].calls.tolist() for piece in self._by_phase(tuple(call))]
        self.forward = self._first_runs(t.Phase.FORWARD)
        self.backward = self._first_runs(t.Phase.BACKWARD)

    def _by_phase(self, call: Call) -> list[tuple[t.Phase, Call]]:
        """A call cut where the phase changes; its operations as rows of the old table."""
        block, begin, end, instance, micro_batch = call
        pieces: list[tuple[t.Phase, Call]] = []
        for op in range(begin, end):
            phase = phase_of(int(self.graph.ops.phase[op]))
            if pieces and pieces[-1][0] == phase:
                start = pieces[-1][1][1]
                pieces[-1] = phase, (block, start, op + 1, instance, micro_batch)
            else:
                pieces.append((phase, (block, op, op + 1, instance, micro_batch)))
        return pieces

    def _first_runs(self, phase: t.Phase) -> list[Place]:
        places = ((call[0], call[3]) for its, call in self.pieces if its == phase and call[0])
        return [p for p in dict.fromkeys(places) if GATHERED in self.units[p[0]].tokens]

    def token(self, block: int, instance: int, what: str) -> tuple[int, int, int]:
        """(block, instance, tensor) of what a unit waits for before it does `what`."""
        here = (block, instance)
        if what == GATHERED:
            at = self.forward.index(here)
            place, token = (self.forward[at - 1], GATHERED) if at else ((0, 0), GATHERED)
        elif what == REGATHERED:
            at = self.backward.index(here)
            place, token = (self.backward[at - 1], REGATHERED) if at else (self.forward[-1], GATHERED)
        else:
            order = [p for p in self.backward if REDUCED in self.units[p[0]].tokens]
            at = order.index(here)
            own = REGATHERED if REGATHERED in self.units[block].tokens else GATHERED
            place, token = (order[at - 1], REDUCED) if at else (here, own)
        return *place, self.units[place[0]].tokens[token]

    def program(self, micro_batches: int) -> list[Call]:
        """All calls of the step: every micro-batch gathers and reduces, then the optimizer runs once."""
        calls: list[Call] = []
        for micro_batch in range(micro_batches):
            calls += self._pass(micro_batch)
        last = micro_batches - 1
        return calls + [self._moved(call, last) for phase, call in self.pieces if phase == t.Phase.OPTIMIZER]

    def _pass(self, micro_batch: int) -> list[Call]:
        calls = self._added((0, 0), ("gather", "unshard"), micro_batch)
        gathered: set[Place] = set()
        regathered: set[Place] = set()
        left = [p for phase, c in self.pieces if phase == t.Phase.BACKWARD for p in [(c[0], c[3])]]
        for phase, call in self.pieces:
            here = (call[0], call[3])
            if phase == t.Phase.FORWARD and here[0] and here not in gathered:
                gathered.add(here)
                calls += self._added(here, ("gather", "unshard"), micro_batch)
            if phase == t.Phase.BACKWARD and here in self.backward and here not in regathered:
                calls += self._prepare_backward(here, regathered, micro_batch)
            if phase != t.Phase.OPTIMIZER:
                calls.append(self._moved(call, micro_batch))
            if phase == t.Phase.BACKWARD:
                left.remove(here)
                if here[0] and here not in left:
                    calls += self._added(here, ("reduce",), micro_batch)
        return calls + self._added((0, 0), ("reduce",), micro_batch)

    def _prepare_backward(self, here: Place, done: set[Place], micro_batch: int) -> list[Call]:
        """Gathers a unit unless it ran ahead, and then the one whose backward comes next."""
        at = self.backward.index(here)
        calls = self._added(here, ("regather",), micro_batch) if at == 0 else []
        calls += self._added(here, ("reunshard",), micro_batch)
        done.add(here)
        if at + 1 < len(self.backward):
            calls += self._added(self.backward[at + 1], ("regather",), micro_batch)
        return calls

    def _added(self, place: Place, names: tuple[str, ...], micro_batch: int) -> list[Call]:
        ranges = self.units[place[0]].ranges
        return [(place[0], *ranges[name], place[1], micro_batch) for name in names if name in ranges]

    def _moved(self, call: Call, micro_batch: int) -> Call:
        block, begin, end, instance, _ = call
        return block, self.ops[begin], self.ops[end - 1] + 1, instance, micro_batch


def _bind_instances(
    graph: StepGraph, builder: GraphBuilder, units: list[Unit], schedule: _Schedule, ops: dict[int, int]
) -> None:
    """Binds every port to where its tensor is now, in ids of the new graph."""
    firsts, own = [], []
    start = 0
    for unit, block in zip(units, graph.blocks, strict=True):
        ports = {tensor for tensor, _ in unit.ports}
        mine = [tensor for tensor in range(*unit.tensor_range) if tensor not in ports]
        firsts.append(start)
        own.append({tensor: position for position, tensor in enumerate(mine)})
        start += len(mine) * len(block.instances)
    counts = [unit.op_range[1] - unit.op_range[0] for unit in units]
    op_starts = np.cumsum([0, *(c * len(b.instances) for c, b in zip(counts, graph.blocks, strict=True))])
    for number, block in enumerate(graph.blocks):
        for index, instance in enumerate(block.instances):
            bindings = []
            for _, meaning in units[number].ports:
                if isinstance(meaning, str):
                    other, which, tensor = schedule.token(number, index, meaning)
                else:
                    old, phase = meaning
                    other, which, bound = graph.locate_tensor(graph.tensor_id(number, index, old))
                    tensor = units[other].tensor(bound, phase)
                bindings.append(firsts[other] + which * len(own[other]) + own[other][tensor])
            op_bindings = []
            for identity in instance.op_bindings:
                other, which, op = graph.locate_op(identity)
                first = units[other].op_range[0]
                op_bindings.append(int(op_starts[other]) + which * counts[other] + ops[op] - first)
            builder.instance(number, instance.label, bindings=bindings, op_bindings=op_bindings)

"""Fully sharded data parallelism (ZeRO-3) as PyTorch's FSDP2 does it.

Parameters, gradients and optimizer state are cut along their first dimension over the ranks. A unit
(`block.Units`) is what is gathered and reduced at once: each layer, and the rest of the model (the root).
Its parameters are all-gathered before its forward pass and, unless it is the root, dropped after it and gathered
again before its backward pass; its gradients are reduce-scattered after it. Gathers run ahead by one unit, so they
overlap the computation before; one reduction is in flight at a time. The optimizer works on the shards. With
replicas of the sharding group (HSDP), the gradients' shards are then all-reduced among them.
(Zhao et al., "PyTorch FSDP", VLDB 2023; the order of operations is that of torch.distributed.fsdp.fully_shard.)

Context- and expert-parallel ranks share the shards, too, but for what is divided over them already (torchtitan's
`dp_shard_cp` and `dp_shard_mod_ep` meshes), and each set of ranks communicates its own.

Under a pipeline each chunk is a root with its layers. As torch's pipelines do, whole gradients then add up over
the micro-batches, and are reduced after the last backward pass of the chunk. torchtitan keeps parameters gathered
there by default, from the first micro-batch to the last: `reshard_after_forward=False`. Else every micro-batch
gathers twice; FSDP2 would keep what backward has gathered for the forward pass of another micro-batch where one
follows, so that is an upper bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from echograph.errors import PlanError
from echograph.ir import types as t
from echograph.ir.graph import Axis, Graph, JobGraph, Program, StepGraph
from echograph.ir.passes.data_parallel import check_sizes, data_mesh
from echograph.ir.passes.data_parallel.distributed_optimizer import Address, Division, ShardedGraph
from echograph.ir.passes.fully_shard.block import How, UnitAction, UnitBlock, Units, actions
from echograph.ir.passes.fully_shard.schedule import UnitSchedule
from echograph.ir.passes.gradients import (
    REPLICATE,
    SHARD,
    final_gradients,
    overflow_flags,
    split_at_optimizer,
    total_norms,
)
from echograph.ir.passes.rewrite import ACCUMULATE, Call, empty_copy, in_micro_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class FullyShard:
    """Lowers a step graph, or each stage of a pipeline, to a job whose ranks hold shards of the model.

    Attributes:
        replicas: number of ranks, each with its own micro-batches.
        shard: ranks that share one copy of the model; None: all of them. Fewer make copies (HSDP).
        micro_batches: forward and backward passes before the optimizer.
        reshard_after_forward: drop a layer's parameters after its forward pass and gather them again; else, under
            a pipeline, they are gathered once for all micro-batches.
        reduce_every_micro_batch: each micro-batch reduces its gradients, and shards add up; else whole gradients
            do, and the last one reduces them (`set_requires_gradient_sync`). None: no under a pipeline.
        reduce_dtype: type in which gradients are reduced; None: their own.
    """

    name: ClassVar[str] = "fully_shard"

    replicas: int
    shard: int | None = None
    micro_batches: int = 1
    reshard_after_forward: bool = True
    reduce_every_micro_batch: bool | None = None
    reduce_dtype: t.DType | None = None

    def __call__(self, graph: StepGraph | JobGraph) -> JobGraph:
        """The job graph; a pipeline's keeps its micro-batches.

        Raises:
            PlanError: a number is out of range, micro-batches are given for a pipeline, or the sharding group does
                not divide the ranks.
        """
        shard, staged = self.replicas if self.shard is None else self.shard, isinstance(graph, JobGraph)
        check_sizes(self.replicas, self.micro_batches, staged)
        if shard < 1 or self.replicas % shard:
            raise PlanError(f"sharding over {shard} ranks does not divide {self.replicas}: choose a divisor")
        copies = self.replicas // shard
        replicate = (Axis(name=REPLICATE, size=copies),) if copies > 1 else ()
        mesh = data_mesh(graph.mesh, (*replicate, Axis(name=SHARD, size=shard)))
        gradients = frozenset(final_gradients(graph))
        division = Division(graph=graph, mesh=mesh, gradients=gradients, copies=(REPLICATE,))
        return _Writer(self, graph, division, self._how(graph)).job()

    def _how(self, graph: Graph) -> How:
        staged = isinstance(graph, JobGraph)
        every = self.reduce_every_micro_batch
        every = not staged if every is None else every
        count = max((int(p.calls[:, 4].max(initial=0)) for p in graph.programs), default=0) + 1
        several = (count if staged else self.micro_batches) > 1
        return How(
            reshard=self.reshard_after_forward,
            once=staged and not self.reshard_after_forward,
            whole=(several or staged) and not every,
            adds=several and (every or not staged),
            reduce_dtype=self.reduce_dtype,
        )


class _Writer:
    def __init__(self, options: FullyShard, graph: StepGraph | JobGraph, division: Division, how: How) -> None:
        self.options, self.graph, self.division, self.how = options, graph, division, how
        self.staged = isinstance(graph, JobGraph)
        self.builder = empty_copy(graph)
        self.builder.mesh = division.mesh
        self.units = Units(graph, sorted(division.gradients))
        self.names = [
            [actions(unit, self.units.is_main(number), how, division) for unit in units]
            for number, units in enumerate(self.units.of_block)
        ]
        self.schedules = [self._schedule(program) for program in graph.programs]

    def _schedule(self, program: Program) -> UnitSchedule:
        return UnitSchedule(self.graph, self.units, self.names, self.how, self._calls(program), self.staged)

    def _calls(self, program: Program) -> list[Call]:
        """The calls of all micro-batches; a pipeline's without those that add up whole gradients if shards do."""
        calls: list[Call] = [(b, x, y, i, m) for b, x, y, i, m in program.calls.tolist() if y > x]
        if self.staged:
            return [c for c in calls if self.how.whole or self.graph.blocks[c[0]].name != ACCUMULATE]
        passes, update = split_at_optimizer(self.graph, calls)
        count = self.options.micro_batches
        return [c for m in range(count) for c in in_micro_batch(passes, m)] + in_micro_batch(update, count - 1)

    def job(self) -> JobGraph:
        """Writes everything."""
        blocks, ops = [], dict[int, range]()
        scalars = {*total_norms(self.graph), *overflow_flags(self.graph)} if self.division.all_axes else set[int]()
        before = self._before()
        for number, block in enumerate(self.graph.blocks):
            if number:
                self.builder.begin_block(block.name)
            made = UnitBlock(
                self.graph, self.builder, number, self.division, ops, units=self.units, how=self.how,
                before=before[number], scalars=scalars,
            )  # fmt: skip
            made.write()
            blocks.append(made)
        job = ShardedGraph(self.graph, self.builder, [block.written for block in blocks], ops)
        job.bind(lambda *where: self._token(blocks, *where))
        for program, schedule in zip(self.graph.programs, self.schedules, strict=True):
            calls = []
            for item in schedule.items:
                if len(item) == 5:
                    calls.append(job.call(item))
                else:
                    (number, instance, unit), name, micro_batch = item
                    calls.append((number, *blocks[number].ranges[unit, name], instance, micro_batch))
            self.builder.program(
                calls, role=program.role or "replica", coordinates=program.coordinates, ranks=program.ranks
            )
        return self.builder.build(JobGraph)

    def _before(self) -> list[dict[int | None, list[UnitAction]]]:
        """Of each block, what is done before which operation; the programs that call it agree."""
        found: list[dict[int | None, list[UnitAction]]] = [{} for _ in self.graph.blocks]
        done = set()
        for schedule in self.schedules:
            for (block, name, unit), row in schedule.before().items():
                if (block, name, unit) not in done:
                    found[block].setdefault(row, []).append((unit, name))
                    done.add((block, name, unit))
        return found

    def _token(self, blocks: list[UnitBlock], block: int, instance: int, what: str, unit: int) -> Address:
        """What a unit's port for a token is bound to; to its own token where no program runs it."""
        place = block, instance, unit
        waits = (schedule.token(place, what) for schedule in self.schedules)
        (number, its_instance, its_unit), name = next((found for found in waits if found), (place, what))
        return number, its_instance, blocks[number].tokens[its_unit, name]

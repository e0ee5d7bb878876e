"""The ranks of a finished job: their order, their number, their programs and their communicators.

A rank is the mixed-radix number of its coordinates, so the order of the axes decides which groups lie within a
node. Groups and programs name axes, and stay as they are; groups that list ranks get the new numbers. (Megatron's
`--use-tp-pp-dp-mapping` and `order` of its parallel state are such orders.)

The number of ranks changes along axes that no program depends on, or in a job without a mesh whose ranks all talk
to all, as in imported traces. One program can stand for every rank of a role, or each rank have its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar, TypeVar

import numpy as np

from echograph.errors import PlanError
from echograph.ir.graph import Axis, Graph, JobGraph, Program
from echograph.ir.passes.annotate import ForgetCommunication
from echograph.ir.passes.rewrite import copy_blocks
from echograph.ir.types import CollectiveKind, OpKind
from echograph.ir.verify import verify


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshOrder:
    """Numbers the ranks of a job anew.

    Attributes:
        order: names of axes, neighbours first; "dp" stands for every axis that begins with it, which keep their
            order. Axes that the job lacks are passed over.
    """

    name: ClassVar[str] = "mesh_order"

    order: tuple[str, ...]

    def __call__(self, graph: JobGraph) -> JobGraph:
        """The same job with its mesh in the order, slowest axis first.

        Raises:
            PlanError: the mesh has an axis that the order does not name.
        """
        made = self.ordered(graph)
        verify(made)
        return made

    def ordered(self, graph: JobGraph) -> JobGraph:
        """The same without verifying, for a job of which some stages are not written."""
        place = {name: at for at, name in enumerate(self.order)}
        for axis in graph.mesh:
            if _family(axis.name) not in place:
                raise PlanError(f"mesh axis {axis.name} is not in the order {'-'.join(self.order)}: name it")
        mesh = tuple(sorted(graph.mesh, key=lambda axis: -place[_family(axis.name)]))
        shape, numbers = [axis.size for axis in graph.mesh], []
        index = {axis.name: at for at, axis in enumerate(graph.mesh)}
        for group in graph.groups:
            coordinates = np.unravel_index(np.array(group.ranks, np.int64), shape) if group.ranks else ()
            moved = [coordinates[index[axis.name]] for axis in mesh] if group.ranks else []
            ranks = np.ravel_multi_index(moved, [axis.size for axis in mesh]).tolist() if group.ranks else ()
            numbers.append(replace(group, ranks=tuple(ranks)))
        return replace(graph, mesh=mesh, groups=tuple(numbers))


def _family(name: str) -> str:
    return "dp" if name.startswith("dp") else name


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeAxes:
    """Gives axes of a job's mesh other sizes, where no program depends on how many ranks there are.

    Programs, tensors and operations stay what they are: the caller knows that they do not depend on the sizes, as
    those of data-parallel ranks that share nothing do not.

    Attributes:
        sizes: ranks along an axis, by its name; axes that the job has not are not added.
    """

    name: ClassVar[str] = "resize_axes"

    sizes: Mapping[str, int]

    def __call__(self, graph: JobGraph) -> JobGraph:
        """The job with other sizes of its axes.

        Raises:
            PlanError: an axis that programs stand along, or that tensors are divided over.
        """
        changed = {axis.name for axis in graph.mesh if self.sizes.get(axis.name, axis.size) != axis.size}
        if not changed:
            return graph
        fixed = {name for program in graph.programs for name in program.coordinates}
        fixed |= {graph.strings[name] for name in graph.tensors.sharded.values.tolist()}
        if stuck := sorted(changed & fixed):
            raise PlanError(
                f"axis {stuck[0]}: programs or tensors of the job depend on its size: lower the step again"
            )
        mesh = tuple(Axis(name=axis.name, size=self.sizes.get(axis.name, axis.size)) for axis in graph.mesh)
        return replace(graph, mesh=mesh)


_SCALED = (CollectiveKind.ALL_TO_ALL, CollectiveKind.GATHER, CollectiveKind.SCATTER)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeWorld:
    """Gives a job of listed ranks, whose every collective is of all of them, another number of ranks.

    Rank r does what rank r modulo the old number did. What a rank computes stays, as does the buffer of each
    collective: of an all-gather the gathered, of a reduce-scatter the whole one, which is how gradients and
    parameters are shared. The durations of communications are of the old ranks, and are dropped.

    Attributes:
        gpus: how many ranks.
    """

    name: ClassVar[str] = "resize_world"

    gpus: int

    def __call__(self, graph: JobGraph) -> JobGraph:
        """The job of that many ranks.

        Raises:
            PlanError: it is not purely data-parallel.
        """
        ranks = graph.world_size
        if self.gpus == ranks:
            return graph
        self._check(graph)
        everyone = tuple(range(self.gpus))
        # Nobody communicates in a group of some ranks.
        groups = tuple(replace(group, ranks=everyone) for group in graph.groups)
        programs = tuple(
            replace(program, ranks=tuple(r for r in everyone if r % ranks in program.ranks))
            for program in graph.programs
        )
        made = replace(graph, groups=groups, programs=tuple(p for p in programs if p.ranks))
        made = ForgetCommunication()(made)
        verify(made)
        return made

    def _check(self, graph: JobGraph) -> None:
        where = f"a job of {graph.world_size} ranks cannot run on {self.gpus}"
        if graph.mesh:
            raise PlanError(f"{where}: it was lowered by a plan: lower its step graph for {self.gpus}")
        ops, world = graph.ops, set(range(graph.world_size))
        used = np.unique(ops.group[np.isin(ops.kind, (OpKind.COLLECTIVE, OpKind.SEND, OpKind.RECV))]).tolist()
        for group in (graph.groups[index] for index in used):
            if set(group.ranks) != world:
                raise PlanError(f"{where}: group '{group.name}' is of some ranks, so it is not only data-parallel")
        if np.isin(ops.kind, (OpKind.SEND, OpKind.RECV)).any():
            raise PlanError(f"{where}: it sends from rank to rank, so it is not only data-parallel")
        kinds = set(ops.variant[ops.kind == OpKind.COLLECTIVE].tolist())
        if scaled := [kind.name.lower() for kind in _SCALED if kind in kinds]:
            raise PlanError(f"{where}: what an {scaled[0]} moves depends on the number of ranks")


MAX_CALLS = 2_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfoldRanks:
    """Gives every rank a program of its own, with its whole place in the mesh.

    What ranks do stays as it is; but tools that tell ranks apart see each of them.
    """

    name: ClassVar[str] = "unfold_ranks"

    def __call__(self, graph: JobGraph) -> JobGraph:
        """The job with one program a rank, in the order of ranks.

        Raises:
            PlanError: the job lists its ranks instead of having a mesh, or is too large to be written out.
        """
        places = sorted((place, number) for number, p in enumerate(graph.programs) for place in _places(graph, p))
        calls = sum(len(graph.programs[number].calls) for _, number in places)
        if calls > MAX_CALLS:
            raise PlanError(
                f"{len(places):,} ranks with {calls:,} calls in all: at most {MAX_CALLS:,} are written out"
            )
        builder = copy_blocks(graph)
        for rank, (place, number) in enumerate(places):
            coordinates = dict(zip((axis.name for axis in graph.mesh), place, strict=True))
            role = graph.programs[number].role
            builder.program(
                graph.programs[number].calls.tolist(), role=f"{role} rank {rank}".strip(), coordinates=coordinates
            )
        return builder.build(JobGraph)


def _places(graph: JobGraph, program: Program) -> Iterator[tuple[int, ...]]:
    """Coordinates of all ranks of a program."""
    if not graph.mesh:
        raise PlanError("the job lists its ranks, so each has its program already")
    own = program.coordinates
    return product(*((own[a.name],) if a.name in own else range(a.size) for a in graph.mesh))


G = TypeVar("G", bound=Graph)


@dataclass(frozen=True, slots=True, kw_only=True)
class OneCommunicator:
    """Gives each group one stream for its collectives: they share links that a model gives to one at a time.

    Threads of a process (gloo's workers) or several streams run collectives of one group side by side, and each
    then takes longer. A model that says how long one takes alone is right about their sum if they follow each
    other.
    """

    name: ClassVar[str] = "one_communicator"

    def __call__(self, graph: G) -> G:
        """The graph with the collectives of each group on a stream of their own, in the order of the program."""
        ops = graph.ops
        rows = np.flatnonzero(ops.kind == OpKind.COLLECTIVE)
        used, place = np.unique(ops.group[rows], return_inverse=True)
        stream = ops.stream.copy()
        stream[rows] = len(graph.streams) + place
        names = tuple(f"communicator {graph.groups[group].name}" for group in used.tolist())
        return replace(graph, streams=(*graph.streams, *names), ops=replace(ops, stream=stream))

"""One program for every rank, where a job has one for every role."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from echograph.errors import PlanError
from echograph.ir.graph import JobGraph, Program
from echograph.ir.passes.rewrite import copy_blocks

MAX_CALLS = 2_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfoldRanks:
    """Gives every rank a program of its own, with its whole place in the mesh.

    What ranks do stays as it is; but tools that tell ranks apart see each of them.
    """

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

"""The same data-parallel job on another number of ranks, where all ranks talk to all, as in imported traces."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from echograph.errors import PlanError
from echograph.ir.graph import JobGraph
from echograph.ir.passes.forget_communication import forget_communication
from echograph.ir.types import CollectiveKind, OpKind
from echograph.ir.verify import verify

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
        groups = tuple(replace(g, ranks=everyone if len(g.ranks) == ranks else ()) for g in graph.groups)
        programs = tuple(
            replace(program, ranks=tuple(r for r in everyone if r % ranks in program.ranks))
            for program in graph.programs
        )
        made = replace(graph, groups=groups, programs=tuple(p for p in programs if p.ranks))
        made = forget_communication(made)
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

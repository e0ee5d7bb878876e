"""Which ranks are neighbours: the order of the mesh axes.

A rank is the mixed-radix number of its coordinates, so the order of the axes decides which groups lie within a
node. Groups and programs name axes, and stay as they are; groups that list ranks get the new numbers. (Megatron's
`--use-tp-pp-dp-mapping` and `order` of its parallel state are such orders.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from echograph.errors import PlanError
from echograph.ir.graph import JobGraph
from echograph.ir.verify import verify


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshOrder:
    """Numbers the ranks of a job anew.

    Attributes:
        order: names of axes, neighbours first; "dp" stands for every axis that begins with it, which keep their
            order. Axes that the job lacks are passed over.
    """

    order: tuple[str, ...]

    def __call__(self, graph: JobGraph) -> JobGraph:
        """The same job with its mesh in the order, slowest axis first.

        Raises:
            PlanError: the mesh has an axis that the order does not name.
        """
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
        ordered = replace(graph, mesh=mesh, groups=tuple(numbers))
        verify(ordered)
        return ordered


def _family(name: str) -> str:
    return "dp" if name.startswith("dp") else name

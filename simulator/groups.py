"""The ranks of process groups, and where programs stand in them."""

from __future__ import annotations

from math import prod

import numpy as np

from echograph.ir.graph import Group, JobGraph, Program


def group_ranks(job: JobGraph, group: Group, fixed: dict[str, int] | None = None) -> range | list[int]:
    """Ranks of a group whose coordinates along other axes are `fixed` (0 where not named)."""
    if not group.axes:
        return list(group.ranks)
    whole = _along(job, group, fixed or {})
    return [whole[position] for position in group.positions] or whole


def place_in_group(job: JobGraph, group: Group, program: Program) -> int:
    """The place of a program among the ranks of a group, 0 along axes that it leaves free."""
    if not group.axes:
        mine = program_ranks(job, program)
        return next(i for i, rank in enumerate(group.ranks) if rank in mine)
    place = 0
    for axis in job.mesh:
        if axis.name in group.axes:
            place = place * axis.size + program.coordinates.get(axis.name, 0)
    return group.positions.index(place) if group.positions else place


def _along(job: JobGraph, group: Group, fixed: dict[str, int]) -> range | list[int]:
    """All ranks along the axes of a group."""
    strides = _strides(job)
    start = sum(strides[axis] * value for axis, value in fixed.items() if axis not in group.axes)
    sizes = {a.name: a.size for a in job.mesh}
    if len(group.axes) == 1:
        (axis,) = group.axes
        return range(start, start + sizes[axis] * strides[axis], strides[axis])
    ranks = np.array([start], np.int64)
    for axis in group.axes:
        ranks = (ranks[:, None] + np.arange(sizes[axis]) * strides[axis]).ravel()
    return sorted(ranks.tolist())


def program_ranks(job: JobGraph, program: Program) -> set[int]:
    """The ranks that a program lists, or the one that its coordinates say."""
    if program.ranks or len(program.coordinates) < len(job.mesh) or not job.mesh:
        return set(program.ranks)
    strides = _strides(job)
    return {sum(strides[axis] * value for axis, value in program.coordinates.items())}


def _strides(job: JobGraph) -> dict[str, int]:
    """How far apart in rank two neighbours along an axis are."""
    return {a.name: prod(b.size for b in job.mesh[i + 1 :]) for i, a in enumerate(job.mesh)}

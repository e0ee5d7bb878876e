"""The ranks of process groups, where programs stand in them, and where programs wait for each other.

Programs meet at the n-th communication under one *key*: the group and the place of its members, and for a message
also its two ends and its tag.
"""

from __future__ import annotations

import numpy as np

from echograph.ir.columns import NONE, Int64, ascending, equal_rows
from echograph.ir.graph import Group, JobGraph, Program
from echograph.ir.types import COMMUNICATIONS, OpKind


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


def program_ranks(job: JobGraph, program: Program) -> set[int]:
    """The ranks that a program lists, or the one that its coordinates say."""
    if program.ranks or len(program.coordinates) < len(job.mesh) or not job.mesh:
        return set(program.ranks)
    return {sum(job.strides[axis] * value for axis, value in program.coordinates.items())}


class RendezvousKeys:
    """Numbers for the keys under which the programs of a job meet."""

    def __init__(self, job: JobGraph) -> None:
        self.job = job
        self.numbers: dict[object, int] = {}
        self.rows = np.flatnonzero(np.isin(job.ops.kind, COMMUNICATIONS))

    def of(self, program: int) -> Int64:
        """int64 [ops]: the number of the key under which a program meets others there; -1 where it does not."""
        # An imported job has millions of operations, and each of its many programs runs few of them.
        found, calls = np.full(len(self.job.ops), NONE, np.int64), self.job.programs[program].calls
        change = np.zeros(len(self.rows) + 1, np.int64)
        np.add.at(change, np.searchsorted(self.rows, calls[:, 1]), 1)
        np.add.at(change, np.searchsorted(self.rows, calls[:, 2]), -1)
        rows = self.rows[np.cumsum(change)[:-1] > 0]
        ops = self.job.ops
        asked = np.stack([ops.kind[rows], ops.group[rows], ops.peer[rows], ops.tag[rows]], axis=1)
        asked[asked[:, 0] == OpKind.COLLECTIVE, 2:] = 0
        # What is equal in these meets under one key, and a job asks for few that differ.
        example, which = equal_rows(asked)
        keys = [rendezvous_key(self.job, program, row) for row in rows[example].tolist()]
        numbers = [NONE if key is None else self.numbers.setdefault(key, len(self.numbers)) for key in keys]
        found[rows] = np.array(numbers, np.int64)[which]
        return found


def rendezvous_key(job: JobGraph, number: int, row: int) -> object:
    """The key under which tasks meet for a communication, or None where they meet only their own like.

    Programs of one role stand for many ranks; a group whose axes the role leaves free lies within the role. There
    a collective meets itself, and a send the receive of a neighbour, which is when the role itself receives.
    """
    ops = job.ops
    program, group_index = job.programs[number], int(ops.group[row])
    group = job.groups[group_index]
    if not _meets_any(job, number, group_index):
        return _within(job, number, row)
    # An explicit group is one set of ranks, whatever the places of its members.
    fixed = tuple(sorted((a, v) for a, v in program.coordinates.items() if group.axes and a not in group.axes))
    key: tuple[object, ...] = (group_index, fixed)
    if ops.kinds[row] == OpKind.COLLECTIVE:
        return key
    here = place_in_group(job, group, program)
    there = (here + int(ops.peer[row])) % job.group_size(group)
    sender, receiver = (here, there) if ops.kinds[row] == OpKind.SEND else (there, here)
    return (*key, sender, receiver, int(ops.tag[row]))


def _within(job: JobGraph, number: int, row: int) -> object:
    """The key of sends and receives between the ranks of one role, by how far they go."""
    ops, program = job.ops, job.programs[number]
    group = job.groups[int(ops.group[row])]
    if ops.kinds[row] == OpKind.COLLECTIVE or not group.axes or set(group.axes) & program.coordinates.keys():
        return None
    towards = int(ops.peer[row]) if ops.kinds[row] == OpKind.SEND else -int(ops.peer[row])
    return number, int(ops.group[row]), towards % job.group_size(group), int(ops.tag[row])


def _meets_any(job: JobGraph, number: int, group: int) -> bool:
    """Whether a program meets others in a group."""
    its, program = job.groups[group], job.programs[number]
    return any(n != number and _meet(job, its, program, p) for n, p in enumerate(job.programs))


def _meet(job: JobGraph, group: Group, one: Program, other: Program) -> bool:
    if not group.axes:
        # Lists may be long: the other program is in few of them.
        return all(not program_ranks(job, its).isdisjoint(group.ranks) for its in (other, one))
    if not any(axis in one.coordinates for axis in group.axes):
        return False
    return all(other.coordinates.get(a) == v for a, v in one.coordinates.items() if a not in group.axes)


def number_rendezvous(key: Int64, nth: Int64) -> Int64:
    """A number for every rendezvous: the n-th under a key."""
    most = np.zeros(int(key.max(initial=NONE)) + 1, np.int64)
    np.maximum.at(most, key, nth + 1)
    return (np.cumsum(most) - most)[key] + nth


def occurrences(values: Int64) -> Int64:
    """For every value, how many equal ones stand before it."""
    order = ascending(values)
    lengths = np.bincount(values)
    before = np.empty(len(values), np.int64)
    before[order] = np.arange(len(values)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return before

"""What a job's communications keep: who takes part in one is in its group, and a message has two ends.

Ranks of a role do the same, so a role is checked once, by its coordinates, whatever the number of its ranks; only
groups that list ranks are checked rank by rank. The operations are columns: an imported job runs millions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import pairwise, product
from math import prod
from typing import NamedTuple, NoReturn

import numpy as np

from echograph.errors import GraphError
from echograph.ir.columns import NONE, Int64
from echograph.ir.graph import Graph, Group, JobGraph, Program
from echograph.ir.types import COMMUNICATIONS, OpKind

MAX_ROLES = 2**20
"""Parts that programs which fix different axes may be cut into to be compared; beyond it a job is refused."""

Place = Mapping[str, int]


def groups_sound(graph: Graph) -> None:
    """A group does not list ranks beside its axes, and positions ascend along one axis."""
    sizes = {axis.name: axis.size for axis in graph.mesh}
    for group in graph.groups:
        if group.axes and group.ranks:
            _fail("groups_sound", f"group '{group.name}'", "has axes and ranks, of which it needs one")
        size = sizes[group.axes[0]] if len(group.axes) == 1 else 0
        ascend = all(one < following for one, following in pairwise(group.positions))
        if group.positions and not (ascend and 0 <= group.positions[0] <= group.positions[-1] < size):
            what = "has positions that do not ascend within the extent of one axis"
            _fail("groups_sound", f"group '{group.name}'", what)


def programs_apart(graph: Graph) -> None:
    """No rank runs two programs."""
    if not isinstance(graph, JobGraph):
        return
    if not graph.mesh:
        ranks = sorted(rank for program in graph.programs for rank in program.ranks)
        twice = next((one for one, following in pairwise(ranks) if one == following), None)
        if twice is not None:
            _fail("programs_apart", f"rank {twice}", "runs two programs")
        return
    seen: dict[tuple[int, ...], int] = {}
    for role in _Roles(graph).all:
        first = seen.setdefault(tuple(role.place.values()), role.program)
        if first != role.program:
            what = f"runs programs {first} and {role.program}"
            _fail("programs_apart", f"rank {_rank(graph, role.place)}", what)


def members_only(graph: Graph) -> None:
    """Every rank that runs a communication is in its group."""
    if not isinstance(graph, JobGraph):
        return
    members: dict[int, frozenset[int]] = {}
    for number, rows, _ in _Uses(graph).of_programs():
        groups, first = np.unique(graph.ops.group[rows], return_index=True)
        for index, row in zip(groups.tolist(), rows[first].tolist(), strict=True):
            group, program = graph.groups[index], graph.programs[number]
            if group.positions:
                stranger = _off_position(graph, program, group)
            elif group.ranks:
                known = members.setdefault(index, frozenset(group.ranks))
                stranger = next((rank for rank in _ranks(graph, number) if rank not in known), None)
            else:
                continue
            if stranger is not None:
                what = f"is run by rank {stranger}, which is not in its group '{group.name}'"
                _fail("members_only", _op(graph, row), what)


def _off_position(graph: Graph, program: Program, group: Group) -> int | None:
    (axis,) = group.axes
    size = next(a.size for a in graph.mesh if a.name == axis)
    places = [program.coordinates[axis]] if axis in program.coordinates else range(size)
    missing = next((place for place in places if place not in group.positions), None)
    return None if missing is None else _rank(graph, {**program.coordinates, axis: missing})


def messages_meet(graph: Graph) -> None:
    """What is sent is received: as often, over the same group, between the same two, with the same tag."""
    if isinstance(graph, JobGraph) and np.isin(graph.ops.kind, (OpKind.SEND, OpKind.RECV)).any():
        _Messages(graph).check()


class _Uses:
    """Which communications the programs run, and how often."""

    def __init__(self, graph: Graph, kinds: Iterable[OpKind] = COMMUNICATIONS) -> None:
        self.graph = graph
        self.rows: Int64 = np.flatnonzero(np.isin(graph.ops.kind, list(kinds)))

    def of_programs(self) -> Iterator[tuple[int, Int64, Int64]]:
        """Of every program its number, the rows that it runs, ascending, and how often it runs each."""
        known: dict[int, tuple[Int64, Int64]] = {}
        for number, program in enumerate(self.graph.programs):
            if id(program.calls) not in known:
                known[id(program.calls)] = self._of(program.calls)
            rows, counts = known[id(program.calls)]
            if len(rows):
                yield number, rows, counts

    def _of(self, calls: Int64) -> tuple[Int64, Int64]:
        begin, end = np.searchsorted(self.rows, calls[:, 1]), np.searchsorted(self.rows, calls[:, 2])
        spans, often = np.unique((begin * (len(self.rows) + 1) + end)[begin < end], return_counts=True)
        begin, end = np.divmod(spans, len(self.rows) + 1)
        lengths = end - begin
        places = np.repeat(begin - (np.cumsum(lengths) - lengths), lengths) + np.arange(int(lengths.sum()))
        found, which = np.unique(places, return_inverse=True)
        return self.rows[found], np.bincount(which, np.repeat(often, lengths), len(found)).astype(np.int64)


class _Role(NamedTuple):
    """Some or all of a program's ranks: those at a place of the mesh."""

    program: int
    place: Place


class _Roles:
    """The programs of a job with a mesh, cut so that all fix the same axes.

    Raises:
        GraphError: that makes too many.
    """

    def __init__(self, graph: Graph) -> None:
        fixed = {axis for program in graph.programs for axis in program.coordinates}
        self.axes = [axis for axis in graph.mesh if axis.name in fixed]
        total = sum(prod(a.size for a in self.axes if a.name not in p.coordinates) for p in graph.programs)
        if total > MAX_ROLES:
            _fail(
                "programs_apart", "the programs", f"fix different axes, with {total:,} places: fix the same ones"
            )
        self.graph = graph

    @property
    def all(self) -> Iterator[_Role]:
        """All parts, with their places in the order of the mesh."""
        for number in range(len(self.graph.programs)):
            yield from self.of(number)

    def of(self, number: int) -> Iterator[_Role]:
        """The parts of a program."""
        own = self.graph.programs[number].coordinates
        names = [axis.name for axis in self.axes]
        for place in product(*([own[a.name]] if a.name in own else range(a.size) for a in self.axes)):
            yield _Role(number, dict(zip(names, place, strict=True)))


class _Messages:
    """Both ends of all messages, as columns: group, set, sender, receiver, tag."""

    def __init__(self, graph: JobGraph) -> None:
        self.graph = graph
        self.sets: dict[tuple[int, ...], int] = {}
        self.listed: dict[int, dict[int, int]] = {}
        self.columns: list[list[Int64]] = []

    def check(self) -> None:
        """Compares the two sides.

        Raises:
            GraphError: one has more, or an end is beyond its group.
        """
        graph, roles = self.graph, _Roles(self.graph)
        for number, rows, counts in _Uses(graph, (OpKind.SEND, OpKind.RECV)).of_programs():
            of_rows = graph.ops.group[rows]
            for index in np.unique(of_rows).tolist():
                mine = of_rows == index
                # A list says its ranks itself, however the program is cut.
                for role in [_Role(number, {})] if graph.groups[index].ranks else roles.of(number):
                    self._add(role, index, rows[mine], counts[mine])
        if not self.columns:  # no program runs what the blocks have
            return
        *keys, rows, counts = (np.concatenate(column) for column in zip(*self.columns, strict=True))
        if not len(rows):
            return
        order = np.lexsort(keys)
        ends = np.stack([key[order] for key in keys])
        starts = np.flatnonzero(np.concatenate([[True], (ends[:, 1:] != ends[:, :-1]).any(axis=0)]))
        balance = np.add.reduceat(counts[order], starts)
        if len(odd := np.flatnonzero(balance)):
            row = int(np.minimum.reduceat(rows[order], starts)[odd].min())
            self._refuse(row)

    def _refuse(self, row: int) -> NoReturn:
        sends = self.graph.ops.kind[row] == OpKind.SEND
        what = "sends what is not received as often" if sends else "receives what is not sent as often"
        group = self.graph.groups[int(self.graph.ops.group[row])].name
        _fail("messages_meet", _op(self.graph, row), f"{what}, in group '{group}' with its tag")

    def _add(self, role: _Role, index: int, rows: Int64, counts: Int64) -> None:
        """Adds what a role sends and receives in a group: the one counts up, the other down."""
        ops, group = self.graph.ops, self.graph.groups[index]
        size = self.graph.group_size(group)
        peer, sends = ops.peer[rows].astype(np.int64), ops.kind[rows] == OpKind.SEND
        if len(beyond := np.flatnonzero(abs(peer) >= size)):
            row = int(rows[beyond[0]])
            _fail("messages_meet", _op(self.graph, row), f"names peer {ops.peer[row]:+} in a group of {size}")
        others = [value for axis, value in role.place.items() if axis not in group.axes]
        number = self.sets.setdefault((index, *others), len(self.sets))
        for here in self._positions(role, index):
            if here == NONE:  # all are there: each sends as far as it receives from
                ends = np.full(len(rows), NONE), np.where(sends, peer, -peer) % size
            else:
                there = (here + peer) % size
                ends = np.where(sends, here, there), np.where(sends, there, here)
            signed = np.where(sends, counts, -counts)
            column = [np.full(len(rows), number), *ends, ops.tag[rows], rows, signed]
            kept = self._run_there(group, there) if group.ranks and here != NONE else slice(None)
            self.columns.append([values[kept] for values in column])

    def _positions(self, role: _Role, index: int) -> Iterable[int]:
        """The positions of a role's ranks in their sets of a group; `NONE` for all of them."""
        group = self.graph.groups[index]
        if group.ranks:
            if index not in self.listed:
                self.listed[index] = {rank: position for position, rank in enumerate(group.ranks)}
            return [self.listed[index][rank] for rank in _ranks(self.graph, role.program)]
        axes = [axis for axis in self.graph.mesh if axis.name in group.axes]
        if not any(axis.name in role.place for axis in axes):
            return [NONE]
        several = prod(axis.size for axis in axes if axis.name not in role.place)
        if several > MAX_ROLES:
            what = f"has {several:,} ranks of one program that exchange messages: make it a group of fewer axes"
            _fail("messages_meet", f"group '{group.name}'", what)
        places = np.zeros(1, np.int64)
        for axis in axes:
            along = [role.place[axis.name]] if axis.name in role.place else range(axis.size)
            places = (places[:, None] * axis.size + np.array(along)).ravel()
        return [group.positions.index(int(places[0]))] if group.positions else places.tolist()

    def _run_there(self, group: Group, positions: Int64) -> np.ndarray:
        """Which positions hold ranks that run a program; a recording may lack those of the others."""
        return np.isin(np.array(group.ranks)[positions], self._recorded)

    @cached_property
    def _recorded(self) -> Int64:
        graph = self.graph
        if not graph.mesh:
            return np.array([rank for number in range(len(graph.programs)) for rank in _ranks(graph, number)])
        listed = sorted({rank for group in graph.groups for rank in group.ranks})
        return np.array([rank for rank in listed if _is_run(graph, rank)], np.int64)


def _ranks(graph: Graph, number: int) -> Iterator[int]:
    """The ranks that run a program, ascending in a mesh."""
    if not graph.mesh:
        yield from graph.programs[number].ranks or (number,)
        return
    own = graph.programs[number].coordinates
    free = [axis for axis in graph.mesh if axis.name not in own]
    # One by one: who asks may have heard enough after a few of a million million.
    for number in range(prod(axis.size for axis in free)):
        place = dict(own)
        for axis in reversed(free):
            number, place[axis.name] = divmod(number, axis.size)
        yield _rank(graph, place)


def _is_run(graph: Graph, rank: int) -> bool:
    """Whether a rank of the mesh runs a program."""
    place: dict[str, int] = {}
    for axis in reversed(graph.mesh):
        rank, place[axis.name] = divmod(rank, axis.size)
    return any(program.coordinates.items() <= place.items() for program in graph.programs)


def _rank(graph: Graph, place: Place) -> int:
    """The rank at a place, 0 along axes that it does not name."""
    rank = 0
    for axis in graph.mesh:
        rank = rank * axis.size + place.get(axis.name, 0)
    return rank


def _op(graph: Graph, row: int) -> str:
    return f"operation {row} ({graph.strings[graph.ops.name[row]]})"


def _fail(invariant: str, where: str, what: str) -> NoReturn:
    raise GraphError(f"{where} {what} [{invariant}]")

"""A dry run of Chakra traces as ASTRA-sim issues their nodes: who is left waiting for whom.

Of what is ready the lowest id goes first. A rank runs one computation at a time, and one collective or send;
receives it posts as they become ready. Computations take their time, communications none but what they wait: the
run shows whether the ranks come to an end, not when. A send does not wait for its receive.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from echograph.ir.chakra.messages import NodeType
from echograph.ir.chakra.reader import (
    ABSENT,
    RankTrace,
    Traces,
    followers,
    group_called,
    group_name,
    ranks_of_group,
)
from echograph.ir.columns import NONE, Int64, expand_ranges

NS_PER_US = 1000

_SEND, _COLLECTIVE = int(NodeType.SEND), int(NodeType.COLLECTIVE)

_Message = tuple[int, int, int]
"""From which rank, to which, and the tag."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A rank that stands still.

    Attributes:
        rank: which.
        trace: its trace.
        row: the communication that it waits in.
        of: the ranks that it waits for.
    """

    rank: int
    trace: RankTrace
    row: int
    of: tuple[int, ...]


_COMPUTE, _COMMUNICATION, _HOST, _RECEIVE = _LANES = range(4)


@dataclass(frozen=True, slots=True, eq=False)
class _Shape:
    """What ranks alike have in common: the nodes that start, by ascending id.

    Computations that follow each other, and nothing else, are one node: the last of them, with the time of all.
    """

    rows: memoryview
    types: bytes
    lanes: bytes
    kinds: memoryview
    sizes: memoryview
    missing: Int64
    offsets: memoryview
    children: memoryview
    duration: memoryview


@dataclass(slots=True, eq=False)
class _Rank:
    """A rank while it runs. Nodes are places in its shape.

    Attributes:
        trace: its trace.
        shape: what it has in common with others.
        missing: of every node, how many that it waits for have not ended.
        groups: of every node, as `Traces.groups_named` counts.
        number: of every collective, the how manieth of its group it is by ascending id.
        calls: of every group, how many collectives have been issued.
        ready: of every lane, the nodes that wait for it.
        busy: of every lane, the node that has it; -1: none.
        posted: receives that wait for their sends.
    """

    trace: RankTrace
    shape: _Shape
    missing: memoryview
    groups: memoryview
    number: memoryview
    calls: Counter[str]
    ready: tuple[list[int], ...]
    busy: list[int]
    posted: set[int]


def dry_run(traces: Traces) -> list[Wait]:
    """Runs all ranks; who waits at the end, by ascending rank. Empty: nobody does.

    Nodes that wait for what their file does not have, or in a cycle, never start.
    """
    return _Run(traces).run()


def free_run(traces: Traces, *, buffered: bool) -> list[Wait]:
    """`dry_run` of ranks that run all that is ready at once, and collectives of a group by ascending id.

    Unless buffered, a send ends with its receive. Control dependencies that cannot be kept are left out.
    """
    return _Run(traces, buffered=buffered, lanes=False).run()


def who_waits(traces: Traces, waits: list[Wait]) -> tuple[Wait, str]:
    """Of those who wait, the first of some that wait for each other, and in words who waits for whom."""
    by_rank = {wait.rank: wait for wait in reversed(waits)}
    path = [waits[0].rank]
    while (after := next((r for r in by_rank[path[-1]].of if r in by_rank), None)) not in (None, *path):
        assert after is not None
        path.append(after)
    shown = [by_rank[rank] for rank in (path[path.index(after) :] if after is not None else path[-1:])]
    more = f", and {len(shown) - 4} more so" if len(shown) > 4 else ""
    return shown[0], ", ".join(_said(traces, wait) for wait in shown[:4]) + more


def _said(traces: Traces, wait: Wait) -> str:
    ranks = ", ".join(str(rank) for rank in wait.of[:4]) + (", ..." if len(wait.of) > 4 else "")
    name = traces.name(wait.trace, wait.row)[:40]
    return f"rank {wait.rank} at node {wait.trace.id[wait.row]} ({name}) waits for rank {ranks}"


class _Run:
    def __init__(self, traces: Traces, *, buffered: bool = True, lanes: bool = True) -> None:
        self.traces, self.buffered, self.lanes = traces, buffered, lanes
        self.members = {name: frozenset(ranks_of_group(traces, name)) for name in ("", *(traces.groups or ()))}
        self.groups = [group_called(named) for named in traces.groups_named]
        shapes: dict[int, _Shape] = {}
        self.ranks: dict[int, _Rank] = {}
        for trace in traces.ranks:
            key = id(trace.id)  # ranks that were found alike share their columns
            if key not in shapes:
                shapes[key] = _shape(trace, strict=lanes)
            self.ranks[trace.rank] = _start(traces, trace, shapes[key], strict=lanes)
        self.events: list[tuple[int, int, int]] = []
        self.now = 0
        self.arrived: dict[tuple[str, int], list[tuple[int, int]]] = {}
        self.sent: dict[_Message, deque[int]] = {}
        self.receiving: dict[_Message, deque[int]] = {}

    def run(self) -> list[Wait]:
        todo = deque(self.ranks)
        while True:
            while todo:
                self._issue(todo.popleft(), todo)
            if not self.events:
                return self._waits()
            self.now, rank, place = heappop(self.events)
            self._end(rank, place, todo)

    def _issue(self, number: int, todo: deque[int]) -> None:
        """Starts what is ready and has a lane."""
        rank = self.ranks[number]
        while rank.ready[_RECEIVE]:
            self._receive(number, heappop(rank.ready[_RECEIVE]), todo)
        for lane in (_COMPUTE, _HOST):
            while rank.ready[lane] and (rank.busy[lane] < 0 or not self.lanes):
                place = rank.busy[lane] = heappop(rank.ready[lane])
                heappush(self.events, (self.now + rank.shape.duration[place], number, place))
        while rank.ready[_COMMUNICATION] and (rank.busy[_COMMUNICATION] < 0 or not self.lanes):
            place = rank.busy[_COMMUNICATION] = heappop(rank.ready[_COMMUNICATION])
            self._communicate(number, place, todo)

    def _communicate(self, number: int, place: int, todo: deque[int]) -> None:
        rank = self.ranks[number]
        kind = rank.shape.types[place]
        if kind == _SEND:
            self._send(number, place, todo)
            return
        name = self.groups[rank.groups[place]] if kind == _COLLECTIVE else "?"
        members = self.members.get(name, frozenset())
        if number not in members or len(members) < 2:
            self._end(number, place, todo)  # nobody else is there
            return
        rank.calls[name] += 1
        key = name, rank.calls[name] if self.lanes else rank.number[place]
        there = self.arrived.setdefault(key, [])
        there.append((number, place))
        if len(there) == len(members) and self._agree(there):
            del self.arrived[key]
            for one, its in there:
                self._end(one, its, todo)

    def _agree(self, there: Sequence[tuple[int, int]]) -> bool:
        """Whether ranks call one collective."""
        number, place = there[0]
        kind, size = self._call(number, place)
        shapes = ((self.ranks[one].shape, its) for one, its in there)
        return all(shape.kinds[its] == kind and shape.sizes[its] == size for shape, its in shapes)

    def _call(self, number: int, place: int) -> tuple[int, int]:
        """Kind and size of a collective."""
        shape = self.ranks[number].shape
        return shape.kinds[place], shape.sizes[place]

    def _send(self, number: int, place: int, todo: deque[int]) -> None:
        rank = self.ranks[number]
        row = rank.shape.rows[place]
        key = (number, int(rank.trace.comm_dst[row]), _tag(rank.trace, row))
        if waiting := self.receiving.get(key):
            self._end(key[1], waiting.popleft(), todo)
            self._end(number, place, todo)
            return
        self.sent.setdefault(key, deque()).append(place)
        if self.buffered:
            self._end(number, place, todo)

    def _receive(self, number: int, place: int, todo: deque[int]) -> None:
        rank = self.ranks[number]
        key = _message(rank, number, place)
        if waiting := self.sent.get(key):
            sent = waiting.popleft()
            if not self.buffered:
                self._end(key[0], sent, todo)
            self._end(number, place, todo)
        else:
            self.receiving.setdefault(key, deque()).append(place)
            rank.posted.add(place)

    def _end(self, number: int, place: int, todo: deque[int]) -> None:
        """Frees the lane of a node, and those that wait for it."""
        rank = self.ranks[number]
        shape = rank.shape
        lane = shape.lanes[place]
        if lane != _RECEIVE:
            rank.busy[lane] = -1
        else:
            rank.posted.discard(place)
        for child in shape.children[shape.offsets[place] : shape.offsets[place + 1]]:
            rank.missing[child] -= 1
            if not rank.missing[child]:
                heappush(rank.ready[shape.lanes[child]], child)
        todo.append(number)

    def _waits(self) -> list[Wait]:
        found = []
        for (name, _), there in self.arrived.items():
            absent = self.members[name] - {one for one, _ in there}
            for number, place in there:  # where all are there, for those that call another collective
                others = absent or {one for one, its in there if self._call(one, its) != self._call(number, place)}
                found.append(self._wait(number, place, sorted(others)))
        for (source, target, _), places in self.sent.items() if not self.buffered else ():
            found += [self._wait(source, place, (target,)) for place in places]
        for number, rank in self.ranks.items():
            found += [self._wait(number, at, (_message(rank, number, at)[0],)) for at in rank.posted]
        return sorted(found, key=lambda wait: (wait.rank, wait.row))

    def _wait(self, number: int, place: int, of: Sequence[int]) -> Wait:
        rank = self.ranks[number]
        return Wait(rank=number, trace=rank.trace, row=rank.shape.rows[place], of=tuple(of))


def _start(traces: Traces, trace: RankTrace, shape: _Shape, *, strict: bool) -> _Rank:
    """A rank before it runs; unless strict, its collectives are numbered by ascending id."""
    number, seen = np.zeros(len(shape.rows), np.int32), Counter[str]()
    if not strict:
        place = np.zeros(len(trace), np.int64)
        place[np.asarray(shape.rows)] = np.arange(len(shape.rows))
        for row in trace.ascending(trace.type == NodeType.COLLECTIVE).tolist():
            seen[name := group_name(traces, trace, row)] += 1
            number[place[row]] = seen[name]
    lanes = np.frombuffer(shape.lanes, np.uint8)
    ready = tuple(np.flatnonzero((shape.missing == 0) & (lanes == lane)).tolist() for lane in _LANES)
    return _Rank(
        trace=trace, shape=shape, missing=shape.missing.copy().data,
        groups=trace.group[np.asarray(shape.rows)].data, number=number.data, calls=Counter(), ready=ready,
        busy=[-1] * len(_LANES), posted=set(),
    )  # fmt: skip


def _shape(trace: RankTrace, *, strict: bool) -> _Shape:
    """The nodes of a rank; unless strict, without dependencies that cannot be kept."""
    rows = np.argsort(trace.id, kind="stable")
    place = np.empty(len(rows), np.int64)
    place[rows] = np.arange(len(rows))
    before, after = trace.edges(control=strict or len(trace.order()) == len(trace))
    before, after = place[before], place[after]
    missing = np.bincount(after, minlength=len(rows))
    for deps in (trace.ctrl_deps, trace.data_deps) if strict else ():
        np.add.at(missing, place[deps.rows[deps.values < 0]], 1)  # what the file does not have never ends
    lanes = np.full(len(rows), _COMMUNICATION, np.uint8)
    lanes[trace.type[rows] == NodeType.COMP] = _COMPUTE
    lanes[trace.type[rows] == NodeType.RECV] = _RECEIVE
    lanes[trace.host[rows]] = _HOST
    duration = np.maximum(np.minimum(trace.duration_us[rows], 2**50).astype(np.int64) * NS_PER_US, 1)
    joined = _joined(lanes, before, after, missing, strict=strict)
    if duration.sum(dtype=np.float64) > 2**62:
        joined[:] = False
    computes, kept = np.flatnonzero(lanes == _COMPUTE), ~joined
    ends = kept[computes]
    last = np.arange(len(rows))
    last[computes] = computes[ends][np.cumsum(ends) - ends]
    one = (np.cumsum(kept) - 1)[last]
    total, waits = np.zeros((2, int(kept.sum())), np.int64)
    np.add.at(total, one, duration)
    waits[one[::-1]] = missing[::-1]  # those of the first of each
    goes_on = kept[before]
    children = followers(len(total), one[before[goes_on]], one[after[goes_on]])
    return _Shape(
        rows=rows[kept].data, types=trace.type[rows[kept]].tobytes(), lanes=lanes[kept].tobytes(),
        kinds=trace.comm_type[rows[kept]].data, sizes=trace.comm_size[rows[kept]].data, missing=waits,
        duration=total.data, offsets=children.offsets.data, children=children.values.data,
    )  # fmt: skip


def _joined(
    lanes: npt.NDArray[np.uint8], before: Int64, after: Int64, missing: Int64, *, strict: bool
) -> npt.NDArray[np.bool_]:
    """Which nodes are computations that nothing waits for but the next computation, which waits for nothing else.

    If strict, where computations run one at a time, none unless all of them follow each other: else those that are
    ready take turns.
    """
    joined = np.zeros(len(lanes), np.bool_)
    computes = np.flatnonzero(lanes == _COMPUTE)
    one, next_one = computes[:-1], computes[1:]
    follow = np.isin(one * len(lanes) + next_one, before * len(lanes) + after)
    if follow.all() or not strict:
        alone = np.bincount(before, minlength=len(lanes)) == 1
        joined[one] = follow & alone[one] & (missing[next_one] == 1)
    return joined


def _message(rank: _Rank, number: int, place: int) -> _Message:
    row = rank.shape.rows[place]
    return int(rank.trace.comm_src[row]), number, _tag(rank.trace, row)


def _tag(trace: RankTrace, row: int) -> int:
    tag = int(trace.comm_tag[row])
    return 0 if tag == ABSENT else tag


# -- without running ------------------------------------------------------------------------------------------
# Whether the ranks of Chakra traces come to an end, shown without running them.
#
# Ranks that run all that is ready at once stand still only where what they wait for goes round in a circle.
# With every collective, and every message, taken for one thing that all of its nodes are, that is a cycle of
# a graph, and there is none where its nodes can be put in order.


FEW = 24
"""Nodes that are gone through one by one rather than as columns."""

Chains = Int64
"""For every row the first one of its chain, -1 where it is in none."""


def surely_end(
    traces: Traces, edges: Mapping[int, tuple[Int64, Int64]], chains: Mapping[int, Chains | None]
) -> bool:
    """Whether the ranks surely come to an end, where a send ends with its receive.

    False says nothing: where messages between two ranks may overtake each other, or a node is no usual one, only a
    run tells.

    Args:
        traces: of all ranks.
        edges: by rank, rows (before, after) of the dependencies that are kept.
        chains: by rank, those of its control dependencies; None where they are none.
    """
    starts = np.concatenate([[0], np.cumsum([len(trace) for trace in traces.ranks])])
    if any(bool((trace.host & (trace.type >= NodeType.SEND)).any()) for trace in traces.ranks):
        return False
    one = np.arange(int(starts[-1]))
    if not (_join_collectives(traces, starts, one) and _join_messages(traces, starts, chains, one)):
        return False
    before = np.concatenate([edges[t.rank][0] + start for t, start in zip(traces.ranks, starts[:-1], strict=True)])
    after = np.concatenate([edges[t.rank][1] + start for t, start in zip(traces.ranks, starts[:-1], strict=True)])
    return _acyclic(int(starts[-1]), one[before], one[after])


def _join_collectives(traces: Traces, starts: Int64, one: Int64) -> bool:
    """Makes one node of the n-th collectives of a group's ranks; whether all ranks call the same ones."""
    named, members = _members(traces)
    nodes, groups, nths = [], [], []
    for trace, start in zip(traces.ranks, starts[:-1].tolist(), strict=True):
        rows = trace.ascending(trace.type == NodeType.COLLECTIVE)
        group = named[trace.group[rows]]
        if not all(found >= 0 and trace.rank in members[found] for found in np.unique(group).tolist()):
            return False
        nodes.append(rows + start)
        groups.append(group)
        nths.append(_nth(group))
    node, group, nth = (np.concatenate(part) for part in (nodes, groups, nths))
    kind = np.concatenate([trace.comm_type for trace in traces.ranks])[node]
    size = np.concatenate([trace.comm_size for trace in traces.ranks])[node]
    order = np.lexsort((nth, group))
    node, group, nth, kind, size = (column[order] for column in (node, group, nth, kind, size))
    begins = np.flatnonzero(np.diff(group, prepend=-1).astype(bool) | np.diff(nth, prepend=-1).astype(bool))
    counts = np.diff(begins, append=len(node))
    first = np.repeat(begins, counts)
    one[node] = node[first]
    whole = counts == np.array([len(ranks) for ranks in members], np.int64)[group[begins]]
    return bool(whole.all() and (kind == kind[first]).all() and (size == size[first]).all())


def _members(traces: Traces) -> tuple[Int64, list[frozenset[int]]]:
    """For what nodes state as their group its number, -1 where there is none so called; the ranks of each."""
    everyone = frozenset(trace.rank for trace in traces.ranks)
    numbers = {"": 0, **{name: 1 + at for at, name in enumerate(traces.groups or {})}}
    members = [everyone, *(frozenset(ranks) for ranks in (traces.groups or {}).values())]
    named = [
        0 if name is None or name == "0" else numbers.get(name, -1) if isinstance(name, str) else -1
        for name in traces.groups_named
    ]
    return np.array(named, np.int64), members


def _nth(keys: Int64) -> Int64:
    """How many equal keys stand before each."""
    order = np.argsort(keys, kind="stable")
    begins = np.flatnonzero(np.diff(keys[order], prepend=-1))
    nth = np.empty(len(keys), np.int64)
    nth[order] = np.arange(len(keys)) - np.repeat(begins, np.diff(begins, append=len(keys)))
    return nth


def _join_messages(traces: Traces, starts: Int64, chains: Mapping[int, Chains | None], one: Int64) -> bool:
    """Makes one node of every send and its receive; whether all have both sides, and none overtakes another."""
    sides: list[list[Int64]] = [[], []]
    for trace, start in zip(traces.ranks, starts[:-1].tolist(), strict=True):
        for side, kind in zip(sides, (NodeType.SEND, NodeType.RECV), strict=True):
            rows = trace.ascending(trace.type == kind)
            if not len(rows):
                continue
            own = np.full(len(rows), trace.rank)
            ends = (own, trace.comm_dst[rows]) if kind == NodeType.SEND else (trace.comm_src[rows], own)
            tags = np.where(trace.comm_tag[rows] == ABSENT, 0, trace.comm_tag[rows])
            key = np.stack([*ends, tags])
            distinct, which = np.unique(key, axis=1, return_inverse=True)
            which = which.ravel()
            if not _in_order(trace, rows, which, chains[trace.rank]):
                return False
            side.append(np.stack([*distinct[:, which], _nth(which), rows + start]))
    if not sides[0] and not sides[1]:
        return True
    if not sides[0] or not sides[1]:
        return False
    sent, received = (_sorted(np.concatenate(side, axis=1)) for side in sides)
    if sent.shape != received.shape or not np.array_equal(sent[:-1], received[:-1]):
        return False
    one[received[-1]] = sent[-1]
    return True


def _sorted(columns: Int64) -> Int64:
    return columns[:, np.lexsort(columns[:-1][::-1])]


def _in_order(trace: RankTrace, rows: Int64, which: Int64, chains: Chains | None) -> bool:
    """Whether the messages of one key, which meet in the order that they become ready in, follow each other."""
    if len(rows) == int(which.max()) + 1:
        return True
    if chains is None:
        return False
    chain = np.where(chains[rows] == NONE, NONE - 1 - rows, chains[rows])
    order = np.argsort(which, kind="stable")
    same = which[order][1:] == which[order][:-1]
    ascending = bool((trace.id[trace.ctrl_deps.values] < trace.id[trace.ctrl_deps.rows]).all())
    return ascending and bool((chain[order][1:] == chain[order][:-1])[same].all())


def _acyclic(count: int, before: Int64, after: Int64) -> bool:
    """Whether the nodes of a graph can be put in order: those that nothing is left before go, wave after wave."""
    after_of = followers(count, before, after)
    offsets, children = after_of.offsets, after_of.values
    missing = np.bincount(after, minlength=count)
    wave = np.flatnonzero(missing == 0)
    left, starts, targets = missing.data, offsets.data, children.data
    gone, seen = 0, np.zeros(count, np.int64)
    while len(wave):
        gone += len(wave)
        if len(wave) <= FEW:
            some: list[int] = []
            for node in wave.tolist():
                for at in range(starts[node], starts[node + 1]):
                    child = targets[at]
                    left[child] -= 1
                    if not left[child]:
                        some.append(child)
            wave = np.array(some, np.int64)
            continue
        reached = children[expand_ranges(offsets[wave], offsets[wave + 1])]
        np.subtract.at(missing, reached, 1)
        reached = reached[missing[reached] == 0]
        places = np.arange(len(reached))
        seen[reached] = places
        wave = reached[seen[reached] == places]  # each once
    return gone == count

"""A dry run of Chakra traces as ASTRA-sim issues their nodes: who is left waiting for whom.

Of what is ready the lowest id goes first. A rank runs one computation at a time, and one collective or send;
receives it posts as they become ready. Computations take their time, communications none but what they wait: the
run shows whether the ranks come to an end, not when. A send does not wait for its receive.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from echograph.ir.chakra_traces import ABSENT, RankTrace, Traces, followers
from echograph.ir.columns import NONE, Int64
from echograph.ir.exporters.chakra_finding import name_of_group, ranks_of
from echograph.ir.serde_chakra import NodeType

if TYPE_CHECKING:
    from echograph.ir.exporters.chakra_dry_loop import Nodes, State

NS_PER_US = 1000


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
    """The nodes of all ranks as columns, and what is left of them when they have run.

    Args:
        traces: of all ranks.
        buffered: whether a send ends without its receive.
        lanes: whether a rank runs one thing of a kind at a time; then dependencies that cannot be kept are kept.
    """

    def __init__(self, traces: Traces, *, buffered: bool = True, lanes: bool = True) -> None:
        self.traces, self.buffered, self.lanes = traces, buffered, lanes
        sizes = [len(trace) for trace in traces.ranks]
        self.starts = np.cumsum([0, *sizes])
        self.rank = np.repeat(np.arange(len(sizes)), sizes)
        self.rows = [np.argsort(trace.id, kind="stable") for trace in traces.ranks]
        groups = [name_of_group(value) for value in traces.groups_named]
        self.names = list(dict.fromkeys(groups))
        self.group_of = np.array([self.names.index(name) for name in groups] or [0])
        self.members = [frozenset(ranks_of(traces, name)) for name in self.names]

    def run(self) -> list[Wait]:
        """Who waits when all has run that can."""
        # The compiler is loaded where it is needed.
        from echograph.ir.exporters.chakra_dry_loop import run, start

        nodes, keys, meetings = self._nodes()
        state = start(nodes, len(self.traces.ranks), keys, meetings)
        run(nodes, state, lanes=self.lanes, buffered=self.buffered)
        return sorted(self._waits(nodes, state), key=lambda wait: (wait.rank, wait.row))

    def column(self, name: str) -> Int64:
        """A column of all ranks, by node."""
        columns = [getattr(t, name)[rows] for t, rows in zip(self.traces.ranks, self.rows, strict=True)]
        return np.concatenate(columns) if columns else np.zeros(0, np.int64)

    def _nodes(self) -> tuple[Nodes, int, int]:
        """What nodes are, how many keys messages have, and how many meetings there may be."""
        from echograph.ir.exporters.chakra_dry_loop import (
            ALONE,
            COLLECTIVE,
            COMMUNICATION,
            COMPUTE,
            HOST,
            RECEIVE,
            SEND,
            Nodes,
        )  # fmt: skip

        kind, host = self.column("type"), self.column("host").astype(np.bool_)
        lane = np.full(len(kind), COMMUNICATION, np.uint8)
        lane[kind == NodeType.COMP], lane[kind == NodeType.RECV], lane[host] = COMPUTE, RECEIVE, HOST
        talks = ~host & np.isin(kind, (NodeType.SEND, NodeType.RECV))
        key, keys = self._keys(kind, talks)
        slot, number, base, members, meetings = self._slots(kind)
        collective = (kind == NodeType.COLLECTIVE) & (members[slot] >= 2) if len(members) else kind < 0
        action = np.where(collective, COLLECTIVE, np.where(kind == NodeType.SEND, SEND, ALONE)).astype(np.uint8)
        call = np.zeros(len(kind), np.int64)
        call[collective] = _numbered(self.column("comm_type")[collective], self.column("comm_size")[collective])
        missing, first, children = self._edges()
        micros = np.minimum(self.column("duration_us"), np.uint64(2**50)).astype(np.int64)
        nodes = Nodes(
            rank=self.rank, lane=lane, duration=np.maximum(micros * NS_PER_US, 1), missing=missing, first=first,
            children=children, action=action, key=np.where(collective, slot, key), call=call, number=number,
            base=base, members=members,
        )  # fmt: skip
        return nodes, keys, meetings

    def _edges(self) -> tuple[Int64, Int64, Int64]:
        """How many each node waits for, and who waits for it: `missing`, `first` and `children` of `Nodes`."""
        missing, counts, children = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for trace, rows, start in zip(self.traces.ranks, self.rows, self.starts.tolist(), strict=False):
            place = np.empty(len(rows), np.int64)
            place[rows] = np.arange(len(rows))
            before, after = trace.edges(control=self.lanes or len(trace.order()) == len(trace))
            follow = followers(len(rows), place[before], place[after])
            counts.append(follow.lengths)
            children.append(start + follow.values)
            missing.append(np.bincount(place[after], minlength=len(rows)))
            for deps in (trace.ctrl_deps, trace.data_deps) if self.lanes else ():
                # What the file does not have never ends.
                np.add.at(missing[-1], place[deps.rows[deps.values == NONE]], 1)
        return np.concatenate(missing), np.cumsum(np.concatenate([[0], *counts])), np.concatenate(children)

    def _keys(self, kind: Int64, talks: np.ndarray) -> tuple[Int64, int]:
        """A number of every message's key: from which rank, to which, and the tag; and how many there are."""
        own, sends = np.array([t.rank for t in self.traces.ranks])[self.rank], kind == NodeType.SEND
        tag = self.column("comm_tag")
        source = np.where(sends, own, self.column("comm_src"))[talks]
        target = np.where(sends, self.column("comm_dst"), own)[talks]
        key = np.zeros(len(kind), np.int64)
        key[talks] = _numbered(source, target, np.where(tag == ABSENT, 0, tag)[talks])
        return key, int(key.max(initial=-1)) + 1

    def _slots(self, kind: Int64) -> tuple[Int64, Int64, Int64, Int64, int]:
        """Of collectives the slot, a rank and a group, and how many come before in it.

        Returns:
            Slot and number of every node; of every slot, the group's first meeting and how many meet, 0 where the
            rank is not in the group; how many meetings there are.
        """
        at = np.flatnonzero(kind == NodeType.COLLECTIVE)
        pairs = self.rank[at] * len(self.names or "?") + self.group_of[self.column("group")[at]]
        known, which, counts = np.unique(pairs, return_inverse=True, return_counts=True)
        slot, number = np.zeros(len(kind), np.int64), np.zeros(len(kind), np.int64)
        slot[at] = which
        order = np.argsort(which, kind="stable")
        number[at[order]] = np.arange(len(at)) - np.repeat(np.cumsum(counts) - counts, counts)
        ranks, groups = np.divmod(known, len(self.names or "?"))
        most = np.zeros(len(self.names or "?"), np.int64)
        np.maximum.at(most, groups, counts)
        inside = [
            len(self.members[g]) if self.traces.ranks[r].rank in self.members[g] else 0
            for r, g in zip(ranks.tolist(), groups.tolist(), strict=True)
        ]
        return slot, number, (np.cumsum(most) - most)[groups], np.array(inside, np.int64), int(most.sum())

    def _waits(self, nodes: Nodes, state: State) -> Iterator[Wait]:
        from echograph.ir.exporters.chakra_dry_loop import MEETINGS, SENDS

        for meeting in np.flatnonzero(state.heads[MEETINGS] >= 0).tolist():
            there = list(_queue(state, MEETINGS, meeting))
            group = int(self.group_of[self._value(there[0], "group")])
            ranks = {self._rank(node): int(nodes.call[node]) for node in there}
            absent = self.members[group] - ranks.keys()
            for node in there:  # where all are there, for those that call another collective
                others = absent or {rank for rank, call in ranks.items() if call != nodes.call[node]}
                yield self._wait(node, sorted(others))
        for key in np.flatnonzero(state.heads[SENDS] >= 0).tolist() if not self.buffered else ():
            for node in _queue(state, SENDS, key):
                yield self._wait(node, [self._value(node, "comm_dst")])
        for node in np.flatnonzero(state.posted).tolist():
            yield self._wait(node, [self._value(node, "comm_src")])

    def _rank(self, node: int) -> int:
        return self.traces.ranks[int(self.rank[node])].rank

    def _row(self, node: int) -> int:
        number = int(self.rank[node])
        return int(self.rows[number][node - int(self.starts[number])])

    def _value(self, node: int, name: str) -> int:
        return int(getattr(self.traces.ranks[int(self.rank[node])], name)[self._row(node)])

    def _wait(self, node: int, of: list[int]) -> Wait:
        trace = self.traces.ranks[int(self.rank[node])]
        return Wait(rank=trace.rank, trace=trace, row=self._row(node), of=tuple(of))


def _queue(state: State, queue: int, key: int) -> Iterator[int]:
    """The nodes of a queue, in order."""
    node = int(state.heads[queue, key])
    while node != NONE:
        yield node
        node = int(state.after[node])


def _numbered(*columns: Int64) -> Int64:
    """A number for every row, equal where all columns are."""
    order = np.lexsort(columns)
    ascending = [column[order] for column in columns]
    differs = np.zeros(len(order), np.bool_)
    for column in ascending:
        differs[1:] |= column[1:] != column[:-1]
    number = np.empty(len(order), np.int64)
    number[order] = np.cumsum(differs)
    return number

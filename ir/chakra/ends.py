"""Whether the ranks of Chakra traces come to an end, shown without running them.

Ranks that run all that is ready at once stand still only where what they wait for goes round in a circle. With
every collective, and every message, taken for one thing that all of its nodes are, that is a cycle of a graph, and
there is none where its nodes can be put in order.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from echograph.ir.chakra.messages import NodeType
from echograph.ir.chakra.reader import ABSENT, RankTrace, Traces, followers
from echograph.ir.columns import NONE, Int64

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
        begins, sizes = offsets[wave], offsets[wave + 1] - offsets[wave]
        edges = np.repeat(begins - (np.cumsum(sizes) - sizes), sizes) + np.arange(int(sizes.sum()))
        reached = children[edges]
        np.subtract.at(missing, reached, 1)
        reached = reached[missing[reached] == 0]
        places = np.arange(len(reached))
        seen[reached] = places
        wave = reached[seen[reached] == places]  # each once
    return gone == count

"""The loop of `chakra_dry_run`, over numbers alone, so that it can be compiled.

A node is its place among the nodes of all ranks, rank after rank, by ascending id. Of what is ready in a lane of a
rank the lowest goes first. Nodes stand in a queue (of a message's key, or of a meeting) by the `after` of each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
from numba.extending import register_jitable

COMPUTE, COMMUNICATION, HOST, RECEIVE = range(4)
LANES = 4
ALONE, SEND, COLLECTIVE = range(3)

# What follows is given to numba whole, so the types are those that it takes: arrays.


class Nodes(NamedTuple):
    """What nodes are; an entry for each, but where another is named.

    `rank`, `lane`, `duration`; `missing`: how many it waits for; `children`: who waits for it, from `first` (one
    more entry) on; `action`: of a communication; `key`: of a message, or the slot (rank and group) of a
    collective; `call`: a number for its kind and size; `number`: how many collectives of its slot come before it.
    Of every slot: `base`, its group's first meeting, and `members`, how many meet.
    """

    rank: Any
    lane: Any
    duration: Any
    missing: Any
    first: Any
    children: Any
    action: Any
    key: Any
    call: Any
    number: Any
    base: Any
    members: Any


class State(NamedTuple):
    """Where the run stands.

    `heap` holds what is ready, in the room from `room` on of each lane of each rank, `ready` of them; `busy` says
    which lanes are; `calls` counts the collectives of each slot. `met` counts those who came to a meeting, and
    `mixed` says whether their calls differ. Queues are of receives and sends by key, and of meetings: `heads` and
    `tails` hold the three in rows, `after` the next node. `posted` are receives without a send. `todo` are ranks
    to look at, and `at` what is gone of it, what is there, how many events there are, and the time.
    """

    heap: Any
    room: Any
    ready: Any
    busy: Any
    calls: Any
    met: Any
    mixed: Any
    heads: Any
    tails: Any
    after: Any
    posted: Any
    todo: Any
    times: Any
    events: Any
    at: Any


MOST_INTERPRETED = 20_000
"""Nodes up to which the loop runs as it stands."""

RECEIVES, SENDS, MEETINGS = range(3)
GONE, THERE, EVENTS, NOW = range(4)


def start(nodes: Nodes, ranks: int, keys: int, meetings: int) -> State:
    """The state before anything has run."""
    count, where = len(nodes.rank), nodes.rank.astype(np.int64) * LANES + nodes.lane
    sizes = np.bincount(where, minlength=ranks * LANES)
    room = np.cumsum(sizes) - sizes
    free = np.flatnonzero(nodes.missing == 0)
    free = free[np.argsort(where[free], kind="stable")]
    ready = np.bincount(where[free], minlength=ranks * LANES)
    heap = np.zeros(count, np.int64)
    heap[room[where[free]] + np.arange(len(free)) - (np.cumsum(ready) - ready)[where[free]]] = free
    todo = np.zeros(count + ranks, np.int64)
    todo[:ranks] = np.arange(ranks)
    queues = max(keys, meetings, 1)
    return State(
        heap=heap, room=room, ready=ready, busy=np.zeros(ranks * LANES, np.bool_),
        calls=np.zeros(len(nodes.base), np.int64), met=np.zeros(meetings, np.int64),
        mixed=np.zeros(meetings, np.bool_), heads=np.full((3, queues), -1, np.int64),
        tails=np.full((3, queues), -1, np.int64), after=np.full(count, -1, np.int64),
        posted=np.zeros(count, np.bool_), todo=todo, times=np.zeros(count, np.int64),
        events=np.zeros(count, np.int64), at=np.array([0, ranks, 0, 0], np.int64),
    )  # fmt: skip


@register_jitable  # type: ignore[untyped-decorator]
def _push(state: State, where: int, node: int) -> None:
    """A node becomes ready."""
    base, at = state.room[where], state.ready[where]
    state.ready[where] += 1
    while at > 0 and state.heap[base + (at - 1) // 2] > node:
        state.heap[base + at] = state.heap[base + (at - 1) // 2]
        at = (at - 1) // 2
    state.heap[base + at] = node


@register_jitable  # type: ignore[untyped-decorator]
def _pop(state: State, where: int) -> int:
    """The lowest node that is ready in a lane."""
    base, lowest = state.room[where], state.heap[state.room[where]]
    state.ready[where] -= 1
    size = state.ready[where]
    last, at = state.heap[base + size], 0
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and state.heap[base + child + 1] < state.heap[base + child]:
            child += 1
        if state.heap[base + child] >= last:
            break
        state.heap[base + at] = state.heap[base + child]
        at = child
    state.heap[base + at] = last
    return lowest


@register_jitable  # type: ignore[untyped-decorator]
def _before(state: State, one: int, time: int, node: int) -> bool:
    """Whether event `one` comes before another."""
    return state.times[one] < time or (state.times[one] == time and state.events[one] < node)


@register_jitable  # type: ignore[untyped-decorator]
def _schedule(state: State, time: int, node: int) -> None:
    """A node will end."""
    at = state.at[EVENTS]
    state.at[EVENTS] += 1
    while at > 0 and not _before(state, (at - 1) // 2, time, node):
        state.times[at], state.events[at] = state.times[(at - 1) // 2], state.events[(at - 1) // 2]
        at = (at - 1) // 2
    state.times[at], state.events[at] = time, node


@register_jitable  # type: ignore[untyped-decorator]
def _next_event(state: State) -> int:
    """The node that ends next; its time is now."""
    state.at[NOW], node = state.times[0], state.events[0]
    state.at[EVENTS] -= 1
    size = state.at[EVENTS]
    time, last, at = state.times[size], state.events[size], 0
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and _before(state, child + 1, state.times[child], state.events[child]):
            child += 1
        if not _before(state, child, time, last):
            break
        state.times[at], state.events[at] = state.times[child], state.events[child]
        at = child
    state.times[at], state.events[at] = time, last
    return node


@register_jitable  # type: ignore[untyped-decorator]
def _append(state: State, queue: int, key: int, node: int) -> None:
    if state.heads[queue, key] < 0:
        state.heads[queue, key] = node
    else:
        state.after[state.tails[queue, key]] = node
    state.tails[queue, key] = node


@register_jitable  # type: ignore[untyped-decorator]
def _take(state: State, queue: int, key: int) -> int:
    node = state.heads[queue, key]
    state.heads[queue, key] = state.after[node]
    state.after[node] = -1
    return node


@register_jitable  # type: ignore[untyped-decorator]
def _end(nodes: Nodes, state: State, node: int) -> None:
    """Frees the lane of a node, and those that wait for it."""
    rank = nodes.rank[node]
    if nodes.lane[node] != RECEIVE:
        state.busy[rank * LANES + nodes.lane[node]] = False
    state.posted[node] = False
    for at in range(nodes.first[node], nodes.first[node + 1]):
        child = nodes.children[at]
        nodes.missing[child] -= 1
        if nodes.missing[child] == 0:
            _push(state, rank * LANES + nodes.lane[child], child)
    state.todo[state.at[THERE]] = rank
    state.at[THERE] += 1


@register_jitable  # type: ignore[untyped-decorator]
def _meet(nodes: Nodes, state: State, node: int, lanes: bool) -> None:
    """A rank comes to a collective; the last one ends it for all, where they call the same."""
    slot = nodes.key[node]
    nth = state.calls[slot] if lanes else nodes.number[node]
    state.calls[slot] += 1
    meeting = nodes.base[slot] + nth
    if state.met[meeting] and nodes.call[state.heads[MEETINGS, meeting]] != nodes.call[node]:
        state.mixed[meeting] = True
    _append(state, MEETINGS, meeting, node)
    state.met[meeting] += 1
    if state.met[meeting] == nodes.members[slot] and not state.mixed[meeting]:
        while state.heads[MEETINGS, meeting] >= 0:
            _end(nodes, state, _take(state, MEETINGS, meeting))


@register_jitable  # type: ignore[untyped-decorator]
def _communicate(nodes: Nodes, state: State, node: int, lanes: bool, buffered: bool) -> None:
    key = nodes.key[node]
    if nodes.action[node] == COLLECTIVE:
        _meet(nodes, state, node, lanes)
    elif nodes.action[node] == SEND and state.heads[RECEIVES, key] >= 0:
        _end(nodes, state, _take(state, RECEIVES, key))
        _end(nodes, state, node)
    elif nodes.action[node] == SEND:
        _append(state, SENDS, key, node)
        if buffered:
            _end(nodes, state, node)
    else:
        _end(nodes, state, node)  # nobody else is there


@register_jitable  # type: ignore[untyped-decorator]
def _receive(nodes: Nodes, state: State, node: int, buffered: bool) -> None:
    key = nodes.key[node]
    if state.heads[SENDS, key] >= 0:
        sent = _take(state, SENDS, key)
        if not buffered:
            _end(nodes, state, sent)
        _end(nodes, state, node)
    else:
        _append(state, RECEIVES, key, node)
        state.posted[node] = True


@register_jitable  # type: ignore[untyped-decorator]
def _issue(nodes: Nodes, state: State, rank: int, lanes: bool, buffered: bool) -> None:
    """Starts what is ready and has a lane."""
    first = rank * LANES
    while state.ready[first + RECEIVE]:
        _receive(nodes, state, _pop(state, first + RECEIVE), buffered)
    for lane in (COMPUTE, HOST):
        while state.ready[first + lane] and not (lanes and state.busy[first + lane]):
            node = _pop(state, first + lane)
            state.busy[first + lane] = True
            _schedule(state, state.at[NOW] + nodes.duration[node], node)
    while state.ready[first + COMMUNICATION] and not (lanes and state.busy[first + COMMUNICATION]):
        node = _pop(state, first + COMMUNICATION)
        state.busy[first + COMMUNICATION] = True
        _communicate(nodes, state, node, lanes, buffered)


def _run(nodes: Nodes, state: State, lanes: bool, buffered: bool) -> None:
    while True:
        while state.at[GONE] < state.at[THERE]:
            rank = state.todo[state.at[GONE]]
            state.at[GONE] += 1
            _issue(nodes, state, rank, lanes, buffered)
        if state.at[EVENTS] == 0:
            return
        _end(nodes, state, _next_event(state))


_RUN: Any = numba.njit(cache=True, nogil=True)(_run)


def run(nodes: Nodes, state: State, *, lanes: bool, buffered: bool) -> None:
    """Runs all that can run; compiled, where that is worth the seconds that compiling takes at first.

    Args:
        nodes: of all ranks; `missing` is used up.
        state: as `start` makes it; afterwards, `posted` and the queues hold those who wait.
        lanes: a rank has one computation, one collective or send, and one piece of host work at a time.
        buffered: a send does not wait for its receive.
    """
    (_RUN if len(nodes.rank) > MOST_INTERPRETED else _run)(nodes, state, lanes, buffered)

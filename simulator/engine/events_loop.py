"""The event loop, compiled: a heap of ends, links that are shared at rates that change, and the loop itself.

*The loop.* A queue is a resource in a column: it runs the tasks of the resource one after the other. The task at
its head waits first for its dependencies, then, if it has a rendezvous, for the other participants, and then
runs:

    due -> waits for a dependency  -> due again, when the queue that runs it has ended that task
        -> waits for participants  -> the last that comes begins the activity
        -> runs                    -> due with the next task, when its end is taken from the heap

An activity is a task, or the tasks of a rendezvous, in the order in which they end; the first leads it and
stands in the heap. Whoever waits is in a wait list, linked through the queues: one hangs at each queue that is
waited for, one at the first participant that came to a rendezvous.

*The heap* has four children a node. An item is the queue that leads an activity, or, below zero, the inverse
(`~`) of a flow. The end of a flow changes while it lasts, so each notes where it stands: an earlier end is
moved, a later one put in when the former is due. The first place may be vacant: most ends are followed by the
beginning of the next task, which then takes it. Ends at the same time come in no particular order (nothing
depends on it), but in the same in every run.

*Rates* are max-min fair, worked out anew only where links are saturated. A link is saturated when its flows,
were nothing to slow them, would load it beyond its capacity. Only saturated links slow anybody, so a flow that
crosses none has rate 1, and one that begins or ends there changes counters and no more. The counters are
integers (parts of the link's capacity), which add and subtract without a trace. Otherwise the flows that are
connected over saturated links share anew, by progressive filling (Bertsekas and Gallager, Data Networks, 2nd
edition, 1992, section 6.5.2): the bytes/s of all rise together until a link is full, or a flow has all it can
use; these are frozen, the others go on. Which flows cross a link is known for links that have been saturated
before; when one is for the first time, all flows are looked through.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar, cast, get_type_hints

import numba
import numpy as np

from echograph.ir.columns import NONE, Float64, Int32, Int64
from echograph.simulator.engine import static
from echograph.simulator.engine.machine_code import OPTIONS, kept
from echograph.simulator.engine.sharing import Sharing

I2 = Annotated[int, "i2"]
I4 = Annotated[int, "i4"]
I8 = Annotated[int, "i8"]
F4 = Annotated[float, "f4"]
F8 = Annotated[float, "f8"]
wide: Callable[[int], int] = cast(Any, np.int64)
"""An integer of 64 bits: a part is compiled once for each type that it is given."""
_Part = TypeVar("_Part", bound=Callable[..., Any])


def part(function: _Part) -> _Part:
    """Compiles a part of `run`, with which it is kept on disk."""
    return cast(_Part, numba.njit(**OPTIONS)(function))


def once(function: _Part) -> _Part:
    """Compiles a part into the one place that calls it, so that its many arguments are not passed."""
    return cast(_Part, numba.njit(forceinline=True, **OPTIONS)(function))


def layout(row: type) -> np.dtype[Any]:
    """The type of an array of rows: a field for each of the class's attributes."""
    fields = get_type_hints(row, include_extras=True)
    return np.dtype([(name, *hint.__metadata__) for name, hint in fields.items()], align=True)


noise = part(static.noise)

# -- the arrays ----------------------------------------------------------------------------------------------


DONE = 2**31 - 1
"""In place of a task: there is none any more."""
ON_ITS_OWN, BY_FACTOR, AS_IT_IS = range(3)
"""How a duration comes about: with noise and a factor, with a factor, or as the task says."""


class TaskRow:
    """A task.

    Attributes:
        duration: picoseconds.
        deps: where its dependencies begin.
        load: bytes/s on its links when nothing slows it.
        start: in the recorded column.
        resource: that runs it.
        after: the next task of the resource.
        rendezvous: its number, or -1.
        participant: the next task of the rendezvous, in a circle.
        row: of the places, or -1.
        route: of the routes, or -1.
        kind: of the factors.
        steady: `ON_ITS_OWN`, `BY_FACTOR` or `AS_IT_IS`.
    """

    duration: I8
    deps: I8
    load: F8
    start: I8
    resource: I4
    after: I4
    rendezvous: I4
    participant: I4
    row: I4
    route: I4
    kind: I4
    steady: I4


class QueueRow:
    """A resource in a column.

    Attributes:
        need: the dependency that its task waits for, or the first not looked at.
        duration: of its task.
        since: when that was ready, or when all was done.
        waited: for participants in other columns.
        task: at its head, or `DONE`.
        column: its own.
        following: the next in the wait list that it is in, or in its activity; -1 the last.
        waiting: the wait list for its task: its head, or -1.
        key: for the first participant that came, of the rendezvous; and so are the others.
        place: where that is.
        missing: how many have not come.
        next: in the table of rendezvous, another one.
    """

    need: I8
    duration: I8
    since: I8
    waited: I8
    task: I4
    column: I4
    following: I4
    waiting: I4
    key: I4
    place: I4
    missing: I4
    next: I4


class LinkRow:
    """A link.

    Attributes:
        load: of all flows as if nothing slowed them, in parts of the capacity.
        headroom: for it, in the same.
        busy: picoseconds times the share of the capacity used.
        left: of the capacity, while filling; and so are `share`, `level`, `seen` and `crossing`.
        share: of the capacity, for each byte/s of the unfrozen flows.
        level: of these if this link stops them, bytes/s, or `UNKNOWN`.
        seen: in which round.
        first: of its nodes, or -1; of a link that was saturated once.
        crossing: how many unfrozen flows do.
        known: `COLD` until it is saturated for the first time, `WARM` while its flows are looked for, then `HOT`.
        changed: 1 if its flows must share anew.
    """

    load: I8
    headroom: I8
    busy: F8
    left: F8
    share: F8
    level: F8
    seen: I4
    first: I4
    crossing: I4
    known: I2
    changed: I2


class FlowRow:
    """An activity that loads links.

    Attributes:
        rate: of its full speed, 1 if nothing slows it, 0 before it has one.
        load: bytes/s at rate 1.
        level: bytes/s that filling gave it, or `UNFROZEN`.
        left: work (picoseconds at rate 1) at the time `since`, until its first task ends.
        since: picoseconds.
        over: the part of a picosecond that is done over `left`.
        seen: in which round.
        queue: that leads it; -1: no flow.
        row: of the links.
        nodes: the first of its own, or -1.
        at: its place in the heap, or the next free flow.
    """

    rate: F8
    load: F8
    level: F8
    left: I8
    since: I8
    over: F4
    seen: I4
    queue: I4
    row: I4
    nodes: I4
    at: I4


class NodeRow:
    """A flow on a link: in the link's list between `before` and `after`, in that of the flow before `next`."""

    share: F8
    link: I4
    flow: I4
    before: I4
    after: I4
    next: I4


class HopRow:
    """A link of a route, and its share of the capacity for each byte/s of the flow, also in parts."""

    share: F8
    parts: F8
    link: I8


class EndRow:
    """A place of the heap: when what ends."""

    time: I8
    item: I4


TASK, QUEUE, LINK, FLOW, NODE, HOP, END = map(
    layout, (TaskRow, QueueRow, LinkRow, FlowRow, NodeRow, HopRow, EndRow)
)


class Work(NamedTuple):
    """What there is to do.

    Attributes:
        tasks: and an end mark.
        deps: of all tasks.
        factor: float64 [kinds, columns], on durations.
        places: int32 [rows, columns], where columns have their rendezvous.
        attendance: int32 [rows, columns], how many columns have it in a place.
        routes: int32 [routes, columns], the row of the links for each place, or -1.
        jitter: relative standard deviation of durations.
        seed: of it.
        record: the column whose times are wanted, or -1.
        lasted: int64 [tasks], how long they took there.
    """

    tasks: Sequence[TaskRow]
    deps: Int32
    factor: Float64
    places: Int32
    attendance: Int32
    routes: Int32
    jitter: float
    seed: np.uint64
    record: int
    lasted: Int64


class TaskQueues(NamedTuple):
    """Who runs it.

    Attributes:
        queues: of all resources in all columns.
        rendezvous: int32 [a power of two], queues that came first, by the hash of key and place: those of one hash
            are a list, by `QueueRow.next`.
        due: int32 [queues], a stack of those to look at.
        order: int32 [2, queues], for sorting.
    """

    queues: Sequence[QueueRow]
    rendezvous: Int32
    due: Int32
    order: Int32


class SharedLinks(NamedTuple):
    """What flows share.

    Attributes:
        offsets: int64 [rows + 1], where the hops of each row begin.
        hops: of all rows.
        links: all.
        nodes: flows on links.
        changed: int32 [links], those whose flows share anew.
        neighbours: int32 [links], a link and the saturated ones connected to it.
        participants: int32 [2, flows], those that share, and those that are frozen at a time.
    """

    offsets: Int64
    hops: Sequence[HopRow]
    links: Sequence[LinkRow]
    nodes: Sequence[NodeRow]
    changed: Int32
    neighbours: Int32
    participants: Int32


# What `EventHeap.counters` counts, here and for the flows: places of one array.
SIZE, VACANT, DUE, FLOWS, FREE, NODES, FREE_NODE, CHANGED, ROUND, LONGEST, NOW, COUNTS = range(12)


class EventHeap(NamedTuple):
    """What ends when.

    Attributes:
        heap: of ends.
        flows: all, some of them free.
        counters: int64 [COUNTS]: the `SIZE` of the heap, whether its first place is `VACANT`, how many queues are
            `DUE`, how many `FLOWS` there were at most and which is `FREE` (or -1), the same of `NODES`, how many
            links have `CHANGED`, the `ROUND` of filling, the links of the `LONGEST` route, and the time `NOW`.
    """

    heap: Sequence[EndRow]
    flows: Sequence[FlowRow]
    counters: Int64


# -- the heap ------------------------------------------------------------------------------------------------


@part
def push(events: EventHeap, time: int, item: int) -> None:
    """Adds an end."""
    counters = events.counters
    if counters[VACANT]:
        counters[VACANT] = 0
        _sink(events, 0, time, item)
        return
    counters[SIZE] += 1
    _rise(events, counters[SIZE] - 1, time, item)


@part
def settle(events: EventHeap) -> None:
    """Fills the first place, if it is vacant."""
    counters = events.counters
    if counters[VACANT]:
        counters[VACANT] = 0
        counters[SIZE] -= 1
        last = events.heap[counters[SIZE]]
        if counters[SIZE]:
            _sink(events, 0, last.time, wide(last.item))


@part
def advance(events: EventHeap, flow: int, time: int) -> None:
    """Moves the end of a flow to an earlier time. The first place may not be vacant."""
    _rise(events, wide(events.flows[flow].at), time, ~flow)


@part
def _rise(events: EventHeap, place: int, time: int, item: int) -> None:
    heap = events.heap
    while place > 0:
        above = (place - 1) >> 2
        if heap[above].time <= time:
            break
        _put(events, place, heap[above].time, wide(heap[above].item))
        place = above
    _put(events, place, time, item)


@part
def _sink(events: EventHeap, place: int, time: int, item: int) -> None:
    heap, size = events.heap, events.counters[SIZE]
    while True:
        first = 4 * place + 1
        if first >= size:
            break
        least, soonest = first, heap[first].time
        for child in range(first + 1, min(first + 4, size)):
            if heap[child].time < soonest:
                least, soonest = child, heap[child].time
        if soonest >= time:
            break
        _put(events, place, soonest, wide(heap[least].item))
        place = least
    _put(events, place, time, item)


@part
def _put(events: EventHeap, place: int, time: int, item: int) -> None:
    row = events.heap[place]
    row.time, row.item = time, item
    if item < 0:
        events.flows[~item].at = place


# -- flows and their rates -----------------------------------------------------------------------------------


COLD, WARM, HOT = range(3)
SLACK = 1e-9
"""Loads over the capacity by a billionth are not over it: they are sums of rounded shares."""
EQUAL = 2.0**-48
"""Rates that differ by less are the same, rounded."""
FORGIVEN_PS = 1e-3
"""What rounding may add to a whole number of picoseconds."""
NEVER = 2**62
LAST_ROUND = 2**31 - 1
"""The highest number that `seen` holds; then the count begins anew."""
# Levels that are not found yet, of flows and of links.
UNFROZEN = UNKNOWN = -1.0


def links_and_hops(sharing: Sharing, flows: int) -> tuple[Any, Any]:
    """Idle links, and the hops of all routes.

    Args:
        sharing: who loads what.
        flows: how many there may be at a time.
    """
    hops, links = np.zeros(len(sharing.weight), HOP), np.zeros(len(sharing.capacity), LINK)
    hops["link"] = sharing.links.values
    hops["share"] = sharing.weight / sharing.capacity[hops["link"]]
    longest = int(sharing.links.lengths.max(initial=0))
    most = float(hops["share"].max(initial=0.0)) * float(sharing.load.max(initial=0.0)) * longest * flows
    # The finest power of two with which no sum exceeds 64 bits.
    parts = 2.0 ** np.floor(61 - np.log2(max(1.0, most)))
    hops["parts"] = hops["share"] * parts
    links["headroom"], links["first"] = int(parts * (1 + SLACK)), NONE
    return links, hops


@once
def begin(
    network: SharedLinks, events: EventHeap, now: int, queue: int, row: int, load: float, left: int, longest: int
) -> None:
    """A flow begins. The heap gets its end, unless `share` must first tell when that is.

    Args:
        network: with room for `LONGEST` more nodes.
        events: ends.
        now: picoseconds.
        queue: the one whose task ends first.
        row: of the links.
        load: bytes/s when nothing slows it.
        left: picoseconds at rate 1 until the first of its tasks ends.
        longest: until the last does.
    """
    counters = events.counters
    number = counters[FREE]
    if number < 0:
        number = counters[FLOWS]
        counters[FLOWS] += 1
    else:
        counters[FREE] = events.flows[number].at
    flow = events.flows[number]
    flow.rate, flow.load, flow.left, flow.over, flow.since = 1.0, load, left, 0.0, now
    flow.queue, flow.row, flow.nodes = queue, row, -1
    for k in range(network.offsets[row], network.offsets[row + 1]):
        hop = network.hops[k]
        link = network.links[hop.link]
        link.load += round(load * hop.parts)
        link.busy += load * hop.share * longest
        if link.known != COLD:
            _attach(network, events, number, hop)
        # No rate yet: all flows that are due at this time begin before `share` looks at who is connected.
        if link.load > link.headroom:
            flow.rate = 0.0
            _change(network, counters, hop.link)
    if flow.rate > 0:
        push(events, now + left, ~number)


@once
def end(network: SharedLinks, events: EventHeap, number: int) -> None:
    """A flow has ended, and left the heap."""
    nodes, flow, counters = network.nodes, events.flows[number], events.counters
    for k in range(network.offsets[flow.row], network.offsets[flow.row + 1]):
        hop = network.hops[k]
        link = network.links[hop.link]
        # Others have more from now on, also if the link is saturated no more.
        if link.load > link.headroom:
            _change(network, counters, hop.link)
        link.load -= round(flow.load * hop.parts)
    at = flow.nodes
    while at >= 0:
        node = nodes[at]
        if node.before >= 0:
            nodes[node.before].after = node.after
        else:
            network.links[node.link].first = node.after
        if node.after >= 0:
            nodes[node.after].before = node.before
        following = node.next
        node.next, counters[FREE_NODE] = counters[FREE_NODE], at
        at = following
    flow.queue, flow.at, counters[FREE] = -1, counters[FREE], number


@part
def _change(network: SharedLinks, counters: Int64, number: int) -> None:
    link = network.links[number]
    if not link.changed:
        link.changed = 1
        network.changed[counters[CHANGED]] = number
        counters[CHANGED] += 1


@part
def _attach(network: SharedLinks, events: EventHeap, number: int, hop: HopRow) -> None:
    """Puts a flow into the list of a link."""
    nodes, counters = network.nodes, events.counters
    at = counters[FREE_NODE]
    if at >= 0:
        counters[FREE_NODE] = nodes[at].next
    else:
        at = counters[NODES]
        counters[NODES] += 1
    node, link, flow = nodes[at], network.links[hop.link], events.flows[number]
    node.share, node.link, node.flow = hop.share, hop.link, number
    node.before, node.after, node.next = -1, link.first, flow.nodes
    if link.first >= 0:
        nodes[link.first].before = at
    link.first = flow.nodes = at


@once
def share(network: SharedLinks, events: EventHeap, now: int) -> bool:
    """Gives new rates to whom the changed links concern; or returns False: more nodes are needed."""
    links, counters = network.links, events.counters
    if not _know(network, events):
        return False
    if counters[ROUND] == LAST_ROUND:
        _forget_rounds(network, events)
    counters[ROUND] += 1
    for i in range(counters[CHANGED]):
        link = links[network.changed[i]]
        link.changed = 0
        # What is connected is filled at once, so a link that was seen in this round has its rates.
        if link.seen != counters[ROUND]:
            near, sharing = _connected(network, events, network.changed[i], counters[ROUND])
            _fill(network, events, near, sharing)
            for k in range(sharing):
                _pace(events, now, wide(network.participants[0, k]))
    counters[CHANGED] = 0
    return True


@once
def _forget_rounds(network: SharedLinks, events: EventHeap) -> None:
    for k in range(len(network.links)):
        network.links[k].seen = 0
    for k in range(len(events.flows)):
        events.flows[k].seen = 0
    events.counters[ROUND] = 0


@once
def _know(network: SharedLinks, events: EventHeap) -> bool:
    """Finds the flows on links that are saturated for the first time; or returns False: more nodes are needed."""
    links, counters, new = network.links, events.counters, False
    for i in range(counters[CHANGED]):
        link = links[network.changed[i]]
        if link.known != HOT:
            link.known, new = WARM, True
    if not new:
        return True
    # First they are counted, then each gets its node.
    for counting in (True, False):
        found = 0
        for number in range(counters[FLOWS]):
            row = events.flows[number].row
            if events.flows[number].queue >= 0:
                for k in range(network.offsets[row], network.offsets[row + 1]):
                    hop = network.hops[k]
                    if links[hop.link].known == WARM:
                        found += 1
                        if not counting:
                            _attach(network, events, number, hop)
        if counting and counters[NODES] + found > len(network.nodes):
            return False
    for i in range(counters[CHANGED]):
        links[network.changed[i]].known = HOT
    return True


@once
def _connected(network: SharedLinks, events: EventHeap, first: int, this: int) -> tuple[int, int]:
    """Finds the saturated links connected to a link, and the flows on them.

    Breadth first: `neighbours` is filled with links while it is read, and row 0 of `participants` with flows.

    Returns:
        How many links, and how many flows.
    """
    links, nodes, neighbours = network.links, network.nodes, network.neighbours
    near, sharing, at = 1, 0, 0
    neighbours[0] = first
    _open(links[first], this)
    while at < near:
        node = links[neighbours[at]].first
        at += 1
        while node >= 0:
            number = nodes[node].flow
            flow = events.flows[number]
            node = nodes[node].after
            if flow.seen == this:
                continue
            flow.seen, flow.level, network.participants[0, sharing] = this, UNFROZEN, number
            sharing += 1
            other = flow.nodes
            while other >= 0:
                link = links[nodes[other].link]
                if link.load > link.headroom:
                    if link.seen != this:
                        _open(link, this)
                        neighbours[near] = nodes[other].link
                        near += 1
                    link.share += nodes[other].share
                    link.crossing += 1
                other = nodes[other].next
    return near, sharing


@part
def _open(link: LinkRow, this: int) -> None:
    link.seen, link.left, link.share, link.crossing, link.level = this, 1.0, 0.0, 0, UNKNOWN


@once
def _fill(network: SharedLinks, events: EventHeap, near: int, sharing: int) -> None:
    """Progressive filling: the level of each flow, bytes/s, at which it is frozen.

    Args:
        network: links in `neighbours`, flows in row 0 of `participants`; row 1 gets those frozen at a time.
        events: flows.
        near: how many links.
        sharing: how many flows.
    """
    flows, participants = events.flows, network.participants
    least, level, unfrozen = np.inf, 0.0, sharing
    for k in range(sharing):
        least = min(least, flows[participants[0, k]].load)
    while unfrozen:
        tightest = network.links[network.neighbours[0]]
        for k in range(near):
            link = network.links[network.neighbours[k]]
            if link.level == UNKNOWN:
                # Of widely different shares the lesser may be lost in the sum.
                lowest = max(level, link.left / link.share) if link.share > 0 else level
                link.level = lowest if link.crossing else np.inf
            if link.level < tightest.level:
                tightest = link
        level, frozen = tightest.level, 0
        if least <= level:
            # Before any link is full, somebody has all it can use.
            least = np.inf
            for k in range(sharing):
                flow = flows[participants[0, k]]
                if flow.level == UNFROZEN and flow.load <= level:
                    flow.level, participants[1, frozen] = flow.load, participants[0, k]
                    frozen += 1
                elif flow.level == UNFROZEN:
                    least = min(least, flow.load)
        else:
            # The tightest link is full: its flows are its bottleneck's, at this level.
            node = tightest.first
            while node >= 0:
                flow = flows[network.nodes[node].flow]
                if flow.level == UNFROZEN:
                    flow.level, participants[1, frozen] = level, network.nodes[node].flow
                    frozen += 1
                node = network.nodes[node].after
        unfrozen -= frozen
        if unfrozen:
            for k in range(frozen):
                _freeze(network, flows[participants[1, k]])


@once
def _freeze(network: SharedLinks, flow: FlowRow) -> None:
    """A flow rises no more: the rest of its links is for the others."""
    node = flow.nodes
    while node >= 0:
        link, its = network.links[network.nodes[node].link], network.nodes[node].share
        if link.load > link.headroom:
            link.left -= its * flow.level
            link.share -= its
            link.crossing -= 1
            link.level = UNKNOWN
        node = network.nodes[node].next


@once
def _pace(events: EventHeap, now: int, number: int) -> None:
    """Gives a flow the rate of its level. The heap learns of a later end when the former is due."""
    flow = events.flows[number]
    rate = 1.0 if flow.level >= flow.load else flow.level / flow.load
    before = flow.rate
    if abs(rate - before) <= rate * EQUAL:
        return
    # What is done is a whole number of picoseconds, and `over`: sums of halves must not lose any.
    if before == 1.0:
        flow.left -= now - flow.since
    else:
        done = before * (now - flow.since) + flow.over
        flow.left -= int(done)
        flow.over = done - np.floor(done)
    flow.since, flow.rate = now, rate
    time = ends(flow)
    if before == 0:
        push(events, time, ~number)
    elif time < events.heap[flow.at].time:
        advance(events, number, time)


@part
def ends(flow: FlowRow) -> int:
    """When the first of its tasks does, at this rate."""
    return flow.since + takes(flow.rate, flow.left, flow.over)


@part
def takes(rate: float, left: int, over: float) -> int:
    """Whole picoseconds until work is done at a rate: never less than the links need."""
    if rate == 1.0:
        return max(0, left)
    time = (left - over) / rate
    return int(min(max(0.0, np.ceil(time - time * EQUAL - FORGIVEN_PS)), float(NEVER)))


# -- the loop ------------------------------------------------------------------------------------------------


def _kept(function: _Part) -> _Part:
    return kept(function, static.noise)


@_kept
def link_tasks(tasks: Sequence[TaskRow], first: Int32, rendezvous: Int32) -> None:
    """Fills `after` and `participant` of all tasks, and the first task of each resource.

    Args:
        tasks: tasks, with an end mark.
        first: int32 [resources], `DONE`.
        rendezvous: int32 [2, rendezvous], -1: of each the first task and the last.
    """
    for task in range(len(tasks) - 2, -1, -1):
        this = tasks[task]
        this.after, first[this.resource] = first[this.resource], task
        this.participant = task
        met = this.rendezvous
        if met >= 0:
            if rendezvous[0, met] < 0:
                rendezvous[1, met] = task
            else:
                this.participant = rendezvous[0, met]
            rendezvous[0, met] = tasks[rendezvous[1, met]].participant = task


@_kept
def run(work: Work, queues: TaskQueues, network: SharedLinks, events: EventHeap) -> bool:
    """Runs until nothing is left that would end; or returns False, to be called again with more nodes."""
    counters = events.counters
    now = counters[NOW]
    while True:
        # All that begins now begins, then all that ends now ends, which may let more begin. Rates change when
        # neither does: between two times they are what all that is under way makes them.
        while counters[DUE]:
            if counters[NODES] + counters[LONGEST] > len(network.nodes):
                counters[NOW] = now
                return False
            counters[DUE] -= 1
            _go_on(work, queues, network, events, now, wide(queues.due[counters[DUE]]))
        settle(events)
        if counters[SIZE] and events.heap[0].time == now:
            _end_first(work, queues, network, events, now)
        elif counters[CHANGED]:
            if not share(network, events, now):
                counters[NOW] = now
                return False
        elif counters[SIZE]:
            now = events.heap[0].time
        else:
            return True


@once
def _go_on(work: Work, queues: TaskQueues, network: SharedLinks, events: EventHeap, now: int, number: int) -> None:
    """A queue is due: its task begins, with all of its rendezvous, unless it has to wait."""
    leader = _ready(work, queues, now, number)
    if leader < 0:
        return
    first = queues.queues[leader]
    task = work.tasks[first.task]
    if task.rendezvous >= 0 or task.row >= 0:
        leader, longest, route, load, place = _gather(work, queues, now, leader)
    else:
        first.duration = longest = _lasts(work, first.task, first.column)
        route, load, place = task.route, task.load, first.column
        if first.column == work.record:
            task.start = now
    if queues.queues[leader].duration == 0:
        leader = _finish(work, queues, events, now, leader)
        if leader < 0:
            return
    left = queues.queues[leader].duration
    row = work.routes[route, place] if route >= 0 and load > 0 else -1
    if row >= 0:
        begin(network, events, now, leader, row, load, left, longest)
    else:
        push(events, now + left, leader)


@once
def _end_first(work: Work, queues: TaskQueues, network: SharedLinks, events: EventHeap, now: int) -> None:
    """The first end of the heap is due: its tasks end, and what is left of its activity goes on."""
    item = wide(events.heap[0].item)
    events.counters[VACANT] = 1
    if item < 0 and ends(events.flows[~item]) > now:
        # It was slowed since this end was put in.
        push(events, ends(events.flows[~item]), item)
        return
    queue = item if item >= 0 else wide(events.flows[~item].queue)
    duration = queues.queues[queue].duration
    leader = _finish(work, queues, events, now, queue)
    if leader >= 0:
        left = queues.queues[leader].duration - duration
        if item < 0:
            flow = events.flows[~item]
            flow.left, flow.over, flow.since, flow.queue = left, 0.0, now, leader
            left, leader = ends(flow) - now, item
        push(events, now + left, leader)
    elif item < 0:
        end(network, events, ~item)


@once
def _ready(work: Work, queues: TaskQueues, now: int, number: int) -> int:
    """Has a queue wait, or returns who leads the activity that begins."""
    tasks, queue = work.tasks, queues.queues[number]
    task = tasks[queue.task]
    base = number - task.resource
    for need in range(queue.need, tasks[queue.task + 1].deps):
        other = queues.queues[base + tasks[work.deps[need]].resource]
        # A queue is past all tasks below that at its head.
        if other.task <= work.deps[need]:
            queue.need = need
            queue.following, other.waiting = other.waiting, number
            return -1
    queue.since, queue.following = now, -1
    if task.rendezvous < 0 and task.row < 0:
        return number
    place = queue.column if task.row < 0 else work.places[task.row, queue.column]
    key = task.rendezvous if task.rendezvous >= 0 else len(tasks) + queue.task
    return _arrive(work, queues, number, key, place)


@once
def _arrive(work: Work, queues: TaskQueues, number: int, key: int, place: int) -> int:
    """A queue comes to a rendezvous; returns the first that came if it is the last, else -1."""
    queue, table = queues.queues[number], queues.rendezvous
    hashed = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(place) * np.uint64(0xD1342543DE82EF95)
    slot = np.int64((hashed ^ (hashed >> np.uint64(32))) & np.uint64(len(table) - 1))
    before, leader = -1, table[slot]
    while leader >= 0 and (queues.queues[leader].key != key or queues.queues[leader].place != place):
        before, leader = leader, queues.queues[leader].next
    if leader < 0:
        queue.missing = _participants(work, queue.task, place) - 1
        if queue.missing:
            queue.key, queue.place = key, place
            queue.next, table[slot] = table[slot], number
            return -1
        return number
    first = queues.queues[leader]
    queue.following, first.following = first.following, number
    first.missing -= 1
    if first.missing:
        return -1
    if before >= 0:
        queues.queues[before].next = first.next
    else:
        table[slot] = first.next
    return wide(leader)


@once
def _participants(work: Work, task: int, place: int) -> int:
    """How many queues have a rendezvous in a place."""
    count, member = 0, task
    while True:
        row = work.tasks[member].row
        count += work.attendance[row, place] if row >= 0 else 1
        member = work.tasks[member].participant
        if member == task:
            return count


@once
def _gather(work: Work, queues: TaskQueues, now: int, leader: int) -> tuple[int, int, int, float, int]:
    """Begins a rendezvous: puts its participants into the order in which they end, and finds whose route it takes.

    Returns:
        Who ends first, the longest duration, the route (or -1) and its load, and the place.
    """
    tasks = work.tasks
    lowest, longest, equal, member, count = DONE, 0, True, leader, 0
    while member >= 0:
        queue = queues.queues[member]
        task = tasks[queue.task]
        queue.duration = _lasts(work, queue.task, queue.column)
        if queue.column == work.record:
            task.start = now
        if task.rendezvous < 0:
            queue.waited += now - queue.since
        if task.route >= 0:
            lowest = min(lowest, queue.task)
        longest = max(longest, queue.duration)
        equal &= queue.duration == queues.queues[leader].duration
        member = queue.following
        count += 1
    one = queues.queues[leader]
    row = tasks[one.task].row
    place = work.places[row, one.column] if row >= 0 else one.column
    if not equal:
        leader = _sort(queues, leader, count)
    if lowest == DONE:
        return leader, longest, -1, 0.0, place
    return leader, longest, tasks[lowest].route, tasks[lowest].load, place


@once
def _sort(queues: TaskQueues, leader: int, count: int) -> int:
    """Puts the participants of a rendezvous in the order of their durations, and returns the first.

    Merges runs of doubling width, from one row of `order` to the other.
    """
    order, rows = queues.order, queues.queues
    for k in range(count):
        order[0, k] = leader
        leader = rows[leader].following
    width, row = 1, 0
    while width < count:
        for first in range(0, count, 2 * width):
            middle, last = min(first + width, count), min(first + 2 * width, count)
            one, other = first, middle
            for k in range(first, last):
                if other == last:
                    from_one = True
                elif one == middle:
                    from_one = False
                else:
                    from_one = rows[order[row, one]].duration <= rows[order[row, other]].duration
                order[1 - row, k] = order[row, one if from_one else other]
                one += from_one
                other += not from_one
        width, row = 2 * width, 1 - row
    for k in range(count):
        rows[order[row, k]].following = order[row, k + 1] if k + 1 < count else -1
    first_of_all: int = order[row, 0]
    return first_of_all


@once
def _lasts(work: Work, task: int, column: int) -> int:
    this = work.tasks[task]
    if this.steady == AS_IT_IS:
        return this.duration
    noisy = 1.0
    if this.steady == ON_ITS_OWN:
        noisy = max(0.0, 1.0 + work.jitter * noise(work.seed, task, column))
    factor: float = work.factor[this.kind, column]
    return round(this.duration * factor * noisy)


@part
def _finish(work: Work, queues: TaskQueues, events: EventHeap, now: int, leader: int) -> int:
    """Ends the tasks of an activity that take no longer than the leader's; returns the next leader, or -1.

    Their queues, and those that wait for these tasks, are due.
    """
    rows, due = queues.queues, queues.due
    duration, member, top = rows[leader].duration, leader, events.counters[DUE]
    while member >= 0 and rows[member].duration == duration:
        queue, number = rows[member], member
        member, task = queue.following, queue.task
        if queue.column == work.record:
            work.lasted[task] = now - work.tasks[task].start
        queue.task = work.tasks[task].after
        if queue.task == DONE:
            queue.since = now
        else:
            queue.need = work.tasks[queue.task].deps
            due[top] = number
            top += 1
        # Who waits for a later task of this queue goes on waiting.
        waiter, queue.waiting = queue.waiting, -1
        while waiter >= 0:
            other, this = rows[waiter], waiter
            waiter = other.following
            if work.deps[other.need] == task:
                due[top] = this
                top += 1
            else:
                other.following, queue.waiting = queue.waiting, this
    events.counters[DUE] = top
    return member

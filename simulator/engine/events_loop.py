"""The event loop, compiled: a heap of ends, links that are shared at rates that change, and the loop itself.

*The loop.* A line is a resource in a column: it runs the tasks of the resource one after the other. It waits for
a task (it then stands in a chain at the line that runs that task), or at a rendezvous for the other members (a
chain at the first that came), or for the end of its activity. An activity is a task, or the tasks that meet, in
the order in which they end; the first leads it, and stands in the heap.

*The heap* has four children a node. An item is the line that leads an activity, or, below zero, the inverse
(`~`) of a flow. The end of a flow changes while it lasts, so each notes where it stands: an earlier end is
moved, a later one put in when the former is due. The first place may be vacant: most ends are followed by the
beginning of the next task, which then takes it. Ends at the same time come in no particular order (nothing
depends on it), but in the same in every run.

*Rates* are max-min fair, worked out anew only where links are crowded. A link is crowded when its flows, were
nothing to slow them, would load it beyond its capacity. Only crowded links slow anybody, so a flow that crosses
none has rate 1, and one that begins or ends there changes counters and no more. The counters are integers (parts
of the link's capacity), which add and subtract without a trace. Otherwise the flows that are connected over
crowded links share anew, by progressive filling (Bertsekas and Gallager, Data Networks, section 6.5): the
bytes/s of all rise together until a link is full, or a flow has all it can use. Which flows cross a link is
known for links that have been crowded before; when one is for the first time, all flows are looked through.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np

from echograph.ir.columns import NONE
from echograph.simulator.engine import static
from echograph.simulator.engine.machine_code import OPTIONS, kept
from echograph.simulator.engine.sharing import Sharing

# What `count` counts, here and for the flows: places of one array.
SIZE, VACANT, DUE, FLOWS, FREE, NODES, FREE_NODE, CHANGED, ROUND, LONGEST, NOW, COUNTS = range(12)

_Part = TypeVar("_Part", bound=Callable[..., Any])


def part(function: _Part) -> _Part:
    """Compiles a part of `events_loop.run`, with which it is kept on disk."""
    return cast(_Part, numba.njit(**OPTIONS)(function))


noise = part(static.noise)


@part
def push(heap: Any, flows: Any, count: Any, time: Any, item: Any) -> None:
    """Adds an end."""
    if count[VACANT]:
        count[VACANT] = 0
        _sink(heap, flows, count[SIZE], 0, time, item)
        return
    count[SIZE] += 1
    _rise(heap, flows, count[SIZE] - 1, time, item)


@part
def settle(heap: Any, flows: Any, count: Any) -> None:
    """Fills the first place, if it is vacant."""
    if count[VACANT]:
        count[VACANT] = 0
        count[SIZE] -= 1
        last = heap[count[SIZE]]
        if count[SIZE]:
            _sink(heap, flows, count[SIZE], 0, last.time, last.item)


@part
def advance(heap: Any, flows: Any, flow: Any, time: Any) -> None:
    """Moves the end of a flow to an earlier time. The first place may not be vacant."""
    _rise(heap, flows, flows[flow].at, time, ~flow)


@part
def _rise(heap: Any, flows: Any, place: Any, time: Any, item: Any) -> None:
    while place > 0:
        above = (place - 1) >> 2
        if heap[above].time <= time:
            break
        _put(heap, flows, place, heap[above].time, heap[above].item)
        place = above
    _put(heap, flows, place, time, item)


@part
def _sink(heap: Any, flows: Any, size: Any, place: Any, time: Any, item: Any) -> None:
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
        _put(heap, flows, place, soonest, heap[least].item)
        place = least
    _put(heap, flows, place, time, item)


@part
def _put(heap: Any, flows: Any, place: Any, time: Any, item: Any) -> None:
    heap[place].time, heap[place].item = time, item
    if item < 0:
        flows[~item].at = place


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
RISING = UNKNOWN = -1.0

LINK = np.dtype(
    [
        *(("load", "i8"), ("room", "i8"), ("busy", "f8"), ("left", "f8"), ("share", "f8"), ("level", "f8")),
        *(("seen", "i4"), ("first", "i4"), ("crossing", "i4"), ("known", "i2"), ("changed", "i2")),
    ],
    align=True,
)
"""`load`: of all flows as if nothing slowed them, and `room` for it, in parts of the capacity. `busy`: picoseconds
times the share of the capacity used. `first`: of the nodes of a link that is known to get crowded. For filling:
`left` of the capacity, `share` of the capacity for each byte/s of the flows that still rise, which are `crossing`;
their `level` if this link stops them; `seen` in which round."""
FLOW = np.dtype(
    [
        *(("rate", "f8"), ("load", "f8"), ("level", "f8"), ("left", "i8"), ("since", "i8")),
        *(("over", "f4"), ("seen", "i4"), ("line", "i4"), ("row", "i4"), ("nodes", "i4"), ("at", "i4")),
    ],
    align=True,
)
"""`load`: bytes/s at rate 1. `left`: work (picoseconds at rate 1) at the time `since` until its first task ends,
that of `line` (-1: no flow); the part of a picosecond done `over` it. `row`: of the routes. `at`: its place in the
heap, or the next free flow."""
NODE = np.dtype(
    [("share", "f8"), *((name, "i4") for name in ("link", "flow", "before", "after", "next"))], align=True
)
"""A flow on a link: in the list of the link between `before` and `after`, in that of the flow before `next`."""
HOP = np.dtype([("share", "f8"), ("parts", "f8"), ("link", "i8")])
"""A link of a route, and its share of the capacity for each byte/s of the flow, also in parts."""


def links_and_hops(sharing: Sharing, lines: int) -> tuple[Any, Any]:
    """Idle links, and the hops of all routes.

    Args:
        sharing: who loads what.
        lines: how many flows there may be at a time.
    """
    hops, links = np.zeros(len(sharing.weight), HOP), np.zeros(len(sharing.capacity), LINK)
    hops["link"] = sharing.links.values
    hops["share"] = sharing.weight / sharing.capacity[hops["link"]]
    longest = int(sharing.links.lengths.max(initial=0))
    most = float(hops["share"].max(initial=0.0)) * float(sharing.load.max(initial=0.0)) * longest * lines
    # The finest power of two with which no sum exceeds 64 bits.
    parts = 2.0 ** np.floor(61 - np.log2(max(1.0, most)))
    hops["parts"] = hops["share"] * parts
    links["room"], links["first"] = int(parts * (1 + SLACK)), NONE
    return links, hops


@part
def begin(
    routes: Any, hops: Any, links: Any, flows: Any, nodes: Any, changed: Any, heap: Any, count: Any,
    now: Any, line: Any, row: Any, load: Any, left: Any, longest: Any,
) -> None:  # fmt: skip
    """A flow begins. The heap gets its end, unless `share` must first tell when that is.

    Args:
        routes: where the hops of each row begin.
        hops: of all rows.
        links: links.
        flows: flows.
        nodes: flows on links; there is room for `count[LONGEST]` more.
        changed: links whose flows share anew.
        heap: ends.
        count: of all these.
        now: picoseconds.
        line: the one whose task ends first.
        row: of the routes.
        load: bytes/s when nothing slows it.
        left: picoseconds at rate 1 until the first of its tasks ends.
        longest: until the last does.
    """
    number = count[FREE]
    if number < 0:
        number = count[FLOWS]
        count[FLOWS] += 1
    else:
        count[FREE] = flows[number].at
    flow = flows[number]
    flow.rate, flow.load, flow.left, flow.over, flow.since = 1.0, load, left, 0.0, now
    flow.line, flow.row, flow.nodes = line, row, -1
    for k in range(routes[row], routes[row + 1]):
        hop = hops[k]
        link = links[hop.link]
        link.load += np.int64(np.rint(load * hop.parts))
        link.busy += load * hop.share * longest
        if link.known != COLD:
            _attach(links, flows, nodes, count, number, hop)
        if link.load > link.room:
            flow.rate = 0.0
            _change(links, changed, count, hop.link)
    if flow.rate > 0:
        push(heap, flows, count, now + left, ~number)


@part
def end(routes: Any, hops: Any, links: Any, flows: Any, nodes: Any, changed: Any, count: Any, number: Any) -> None:
    """A flow has ended, and left the heap."""
    flow = flows[number]
    for k in range(routes[flow.row], routes[flow.row + 1]):
        hop = hops[k]
        link = links[hop.link]
        if link.load > link.room:
            _change(links, changed, count, hop.link)
        link.load -= np.int64(np.rint(flow.load * hop.parts))
    at = flow.nodes
    while at >= 0:
        node = nodes[at]
        if node.before >= 0:
            nodes[node.before].after = node.after
        else:
            links[node.link].first = node.after
        if node.after >= 0:
            nodes[node.after].before = node.before
        following = node.next
        node.next, count[FREE_NODE] = count[FREE_NODE], at
        at = following
    flow.line, flow.at, count[FREE] = -1, count[FREE], number


@part
def _change(links: Any, changed: Any, count: Any, number: Any) -> None:
    link = links[number]
    if not link.changed:
        link.changed = 1
        changed[count[CHANGED]] = number
        count[CHANGED] += 1


@part
def _attach(links: Any, flows: Any, nodes: Any, count: Any, number: Any, hop: Any) -> None:
    at = count[FREE_NODE]
    if at >= 0:
        count[FREE_NODE] = nodes[at].next
    else:
        at = count[NODES]
        count[NODES] += 1
    node, link, flow = nodes[at], links[hop.link], flows[number]
    node.share, node.link, node.flow = hop.share, hop.link, number
    node.before, node.after, node.next = -1, link.first, flow.nodes
    if link.first >= 0:
        nodes[link.first].before = at
    link.first = flow.nodes = at


@part
def share(
    routes: Any, hops: Any, links: Any, flows: Any, nodes: Any, changed: Any, near: Any, fellows: Any,
    heap: Any, count: Any, now: Any,
) -> Any:  # fmt: skip
    """Gives new rates to whom the changed links concern; or returns False: more nodes are needed."""
    if not _know(routes, hops, links, flows, nodes, changed, count):
        return False
    if count[ROUND] == LAST_ROUND:
        links["seen"][:], flows["seen"][:], count[ROUND] = 0, 0, 0
    count[ROUND] += 1
    for i in range(count[CHANGED]):
        link = links[changed[i]]
        link.changed = 0
        if link.seen != count[ROUND]:
            joined, sharing = _connected(links, flows, nodes, near, fellows, changed[i], count[ROUND])
            _fill(links, flows, nodes, near, joined, fellows, sharing)
            for k in range(sharing):
                _pace(flows, heap, count, now, fellows[0, k])
    count[CHANGED] = 0
    return True


@part
def _know(routes: Any, hops: Any, links: Any, flows: Any, nodes: Any, changed: Any, count: Any) -> Any:
    """Finds the flows on links that are crowded for the first time; or returns False: more nodes are needed."""
    new = False
    for i in range(count[CHANGED]):
        link = links[changed[i]]
        if link.known != HOT:
            link.known, new = WARM, True
    if not new:
        return True
    # First they are counted, then each gets its node.
    for counting in (True, False):
        found = 0
        for number in range(count[FLOWS]):
            row = flows[number].row
            if flows[number].line >= 0:
                for k in range(routes[row], routes[row + 1]):
                    hop = hops[k]
                    if links[hop.link].known == WARM:
                        found += 1
                        if not counting:
                            _attach(links, flows, nodes, count, number, hop)
        if counting and count[NODES] + found > len(nodes):
            return False
    for i in range(count[CHANGED]):
        links[changed[i]].known = HOT
    return True


@part
def _connected(links: Any, flows: Any, nodes: Any, near: Any, fellows: Any, first: Any, this: Any) -> Any:
    """Fills `near` with a link and the crowded ones connected to it, row 0 of `fellows` with the flows on them."""
    joined, sharing, at = 1, 0, 0
    near[0] = first
    _open(links[first], this)
    while at < joined:
        node = links[near[at]].first
        at += 1
        while node >= 0:
            number = nodes[node].flow
            flow = flows[number]
            node = nodes[node].after
            if flow.seen == this:
                continue
            flow.seen, flow.level, fellows[0, sharing] = this, RISING, number
            sharing += 1
            other = flow.nodes
            while other >= 0:
                link = links[nodes[other].link]
                if link.load > link.room:
                    if link.seen != this:
                        _open(link, this)
                        near[joined] = nodes[other].link
                        joined += 1
                    link.share += nodes[other].share
                    link.crossing += 1
                other = nodes[other].next
    return joined, sharing


@part
def _open(link: Any, this: Any) -> None:
    link.seen, link.left, link.share, link.crossing, link.level = this, 1.0, 0.0, 0, UNKNOWN


@part
def _fill(links: Any, flows: Any, nodes: Any, near: Any, joined: Any, fellows: Any, sharing: Any) -> None:
    """Progressive filling: the level of each flow, bytes/s. Row 1 of `fellows` has those that stop at a time."""
    least, level, still = np.inf, 0.0, sharing
    for k in range(sharing):
        least = min(least, flows[fellows[0, k]].load)
    while still:
        tightest = links[near[0]]
        for k in range(joined):
            link = links[near[k]]
            if link.level == UNKNOWN:
                # Of widely different shares the lesser may be lost in the sum.
                lowest = max(level, link.left / link.share) if link.share > 0 else level
                link.level = lowest if link.crossing else np.inf
            if link.level < tightest.level:
                tightest = link
        level, stop = tightest.level, 0
        if least <= level:
            least = np.inf
            for k in range(sharing):
                flow = flows[fellows[0, k]]
                if flow.level == RISING and flow.load <= level:
                    flow.level, fellows[1, stop] = flow.load, fellows[0, k]
                    stop += 1
                elif flow.level == RISING:
                    least = min(least, flow.load)
        else:
            node = tightest.first
            while node >= 0:
                flow = flows[nodes[node].flow]
                if flow.level == RISING:
                    flow.level, fellows[1, stop] = level, nodes[node].flow
                    stop += 1
                node = nodes[node].after
        still -= stop
        if still:
            for k in range(stop):
                _stop(links, nodes, flows[fellows[1, k]])


@part
def _stop(links: Any, nodes: Any, flow: Any) -> None:
    """A flow rises no more: the rest of its links is for the others."""
    node = flow.nodes
    while node >= 0:
        link, part = links[nodes[node].link], nodes[node].share
        if link.load > link.room:
            link.left -= part * flow.level
            link.share -= part
            link.crossing -= 1
            link.level = UNKNOWN
        node = nodes[node].next


@part
def _pace(flows: Any, heap: Any, count: Any, now: Any, number: Any) -> None:
    """Gives a flow the rate of its level. The heap learns of a later end when the former is due."""
    flow = flows[number]
    rate = 1.0 if flow.level >= flow.load else flow.level / flow.load
    before = flow.rate
    if abs(rate - before) <= rate * EQUAL:
        return
    if before == 1.0:
        flow.left -= now - flow.since
    else:
        done = before * (now - flow.since) + flow.over
        flow.left -= np.int64(done)
        flow.over = done - np.floor(done)
    flow.since, flow.rate = now, rate
    time = ends(flow)
    if before == 0:
        push(heap, flows, count, time, ~number)
    elif time < heap[flow.at].time:
        advance(heap, flows, number, time)


@part
def ends(flow: Any) -> Any:
    """When the first of its tasks does, at this rate."""
    return flow.since + takes(flow.rate, flow.left, flow.over)


@part
def takes(rate: Any, left: Any, over: Any) -> Any:
    """Whole picoseconds until work is done at a rate: never less than the links need."""
    if rate == 1.0:
        return max(0, left)
    time = (left - over) / rate
    return np.int64(min(max(0.0, np.ceil(time - time * EQUAL - FORGIVEN_PS)), float(NEVER)))


DONE = 2**31 - 1
"""In place of a task: there is none any more."""
TASK = np.dtype(
    [
        *(("duration", "i8"), ("deps", "i8"), ("load", "f8"), ("start", "i8")),
        *(
            (name, "i4")
            for name in ("resource", "after", "rendezvous", "fellow", "row", "route", "kind", "steady")
        ),
    ],
    align=True,
)
"""`deps`: where the dependencies begin. `after`: the next task of the resource. `fellow`: the next of those that
meet, in a circle. `row`: of the places. `steady`: 2 takes its duration, 1 times the factor of its `kind`, 0 and
noise. `start`: in the recorded column."""
LINE = np.dtype(
    [
        *(("need", "i8"), ("duration", "i8"), ("since", "i8"), ("waited", "i8")),
        *((name, "i4") for name in ("task", "column", "chain", "waiters", "meets", "place", "missing", "next")),
    ],
    align=True,
)
"""`need`: the dependency waited for, or the first not looked at. `duration`: of its task. `since`: when ready, or
when all was done. `waiters`: the chain of lines that wait for a task of this one. For the first at a meeting: what
it `meets` for and in which `place`, how many are `missing`, and the `next` in the table of meetings."""


def _sources() -> str:
    """What changes with the source of `noise`: the cache of compiled code knows this file alone."""
    return hashlib.sha256(inspect.getsource(static.noise).encode()).hexdigest()[:16]


END = np.dtype([("time", "i8"), ("item", "i4"), (f"of_{_sources()}", "i4")])
"""A place of the heap. Its type tells compiled code of other sources apart."""


@kept
def chain(tasks: Any, first: Any, rendezvous: Any) -> None:
    """Fills `after` and `fellow` of all tasks, and the first task of each resource.

    Args:
        tasks: tasks, with an end mark.
        first: int32 [resources], `DONE`.
        rendezvous: int32 [2, rendezvous], -1: of each the first task and the last.
    """
    for task in range(len(tasks) - 2, -1, -1):
        this = tasks[task]
        this.after, first[this.resource] = first[this.resource], task
        this.fellow = task
        met = this.rendezvous
        if met >= 0:
            if rendezvous[0, met] < 0:
                rendezvous[1, met] = task
            else:
                this.fellow = rendezvous[0, met]
            rendezvous[0, met] = tasks[rendezvous[1, met]].fellow = task


@kept
def run(
    tasks: Any, deps: Any, factor: Any, places: Any, attend: Any, jitter: Any, seed: Any, record: Any, lasted: Any,
    lines: Any, meetings: Any, todo: Any, heap: Any, count: Any,
    routed: Any, routes: Any, hops: Any, links: Any, flows: Any, changed: Any, near: Any, fellows: Any,
    nodes: Any,
) -> Any:  # fmt: skip
    """Runs until nothing is left that would end; or returns False, to be called again with more nodes."""
    now = count[NOW]
    while True:
        while count[DUE]:
            if count[NODES] + count[LONGEST] > len(nodes):
                count[NOW] = now
                return False
            count[DUE] -= 1
            number = todo[count[DUE]]
            leader = _ready(tasks, deps, places, attend, lines, meetings, now, number)
            if leader < 0:
                continue
            task = tasks[lines[leader].task]
            if task.rendezvous >= 0 or task.row >= 0:
                leader, longest, route, load, place = _gather(
                    tasks, factor, places, jitter, seed, record, lines, fellows, now, leader
                )
            else:
                line = lines[leader]
                line.duration = longest = _lasts(tasks, factor, jitter, seed, line.task, line.column)
                route, load, place = task.route, task.load, line.column
                if line.column == record:
                    task.start = now
            if lines[leader].duration == 0:
                leader = _finish(tasks, deps, record, lasted, lines, todo, count, now, leader)
                if leader < 0:
                    continue
            left = lines[leader].duration
            row = routed[route, place] if route >= 0 and load > 0 else -1
            if row >= 0:
                begin(
                    routes, hops, links, flows, nodes, changed, heap, count, now, leader, row, load, left, longest
                )
            else:
                push(heap, flows, count, now + left, leader)
        settle(heap, flows, count)
        if count[SIZE] and heap[0].time == now:
            item = heap[0].item
            count[VACANT] = 1
            if item < 0 and ends(flows[~item]) > now:
                push(heap, flows, count, ends(flows[~item]), item)
                continue
            line = item if item >= 0 else flows[~item].line
            duration = lines[line].duration
            leader = _finish(tasks, deps, record, lasted, lines, todo, count, now, line)
            if leader >= 0:
                left = lines[leader].duration - duration
                if item < 0:
                    flow = flows[~item]
                    flow.left, flow.over, flow.since, flow.line = left, 0.0, now, leader
                    left, leader = ends(flow) - now, item
                push(heap, flows, count, now + left, leader)
            elif item < 0:
                end(routes, hops, links, flows, nodes, changed, count, ~item)
        elif count[CHANGED]:
            if not share(routes, hops, links, flows, nodes, changed, near, fellows, heap, count, now):
                count[NOW] = now
                return False
        elif count[SIZE]:
            now = heap[0].time
        else:
            return True


@part
def _ready(
    tasks: Any, deps: Any, places: Any, attend: Any, lines: Any, meetings: Any, now: Any, number: Any
) -> Any:
    """Has a line wait, or returns who leads the activity that begins."""
    line = lines[number]
    task = tasks[line.task]
    base = number - task.resource
    for need in range(line.need, tasks[line.task + 1].deps):
        other = lines[base + tasks[deps[need]].resource]
        if other.task <= deps[need]:
            line.need = need
            line.chain, other.waiters = other.waiters, number
            return -1
    line.since, line.chain = now, -1
    if task.rendezvous < 0 and task.row < 0:
        return number
    place = line.column if task.row < 0 else places[task.row, line.column]
    what = task.rendezvous if task.rendezvous >= 0 else len(tasks) + line.task
    key = np.uint64(what) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(place) * np.uint64(0xD1342543DE82EF95)
    slot = np.int64((key ^ (key >> np.uint64(32))) & np.uint64(len(meetings) - 1))
    before, leader = -1, meetings[slot]
    while leader >= 0 and (lines[leader].meets != what or lines[leader].place != place):
        before, leader = leader, lines[leader].next
    if leader < 0:
        line.missing = _attendance(tasks, attend, line.task, place) - 1
        if line.missing:
            line.meets, line.place = what, place
            line.next, meetings[slot] = meetings[slot], number
            return -1
        return number
    first = lines[leader]
    line.chain, first.chain = first.chain, number
    first.missing -= 1
    if first.missing:
        return -1
    if before >= 0:
        lines[before].next = first.next
    else:
        meetings[slot] = first.next
    return leader


@part
def _attendance(tasks: Any, attend: Any, task: Any, place: Any) -> Any:
    """How many lines meet in a place."""
    count, member = 0, task
    while True:
        count += attend[tasks[member].row, place] if tasks[member].row >= 0 else 1
        member = tasks[member].fellow
        if member == task:
            return count


@part
def _gather(
    tasks: Any, factor: Any, places: Any, jitter: Any, seed: Any, record: Any, lines: Any, fellows: Any,
    now: Any, leader: Any,
) -> Any:  # fmt: skip
    """Begins a meeting: puts its members into the order in which they end, and finds whose route it takes."""
    lowest, longest, equal, member, count = DONE, np.int64(0), True, leader, 0
    while member >= 0:
        line = lines[member]
        task = tasks[line.task]
        line.duration = _lasts(tasks, factor, jitter, seed, line.task, line.column)
        if line.column == record:
            task.start = now
        if task.rendezvous < 0:
            line.waited += now - line.since
        if task.route >= 0:
            lowest = min(lowest, line.task)
        longest = max(longest, line.duration)
        equal &= line.duration == lines[leader].duration
        member = line.chain
        count += 1
    one = lines[leader]
    row = tasks[one.task].row
    place = places[row, one.column] if row >= 0 else one.column
    if not equal:
        leader = _sort(lines, leader, count, fellows)
    if lowest == DONE:
        return leader, longest, np.int32(-1), 0.0, place
    return leader, longest, tasks[lowest].route, tasks[lowest].load, place


@part
def _sort(lines: Any, leader: Any, count: Any, fellows: Any) -> Any:
    """Puts the members of a meeting in the order of their durations, and returns the first.

    Merges runs of doubling width, from one row of `fellows` to the other.
    """
    for k in range(count):
        fellows[0, k] = leader
        leader = lines[leader].chain
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
                    from_one = lines[fellows[row, one]].duration <= lines[fellows[row, other]].duration
                fellows[1 - row, k] = fellows[row, one if from_one else other]
                one += from_one
                other += not from_one
        width, row = 2 * width, 1 - row
    for k in range(count):
        lines[fellows[row, k]].chain = fellows[row, k + 1] if k + 1 < count else -1
    return fellows[row, 0]


@part
def _lasts(tasks: Any, factor: Any, jitter: Any, seed: Any, task: Any, column: Any) -> Any:
    this = tasks[task]
    if this.steady == 2:
        return this.duration
    noisy = 1.0 if this.steady else max(0.0, 1.0 + jitter * noise(seed, task, column))
    return np.int64(np.rint(this.duration * factor[this.kind, column] * noisy))


@part
def _finish(
    tasks: Any, deps: Any, record: Any, lasted: Any, lines: Any, todo: Any, count: Any, now: Any, leader: Any
) -> Any:
    """Ends the tasks of an activity that take no longer than the leader's; returns the next leader, or -1.

    Their lines, and those that wait for these tasks, may go on.
    """
    duration, member, top = lines[leader].duration, leader, count[DUE]
    while member >= 0 and lines[member].duration == duration:
        line, number = lines[member], member
        member, task = line.chain, line.task
        if line.column == record:
            lasted[task] = now - tasks[task].start
        line.task = tasks[task].after
        if line.task == DONE:
            line.since = now
        else:
            line.need = tasks[line.task].deps
            todo[top] = number
            top += 1
        waiter, line.waiters = line.waiters, -1
        while waiter >= 0:
            other, this = lines[waiter], waiter
            waiter = other.chain
            if deps[other.need] == task:
                todo[top] = this
                top += 1
            else:
                other.chain, line.waiters = line.waiters, this
    count[DUE] = top
    return member

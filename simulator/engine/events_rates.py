"""Rates of flows that share links: max-min fair, worked out anew only where links are crowded.

A link is crowded when its flows, were nothing to slow them, would load it beyond its capacity. Only crowded links
slow anybody, so a flow that crosses none has rate 1, and one that begins or ends there changes counters and no
more. The counters are integers (parts of the link's capacity), which add and subtract without a trace. Otherwise
the flows that are connected over crowded links share anew, by progressive filling (Bertsekas and Gallager, Data
Networks, section 6.5): the bytes/s of all rise together until a link is full, or a flow has all it can use.

Which flows cross a link is known for links that have been crowded before; when one is for the first time, all
flows are looked through.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from echograph.ir.columns import NONE
from echograph.simulator.engine.events_heap import (
    CHANGED,
    FLOWS,
    FREE,
    FREE_NODE,
    NODES,
    ROUND,
    advance,
    part,
    push,
)
from echograph.simulator.engine.sharing import Sharing

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

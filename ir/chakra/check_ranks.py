"""Checks of what ranks do with each other: collectives in one order, messages in pairs, an end that all reach."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

import numpy as np

from echograph.ir.chakra.dry_run import dry_run, who_waits
from echograph.ir.chakra.finding import WARNING, Finding, at_node, group_name, ranks_of
from echograph.ir.chakra.lowering import MAX_TAGS
from echograph.ir.chakra.messages import CommType, NodeType
from echograph.ir.chakra.reader import ABSENT, RankTrace, Traces
from echograph.ir.columns import Int64

Side = tuple[RankTrace, list[int]]
"""A trace, and rows of it by ascending id."""


def collectives_agree(traces: Traces) -> Iterator[Finding]:
    """The ranks of a group run the same collectives of the same sizes, in one order."""
    traced = {trace.rank for trace in traces.ranks}
    for name, sides in _by_group(traces).items():
        ran = {trace.rank for trace, _ in sides}
        calls = [_calls(trace, rows) for trace, rows in sides]
        usual = Counter(len(call) for call in calls).most_common(1)[0][0]
        length = max(len(call) for call in calls)
        for place in range(length) if len({call.tobytes() for call in calls}) > 1 else ():
            said = Counter(tuple(call[place].tolist()) for call in calls if place < len(call))
            common = said.most_common(1)[0][0]
            for (trace, rows), call in zip(sides, calls, strict=True):
                if place < len(call) and len(said) > 1 and (mine := tuple(call[place].tolist())) != common:
                    what = f"is {_call(mine)} as number {place + 1} of {_group(name)}, where other ranks have"
                    yield at_node(traces, trace, rows[place], f"{what} {_call(common)}, and hangs", _SAME)
            if len(said) > 1:
                break  # what follows a difference differs, too
        for trace, rows in sides:
            if len(rows) != usual:
                what = (
                    f"rank {trace.rank} runs {len(rows)} collectives of {_group(name)}, others {usual}, and hangs"
                )
                yield at_node(traces, trace, rows[-1], what, _SAME)
        silent = [rank for rank in ranks_of(traces, name) if rank not in ran and rank in traced]
        if silent:
            trace, rows = sides[0]
            more = f" and {len(silent) - 1} more" if len(silent) > 1 else ""
            what = f"waits for rank {silent[0]}{more} of {_group(name)}, which runs no collective of it"
            yield at_node(traces, trace, rows[0], what, _SAME)


def _by_group(traces: Traces) -> dict[str, list[Side]]:
    """For every group that there is, the collectives of its ranks."""
    found: dict[str, list[Side]] = defaultdict(list)
    for trace in traces.ranks:
        collectives = (trace.type == NodeType.COLLECTIVE) & ~trace.host
        for group in np.unique(trace.group[collectives]).tolist():
            rows = trace.ascending(collectives & (trace.group == group)).tolist()
            if trace.rank in ranks_of(traces, name := group_name(traces, trace, rows[0])):
                found[name].append((trace, rows))
    return found


def _group(name: str) -> str:
    return f"group {name}" if name else "all ranks"


def _calls(trace: RankTrace, rows: list[int]) -> Int64:
    """Kind and size of every collective."""
    return np.stack([trace.comm_type[rows], trace.comm_size[rows]], axis=1)


def _call(call: tuple[int, ...]) -> str:
    kind, size = call
    name = CommType(kind).name if 0 <= kind < len(CommType) else "a collective without a kind"
    return f"{name} of {size:,} bytes" if size != ABSENT else name


# -- messages ------------------------------------------------------------------------------------------------


def messages_addressed(traces: Traces) -> Iterator[Finding]:
    """A message says from whom it is and to whom, and is from or to the rank that has it."""
    known = {trace.rank for trace in traces.ranks}
    for trace in traces.ranks:
        for kind, own, peer in (
            (NodeType.SEND, "comm_src", "comm_dst"),
            (NodeType.RECV, "comm_dst", "comm_src"),
        ):
            for row in np.flatnonzero(trace.type == kind).tolist():
                mine, other = (int(getattr(trace, column)[row]) for column in (own, peer))
                if other == ABSENT:
                    yield at_node(traces, trace, row, f"has no {peer}", "give the other rank")
                elif other not in known or other == trace.rank:
                    what = f"has the {peer} {other}, and the other ranks are those of 0 to {max(known)}"
                    yield at_node(traces, trace, row, what, "give a rank that has a trace, and is another")
                if mine not in (ABSENT, trace.rank):
                    what = f"has the {own} {mine}, which aborts: this is the trace of rank {trace.rank}"
                    yield at_node(traces, trace, row, what, f"give {trace.rank}, or leave it out")
                tag = int(trace.comm_tag[row])
                if tag == ABSENT:
                    yield at_node(traces, trace, row, "has no comm_tag, and counts as 0", "give one", WARNING)
                elif not 0 <= tag < MAX_TAGS:
                    what = f"has the comm_tag {tag}, and may meet the messages of collectives"
                    yield at_node(traces, trace, row, what, f"give one from 0 to {MAX_TAGS - 1:,}", WARNING)


def messages_match(traces: Traces) -> Iterator[Finding]:
    """The n-th send from a rank to another with a tag meets the n-th receive, of the same size."""
    sent, received = _messages(traces, NodeType.SEND), _messages(traces, NodeType.RECV)
    for key in sorted({*sent, *received}):
        source, target, tag = key
        where = f"from rank {source} to rank {target} with the tag {tag}"
        sends, receives = sent.get(key), received.get(key)
        for side, other, verb, others in (
            (sends, receives, "sends", "receives"),
            (receives, sends, "receives", "sends"),
        ):
            more = 0 if side is None else len(side[1]) - (0 if other is None else len(other[1]))
            if side is not None and more > 0:
                what = f"{len(side[1])} {verb} {where} meet {len(side[1]) - more} {others}"
                hangs = ", and it hangs" if verb == "receives" else ""
                yield at_node(traces, side[0], side[1][-more], what + hangs, "write both sides of every message")
        if sends and receives:
            for one, two in zip(sends[1], receives[1], strict=False):
                sizes = int(sends[0].comm_size[one]), int(receives[0].comm_size[two])
                if sizes[0] != sizes[1]:
                    what = f"sends {sizes[0]:,} bytes {where}, where node {receives[0].id[two]} receives"
                    yield at_node(traces, sends[0], one, f"{what} {sizes[1]:,}", "give both the same size")


def _messages(traces: Traces, kind: NodeType) -> dict[tuple[int, int, int], Side]:
    """Sends or receives by (source, target, tag)."""
    found: dict[tuple[int, int, int], Side] = {}
    for trace in traces.ranks:
        for row in trace.ascending(trace.type == kind).tolist():
            peer = int((trace.comm_dst if kind == NodeType.SEND else trace.comm_src)[row])
            ends = (trace.rank, peer) if kind == NodeType.SEND else (peer, trace.rank)
            if peer != ABSENT:
                found.setdefault((*ends, max(0, int(trace.comm_tag[row]))), (trace, []))[1].append(row)
    return found


# -- all of it -----------------------------------------------------------------------------------------------


def ranks_finish(traces: Traces) -> Iterator[Finding]:
    """A dry run of all ranks comes to an end: nobody waits for ever."""
    if waits := dry_run(traces):
        first, said = who_waits(traces, waits)
        what = f"a dry run hangs with {len({wait.rank for wait in waits})} ranks: {said}"
        yield at_node(traces, first.trace, first.row, what, "run communications in one order on all ranks")


_SAME = "write the same collectives in the same order on all ranks of the group"

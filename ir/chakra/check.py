"""What makes ASTRA-sim abort, hang or loop on a set of Chakra traces, found before it runs.

Each check is one function of `CHECKS`, from the set to its findings. ASTRA-sim's exit status says nothing of what
is wrong: it ends with 0 where ranks wait for each other for ever.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from echograph.ir.chakra.dry_run import dry_run, who_waits
from echograph.ir.chakra.messages import CommType, NodeType
from echograph.ir.chakra.reader import ABSENT, RankTrace, Traces, group_name, ranks_of_group
from echograph.ir.chakra.writer import LEAST_GATHER_BYTES, MAX_TAGS, MOST_GROUPS
from echograph.ir.columns import NONE, Int64

MAX_SHOWN = 5
"""Findings of a check that are kept; the others are counted."""

SIMULATED = (CommType.ALL_REDUCE, CommType.ALL_GATHER, CommType.REDUCE_SCATTER, CommType.ALL_TO_ALL)
"""Collectives that ASTRA-sim simulates."""

ERROR, WARNING = "error", "warning"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that a simulator trips over.

    Attributes:
        severity: `ERROR`: it aborts, hangs or is wrong; `WARNING`: it may not mean what was meant.
        file: the file's name.
        what: what is wrong.
        fix: what to do.
        node: id of the node; None where it is of the file.
        name: of the node.
        check: the name of the one that found it.
    """

    severity: str
    file: str
    what: str
    fix: str
    node: int | None = None
    name: str = ""
    check: str = ""

    def __str__(self) -> str:
        node = "" if self.node is None else f": node {self.node} ({self.name[:60]})"
        return f"{self.severity}: {self.file}{node}: {self.what}: {self.fix}"


def at_node(traces: Traces, trace: RankTrace, row: int, what: str, fix: str, severity: str = ERROR) -> Finding:
    """A finding at a node."""
    return Finding(
        severity=severity,
        file=trace.path.name,
        node=int(trace.id[row]),
        name=traces.name(trace, row),
        what=what,
        fix=fix,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What a check of a set of traces found.

    Attributes:
        ranks: how many traces there are.
        nodes: of all of them.
        findings: at most `MAX_SHOWN` of each check, in the order of `CHECKS`.
        counts: findings of each check, by its name, with those that are not kept.
        errors: findings that are errors, with those that are not kept.
    """

    ranks: int
    nodes: int
    findings: tuple[Finding, ...]
    counts: dict[str, int]
    errors: int


def check(traces: Traces) -> Checked:
    """Runs all checks."""
    kept: list[Finding] = []
    counts: dict[str, int] = {}
    errors = 0
    for one in CHECKS:
        name = one.__name__
        counts[name] = 0
        for finding in one(traces):
            counts[name] += 1
            errors += finding.severity == ERROR
            if counts[name] <= MAX_SHOWN:
                kept.append(replace(finding, check=name))
    return Checked(
        ranks=len(traces.ranks),
        nodes=sum(len(trace) for trace in traces.ranks),
        findings=tuple(kept),
        counts=counts,
        errors=errors,
    )


# -- files and their nodes -----------------------------------------------------------------------------------


def metadata_first(traces: Traces) -> Iterator[Finding]:
    """A file begins with metadata that is not empty, which readers would take for its end."""
    for trace in traces.ranks:
        if trace.version is None:
            yield _of_file(trace.path, "its metadata is empty, which reads as the end of the file", _WRITE_VERSION)
        elif not trace.version:
            yield _of_file(trace.path, "its metadata states no version", _WRITE_VERSION, WARNING)


def ranks_complete(traces: Traces) -> Iterator[Finding]:
    """The files are those of ranks 0 to N - 1."""
    numbers = [-1, *(trace.rank for trace in traces.ranks)]
    for before, after in pairwise(numbers):
        if after > before + 1:
            which = f"rank {before + 1}" if after == before + 2 else f"ranks {before + 1} to {after - 1}"
            path = traces.ranks[0].path.parent / f"{traces.prefix}.{before + 1}.et"
            yield _of_file(path, f"{which} of {numbers[-1] + 1} have no trace", "export all ranks")


def ranks_work(traces: Traces) -> Iterator[Finding]:
    """Every rank has a node."""
    for trace in traces.ranks:
        if not len(trace):
            yield _of_file(trace.path, "has no node, which throws", "give the rank a COMP node of 1 microsecond")


def ids_unique(traces: Traces) -> Iterator[Finding]:
    """No id stands twice in a file."""
    for trace in traces.ranks:
        order = np.argsort(trace.id, kind="stable")
        for row in order[1:][trace.id[order[1:]] == trace.id[order[:-1]]].tolist():
            yield at_node(traces, trace, row, "has an id that an earlier node has", "number nodes from 1 on")


def dependencies_exist(traces: Traces) -> Iterator[Finding]:
    """What a node waits for is in its file."""
    for trace in traces.ranks:
        for kind, deps in (("control", trace.ctrl_deps), ("data", trace.data_deps)):
            rows, counts = np.unique(deps.rows[deps.values == NONE], return_counts=True)
            for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
                what = f"waits for {count} {kind} dependencies that the file does not have, which throws"
                yield at_node(traces, trace, row, what, "remove them, or write the nodes")


def dependencies_end(traces: Traces) -> Iterator[Finding]:
    """Dependencies make no cycle."""
    orders: dict[int, list[int]] = {}
    for trace in traces.ranks:
        key = id(trace.id)  # ranks that were found alike share their columns
        order = orders[key] if key in orders else orders.setdefault(key, trace.order())
        if len(order) < len(trace):
            cycle = _cycle(trace, set(range(len(trace))) - set(order))
            ids = " -> ".join(str(trace.id[row]) for row in cycle[:8]) + (" -> ..." if len(cycle) > 8 else "")
            what = f"is in a cycle of dependencies ({ids} -> {trace.id[cycle[0]]}), so that it never starts"
            yield at_node(traces, trace, cycle[0], what, "remove a dependency")


def _cycle(trace: RankTrace, stuck: set[int]) -> list[int]:
    """Rows of a cycle, each before the one that waits for it."""
    before, after = trace.edges()
    waits = {a: b for b, a in zip(before.tolist(), after.tolist(), strict=True) if a in stuck and b in stuck}
    path: list[int] = [min(waits)]
    seen: dict[int, int] = {}
    while path[-1] not in seen:
        seen[path[-1]] = len(seen)
        path.append(waits[path[-1]])
    return path[seen[path[-1]] : -1][::-1]


def types_run(traces: Traces) -> Iterator[Finding]:
    """No node is of a type that aborts."""
    for trace in traces.ranks:
        for kind in (NodeType.INVALID, NodeType.METADATA):
            for row in np.flatnonzero(trace.type == kind).tolist():
                what = f"is a {kind.name} node, which aborts"
                yield at_node(traces, trace, row, what, "leave it out and join its dependencies")
        for row in np.flatnonzero(trace.host).tolist():
            yield at_node(traces, trace, row, "is work of the host (is_cpu_op), which aborts", "leave it out")


def dimensions_listed(traces: Traces) -> Iterator[Finding]:
    """`involved_dim` is a list of booleans."""
    for trace in traces.ranks:
        for row in np.flatnonzero(trace.wrong_dims).tolist():
            yield at_node(traces, trace, row, "has an involved_dim that is no bool_list, which aborts", "use one")


# -- groups --------------------------------------------------------------------------------------------------


def groups_sound(traces: Traces) -> Iterator[Finding]:
    """Groups are numbered from 1 on, and made of two ranks or more that exist."""
    used = {value for value in traces.groups_named if isinstance(value, str)}
    last = traces.ranks[-1].rank
    for name, ranks in (traces.groups or {}).items():
        said = f"group {name[:40]}"
        if not _is_number(name):
            yield _of_file(
                traces.groups_path, f"{said} is not named by a number > 0, which aborts", _NUMBER_GROUPS
            )
        elif int(name) > MOST_GROUPS:
            what = f"{said} is numbered over {MOST_GROUPS:,}, where the numbers of streams wrap"
            yield _of_file(traces.groups_path, what, "number groups from 1 on, without gaps", WARNING)
        if len(set(ranks)) != len(ranks):
            yield _of_file(traces.groups_path, f"{said} lists a rank twice", "list every rank once")
        if ranks and not 0 <= min(ranks) <= max(ranks) <= last:
            wrong = min(ranks) if min(ranks) < 0 else max(ranks)
            what = f"{said} lists rank {wrong}, and the ranks are 0 to {last}"
            yield _of_file(traces.groups_path, what, "list ranks that have a trace")
        if len(ranks) < 2:
            what, severity = f"{said} has {len(ranks)} ranks", ERROR if name in used else WARNING
            fix = "leave its collectives out: one rank alone has nothing to wait for, yet they hang"
            yield _of_file(traces.groups_path, what, fix, severity)


def groups_named(traces: Traces) -> Iterator[Finding]:
    """Every collective names a group that its rank is in."""
    for trace in traces.ranks:
        collectives = (trace.type == NodeType.COLLECTIVE) & ~trace.host
        for group in np.unique(trace.group[collectives]).tolist():
            severity = WARNING if traces.groups_named[group] is None else ERROR
            if (what := _wrong_group(traces, trace.rank, group)) is not None:
                for row in np.flatnonzero(collectives & (trace.group == group)).tolist():
                    yield at_node(traces, trace, row, what, _NAME_GROUP, severity)


def _wrong_group(traces: Traces, rank: int, group: int) -> str | None:
    named = traces.groups_named[group]
    if named is None:
        return "has no pg_name, which some versions take for all ranks"
    if not isinstance(named, str):
        return f"has a pg_name that is a {type(named).__name__} ({str(named)[:40]}), no text, which aborts"
    if not _is_number(named):
        return f"has the pg_name '{named[:40]}', which is no number > 0 and aborts"
    if traces.groups is None:
        return f"names group {named}, and there is no {traces.groups_path.name}"
    if named not in traces.groups:
        return f"names group {named}, which {traces.groups_path.name} does not have"
    if rank not in ranks_of_group(traces, named):
        return f"names group {named}, which rank {rank} is not in"
    return None


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdecimal() and 0 < int(name[:20]) < 2**31 and name[0] != "0"


# -- sizes, kinds and times ----------------------------------------------------------------------------------


def kinds_simulated(traces: Traces) -> Iterator[Finding]:
    """Collectives are of the four kinds that are simulated."""
    known = {int(kind) for kind in CommType}
    for trace in traces.ranks:
        wrong = (trace.type == NodeType.COLLECTIVE) & ~np.isin(trace.comm_type, SIMULATED) & ~trace.host
        for row in np.flatnonzero(wrong).tolist():
            kind = int(trace.comm_type[row])
            if kind == ABSENT:
                yield at_node(traces, trace, row, "has no comm_type", "give it one, as 0 for an all-reduce")
            elif kind not in known:
                yield at_node(traces, trace, row, f"has the unknown comm_type {kind}", "give one from 0 to 9")
            elif kind == CommType.BROADCAST:
                what = "is a BROADCAST, which only takes its duration, on each rank alone"
                yield at_node(traces, trace, row, what, "write sends and receives, or an all-gather", WARNING)
            else:
                what = f"is a {CommType(kind).name}, which aborts"
                yield at_node(traces, trace, row, what, _INSTEAD.get(kind, "write sends and receives"))


def sizes_positive(traces: Traces) -> Iterator[Finding]:
    """What moves has a size."""
    for trace in traces.ranks:
        talks = np.isin(trace.type, (NodeType.COLLECTIVE, NodeType.SEND, NodeType.RECV))
        talks &= (trace.comm_type != CommType.BARRIER) & ~trace.host
        loads = np.isin(trace.type, (NodeType.MEM_LOAD, NodeType.MEM_STORE))
        for name, where in (("comm_size", talks), ("tensor_size", loads)):
            sizes = getattr(trace, name)
            for row in np.flatnonzero(where & (sizes <= 0)).tolist():
                size = int(sizes[row])
                what = f"has no {name}" if size == ABSENT else f"has the {name} {size}"
                yield at_node(traces, trace, row, what, "give its bytes, or leave a node out that moves none")


def gathers_large_enough(traces: Traces) -> Iterator[Finding]:
    """All-gathers are not so small that they loop for ever."""
    for trace in traces.ranks:
        gathers = (trace.type == NodeType.COLLECTIVE) & (trace.comm_type == CommType.ALL_GATHER)
        small = gathers & (trace.comm_size > 0) & (trace.comm_size < LEAST_GATHER_BYTES)
        for row in np.flatnonzero(small).tolist():
            what = f"gathers {int(trace.comm_size[row])} bytes a rank, which loops for ever"
            yield at_node(traces, trace, row, f"{what} where they are divided into more pieces", _LARGER)


def compute_timed(traces: Traces) -> Iterator[Finding]:
    """Computations say how long they take, or how much they compute."""
    for trace in traces.ranks:
        untimed = (trace.type == NodeType.COMP) & (trace.duration_us == 0) & (trace.num_ops <= 0) & ~trace.host
        for row in np.flatnonzero(untimed).tolist():
            what = "has neither duration_micros nor num_ops, and takes 1 nanosecond"
            yield at_node(traces, trace, row, what, "leave it out, or give one", WARNING)


def _of_file(path: Path, what: str, fix: str, severity: str = ERROR) -> Finding:
    return Finding(severity=severity, file=path.name, what=what, fix=fix)


_LARGER = f"give {LEAST_GATHER_BYTES} bytes or more"
_WRITE_VERSION = "write a GlobalMetadata with a version first"
_NUMBER_GROUPS = 'call the groups "1", "2", ...'
_NAME_GROUP = "give pg_name as text, the number of a group of comm_groups.json, the world's too"
_INSTEAD: dict[int, str] = {
    CommType.BARRIER: "join the dependencies of its ranks instead",
    CommType.REDUCE: "write an all-reduce, or sends and receives",
    CommType.REDUCE_SCATTER_BLOCK: "write a REDUCE_SCATTER",
}


# -- between ranks --------------------------------------------------------------------------------------------
# Checks of what ranks do with each other: collectives in one order, messages in pairs, an end that all reach.


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
        silent = [rank for rank in ranks_of_group(traces, name) if rank not in ran and rank in traced]
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
            if trace.rank in ranks_of_group(traces, name := group_name(traces, trace, rows[0])):
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

CHECKS: tuple[Callable[[Traces], Iterator[Finding]], ...] = (
    metadata_first,
    ranks_complete,
    ranks_work,
    ids_unique,
    dependencies_exist,
    dependencies_end,
    types_run,
    dimensions_listed,
    groups_sound,
    groups_named,
    kinds_simulated,
    sizes_positive,
    gathers_large_enough,
    compute_timed,
    collectives_agree,
    messages_addressed,
    messages_match,
    ranks_finish,
)

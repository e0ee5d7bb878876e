"""The collectives of a job in its traces: which rank ran which, of what size, and which of them are one."""

from __future__ import annotations

import ast
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from echograph.ir.columns import Bools, Int64
from echograph.ir.comms.record import NativeSource
from echograph.profiler.traces.events import details
from echograph.profiler.traces.kernel_names import communicates, function_name
from echograph.profiler.traces.operands import TORCH_DTYPES
from echograph.profiler.traces.relations import Stacks, call_stacks
from echograph.profiler.traces.trace import KERNELS, NONE, OPERATORS, Trace, TraceSet
from echograph.units import PS_PER_NS

NAME = "comms.jsonl"
# What a stamp within a call may be before or after the profiler's stamps of that call.
_NEAR_PS = 100_000_000


class RecordedGroups:
    """The calls of a rank with their groups, by the time at which they were made; none without such a trace.

    A recording has both traces in one folder, and their times are of one clock.

    Raises:
        FormatError: the trace of collectives is none, or says what cannot be.
    """

    def __init__(self, trace: Trace) -> None:
        self.times: list[int] = []
        self.groups: list[tuple[str, tuple[int, ...], str]] = []
        path, base = Path(trace.path).with_name(NAME), trace.header.get("baseTimeNanoseconds")
        if not path.is_file() or not isinstance(base, int):
            return
        source = NativeSource(path)
        source.open()
        found = [
            (queued * PS_PER_NS - base * PS_PER_NS - trace.origin, what.group, what.channel)
            for rows in source.rows()
            for number, _, queued, *_ in rows.tolist()
            if (what := source.signatures[number]) is not None
        ]
        found.sort()
        self.times = [time for time, *_ in found]
        self.groups = [(name, source.groups.get(name, ()), channel) for _, name, channel in found]

    def of(self, begin: int, end: int) -> tuple[str, tuple[int, ...], str]:
        """Name, ranks and channel of what was called between two moments; "", none and "" where unknown."""
        at = bisect_left(self.times, begin - _NEAR_PS)
        fitting = range(at, bisect_left(self.times, end + _NEAR_PS))
        nearest = min(
            fitting, key=lambda one: max(begin - self.times[one], self.times[one] - end, 0), default=None
        )
        return ("", (), "") if nearest is None else self.groups[nearest]


# By the letters of a name alone, so that c10d::_allgather_base_, nccl:all_gather and ncclKernel_AllGather_RING are
# the same; the longer words stand first.
_KINDS = {
    "crossdevicereduce": "all_reduce",
    "allreduce": "all_reduce",
    "reducescatter": "reduce_scatter",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "gather": "gather",
    "scatter": "scatter",
    "reduce": "reduce",
    "send": "send",
    "recv": "recv",
}
MESSAGES = frozenset({"send", "recv"})
# Kernels of which the n-th is the n-th of the other ranks.
_IN_ORDER = re.compile(r"nccl|rccl")
_GLOO = "gloo:"
# It reduces everything everywhere and keeps a part.
_GLOO_DOES = {"reduce_scatter": "all_reduce"}
_C10D = "c10d::"
"""Operators whose arguments are what comes out and what goes in, where these are two tensors."""
_OF_TWO_BUFFERS = frozenset({"all_gather", "reduce_scatter", "all_to_all"})
_CALLED = re.compile(r"c10d::|nccl:|record_param_comms")
_NOT_LETTERS = re.compile(r"[^a-z]")
MOST_MOVED = 2**60
"""Bytes of one collective or copy, as many as a graph's tensor may have: a trace that says more is wrong."""
_WIDTHS = {name: dtype.nbytes(1) for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCall:
    """A collective on one rank.

    Attributes:
        rank: the rank.
        row: of the transfer: a kernel, or what a worker thread of gloo did.
        issue: row of the host's call that led to it, or -1.
        kind: "all_reduce", ...; "" where no name tells.
        group: name of its process group; "" where the trace does not say.
        ranks: of the group; empty where the trace does not say.
        nbytes: of the whole buffer of a rank, as nccl-tests counts it; 0 where the trace does not say.
        dtype: torch's name of its type, in lower case; "" where unknown.
        channel: of a message: what the n-th send goes into, the n-th receive takes out; "" where unknown.
        known: whether something tells of which ranks it is: a process group, or an order that all ranks share.
            Kernels that go round NCCL have neither.
    """

    rank: int
    row: int
    issue: int
    kind: str
    group: str = ""
    ranks: tuple[int, ...] = ()
    nbytes: int = 0
    dtype: str = ""
    channel: str = ""
    known: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchedCollective:
    """One collective of several ranks: the n-th of its kind in its group on each of them.

    Attributes:
        kind: "all_reduce", ...
        group: name of the process group, or "".
        number: n, from 0 on.
        calls: by rank.
    """

    kind: str
    group: str
    number: int
    calls: Mapping[int, CollectiveCall]

    @property
    def nbytes(self) -> int:
        """Bytes of a rank's buffer, or 0."""
        return max(call.nbytes for call in self.calls.values())

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the group, traced or not, as far as the traces say."""
        return next(iter(self.calls.values())).ranks or tuple(self.calls)


def collectives(trace: Trace, stacks: Stacks | None = None) -> list[CollectiveCall]:
    """The collectives and messages of one rank, in the order in which they were issued.

    Args:
        trace: one rank's; its file is read again for the sizes that the columns do not keep, and a trace of
            collectives beside it for groups that the profiler does not say.
        stacks: its call stacks, if they are known.
    """
    stacks = stacks or call_stacks(trace)
    kernel, gloo, ordered = (
        np.array([*(bool(match(text)) for text in trace.strings), False])[trace.name]
        for match in (communicates, lambda text: text.startswith(_GLOO), _IN_ORDER.match)
    )
    rows = np.flatnonzero((kernel & trace.of_category(KERNELS) & (trace.stream >= 0)) | gloo)
    issues = _issues(trace, stacks, rows)
    named, operators = trace.argument("Collective name"), trace.of_category(OPERATORS)
    sized = {row: _described(trace, stacks, row, named, operators) for row in rows.tolist()}
    asked = sorted({where for _, places in sized.values() for where in places})
    said = dict(zip(asked, details(trace, np.array(asked, np.int64)), strict=True)) if asked else {}
    found, recorded, end = [], RecordedGroups(trace), trace.end
    for row in rows.tolist():
        kind, places = sized[row]
        told: list[dict[str, Any]] = [said[where].get("args") or {} for where in places]
        (group, ranks), channel = _group(trace, told[0] if told else {}), ""
        if not ranks and (issue := issues.get(row, NONE)) != NONE:
            group, ranks, channel = recorded.of(int(trace.start[issue]), int(end[issue]))
        sizes = [
            _size(arguments, kind, len(ranks), both=trace.text(where).startswith(_C10D))
            for where, arguments in zip(places, told, strict=True)
        ]
        nbytes, dtype = next((size for size in sizes if size[0]), sizes[0] if sizes else (0, ""))
        found.append(
            CollectiveCall(
                rank=trace.rank, row=row, issue=issues.get(row, NONE), kind=kind, group=group, ranks=ranks,
                nbytes=nbytes, dtype=dtype, channel=channel if kind in MESSAGES else "",
                known=bool(ranks or gloo[row] or ordered[row]),
            )
        )  # fmt: skip
    return sorted(found, key=lambda call: int(trace.start[call.row if call.issue == NONE else call.issue]))


def match_collectives(
    calls: Mapping[int, list[CollectiveCall]], traces: Mapping[int, Trace] | None = None
) -> tuple[list[MatchedCollective], list[str]]:
    """Which collectives are one: the n-th of a kind in a group, on all ranks of the group that were traced.

    Where ranks ran them unequally often, as their profiles began or ended one after the other, times tell which of
    them are one, if the clocks agree so far that all of them overlap.

    Args:
        calls: of each rank, in order.
        traces: with their times; None: collectives that ranks ran unequally often are not matched.

    Returns:
        The collectives, and a line for each kind and group that the ranks did not run equally often.
    """
    matched, notes = [], []
    for (kind, ranks, _), of_rank in _alike(calls).items():
        members = (set(ranks) or set(calls)) & set(calls)
        if len(members) < 2:
            continue
        own = {rank: of_rank.get(rank, []) for rank in sorted(members)}
        counts = {rank: len(found) for rank, found in own.items()}
        first: Mapping[int, int] | None = dict.fromkeys(own, 0)
        if len(set(counts.values())) > 1:
            first = None if traces is None else _first_shared(own, traces)
            how = "not matched" if first is None else "matched by their times, those at the ends left out"
            notes.append(f"{kind} was run {_counts(counts)}: {how}")
        if first is None:
            continue
        shared = {rank: found[first[rank] :] for rank, found in own.items()}
        for number in range(min(map(len, shared.values()))):
            same = {rank: found[number] for rank, found in shared.items()}
            matched.append(
                MatchedCollective(kind=kind, group=next(iter(same.values())).group, number=number, calls=same)
            )
    return matched, notes


def _counts(counts: Mapping[int, int]) -> str:
    """How often ranks did something: "3 on rank 0, 1; 4 on rank 2"."""
    often: dict[int, list[int]] = defaultdict(list)
    for rank, count in counts.items():
        often[count].append(rank)
    return "; ".join(f"{count} on rank {_first_few(same)}" for count, same in sorted(often.items()))


def _first_few(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:4])) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")


def _first_shared(
    own: Mapping[int, list[CollectiveCall]], traces: Mapping[int, Trace]
) -> Mapping[int, int] | None:
    """Where in each rank's list the first collective stands that all of them have; None if times do not tell.

    Lists are stretches of one sequence. A collective ends on no rank before all have begun it, so at the right
    shift all that two lists share overlap, and are equally large as far as that is known; of several such shifts
    that one is taken at which the ends differ least.
    """
    spans = {}
    for rank, found in own.items():
        rows = np.array([call.row for call in found], np.int64)
        start = traces[rank].start[rows]
        spans[rank] = _Spans(
            start, start + traces[rank].duration[rows], np.array([c.nbytes for c in found], np.int64)
        )
    longest = max(own, key=lambda rank: len(own[rank]))
    shifts = {rank: _shift(spans[longest], spans[rank]) for rank in own}
    known = {rank: shift for rank, shift in shifts.items() if shift is not None}
    if len(known) < len(own):
        return None
    begin = max(known.values())
    end = min(shift + len(own[rank]) for rank, shift in known.items())
    return {rank: begin - shift for rank, shift in known.items()} if begin < end else None


class _Spans(NamedTuple):
    """Begins, ends and bytes (0: not known) of a rank's collectives."""

    start: Int64
    end: Int64
    nbytes: Int64


def _shift(reference: _Spans, other: _Spans) -> int | None:
    """At which place of the reference the other list begins, be it before it; None if at none."""
    count, length = len(reference.start), len(other.start)
    best: tuple[float, int] | None = None
    # Of the shorter list at least half is shared.
    least = (min(count, length) + 1) // 2
    for shift in range(least - length, count - least + 1) if least else ():
        begin, end = max(0, shift), min(count, shift + length)
        one = _Spans(*(column[begin:end] for column in reference))
        two = _Spans(*(column[begin - shift : end - shift] for column in other))
        overlap = (one.start <= two.end) & (two.start <= one.end)
        if (overlap & ((one.nbytes == two.nbytes) | (one.nbytes == 0) | (two.nbytes == 0))).all():
            apart = float(np.abs(one.end - two.end).mean())
            best = min(best or (apart, shift), (apart, shift))
    return None if best is None else best[1]


def _alike(
    calls: Mapping[int, list[CollectiveCall]],
) -> dict[tuple[str, tuple[int, ...], str], dict[int, list[CollectiveCall]]]:
    """The calls of each rank by kind, ranks of the group, and its name where all ranks have the same names."""
    named: dict[tuple[int, ...], dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for rank, found in calls.items():
        for call in found:
            named[call.ranks][rank].add(call.group)
    same = {ranks for ranks, names in named.items() if len({frozenset(known) for known in names.values()}) == 1}
    alike: dict[tuple[str, tuple[int, ...], str], dict[int, list[CollectiveCall]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for rank, found in calls.items():
        for call in found:
            if call.known and call.kind and call.kind not in MESSAGES:
                alike[call.kind, call.ranks, call.group if call.ranks in same else ""][rank].append(call)
    return alike


def collectives_of_job(traces: TraceSet) -> tuple[list[MatchedCollective], list[str]]:
    """The collectives that the ranks of a job ran together, by the time at which the first of their ranks began.

    Returns:
        As `match_collectives`.
    """
    matched, notes = match_collectives({rank: collectives(trace) for rank, trace in traces.items()}, traces)
    matched.sort(key=lambda one: min(int(traces[rank].start[call.row]) for rank, call in one.calls.items()))
    return matched, notes


def collective_of_kernel(name: str) -> str:
    """Which collective a name stands for, or ""."""
    letters = _NOT_LETTERS.sub("", name.lower())
    return next((kind for word, kind in _KINDS.items() if word in letters), "")


def _issues(trace: Trace, stacks: Stacks, rows: np.ndarray[Any, Any]) -> dict[int, int]:
    """The host's call of each transfer; gloo's workers take calls in the order in which they were made."""
    found = {row: int(stacks.parent[row]) for row in rows.tolist() if trace.stream[row] >= 0}
    operators = np.flatnonzero(
        trace.of_category(OPERATORS) & np.array([*("c10d::" in text for text in trace.strings), False])[trace.name]
    )
    start, kinds = trace.start.tolist(), [collective_of_kernel(text) for text in trace.strings]
    queue = sorted(operators.tolist(), key=start.__getitem__)
    gloo = [row for row in rows.tolist() if trace.stream[row] < 0]
    for row in sorted(gloo, key=start.__getitem__):
        does = kinds[trace.name[row]]
        for at, call in enumerate(queue):
            if start[call] > start[row]:
                break
            asked = kinds[trace.name[call]]
            if does in (asked, _GLOO_DOES.get(asked)):
                found[row] = queue.pop(at)
                break
    return found


def _described(trace: Trace, stacks: Stacks, row: int, named: Int64, operators: Bools) -> tuple[str, list[int]]:
    """The kind of a transfer, and the rows that say something of it, those first that say most.

    Its own row or one that it was called from: a record of the collective, operators, annotations. Which of them
    has the size differs: of lists of tensors the operator's shapes are not recorded, while the annotation's are.
    """
    kind, found = collective_of_kernel(function_name(trace.text(row))), list[tuple[int, int]]()
    for above in _ancestors(stacks, row):
        said = int(named[above])
        text = trace.strings[said] if said != NONE else trace.text(above)
        if above != row and not (said != NONE or _CALLED.match(text)):
            continue
        # NCCL runs an all-to-all as sends and receives: the name of the call, where there is one, is right.
        kind = collective_of_kernel(text) or kind
        found.append((3 if said != NONE else 2 if operators[above] else 1, above))
        if said != NONE:
            break
    return kind, [above for _, above in sorted(found, key=lambda one: -one[0])]


def _ancestors(stacks: Stacks, row: int) -> Iterator[int]:
    while row != NONE:
        yield row
        row = int(stacks.parent[row])


def _group(trace: Trace, arguments: Mapping[str, Any]) -> tuple[str, tuple[int, ...]]:
    name, ranks = str(arguments.get("Process Group Name", "")), _ranks(arguments.get("Process Group Ranks"))
    job = trace.header.get("distributedInfo")
    groups = job.get("pg_config") if isinstance(job, dict) else None
    if ranks or not isinstance(groups, list):
        return name, ranks
    known = [(str(g.get("pg_name", "")), _ranks(g.get("ranks"))) for g in groups if isinstance(g, dict)]
    if name:
        return name, next((ranks for other, ranks in known if other == name), ())
    # Where all groups are of the same ranks, it does not matter which it is.
    same = {ranks for _, ranks in known}
    return (known[0][0] if len(known) == 1 else "", same.pop()) if len(same) == 1 else ("", ())


def _ranks(text: object) -> tuple[int, ...]:
    try:
        ranks = ast.literal_eval(text) if isinstance(text, str) else text
    except (ValueError, SyntaxError):  # torch shortens long lists: "[0, 1, ..., 7]"
        return ()
    whole = isinstance(ranks, list) and ranks and all(type(rank) is int and rank >= 0 for rank in ranks)
    return tuple(ranks) if whole else ()  # type: ignore[arg-type]


def _size(arguments: Mapping[str, Any], kind: str, ranks: int, *, both: bool) -> tuple[int, str]:
    """Bytes of a rank's whole buffer, and their type; 0 of what no buffer has.

    Args:
        arguments: what an event says.
        kind: of the collective.
        ranks: of its group; 0 where unknown.
        both: whether its shapes are of what goes in and of what comes out.
    """
    nbytes, dtype = _said_size(arguments, kind, ranks, both=both)
    return (nbytes, dtype) if 0 <= nbytes < MOST_MOVED else (0, "")


def _said_size(arguments: Mapping[str, Any], kind: str, ranks: int, *, both: bool) -> tuple[int, str]:
    counted = [arguments.get(name) for name in ("In msg nelems", "Out msg nelems")]
    dtype = str(arguments.get("dtype", "")).lower()
    if dtype in _WIDTHS and all(isinstance(count, int) and count >= 0 for count in counted):
        return max(int(count) for count in counted if count is not None) * _WIDTHS[dtype], dtype
    shapes, types = arguments.get("Input Dims"), arguments.get("Input type")
    if not isinstance(shapes, list) or not isinstance(types, list):
        return 0, ""
    sizes = []
    for shape, text in zip(shapes, types, strict=False):
        width = _WIDTHS.get(str(text).lower(), 0)
        if width and isinstance(shape, list) and shape and all(type(extent) is int for extent in shape):
            sizes.append(prod(shape) * width)
            dtype = str(text).lower()
    if both and len(sizes) > 1 and kind in _OF_TWO_BUFFERS:
        return max(sizes), dtype
    return sum(sizes) * (ranks if kind == "all_gather" else 1), dtype

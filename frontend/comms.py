"""A trace of collectives to a job graph, its communication skeleton: one program a rank, in the one block.

A rank is one line of work, from call to call, and a stream for each group (for messages: sender, receiver and tag)
that it communicates in. What lies between the end of what was waited for and the next call is work of that length.
A communication lasts from when the last of its ranks has come, and is done with the group's call before, to its
end on each rank; so a simulation with these durations gives the traced times again.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from echograph.errors import FormatError, InputError
from echograph.ir.builder import Common, GraphBuilder
from echograph.ir.comms.operations import collective_of_operation
from echograph.ir.comms.record import UNKNOWN, CallSignature, NativeSource
from echograph.ir.formats import Imported
from echograph.ir.graph import JobGraph, Workload
from echograph.ir.types import CollectiveKind, DType, Duration, Phase, Source
from echograph.units import PS_PER_NS, format_time

DEVICE = "trace"
"""Of the durations: the machines of the job."""

MAX_CALLS = 5_000_000
_RANK = re.compile("[0-9]{1,9}")

_DTYPES = {
    "float32": DType.FP32,
    "float16": DType.FP16,
    "bfloat16": DType.BF16,
    "float64": DType.FP64,
    "float8_e4m3fn": DType.FP8_E4M3,
    "float8_e5m2": DType.FP8_E5M2,
    "int64": DType.INT64,
    "int32": DType.INT32,
    "int16": DType.INT16,
    "int8": DType.INT8,
    "bool": DType.BOOL,
    "complex64": DType.COMPLEX64,
}
_PHASES = {
    "forward": Phase.FORWARD,
    "backward": Phase.BACKWARD,
    "recompute": Phase.RECOMPUTE,
    "optimizer": Phase.OPTIMIZER,
}
_ALONE = "calls that not all of their ranks recorded, or none saw the end of, left out"
_EARLY = "calls that a rank had ended before the last one came (buffered sends, roots): taken to wait for it"
_UNSEEN = (
    "calls that only C++ waits for: taken to be waited for when the last of them had been made, "
    "before the next call of another kind or the first one again"
)
_THREADS = "calls made while another thread waited: taken to come after that"


def load(source: Path) -> Imported:
    """Reads the traces of all ranks in a folder, or those whose names begin with a path (`FOLDER/NAME`).

    Raises:
        InputError: there are no traces, or those of ranks are missing.
        FormatError: a call that no graph can hold; names the rank and the call.
    """
    return _Import(_sources(source), source.stem).run()


def _sources(source: Path) -> list[NativeSource]:
    folder, begins = (source, "") if source.is_dir() else (source.parent, source.name)
    # In a recording each rank has a folder of its own.
    files = sorted(file for pattern in ("*", "*/comms.jsonl") for file in folder.glob(pattern))
    found: dict[int, NativeSource] = {}
    for path in files:
        if not (path.is_file() and path.name.startswith(begins) and _is_trace(path)):
            continue
        trace = NativeSource(path)
        trace.open()
        if (other := found.setdefault(trace.rank, trace)) is not trace:
            raise InputError(
                f"{path}: of rank {trace.rank}, as is {other.path.name}: name one trace, as FOLDER/NAME"
            )
    if not found:
        raise InputError(f"{source}: no trace of collectives here: give the folder where trace.<rank>.jsonl are")
    world = max(trace.world for trace in found.values())
    if missing := list(islice((rank for rank in range(world) if rank not in found), 8)):
        ranks = ", ".join(map(str, missing))
        raise InputError(f"{source}: of {world} ranks those of {ranks} are missing: put their files beside it")
    return [found[rank] for rank in sorted(found)]


def _is_trace(path: Path) -> bool:
    with path.open("rb") as stream:
        return b'"line":"header"' in stream.read(200)


@dataclass(slots=True, eq=False)
class _Call:
    """A call of one rank; times are nanoseconds of the wall clock, `UNKNOWN` where they are not known.

    `wait` is when its line of work begins to wait for it, `duration` its own share once all ranks have come.
    """

    what: CallSignature
    rank: int
    sequence: int
    queued: int
    end: int
    wait: int
    unseen: bool
    duration: int = 0
    op: int = -1


@dataclass(slots=True)
class _Import:
    sources: Sequence[NativeSource]
    name: str
    notes: Counter[str] = field(default_factory=Counter)
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    builder: GraphBuilder = field(init=False)

    def run(self) -> Imported:
        """The job of all traces."""
        calls = [call for source in self.sources for call in self._calls(source)]
        kept = self._meet(calls)
        if not kept:
            raise InputError(f"{self.sources[0].path.parent}: no call that all of its ranks recorded")
        self.builder = GraphBuilder(name=self.name, workload=Workload(model=self.name), streams=("work",))
        self.numbers = {name: self.builder.group(name, ranks=ranks) for name, ranks in self.groups.items()}
        by_rank: dict[int, list[_Call]] = defaultdict(list)
        for call in kept:
            by_rank[call.rank].append(call)
        began = min(call.queued for call in kept)
        if (max(max(call.end, call.wait) for call in kept) - began) * PS_PER_NS >= 2**63:
            raise FormatError(f"{self.sources[0].path.parent}: from first call to last over 106 days: trace less")
        for source in self.sources:
            mine, begin = by_rank[source.rank], self.builder.op_count()
            first = began if self._one_host else min((c.queued for c in mine), default=began)
            self._program(mine, first)
            calls_of = [(0, begin, self.builder.op_count(), 0, 0)]
            self.builder.program(calls_of, role=f"rank {source.rank}", ranks=(source.rank,))
        spans = [max(c.end for c in mine) - min(c.queued for c in mine) for mine in by_rank.values()]
        said = [f"the job is the whole trace, {format_time(max(spans) * PS_PER_NS)} from its first call on"]
        for source in self.sources:
            self.notes.update(source.problems)
        said += [f"{count:,} {what}" for what, count in self.notes.items() if count]
        return Imported(graph=self.builder.build(JobGraph), notes=tuple(said))

    @property
    def _one_host(self) -> bool:
        return len({source.host for source in self.sources}) == 1

    # -- calls -----------------------------------------------------------------------------------------------

    def _calls(self, source: NativeSource) -> Iterable[_Call]:
        """The calls of a rank; of one that stands twice, first without its end, the later row counts."""
        found: dict[tuple[str, int], _Call] = {}
        for rows in source.rows():
            for number, sequence, queued, _, end, wait in rows.tolist():
                what = source.signatures[number]
                assert what is not None
                if what.device not in ("cpu", ""):
                    raise FormatError(
                        f"{source.path}: {what.op} on {what.device}, where the times of calls do not tell those "
                        "of the work between them: import a trace of the cpu"
                    )
                found[what.channel, sequence] = _call(what, source.rank, (sequence, queued, end, wait))
            if len(found) > MAX_CALLS:
                raise FormatError(f"{source.path}: over {MAX_CALLS:,} calls: trace some steps alone")
        for name, ranks in source.groups.items():
            self.groups.setdefault(name, ranks)
        return found.values()

    def _meet(self, calls: Iterable[_Call]) -> list[_Call]:
        """The calls that all of their ranks recorded, by time, with the duration of each."""
        meetings: dict[tuple[str, int], list[_Call]] = defaultdict(list)
        for call in calls:
            meetings[call.what.channel, call.sequence].append(call)
        free: dict[tuple[str, int], int] = {}
        kept: list[_Call] = []
        for (channel, _), met in sorted(meetings.items()):
            if len(groups := {call.what.group for call in met}) > 1:
                named = " and ".join(f"'{name[:40]}'" for name in sorted(groups)[:2])
                raise FormatError(f"channel '{channel[:40]}': a call of two groups, {named}: trace it again")
            ranks = _ranks(met[0].what, self.groups.get(met[0].what.group, ()))
            if {call.rank for call in met} != set(ranks) or all(call.end == UNKNOWN for call in met):
                self.notes[_ALONE] += len(met)
                continue
            self._time(met, [free.get((channel, call.rank), 0) for call in met])
            free |= {(channel, call.rank): call.end for call in met}
            kept += met
        return sorted(kept, key=lambda call: (call.queued, call.what.channel, call.sequence))

    def _time(self, met: Sequence[_Call], free: Sequence[int]) -> None:
        """Sets the durations of one communication.

        On one host the clock tells who came last. The clocks of several are not compared: there the rank that
        took least is taken for the last to come, and its time for that of all.
        """
        ready = [max(call.queued, before) for call, before in zip(met, free, strict=True)]
        ended = [(call.end, came) for call, came in zip(met, ready, strict=True) if call.end != UNKNOWN]
        shortest = min(end - came for end, came in ended)
        for call, came in zip(met, ready, strict=True):
            if call.end == UNKNOWN:
                call.end = max(ended)[0] if self._one_host else came + max(0, shortest)
        latest = max(ready)
        took = [call.end - latest if self._one_host else shortest for call in met]
        for call, duration in zip(met, took, strict=True):
            self.notes[_EARLY] += int(duration < 0)
            call.duration = max(0, duration)

    # -- programs --------------------------------------------------------------------------------------------

    def _program(self, calls: Sequence[_Call], began: int) -> None:
        line = _Line(builder=self.builder, now=began)
        streams: dict[str, int] = {}
        events = [(call.queued, n, False, call) for n, call in enumerate(calls)]
        events += [(call.wait, n, True, call) for n, call in enumerate(calls) if call.wait != UNKNOWN]
        for at, _, waits, call in sorted(events, key=lambda event: event[:3]):
            if waits:
                line.work_until(at)
                line.wait_for(call)
                continue
            line.wait_for_unseen(call)
            self.notes[_THREADS] += int(at < line.now)
            self.notes[_UNSEEN] += int(call.unseen)
            line.work_until(at)
            slot = streams.setdefault(call.what.channel, len(streams))
            self._add(call, self.builder.stream(f"communicator {slot}"), sorted(line.after))

    def _add(self, call: _Call, stream: int, deps: Iterable[int]) -> None:
        what = call.what
        group, ranks = self.numbers[what.group], self.groups[what.group]
        common: Common = {
            "phase": _PHASES.get(what.phase, Phase.OTHER), "module": what.module, "stream": stream, "deps": deps,
            "durations": (_duration(call.duration),),
        }  # fmt: skip
        if what.op in ("send", "recv"):
            tag = what.channel.rpartition("/")[2]
            (other,) = {*_ranks(what, ranks)} - {call.rank}
            add = self.builder.send if what.op == "send" else self.builder.recv
            call.op = add(
                what.op, group=group, peer=ranks.index(other) - ranks.index(call.rank), nbytes=what.bytes,
                tag=int(tag) if tag.isdigit() and len(tag) < 19 else 0, **common,
            )  # fmt: skip
            return
        call.op = self.builder.collective(
            what.op, _kind(call), group=group, bytes_per_rank=what.bytes, asynchronous=what.asynchronous,
            dtype=_DTYPES.get(what.dtype, DType.UINT8), **common,
        )  # fmt: skip


@dataclass(slots=True, kw_only=True)
class _Line:
    """The line of work of a rank, as far as it is: what it has to wait for, and since when it works."""

    builder: GraphBuilder
    now: int
    after: set[int] = field(default_factory=set)
    unseen: list[_Call] = field(default_factory=list)

    def work_until(self, at: int) -> None:
        if at > self.now:
            work = self.builder.compute(
                "work", phase=Phase.OTHER, deps=sorted(self.after), durations=(_duration(at - self.now),)
            )
            self.after, self.now = {work}, at

    def wait_for(self, call: _Call) -> None:
        self.after.add(call.op)
        self.now = max(self.now, call.end)

    def wait_for_unseen(self, following: _Call) -> None:
        """Waits for calls that only C++ waits for, where that must have been before the following call."""
        again = any(call.what.id == following.what.id for call in self.unseen)
        over = max((call.end for call in self.unseen), default=0) <= following.queued
        if over and (again or not following.unseen):
            for call in self.unseen:
                self.wait_for(call)
            self.unseen = []
        if following.unseen:
            self.unseen.append(following)


def _call(what: CallSignature, rank: int, row: tuple[int, int, int, int]) -> _Call:
    sequence, queued, end, wait = row
    unseen = False
    if end < 0:
        wait = UNKNOWN  # who waits for a call learns of its end
    elif wait < 0 and not what.asynchronous:
        wait = 0
    elif wait < 0:
        unseen = True
    return _Call(
        what=what, rank=rank, sequence=sequence, queued=queued, end=UNKNOWN if end < 0 else queued + end,
        wait=UNKNOWN if wait < 0 else queued + wait, unseen=unseen,
    )  # fmt: skip


def _ranks(what: CallSignature, group: tuple[int, ...]) -> tuple[int, ...]:
    """The ranks that a call is of."""
    if what.op not in ("send", "recv"):
        return group
    sender, _, receiver = what.channel.rpartition(":")[2].partition("/")[0].partition(">")
    ends = [int(end) for end in (sender, receiver) if _RANK.fullmatch(end)]
    return tuple(ends) if len(set(ends)) == 2 and set(ends) <= set(group) else ()


def _kind(call: _Call) -> CollectiveKind:
    op = call.what.op
    kind = collective_of_operation(op)
    if kind is None:
        raise FormatError(f"rank {call.rank}: {op[:40]} is no collective that a graph holds: leave it out")
    return kind


def _duration(nanoseconds: int) -> Duration:
    return Duration(device=DEVICE, picoseconds=nanoseconds * PS_PER_NS, source=Source.IMPORTED, samples=1)

"""The work items of all ranks of a job, on one clock, and the job graph that is made of them.

A graph has one program a rank; collectives that ranks ran together are of one group.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType

import numpy as np

from echograph.errors import InputError
from echograph.ir.builder import Common, GraphBuilder
from echograph.ir.columns import Ragged
from echograph.ir.graph import JobGraph, Workload
from echograph.ir.traced import FREE, NOT_TRACED, NOT_TRACED_WORLD, ONE_OF_SEVERAL, PARTLY_TRACED, STEP, TRACE
from echograph.ir.types import CollectiveKind, CopyDirection, DType, Duration, OpKind, Payload, Phase, Source
from echograph.profiler.replay.profiling_overhead import Observed
from echograph.profiler.replay.rank import WorkItem, WorkKind, rank_work_items
from echograph.profiler.traces.alignment import align, clocks
from echograph.profiler.traces.collectives import (
    MESSAGES,
    CollectiveCall,
    MatchedCollective,
    collectives_of_job,
    match_collectives,
)
from echograph.profiler.traces.operands import TORCH_DTYPES
from echograph.profiler.traces.trace import NONE, TraceSet
from echograph.progress import Progress, silent


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchedWork:
    """A collective of several ranks, or a message.

    Attributes:
        collective: what it is.
        work_items: by rank.
    """

    collective: MatchedCollective
    work_items: Mapping[int, WorkItem]

    @property
    def begun(self) -> int:
        """When the last of its ranks had begun: from then on it takes what it takes, before that it waits."""
        return max(item.start for item in self.work_items.values())

    @property
    def last(self) -> int:
        """The rank that began last."""
        return max(self.work_items, key=lambda rank: (self.work_items[rank].start, -rank))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobWorkItems:
    """A traced job in work items.

    Attributes:
        traces: the traces, on one clock.
        of_rank: the work items of each rank, each after all that it waits for.
        collectives: those that several of the traced ranks ran.
        messages: the messages of which the sender and the receiver were traced.
        notes: what was taken for something, or could not be matched, a line each.
    """

    traces: TraceSet
    of_rank: Mapping[int, Sequence[WorkItem]]
    collectives: Sequence[MatchedWork]
    messages: Sequence[MatchedWork]
    notes: tuple[str, ...]


def job_work_items(
    traces: TraceSet, progress: Progress = silent, seen: Mapping[int, Observed] = MappingProxyType({})
) -> JobWorkItems:
    """The work items of a job.

    Clocks are aligned where they contradict one another: where a collective would have ended on one rank before
    another one had begun it.

    Args:
        traces: one a rank.
        progress: told how far it is.
        seen: how ranks were observed, where what that cost is to be known.

    Raises:
        InputError: a trace's file is gone, or no trace has anything in it.
    """
    if not any(len(trace) for trace in traces.values()):
        raise InputError(f"{next(iter(traces.values())).path}: no complete event in it: nothing to replay")
    if len(traces) > 1:
        matched, unmatched = collectives_of_job(traces)
        if clocks(traces, matched).apart_before:
            traces, fit = align(traces, (matched, unmatched))
            progress(f"clocks aligned to {fit.residual_ps / 1e6:.1f} us")
    with _collector_off():
        return _on_their_clocks(traces, progress, seen)


def _on_their_clocks(traces: TraceSet, progress: Progress, seen: Mapping[int, Observed]) -> JobWorkItems:
    of_rank, dropped = {}, 0
    for done, (rank, trace) in enumerate(traces.items()):
        progress("going through the events of ranks", done, len(traces))
        of_rank[rank], against = rank_work_items(trace, seen.get(rank)).in_order()
        dropped += against
    of_call = {id(item.call): item for order in of_rank.values() for item in order if item.call is not None}
    calls = {rank: [p.call for p in order if p.call is not None] for rank, order in of_rank.items()}
    matched, notes = match_collectives(calls, traces)
    matched_work = [
        MatchedWork(collective=one, work_items={rank: of_call[id(call)] for rank, call in one.calls.items()})
        for one in matched
    ]
    joined = {id(item) for one in matched_work for item in one.work_items.values()}
    every = [item for order in of_rank.values() for item in order if item.call is not None]
    unmatched = [item for item in every if item.work is WorkKind.COLLECTIVE and id(item) not in joined]
    messages = _messages(of_rank)
    sent = [item for item in every if item.call is not None and item.call.kind in MESSAGES]
    if lone := sum(item.work is not WorkKind.MESSAGE for item in sent):
        notes.append(f"{lone:,} sends and receives take what they took: ranks do not wait for each other there")
    if alone := sum(item.call is not None and len(item.call.ranks) != 1 for item in unmatched):
        notes.append(
            f"{alone:,} collectives whose other ranks are not in the traces, or not known: as long as they took, "
            "with what they waited"
        )
    if dropped:
        notes.append(f"{dropped:,} waits left out: by the trace's clocks, what was waited for came later")
    return JobWorkItems(
        traces=traces,
        of_rank=of_rank,
        collectives=matched_work,
        messages=messages,
        notes=tuple(dict.fromkeys((*traces.notes, *notes))),
    )


def _messages(of_rank: Mapping[int, Sequence[WorkItem]]) -> list[MatchedWork]:
    """The n-th send of a channel and its n-th receive, where there are as many of both."""
    ends: dict[str, dict[str, list[tuple[int, WorkItem, CollectiveCall]]]] = defaultdict(
        lambda: {"send": [], "recv": []}
    )
    for rank, order in of_rank.items():
        for item in order:
            if item.call is not None and item.call.channel:
                ends[item.call.channel][item.call.kind].append((rank, item, item.call))
    found = []
    for of in ends.values():
        sends, receives = of["send"], of["recv"]
        if len(sends) != len(receives) or {rank for rank, *_ in sends} & {rank for rank, *_ in receives}:
            continue
        for number, pair in enumerate(zip(sends, receives, strict=True)):
            for _, item, _ in pair:
                item.work = WorkKind.MESSAGE
            calls = {rank: call for rank, _, call in pair}
            message = MatchedCollective(kind="send", group=pair[0][2].group, number=number, calls=calls)
            found.append(MatchedWork(collective=message, work_items={rank: item for rank, item, _ in pair}))
    return found


CPU = "cpu"
UNNAMED = "unnamed device"
"""The device of traces in which one ran and none is named."""

_DIRECTIONS = {
    "HtoD": CopyDirection.HOST_TO_DEVICE,
    "HostToDevice": CopyDirection.HOST_TO_DEVICE,
    "DtoH": CopyDirection.DEVICE_TO_HOST,
    "DeviceToHost": CopyDirection.DEVICE_TO_HOST,
}
_PAYLOADS = {Phase.BACKWARD: Payload.GRADIENT, Phase.OPTIMIZER: Payload.GRADIENT}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweredTraces:
    """A job graph from traces.

    Attributes:
        graph: the job; its durations are measured.
        notes: what was taken for something, or could not be matched, a line each.
    """

    graph: JobGraph
    notes: tuple[str, ...] = ()


Instead = Mapping[int, Mapping[int, int]]
"""Picoseconds by rank and row of its trace."""


def lower(
    traces: TraceSet,
    name: str = "",
    progress: Progress = silent,
    *,
    seen: Mapping[int, Observed] = MappingProxyType({}),
    instead: Instead = MappingProxyType({}),
) -> LoweredTraces:
    """The job graph of the traces of a job.

    Args:
        traces: one a rank; they are replayed from first to last event.
        name: of the graph.
        progress: told how far it is.
        seen: how ranks were observed: durations are without what that cost, where it is known.
        instead: other durations of work on devices than the measured ones.

    Raises:
        InputError: a trace's file is gone, or no trace has anything in it.
    """
    with _collector_off():
        return _Lowering(job_work_items(traces, progress, seen), name, seen, instead).run()


@contextmanager
def _collector_off() -> Iterator[None]:
    """Without the search for cycles, which goes through all work items again and again while they are made.

    None of them is garbage; it takes up to half of the time of a lowering.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@dataclass(slots=True)
class _Lowering:
    job: JobWorkItems
    name: str
    seen: Mapping[int, Observed]
    instead: Instead
    builder: GraphBuilder = field(init=False)
    device: str = CPU
    groups: dict[int, tuple[int, int]] = field(default_factory=dict)
    tags: dict[str, int] = field(default_factory=dict)
    names: dict[tuple[int, ...], set[str]] = field(default_factory=lambda: defaultdict(set))

    def run(self) -> LoweredTraces:
        self.builder = GraphBuilder(name=self.name, workload=Workload(model=self.name), streams=("main",))
        self.device = _device(self.job.traces)
        together = (*self.job.collectives, *self.job.messages)
        for one in together:
            self.names[tuple(sorted(one.work_items))].add(one.collective.group)
        for one in together:
            number, begun = self._group(one), one.begun + one.work_items[one.last].cost
            for item in one.work_items.values():
                # A rank whose profile began behind the launch has no record of it; the others say.
                item.nbytes = item.nbytes or one.collective.nbytes
                self.groups[id(item)] = number, max(0, item.end - begun)
        for rank, order in self.job.of_rank.items():
            begin = self.builder.op_count()
            self._program(rank, order)
            calls = [(0, begin, self.builder.op_count(), 0, 0)]
            self.builder.program(calls, role=f"rank {rank}", ranks=(rank,))
        return LoweredTraces(graph=self.builder.build(JobGraph), notes=self.job.notes)

    def _group(self, one: MatchedWork) -> int:
        """A group is of the ranks that were traced; one of all of them is the world.

        Groups of the same ranks have an order each: what runs in one says nothing of the other.
        """
        ranks = tuple(sorted(one.work_items))
        name = "world" if len(ranks) == len(self.job.of_rank) else f"ranks {','.join(map(str, ranks))}"
        if missing := self._others(one):
            name = f"{PARTLY_TRACED}: {name} and {missing} more"
        return self.builder.group(
            f"{name} ({one.collective.group})" if len(self.names[ranks]) > 1 else name, ranks=ranks
        )

    def _others(self, one: MatchedWork) -> int:
        """How many ranks of a collective were not traced; where it does not say its ranks, all are in it."""
        known = {rank for call in one.collective.calls.values() for rank in call.ranks}
        world = max(self.job.traces[rank].world_size for rank in one.work_items)
        return len(known - self.job.of_rank.keys()) if known else max(0, world - len(self.job.of_rank))

    def _program(self, rank: int, order: Sequence[WorkItem]) -> None:
        """Writes what a rank did. Most of it goes in by columns; marks of steps and messages one by one."""
        forward: dict[int, int] = {}
        rows, begin = _Rows(self.builder, self.device), self.builder.op_count()
        for item in order:
            deps = [begin + one.at for one in item.after]
            if len(deps) > 1:
                deps.sort()
            if item.step != NONE or item.work is WorkKind.MESSAGE:
                rows.write()
                self._alone(rank, item, deps)
            elif item.work is WorkKind.HOST:
                rows.add(item, {}, deps, item.duration - item.cost, Source.MEASURED)
            else:
                rows.add(item, self._columns(rank, item, forward), deps, *self._takes(rank, item))
            if item.sequence != NONE and item.work is WorkKind.COMPUTE:
                forward[item.sequence] = begin + item.at
        rows.write()

    def _takes(self, rank: int, item: WorkItem) -> tuple[int, Source]:
        """Picoseconds of a work item: what it took, of a collective without waiting, or what stands instead."""
        if (together := self.groups.get(id(item))) is not None:
            return together[1], Source.MEASURED
        other = self.instead[rank].get(item.row) if rank in self.instead else None
        return (item.duration - item.cost, Source.MEASURED) if other is None else (other, Source.ANALYTICAL)

    def _columns(self, rank: int, item: WorkItem, forward: Mapping[int, int]) -> dict[str, int]:
        """What an operation has beside the columns that all have."""
        match item.work:
            case WorkKind.COMPUTE:
                return {"forward_op": forward.get(item.forward, NONE)}
            case WorkKind.COPY:
                direction = next((d for w, d in _DIRECTIONS.items() if w in item.name), None)
                return {"variant": direction or CopyDirection.DEVICE_TO_DEVICE, "nbytes": item.nbytes}
            case WorkKind.COLLECTIVE:
                return self._collective(rank, item)
            case _:
                return {}

    def _alone(self, rank: int, item: WorkItem, deps: list[int]) -> None:
        stream = self.builder.stream(item.line)
        common: Common = {"phase": item.phase, "stream": stream, "deps": deps}
        if item.step == NONE:
            self._message(item, common)
            return
        # What runs a host's work takes the last of its durations.
        own = _duration(self.device, item.duration - item.cost)
        common["durations"] = (*self._of_step(rank, item), own)
        self.builder.host(item.name, **common)

    def _of_step(self, rank: int, item: WorkItem) -> Iterator[Duration]:
        yield _duration(STEP, item.step)
        if item.name != TRACE and rank in self.seen and self.seen[rank].free_ps:
            yield _duration(FREE, self.seen[rank].free_ps)

    def _collective(self, rank: int, item: WorkItem) -> dict[str, int]:
        assert item.call is not None
        group, _ = self.groups.get(id(item), (None, 0))
        if group is None:
            group = self.builder.group(self._name_alone(rank, item.call), ranks=(rank,))
        return {
            "variant": CollectiveKind[item.call.kind.upper()], "group": group, "nbytes": item.nbytes,
            "dtype": TORCH_DTYPES.get(item.call.dtype, DType.UINT8),
            "payload": _PAYLOADS.get(item.phase, Payload.OTHER), "asynchronous": 1,
        }  # fmt: skip

    def _name_alone(self, rank: int, call: CollectiveCall) -> str:
        """The group of a collective of which only this rank is known to have been in it."""
        world = self.job.traces[rank].world_size
        if len(call.ranks) == 1 or (world == 1 and not call.ranks):
            return "one rank" if world <= 1 else ONE_OF_SEVERAL
        return NOT_TRACED_WORLD if world > 1 and len(set(call.ranks)) == world else NOT_TRACED

    def _message(self, item: WorkItem, common: Common) -> None:
        assert item.call is not None
        group, duration = self.groups[id(item)]
        common["durations"] = (_duration(self.device, duration),)
        add = self.builder.send if item.call.kind == "send" else self.builder.recv
        tag = self.tags.setdefault(item.call.channel, len(self.tags))
        # Of the two ranks in the group, the other one.
        add(item.name, group=group, peer=1, tag=tag, nbytes=item.nbytes, **common)


_COLUMNS = {
    "variant": 0,
    "group": NONE,
    "nbytes": 0,
    "dtype": 0,
    "payload": 0,
    "asynchronous": 0,
    "forward_op": NONE,
}
"""Columns of operations beside those that all state, with what stands in them where an operation has none."""
_OPS = {
    WorkKind.HOST: OpKind.HOST, WorkKind.COMPUTE: OpKind.COMPUTE, WorkKind.COPY: OpKind.COPY,
    WorkKind.COLLECTIVE: OpKind.COLLECTIVE,
}  # fmt: skip


class _Rows:
    """Operations that follow each other, kept until they go into a builder by columns."""

    def __init__(self, builder: GraphBuilder, device: str) -> None:
        self.builder, self.device = builder, device
        self.streams: dict[str, int] = {}
        self.rows: list[tuple[int, ...]] = []
        self.deps: list[list[int]] = []
        self.further: list[tuple[int, dict[str, int]]] = []

    def add(self, item: WorkItem, further: dict[str, int], deps: list[int], took: int, source: Source) -> None:
        """Keeps an operation with its further columns, what it waits for, and how long it takes."""
        if (stream := self.streams.get(item.line)) is None:
            stream = self.streams[item.line] = self.builder.stream(item.line)
        if further:
            self.further.append((len(self.rows), further))
        self.rows.append((_OPS[item.work], self.builder.string(item.name), item.phase, stream, took, source))
        self.deps.append(deps)
        if len(self.rows) == 1:
            self.builder.string(self.device)  # texts are numbered in the order in which they come

    def write(self) -> None:
        """Puts what is kept into the builder."""
        if not self.rows:
            return
        names = ("kind", "name", "phase", "stream", "picoseconds", "source")
        columns = dict(zip(names, np.array(self.rows, np.int64).T, strict=True))
        for name, default in _COLUMNS.items():
            columns[name] = np.full(len(self.rows), default, np.int64)
        for at, further in self.further:
            for name, value in further.items():
                columns[name][at] = value
        offsets = np.cumsum([0, *map(len, self.deps)], dtype=np.int64)
        deps = Ragged(offsets, np.fromiter(chain.from_iterable(self.deps), np.int64, int(offsets[-1])))
        durations = columns.pop("picoseconds"), self.device, columns.pop("source")
        self.builder.op_columns(columns, deps, durations, samples=1)
        self.rows, self.deps, self.further = [], [], []


def _device(traces: TraceSet) -> str:
    """The first device that ran something and is named: ranks of one job have the same kind."""
    ran = False
    for trace in traces.values():
        used = set(trace.pid[trace.on_device].tolist())
        ran = ran or bool(used)
        listed = trace.header.get("deviceProperties")
        known = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) and used else []
        for one in sorted(known, key=lambda one: one.get("id") not in used):
            if isinstance(one.get("name"), str) and one["name"].strip():
                return str(one["name"])
    return UNNAMED if ran else CPU


def _duration(device: str, picoseconds: int) -> Duration:
    return Duration(device=device, picoseconds=picoseconds, source=Source.MEASURED, samples=1)

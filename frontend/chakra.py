"""Chakra execution traces to a job graph: one program a rank, in the one block, with groups of listed ranks.

A node becomes an operation of its name. Where a rank's control dependencies are chains, each chain is a stream, as
`ir.exporters.chakra` writes them; else work runs on one stream by kind: compute, one for each process group and
for each peer, or the stream that PyTorch's traces state.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from echograph.errors import FormatError, InputError
from echograph.frontend import Imported
from echograph.ir.builder import GraphBuilder
from echograph.ir.chakra_traces import ABSENT, MAX_DEPENDENCIES, RankTrace, Traces, read_traces
from echograph.ir.columns import NONE
from echograph.ir.exporters.chakra_dry_run import free_run, who_waits
from echograph.ir.graph import JobGraph, Workload
from echograph.ir.serde_chakra import CommType, NodeType, read_metadata
from echograph.ir.types import CollectiveKind, CopyDirection, DType, OpKind, Payload, Phase, Source
from echograph.units import PS_PER_NS, PS_PER_US

DEVICE = "chakra"
"""Of the durations: whatever the traces were made for."""

WORLD = ""
"""In place of the name of the group of all ranks, which messages are sent in, and collectives without a group."""

MAX_STEP_US = 2**63 // PS_PER_US

_KINDS = {
    CommType.ALL_REDUCE: CollectiveKind.ALL_REDUCE,
    CommType.REDUCE: CollectiveKind.REDUCE,
    CommType.ALL_GATHER: CollectiveKind.ALL_GATHER,
    CommType.GATHER: CollectiveKind.GATHER,
    CommType.SCATTER: CollectiveKind.SCATTER,
    CommType.BROADCAST: CollectiveKind.BROADCAST,
    CommType.ALL_TO_ALL: CollectiveKind.ALL_TO_ALL,
    CommType.REDUCE_SCATTER: CollectiveKind.REDUCE_SCATTER,
    CommType.REDUCE_SCATTER_BLOCK: CollectiveKind.REDUCE_SCATTER,
    CommType.BARRIER: CollectiveKind.BARRIER,
}
_COPIES = {NodeType.MEM_LOAD: CopyDirection.HOST_TO_DEVICE, NodeType.MEM_STORE: CopyDirection.DEVICE_TO_HOST}
_NO_NODES = "control dependencies on nodes that are not there left out"
_CONTRADICTED = "control dependencies that contradict data dependencies left out, with all of their ranks"
_BUFFERED = "sends whose receives begin later: what waits for them waits for what they waited for instead"
_HANGS = "the ranks wait for each other, and a simulation will hang"
_LEFT_OUT = (NodeType.INVALID, NodeType.METADATA)


def load(source: Path) -> Imported:
    """Reads the traces of all ranks in a folder, or those whose names begin with a path (`FOLDER/NAME`).

    Raises:
        InputError: there are no traces, or those of ranks are missing.
        FormatError: a trace is malformed, or does not say what a communication needs; names the node.
    """
    return _Import(read_traces(source)).run()


@dataclass(slots=True)
class _Import:
    traces: Traces
    notes: Counter[str] = field(default_factory=Counter)
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    members: dict[str, frozenset[int]] = field(default_factory=dict)
    timed: bool = False
    buffered: bool = False
    waits: int = 0
    builder: GraphBuilder = field(init=False)
    streams: dict[str, int] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)

    def run(self) -> Imported:
        """The job of all traces."""
        traces = self.traces
        _check_ranks(traces)
        _, metadata = read_metadata(traces.ranks[0].path)
        producer = metadata.get("producer")
        self.builder = GraphBuilder(
            name=traces.prefix,
            producer=producer if isinstance(producer, str) else "chakra",
            workload=Workload(model=traces.prefix),
            streams=(),
        )
        self.groups = dict(traces.groups or {})
        self._add_groups()
        self.timed = any(bool((t.duration_us[t.type == NodeType.COMP] > 0).any()) for t in traces.ranks)
        self._run_dry()
        for trace in traces.ranks:
            begin = self.builder.op_count()
            self._rank(trace)
            self.builder.program(
                [(0, begin, self.builder.op_count(), 0, 0)], role=f"rank {trace.rank}", ranks=(trace.rank,)
            )
        if not self.streams:
            self.builder.stream("compute")
        return Imported(graph=self.builder.build(JobGraph), notes=tuple(self._said()))

    def _run_dry(self) -> None:
        """Finds out whether ranks come to an end, and whether only because sends do not wait for receives."""
        if not free_run(self.traces, buffered=False):
            return
        if waits := free_run(self.traces, buffered=True):
            self.notes[f"{_HANGS}: {who_waits(self.traces, waits)[1]}"] = 1
        else:
            self.buffered = True

    def _add_groups(self) -> None:
        """The groups of the file in its order, then those that nodes name beyond, of the ranks that name them."""
        users: dict[str, list[int]] = defaultdict(list)
        for trace in self.traces.ranks:
            used = np.unique(trace.group[(trace.type == NodeType.COLLECTIVE) & ~trace.host]).tolist()
            for name in dict.fromkeys(self._group(index) for index in used):
                users[name].append(trace.rank)
            if np.isin(trace.type, (NodeType.SEND, NodeType.RECV)).any():
                users[WORLD].append(trace.rank)
        everyone = tuple(trace.rank for trace in self.traces.ranks)
        for name in sorted(users.keys() - self.groups.keys()):
            self.groups[name] = everyone if name == WORLD else tuple(users[name])
            if name != WORLD:
                self.notes[f"group {name[:40]} has no list of ranks: taken for those that use it"] = 1
        for name, ranks in self.groups.items():
            if not ranks or not set(ranks) <= set(everyone) or len(set(ranks)) < len(ranks):
                what = f"group {name[:40]} lists no rank, one twice, or one without a trace"
                raise FormatError(f"{self.traces.groups_path}: {what}")
            self.numbers[name] = self.builder.group(name or "world", ranks=ranks)
            self.members[name] = frozenset(ranks)

    def _group(self, index: int) -> str:
        named = self.traces.groups_named[index]
        everyone = named is None or named == "" or (str(named) == "0" and "0" not in (self.traces.groups or {}))
        return WORLD if everyone else str(named)

    # -- a rank ----------------------------------------------------------------------------------------------

    def _rank(self, trace: RankTrace) -> None:
        if len(missing := np.flatnonzero(trace.data_deps.values == NONE)):
            row = int(trace.data_deps.rows[missing[0]])
            raise FormatError(f"{_where(self.traces, trace, row)}: waits for a node that the file does not have")
        order, control = self._order(trace)
        self.notes[_NO_NODES] += int((trace.ctrl_deps.values == NONE).sum()) if control else 0
        streams, before = self._streams(trace, order, control=control)
        made: dict[int, tuple[int, ...]] = {}
        types = trace.type.tolist()
        for row in order:
            deps = {op for dep in before(row) for op in made[dep]}
            self.waits += len(deps)
            if self.waits > MAX_DEPENDENCIES:
                where = _where(self.traces, trace, row)
                raise FormatError(f"{where}: over {MAX_DEPENDENCIES:,} dependencies where nodes are left out")
            if types[row] in _LEFT_OUT:
                self.notes[f"{NodeType(types[row]).name} nodes left out, their dependencies joined"] += 1
                made[row] = tuple(sorted(deps))
            else:
                op = self._add(trace, row, streams[row], sorted(deps))
                buffered = self.buffered and types[row] == NodeType.SEND
                self.notes[_BUFFERED] += int(buffered)
                made[row] = tuple(sorted(deps)) if buffered else (op,)

    def _order(self, trace: RankTrace) -> tuple[list[int], bool]:
        """Rows in the order of the program, and whether control dependencies are kept.

        In traces of PyTorch they are the stack of calls, which data dependencies may contradict.
        """
        order = trace.order()
        if len(order) == len(trace):
            return order, True
        if len(alone := trace.order(control=False)) == len(trace):
            self.notes[_CONTRADICTED] += len(trace.ctrl_deps.values)
            return alone, False
        stuck = min(set(range(len(trace))) - set(alone), key=lambda row: int(trace.id[row]))
        raise FormatError(f"{_where(self.traces, trace, stuck)}: waits for itself, in a cycle of dependencies")

    def _streams(
        self, trace: RankTrace, order: list[int], *, control: bool
    ) -> tuple[dict[int, int], Callable[[int], set[int]]]:
        """The stream of every row, and what a row waits for beyond the one before it there."""
        chains = _chains(trace) if control and not self.buffered else None
        taken: dict[int | str, int] = {}
        found: dict[int, int] = {}
        counts: Counter[str] = Counter()
        for row in order:
            kind = self._kind(trace, row)
            key = (chains or {}).get(row, kind)
            if key not in taken:
                counts[kind] += 1
                taken[key] = self._stream(kind if counts[kind] == 1 else f"{kind} {counts[kind]}")
            found[row] = taken[key]
        kinds = (trace.data_deps,) if chains is not None or not control else (trace.data_deps, trace.ctrl_deps)
        lists = [(kind.offsets.tolist(), kind.values.tolist()) for kind in kinds]
        return found, lambda row: {
            dep for offsets, deps in lists for dep in deps[offsets[row] : offsets[row + 1]] if dep != NONE
        }

    def _stream(self, name: str) -> int:
        if name not in self.streams:
            self.streams[name] = len(self.streams)
            self.builder.streams.append(name)
        return self.streams[name]

    def _kind(self, trace: RankTrace, row: int) -> str:
        """The stream of a node that no chain puts on one."""
        if trace.host[row]:
            return "host"
        if int(trace.stream[row]) != ABSENT:
            return f"stream {int(trace.stream[row])}"
        match NodeType(int(trace.type[row])):
            case NodeType.COLLECTIVE:
                return f"group {self._group(int(trace.group[row]))[:40] or 'world'}"
            case NodeType.SEND:
                return f"send {int(trace.comm_dst[row]) - trace.rank:+d}{self._lane(trace, row)}"
            case NodeType.RECV:
                return f"recv {int(trace.comm_src[row]) - trace.rank:+d}{self._lane(trace, row)}"
            case NodeType.MEM_LOAD | NodeType.MEM_STORE:
                return "copy"
            case _:
                return "compute"

    def _lane(self, trace: RankTrace, row: int) -> str:
        """Where sends do not wait for their receives, messages of another tag may overtake."""
        return f" tag {max(0, int(trace.comm_tag[row]))}" if self.buffered else ""

    # -- a node ----------------------------------------------------------------------------------------------

    def _add(self, trace: RankTrace, row: int, stream: int, deps: list[int]) -> int:
        builder, kind = self.builder, NodeType(int(trace.type[row]))
        values = self._values(trace, row, kind)
        op = OpKind.HOST if trace.host[row] else _OPS[kind]
        name = builder.string(self.traces.name(trace, row))
        times = self._durations(trace, row, kind)
        builder.op_row(op, name, Phase.OTHER, 0, stream, (), (), deps, times, **values)
        return builder.op_count() - 1

    def _durations(self, trace: RankTrace, row: int, kind: NodeType) -> list[tuple[int, int, int, int, float]]:
        micros = int(trace.duration_us[row])
        if micros >= MAX_STEP_US:
            raise FormatError(f"{_where(self.traces, trace, row)}: takes {micros:,} microseconds, beyond 63 bits")
        works = kind == NodeType.COMP or bool(trace.host[row])
        if not micros and not (works and self.timed):
            return []
        # What is 0 in whole microseconds is a nanosecond to readers of the format.
        picoseconds = micros * PS_PER_US or PS_PER_NS
        return [(self.builder.string(DEVICE), picoseconds, Source.IMPORTED, 0, 0.0)]

    def _values(self, trace: RankTrace, row: int, kind: NodeType) -> dict[str, int]:
        if trace.host[row]:
            return {}
        match kind:
            case NodeType.COMP:
                flops, moved = int(trace.num_ops[row]), int(trace.tensor_size[row])
                return {"flops": max(0, flops), "bytes_read": max(0, moved)}
            case NodeType.MEM_LOAD | NodeType.MEM_STORE:
                return {"variant": _COPIES[kind], "nbytes": max(0, int(trace.tensor_size[row]))}
            case NodeType.COLLECTIVE:
                return self._collective(trace, row)
            case _:
                return self._message(trace, row, kind)

    def _collective(self, trace: RankTrace, row: int) -> dict[str, int]:
        name, code = self._group(int(trace.group[row])), int(trace.comm_type[row])
        if not 0 <= code < len(CommType):
            said = "no comm_type" if code == ABSENT else f"the unknown comm_type {code}"
            raise FormatError(f"{_where(self.traces, trace, row)}: a collective of {said}")
        if trace.rank not in self.members[name]:
            where = _where(self.traces, trace, row)
            raise FormatError(
                f"{where}: a collective of group {name[:40]}, of which rank {trace.rank} is no member"
            )
        size = 0 if code == CommType.BARRIER else self._size(trace, row)
        if code in (CommType.ALL_GATHER, CommType.GATHER):
            size *= len(self.groups[name])  # the format counts the part of a rank
        if size >= 2**63:
            raise FormatError(f"{_where(self.traces, trace, row)}: gathers {size:,} bytes, beyond 63 bits")
        return {
            "variant": _KINDS[CommType(code)], "group": self.numbers[name], "nbytes": size, "dtype": DType.UINT8,
            "payload": Payload.OTHER, "asynchronous": True,
        }  # fmt: skip

    def _message(self, trace: RankTrace, row: int, kind: NodeType) -> dict[str, int]:
        stated = trace.comm_dst if kind == NodeType.SEND else trace.comm_src
        peer, tag = int(stated[row]), max(0, int(trace.comm_tag[row]))
        ranks = len(self.traces.ranks)
        if not 0 <= peer < ranks or peer == trace.rank:
            which = "no other rank" if peer == ABSENT else f"rank {peer}"
            towards = "to" if kind == NodeType.SEND else "from"
            raise FormatError(
                f"{_where(self.traces, trace, row)}: a message {towards} {which} of 0 to {ranks - 1}"
            )
        return {
            "group": self.numbers[WORLD], "peer": peer - trace.rank, "tag": tag, "nbytes": self._size(trace, row),
            "payload": Payload.OTHER,
        }  # fmt: skip

    def _size(self, trace: RankTrace, row: int) -> int:
        size = int(trace.comm_size[row])
        if size < 0:
            said = "no comm_size" if size == ABSENT else f"the comm_size {size}"
            raise FormatError(f"{_where(self.traces, trace, row)}: a communication of {said}")
        return size

    def _said(self) -> Iterator[str]:
        for what, count in self.notes.items():
            if count:
                yield what if what.startswith(("group ", _HANGS)) else f"{count:,} {what}"
        lost = ", ".join(f"{name} ({count:,})" for name, count in list(self.traces.others.items())[:12])
        if lost:
            more = f" and {len(self.traces.others) - 12} more" if len(self.traces.others) > 12 else ""
            yield f"attributes that a graph does not hold, with their nodes: {lost}{more}"
        if not self.timed and any(bool((trace.type == NodeType.COMP).any()) for trace in self.traces.ranks):
            yield "no computation has a duration: num_ops and tensor_size are kept, and a device's costs apply"


_OPS = {
    NodeType.COMP: OpKind.COMPUTE,
    NodeType.MEM_LOAD: OpKind.COPY,
    NodeType.MEM_STORE: OpKind.COPY,
    NodeType.COLLECTIVE: OpKind.COLLECTIVE,
    NodeType.SEND: OpKind.SEND,
    NodeType.RECV: OpKind.RECV,
}


def _chains(trace: RankTrace) -> dict[int, int] | None:
    """For rows in chains of control dependencies the first of their chain; None where they are no chains.

    In a chain a node has one control dependency at most, and is that of one at most.
    """
    rows, deps = trace.ctrl_deps.rows, trace.ctrl_deps.values
    if not len(deps) or len(np.unique(rows)) < len(rows) or len(np.unique(deps)) < len(deps) or deps.min() == NONE:
        return None
    after = dict(zip(deps.tolist(), rows.tolist(), strict=True))
    first: dict[int, int] = {}
    for row in after.keys() - set(rows.tolist()):
        at: int | None = row
        while at is not None:
            first[at] = row
            at = after.get(at)
    return first


def _check_ranks(traces: Traces) -> None:
    """Refuses a set that lacks ranks."""
    have, highest = len(traces.ranks), traces.ranks[-1].rank
    if highest != have - 1:
        missing = next(i for i, trace in enumerate([*traces.ranks, None]) if trace is None or trace.rank != i)
        folder = traces.ranks[0].path.parent
        raise InputError(
            f"{folder}: has traces of {have} ranks up to rank {highest}, but none of rank {missing}: add it"
        )


def _where(traces: Traces, trace: RankTrace, row: int) -> str:
    return f"{trace.path}: node {trace.id[row]} ({traces.name(trace, row)[:60]})"

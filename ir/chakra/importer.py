"""Chakra execution traces to a job graph: one program a rank, in the one block, with groups of listed ranks.

A node becomes an operation of its name. Where a rank's control dependencies are chains, each chain is a stream, as
`writer` writes them; else work runs on one stream by kind: compute, one for each process group and
for each peer, or the stream that PyTorch's traces state.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from echograph.errors import FormatError, InputError
from echograph.ir.builder import GraphBuilder
from echograph.ir.chakra.dry_run import free_run, surely_end, who_waits
from echograph.ir.chakra.messages import CommType, NodeType, read_metadata
from echograph.ir.chakra.reader import ABSENT, MAX_DEPENDENCIES, RankTrace, Traces, read_traces
from echograph.ir.columns import NONE, Int64, Ragged
from echograph.ir.formats import Imported
from echograph.ir.graph import JobGraph, Workload
from echograph.ir.types import CollectiveKind, CopyDirection, DType, OpKind, Payload, Phase, Source
from echograph.progress import Progress, silent
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


def load(source: Path, progress: Progress = silent) -> Imported:
    """Reads the traces of all ranks in a folder, or those whose names begin with a path (`FOLDER/NAME`).

    Args:
        source: the folder, or the path.
        progress: told what is being done, and how much of it has been.

    Raises:
        InputError: there are no traces, or those of ranks are missing.
        FormatError: a trace is malformed, or does not say what a communication needs; names the node.
    """
    return _Import(read_traces(source, progress), progress).run()


@dataclass(slots=True)
class _Import:
    traces: Traces
    progress: Progress
    notes: Counter[str] = field(default_factory=Counter)
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    members: dict[str, frozenset[int]] = field(default_factory=dict)
    timed: bool = False
    buffered: bool = False
    waits: int = 0
    shapes: dict[int, _Shape] = field(default_factory=dict)
    programs: dict[tuple[int, bytes], tuple[int, int, list[int]]] = field(default_factory=dict)
    names: Int64 = field(init=False)
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
        self.names = np.array([self.builder.string(name) for name in traces.names], np.int64)
        shapes = [self._shape(trace) for trace in traces.ranks]
        self.progress("looking for ranks that wait for each other")
        self._run_dry(shapes)
        for done, (trace, shape) in enumerate(zip(traces.ranks, shapes, strict=True)):
            self._rank(trace, shape)
            self.progress("building the job, by ranks", done + 1, len(traces.ranks))
        for begin, end, ranks in self.programs.values():
            role = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} and {len(ranks) - 1} alike"
            self.builder.program([(0, begin, end, 0, 0)], role=role, ranks=ranks)
        if not self.streams:
            self.builder.stream("compute")
        self.progress("verifying the job")
        return Imported(graph=self.builder.build(JobGraph), notes=tuple(self._said()))

    def _run_dry(self, shapes: Sequence[_Shape]) -> None:
        """Finds out whether ranks come to an end, and whether only because sends do not wait for receives."""
        ranks = [trace.rank for trace in self.traces.ranks]
        edges = {rank: shape.edges for rank, shape in zip(ranks, shapes, strict=True)}
        chains = {rank: shape.chains for rank, shape in zip(ranks, shapes, strict=True)}
        if surely_end(self.traces, edges, chains) or not free_run(self.traces, buffered=False):
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

    # -- what ranks alike have in common ---------------------------------------------------------------------

    def _shape(self, trace: RankTrace) -> _Shape:
        """The order of a rank's nodes; of ranks with the same nodes and dependencies it is worked out once."""
        key = id(trace.id)  # ranks that were found alike share their columns
        if key not in self.shapes:
            self.shapes[key] = self._ordered(trace)
        return self.shapes[key]

    def _ordered(self, trace: RankTrace) -> _Shape:
        """Rows in the order of the program, with control dependencies unless data dependencies contradict them.

        In traces of PyTorch they are the stack of calls, which data dependencies may contradict.
        """
        if len(missing := np.flatnonzero(trace.data_deps.values == NONE)):
            row = int(trace.data_deps.rows[missing[0]])
            raise FormatError(f"{_where(self.traces, trace, row)}: waits for a node that the file does not have")
        order = trace.order()
        if control := len(order) == len(trace):
            return _Shape(trace, order, control=control)
        if len(alone := trace.order(control=False)) == len(trace):
            return _Shape(trace, alone, control=control)
        stuck = min(set(range(len(trace))) - set(alone), key=lambda row: int(trace.id[row]))
        raise FormatError(f"{_where(self.traces, trace, stuck)}: waits for itself, in a cycle of dependencies")

    # -- a rank ----------------------------------------------------------------------------------------------

    def _rank(self, trace: RankTrace, shape: _Shape) -> None:
        """Adds the operations of a rank; where another has the very same, it runs those."""
        layout = shape.layout(buffered=self.buffered)
        if self.waits + layout.waits > MAX_DEPENDENCIES or layout.too_many is not None:
            row = int(shape.order[-1]) if layout.too_many is None else layout.too_many
            where = _where(self.traces, trace, row)
            raise FormatError(f"{where}: over {MAX_DEPENDENCIES:,} dependencies where nodes are left out")
        self.waits += layout.waits
        if shape.control:
            self.notes[_NO_NODES] += int((trace.ctrl_deps.values == NONE).sum())
        else:
            self.notes[_CONTRADICTED] += len(trace.ctrl_deps.values)
        for kind, count in zip(
            *np.unique(trace.type[np.isin(trace.type, _LEFT_OUT)], return_counts=True), strict=True
        ):
            self.notes[f"{NodeType(kind).name} nodes left out, their dependencies joined"] += int(count)
        if self.buffered:
            self.notes[_BUFFERED] += int((trace.type == NodeType.SEND).sum())
        streams = self._streams(trace, layout)
        columns = {name: column[layout.rows] for name, column in self._columns(trace, shape).items()}
        columns["stream"] = streams[layout.rows]
        # Of ranks that were found alike nothing else differs.
        own = np.stack([columns[name] for name in ("stream", "group", "peer")]).astype(np.int32)
        begin = self.builder.op_count()
        first: tuple[int, int, list[int]] = (begin, begin + len(layout.rows), [])
        _, _, ranks = self.programs.setdefault(
            (id(trace.id), blake2b(own.tobytes(), digest_size=32).digest()), first
        )
        ranks.append(trace.rank)
        if ranks is first[2]:
            durations = columns.pop("picoseconds"), DEVICE, Source.IMPORTED
            deps = Ragged(layout.deps.offsets, layout.deps.values + begin)
            self.builder.op_columns(columns, deps, durations)

    def _streams(self, trace: RankTrace, layout: _Layout) -> Int64:
        """The stream of every row: that of its chain, which its first row names, or else one by kind."""
        taken: dict[int | str, int] = {}
        counts: Counter[str] = Counter()
        found = np.zeros(len(trace), np.int64)
        rows = layout.leads
        facts = (trace.host, trace.stream, trace.type, trace.group, trace.comm_src, trace.comm_dst, trace.comm_tag)
        kinds: dict[tuple[int, ...], str] = {}
        each = zip(rows.tolist(), zip(*(fact[rows].tolist() for fact in facts), strict=True), strict=True)
        chained = layout.chained[rows].tolist()
        streams = []
        for (row, fact), in_chain in zip(each, chained, strict=True):
            kind = kinds.get(fact) or kinds.setdefault(fact, self._kind(trace, row))
            key = row if in_chain else kind
            if key not in taken:
                counts[kind] += 1
                taken[key] = self._stream(kind if counts[kind] == 1 else f"{kind} {counts[kind]}")
            streams.append(taken[key])
        found[rows] = streams
        return found[layout.lead]

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

    # -- its nodes -------------------------------------------------------------------------------------------

    def _columns(self, trace: RankTrace, shape: _Shape) -> dict[str, npt.NDArray[Any]]:
        """What the nodes of a rank become, a row each, whatever their kind.

        Raises:
            FormatError: one does not say what it needs; names the first.
        """
        device = ~trace.host & ~np.isin(trace.type, _LEFT_OUT)
        work = device & (trace.type == NodeType.COMP)
        copies = device & np.isin(trace.type, tuple(_COPIES))
        collective = device & (trace.type == NodeType.COLLECTIVE)
        sends, receives = (device & (trace.type == kind) for kind in (NodeType.SEND, NodeType.RECV))
        talks = sends | receives
        code = np.clip(trace.comm_type, -1, len(CommType))
        barrier = collective & (code == CommType.BARRIER)
        numbers, sizes, inside = self._groups_of(trace)
        shares = np.where(
            np.isin(code, (CommType.ALL_GATHER, CommType.GATHER)) & collective, sizes[trace.group], 1
        )
        peer = np.where(sends, trace.comm_dst, trace.comm_src)
        wrong = collective & ((code < 0) | (code >= len(CommType)) | ~inside[trace.group])
        wrong |= (collective & ~barrier | talks) & ((trace.comm_size < 0) | (trace.comm_size > _MAX // shares))
        wrong |= talks & ((peer < 0) | (peer >= len(self.traces.ranks)) | (peer == trace.rank))
        wrong |= (trace.duration_us >= MAX_STEP_US) & ~np.isin(trace.type, _LEFT_OUT)
        if wrong.any():
            self._refuse(trace, int(shape.order[np.flatnonzero(wrong[shape.order])[0]]))
        timed = (trace.duration_us > 0) | (work | trace.host if self.timed else np.zeros(len(trace), np.bool_))
        micros = trace.duration_us.astype(np.int64)
        moved = np.where(barrier, 0, trace.comm_size * shares)
        zero = np.zeros(len(trace), np.int64)
        return {
            "kind": np.where(trace.host, OpKind.HOST, _OF_TYPE[0][trace.type]),
            "name": self.names[trace.name],
            "phase": np.full(len(trace), Phase.OTHER),
            "flops": np.where(work, np.maximum(trace.num_ops, 0), zero),
            "bytes_read": np.where(work, np.maximum(trace.tensor_size, 0), zero),
            "variant": np.where(collective, _VARIANT[code], np.where(copies, _OF_TYPE[1][trace.type], zero)),
            "dtype": np.where(collective, DType.UINT8, zero),
            "payload": np.where(collective | talks, Payload.OTHER, zero),
            "asynchronous": collective,
            "group": np.where(collective, numbers[trace.group], np.where(talks, self.numbers.get(WORLD, 0), NONE)),
            "peer": np.where(talks, peer - trace.rank, zero),
            "tag": np.where(talks, np.maximum(trace.comm_tag, 0), zero),
            "nbytes": np.where(
                copies, np.maximum(trace.tensor_size, 0), np.where(collective | talks, moved, zero)
            ),
            # What is 0 in whole microseconds is a nanosecond to readers of the format.
            "picoseconds": np.where(timed, np.where(micros > 0, micros * PS_PER_US, PS_PER_NS), NONE),
        }  # fmt: skip

    def _groups_of(self, trace: RankTrace) -> tuple[Int64, Int64, npt.NDArray[np.bool_]]:
        """For what a rank's nodes state as their group: its number, its size, whether the rank is in it."""
        count = len(self.traces.groups_named)
        numbers, sizes, inside = np.full(count, NONE), np.ones(count, np.int64), np.zeros(count, np.bool_)
        for index in np.unique(trace.group).tolist():
            if (name := self._group(index)) in self.numbers:
                numbers[index], sizes[index] = self.numbers[name], max(1, len(self.groups[name]))
                inside[index] = trace.rank in self.members[name]
        return numbers, sizes, inside

    def _refuse(self, trace: RankTrace, row: int) -> NoReturn:
        """Says what is wrong with a node."""
        where, kind = _where(self.traces, trace, row), NodeType(int(trace.type[row]))
        if not trace.host[row] and kind == NodeType.COLLECTIVE:
            self._refuse_collective(trace, row, where)
        if not trace.host[row] and kind in (NodeType.SEND, NodeType.RECV):
            self._refuse_message(trace, row, where, kind)
        raise FormatError(f"{where}: takes {int(trace.duration_us[row]):,} microseconds, beyond 63 bits")

    def _refuse_collective(self, trace: RankTrace, row: int, where: str) -> None:
        name, code, size = self._group(int(trace.group[row])), int(trace.comm_type[row]), int(trace.comm_size[row])
        if not 0 <= code < len(CommType):
            said = "no comm_type" if code == ABSENT else f"the unknown comm_type {code}"
            raise FormatError(f"{where}: a collective of {said}")
        if trace.rank not in self.members[name]:
            raise FormatError(
                f"{where}: a collective of group {name[:40]}, of which rank {trace.rank} is no member"
            )
        if code != CommType.BARRIER:
            _refuse_size(size, where)
            # The format counts the part of a rank.
            size *= len(self.groups[name]) if code in (CommType.ALL_GATHER, CommType.GATHER) else 1
            if size >= 2**63:
                raise FormatError(f"{where}: gathers {size:,} bytes, beyond 63 bits")

    def _refuse_message(self, trace: RankTrace, row: int, where: str, kind: NodeType) -> None:
        peer, ranks = (
            int((trace.comm_dst if kind == NodeType.SEND else trace.comm_src)[row]),
            len(self.traces.ranks),
        )
        if not 0 <= peer < ranks or peer == trace.rank:
            which = "no other rank" if peer == ABSENT else f"rank {peer}"
            towards = "to" if kind == NodeType.SEND else "from"
            raise FormatError(f"{where}: a message {towards} {which} of 0 to {ranks - 1}")
        _refuse_size(int(trace.comm_size[row]), where)

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
_OF_TYPE = np.array(
    [[_OPS.get(kind, OpKind.HOST) for kind in NodeType], [_COPIES.get(kind, 0) for kind in NodeType]], np.int64
)
_VARIANT = np.array([*(_KINDS[kind] for kind in CommType), 0, 0], np.int64)
_MAX = np.int64(2**63 - 1)


class _Shape:
    """What ranks with the same nodes and dependencies have in common.

    Attributes:
        order: rows in the order of the program.
        control: whether control dependencies are kept.
        edges: rows (before, after) of the dependencies that are kept, each pair once.
        chains: for every row the first one of its chain of control dependencies, -1 where it is in none; None
            where these are no chains.
    """

    def __init__(self, trace: RankTrace, order: Sequence[int], *, control: bool) -> None:
        self.order, self.control = np.array(order, np.int64), control
        self.edges = trace.edges(control=control)
        self.chains = _chains(trace) if control else None
        self._data_alone = trace.edges(control=False) if self.chains is not None else self.edges
        self._type = trace.type
        self._layout: _Layout | None = None

    def layout(self, *, buffered: bool) -> _Layout:
        """What becomes of the nodes; the same in every call."""
        if self._layout is None:
            chains = None if buffered else self.chains
            own = np.arange(len(self.order))
            lead = own if chains is None else np.where(chains == NONE, own, chains)
            place = np.empty(len(self.order), np.int64)
            place[self.order] = own
            before, after = self.edges if chains is None else self._data_alone
            left_out = np.isin(self._type, _LEFT_OUT)
            through = left_out | (self._type == NodeType.SEND) if buffered else left_out
            joined = _Joined(place[before], place[after], left_out[self.order], through[self.order])
            leads = np.unique(lead)
            self._layout = _Layout(
                rows=self.order[~left_out[self.order]],
                deps=joined.deps,
                waits=joined.waits,
                too_many=None if joined.too_many is None else int(self.order[joined.too_many]),
                lead=lead,
                leads=leads[np.argsort(place[leads])],
                chained=np.zeros(len(own), np.bool_) if chains is None else chains != NONE,
            )
        return self._layout


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Layout:
    """What becomes of the nodes of ranks alike.

    Attributes:
        rows: those that become operations, in order.
        deps: of each of these, what it waits for beyond the one before it on its stream, as places among them.
        waits: how many dependencies there are, those of nodes that are left out among them.
        too_many: the row at which there are more than is read; None where there are not.
        lead: for every row the one that says on which stream it is.
        leads: these, in order.
        chained: for every row, whether it is in a chain.
    """

    rows: Int64
    deps: Ragged
    waits: int
    too_many: int | None
    lead: Int64
    leads: Int64
    chained: npt.NDArray[np.bool_]


class _Joined:
    """Dependencies between places, without those left out: what waits for one waits for what it waits for.

    Args:
        before: places.
        after: places that wait for them, each pair once.
        left_out: bool [places].
        through: bool [places], which are not waited for themselves.
    """

    def __init__(
        self, before: Int64, after: Int64, left_out: npt.NDArray[np.bool_], through: npt.NDArray[np.bool_]
    ) -> None:
        self.too_many: int | None = None
        count = len(left_out)
        order = np.lexsort((before, after))
        before, after = before[order], after[order]
        offsets = np.concatenate([[0], np.cumsum(np.bincount(after, minlength=count))])
        if not through.any():
            self.deps, self.waits = Ragged(offsets, before), len(before)
            return
        number = np.cumsum(~left_out) - 1
        made: list[tuple[int, ...]] = []
        values: list[int] = []
        ends = [0]
        self.waits = 0
        for place in range(count):
            found = {op for dep in before[offsets[place] : offsets[place + 1]].tolist() for op in made[dep]}
            self.waits += len(found)
            if self.waits > MAX_DEPENDENCIES:
                self.too_many = place
                break
            deps = tuple(sorted(found))
            made.append(deps if through[place] else (int(number[place]),))
            if not left_out[place]:
                values += deps
                ends.append(len(values))
        self.deps = Ragged(np.array(ends, np.int64), np.array(values, np.int64))


def _chains(trace: RankTrace) -> Int64 | None:
    """For every row the first of its chain of control dependencies, -1 where it has none; None: no chains.

    In a chain a node has one control dependency at most, and is that of one at most. There is no cycle.
    """
    rows, deps = trace.ctrl_deps.rows, trace.ctrl_deps.values
    if not len(deps) or len(np.unique(rows)) < len(rows) or len(np.unique(deps)) < len(deps) or deps.min() == NONE:
        return None
    first = np.arange(len(trace))
    first[rows] = deps
    while not np.array_equal(further := first[first], first):
        first = further
    alone = np.ones(len(trace), np.bool_)
    alone[rows] = alone[deps] = False
    first[alone] = NONE
    return first


def _refuse_size(size: int, where: str) -> None:
    if size < 0:
        said = "no comm_size" if size == ABSENT else f"the comm_size {size}"
        raise FormatError(f"{where}: a communication of {said}")


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

"""A job as Chakra execution traces, which ASTRA-sim 2 reads: one file a rank, and the groups of all ranks.

An operation is a kind of node and its attributes, or nothing. Readers simulate all-reduce, all-gather,
reduce-scatter and all-to-all alone. The other collectives become the one of these that moves as many bytes
through the busiest rank of a ring.

Operations keep the order of their program, whose place is their id, since readers issue what is ready by
ascending id. Streams are chains of control dependencies; what streams wait for of each other are data
dependencies.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from echograph.errors import PlanError, SimulationError, UsageError
from echograph.ir.chakra.messages import (
    AttributeValue,
    CommType,
    NodeType,
    Template,
    encode_attributes,
    encode_name,
)
from echograph.ir.columns import NONE, Int64, expand_ranges
from echograph.ir.files import whole_folder
from echograph.ir.formats import Exported
from echograph.ir.graph import Group, JobGraph, Program
from echograph.ir.schedule import Edges
from echograph.ir.types import COMMUNICATIONS, CollectiveKind, OpKind, Source
from echograph.progress import Progress, silent
from echograph.units import PS_PER_NS, PS_PER_US, format_time

DIMENSIONS = 4
"""Of a network, at most: collectives say of each that they use it."""

BARRIER_BYTES = 4
MAX_TAGS = 1_000_000
"""The first tag that ASTRA-sim gives the messages of collectives."""

LEAST_GATHER_BYTES = 64
"""ASTRA-sim divides the shard of an all-gather into pieces, and loops for ever where it has fewer bytes than it is
to have pieces (`preferred-dataset-splits`): smaller shards are rounded up to this."""

_COLLECTIVES = {
    CollectiveKind.ALL_REDUCE: CommType.ALL_REDUCE,
    CollectiveKind.ALL_GATHER: CommType.ALL_GATHER,
    CollectiveKind.REDUCE_SCATTER: CommType.REDUCE_SCATTER,
    CollectiveKind.ALL_TO_ALL: CommType.ALL_TO_ALL,
    CollectiveKind.BROADCAST: CommType.ALL_GATHER,
    CollectiveKind.REDUCE: CommType.REDUCE_SCATTER,
    CollectiveKind.GATHER: CommType.ALL_GATHER,
    CollectiveKind.SCATTER: CommType.REDUCE_SCATTER,
    CollectiveKind.BARRIER: CommType.ALL_REDUCE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """A row of the operation table as a node.

    Attributes:
        kind: of the node.
        attributes: encoded, those that all ranks have alike.
        differs: where the others come from.
    """

    kind: NodeType
    attributes: bytes
    differs: Differs | None = None


@dataclass(slots=True, kw_only=True)
class Lowering:
    """Lowers the rows of a job, and counts what it changed.

    Attributes:
        job: the job.
        picoseconds: int64 [operations], how long each runs; -1 where unknown.
        sizes: ranks of every group.
        changed: by what was done, the rows that it was done to.
        first_tags: by group, what is added to the tags of its messages.
    """

    job: JobGraph
    picoseconds: Int64
    sizes: tuple[int, ...]
    changed: Counter[str] = field(default_factory=Counter)
    first_tags: Mapping[int, int] = field(init=False)
    _kernels: dict[tuple[int, int], Lowered] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.first_tags = _first_tags(self.job)

    def __call__(self, row: int) -> Lowered | None:
        """The node of a row; None where the trace has none.

        Raises:
            SimulationError: it runs on the device, and how long is unknown.
        """
        match OpKind(int(self.job.ops.kind[row])):
            case OpKind.COLLECTIVE:
                return self._collective(row)
            case OpKind.SEND | OpKind.RECV as kind:
                return self._message(row, kind)
            case OpKind.COPY:
                return self._work(
                    row, flops=0, moved=int(self.job.ops.nbytes[row]), change="copies run as compute"
                )
            case OpKind.HOST:
                self.changed["operations of the host left out"] += 1
                return None
            case OpKind.COMPUTE:
                ops = self.job.ops
                moved = int(ops.bytes_read[row]) + int(ops.bytes_written[row])
                return self._work(row, flops=int(ops.flops[row]), moved=moved)

    def _work(self, row: int, *, flops: int, moved: int, change: str = "") -> Lowered | None:
        if self.picoseconds[row] < 0:
            name = self.job.strings[self.job.ops.name[row]]
            raise SimulationError(f"operation {row} ({name}) has no duration on this device: annotate the graph")
        if flops == moved == self.picoseconds[row] == 0:
            return None
        if change:
            self.changed[change] += 1
        if (flops, moved) not in self._kernels:
            # A roofline divides both by each other: neither is 0.
            work: dict[str, AttributeValue] = {
                "num_ops": max(1, flops),
                "tensor_size": max(1, moved),
                "is_cpu_op": False,
            }
            self._kernels[flops, moved] = Lowered(kind=NodeType.COMP, attributes=encode_attributes(work))
        return self._kernels[flops, moved]

    def _collective(self, row: int) -> Lowered | None:
        ops, group = self.job.ops, int(self.job.ops.group[row])
        kind, size, ranks = CollectiveKind(int(ops.variant[row])), int(ops.nbytes[row]), self.sizes[group]
        if kind == CollectiveKind.BARRIER:
            size = BARRIER_BYTES
        if ranks == 1 or size == 0:
            return None
        becomes = _COLLECTIVES[kind]
        if becomes.name != kind.name:
            self.changed[f"{kind.name.lower()} as {becomes.name.lower()}"] += 1
        if becomes == CommType.ALL_GATHER:
            size = -(-size // ranks)
            if size < LEAST_GATHER_BYTES:
                self.changed[f"all_gather shards made {LEAST_GATHER_BYTES} bytes"] += 1
            size = max(size, LEAST_GATHER_BYTES)
        attributes: dict[str, AttributeValue] = {
            "comm_type": int(becomes),
            "comm_size": size,
            "involved_dim": (True,) * DIMENSIONS,
            "comm_priority": 0,
            "is_cpu_op": False,
        }
        return Lowered(
            kind=NodeType.COLLECTIVE,
            attributes=encode_attributes(attributes),
            differs=(OpKind.COLLECTIVE, group, 0),
        )

    def _message(self, row: int, kind: OpKind) -> Lowered | None:
        ops, group = self.job.ops, int(self.job.ops.group[row])
        away, size = int(ops.peer[row]) % self.sizes[group], int(ops.nbytes[row])
        if away == 0 or size == 0:
            return None
        # Two groups that hold the same two ranks keep their messages apart.
        tag = int(ops.tag[row]) + self.first_tags[group]
        attributes: dict[str, AttributeValue] = {"comm_tag": tag, "comm_size": size, "is_cpu_op": False}
        return Lowered(
            kind=NodeType.SEND if kind == OpKind.SEND else NodeType.RECV,
            attributes=encode_attributes(attributes),
            differs=(kind, group, away),
        )


def _first_tags(job: JobGraph) -> dict[int, int]:
    """Tags of one group follow those of another, since two groups may hold the same two ranks."""
    ops, first, found = job.ops, 0, {}
    messages = np.isin(ops.kind, (OpKind.SEND, OpKind.RECV))
    for group in np.unique(ops.group[messages]).tolist():
        found[group] = first
        first += 1 + int(ops.tag[messages & (ops.group == group)].max())
    if first > MAX_TAGS:
        raise PlanError(f"messages have {first:,} tags: at most {MAX_TAGS:,} are told apart from collectives")
    return found


# -- who takes part -------------------------------------------------------------------------------------------
# Which ranks a role has, and who is whose group and peer: what differs between the traces of its ranks.


MAX_RANKS = 2**20

Differs = tuple[int, int, int]
"""What a communication is between: an `OpKind`, a group of the graph, and how far away the peer is."""


class Communicators:
    """The groups of a job as numbered lists of ranks.

    Numbers begin with 1, since readers take 0 for the whole world. Groups of listed ranks stand, in a job with a
    mesh, for the first place along the axes that programs leave free; the other places have groups alike.

    Args:
        job: the job.
        used: groups, as indices, that get numbers because collectives use them.

    Raises:
        PlanError: more than 2^20 ranks.
    """

    def __init__(self, job: JobGraph, used: Iterable[int]) -> None:
        if job.world_size > MAX_RANKS:
            raise PlanError(f"{job.world_size:,} ranks: traces are written for at most {MAX_RANKS:,}")
        self.job = job
        self._groups: dict[int, _Numbered] = {}
        first = 1
        for index in sorted(used):
            self._groups[index] = numbered = self._number(job.groups[index], first)
            first += len(numbered.starts)
        self.count = first - 1

    def ranks(self, number: int) -> Int64:
        """The ranks that run a program, ascending."""
        job, program = self.job, self.job.programs[number]
        if not job.mesh:
            return np.array(sorted(program.ranks) or [number], np.int64)
        start = sum(job.strides[axis] * value for axis, value in program.coordinates.items())
        return np.array(job.ranks_along(job.strides.keys() - program.coordinates.keys(), start))

    def size(self, group: int) -> int:
        """Ranks of a group."""
        return len(self._offsets(self.job.groups[group]))

    def members(self) -> Iterator[tuple[int, list[int]]]:
        """Number and ranks of every numbered group."""
        for numbered in self._groups.values():
            for place, start in enumerate(numbered.starts.tolist()):
                yield numbered.first + place, (start + numbered.offsets).tolist()

    def attributes(self, differs: Differs, rank: int) -> dict[str, AttributeValue]:
        """The attributes of a communication that only its rank knows.

        Raises:
            PlanError: the rank is in no group of this kind.
        """
        kind, index, away = differs
        if kind == OpKind.COLLECTIVE:
            numbered = self._groups[index]
            start = self._start(index, rank)
            return {"pg_name": str(numbered.first + int(np.searchsorted(numbered.starts, start)))}
        peer = self._peer(index, rank, away)
        source, target = (rank, peer) if kind == OpKind.SEND else (peer, rank)
        return {"comm_src": source, "comm_dst": target}

    def _peer(self, index: int, rank: int, away: int) -> int:
        offsets, start = self._offsets(self.job.groups[index]), self._start(index, rank)
        place = int(np.flatnonzero(offsets == rank - start)[0])
        return start + int(offsets[(place + away) % len(offsets)])

    def _start(self, index: int, rank: int) -> int:
        """The rank from which the offsets of a group count, for the group of this kind that a rank is in."""
        group = self.job.groups[index]
        if group.axes:
            place = self.job.coordinates(rank)
            return rank - sum(place[axis] * self.job.strides[axis] for axis in group.axes)
        return group.ranks[0]

    def _number(self, group: Group, first: int) -> _Numbered:
        others = self.job.ranks_along(self.job.strides.keys() - set(group.axes)) if group.axes else group.ranks[:1]
        return _Numbered(first=first, starts=np.array(others, np.int64), offsets=self._offsets(group))

    def _offsets(self, group: Group) -> Int64:
        """The ranks of a group in order, as distances from where it starts."""
        ranks = np.array(self.job.group_ranks(group), np.int64)
        return ranks if group.axes else ranks - ranks[0]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Numbered:
    """The groups of one kind: numbers from `first` on, where each starts, and how far from there its ranks are."""

    first: int
    starts: Int64
    offsets: Int64


MAX_NODES = 100_000_000
MAX_ROLE_NODES = 20_000_000
MOST_GROUPS = 2_147
"""ASTRA-sim numbers the streams of group n from n million on, in 32 bits."""

MARK = "chakra.json"
GROUPS = "comm_groups.json"
ROLES = "roles.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChakraExport(Exported):
    """What was written.

    Attributes:
        ranks: ranks of the job.
        nodes: nodes in all files together.
        drift_ps: what whole microseconds made a stream of a rank longer, or shorter where below 0: the largest.
        one_at_a_time_ps: the step of a reader that runs one kernel and one communication of a rank at a time; None
            where it was not asked for, or there are too many nodes to find out.
        expected: what becomes of the step in such a reader, and why, where that is known.
    """

    ranks: int
    nodes: int
    drift_ps: int
    one_at_a_time_ps: int | None = None
    expected: Mapping[str, float] | None = None


def write_chakra(
    job: JobGraph,
    output: Path,
    *,
    device: str = "",
    name: str = "",
    per_role: bool = False,
    beside: Mapping[str, str] = MappingProxyType({}),
    progress: Progress = silent,
    communication_ps: Int64 | None = None,
) -> ChakraExport:
    """Writes `NAME.<rank>.et` for every rank and `comm_groups.json`, all of them or none.

    Args:
        job: the job.
        output: the folder.
        device: whose durations are taken, where an operation has one; others are imported ones.
        name: of the files; "" takes the model's.
        per_role: writes `NAME.role<number>.et`, the trace of a role's first rank, and `roles.json`: whose it is.
        beside: other files to write into the folder, by name.
        progress: told how many ranks have been written.
        communication_ps: int64 [operations], how long communications take, where it is to be found out how long a
            reader takes that runs one at a time.

    Raises:
        PlanError: the job is too large to be written out, or a rank communicates in a group that it is not in.
        UsageError: the name is none of a file.
        SimulationError: how long an operation runs is unknown.
        OutputError: the folder cannot be written, or holds something that is no earlier export.
    """
    name = name or re.sub(r"[^\w.-]", "-", job.workload.model or job.name) or "job"
    if not re.fullmatch(r"\w[\w.-]{0,99}", name):
        raise UsageError(f"name '{name[:40]}': give letters, digits, '-', '_' and '.'")
    writer = _Writer(job=job, picoseconds=_times(job, device), name=name, per_role=per_role, progress=progress)
    if communication_ps is not None:
        writer.serial = Serial(writer.ranks, writer.rows, communication_ps)
    with whole_folder(Path(output), MARK) as folder:
        writer.write(folder)
        for file, text in beside.items():
            (folder / file).write_text(text, encoding="utf-8")
        return writer.finish(folder, list(beside))


@dataclass(slots=True, kw_only=True)
class _Writer:
    job: JobGraph
    picoseconds: Int64
    name: str
    per_role: bool
    progress: Progress = silent
    serial: Serial | None = None
    written: int = 0
    nodes: int = 0
    drift_ps: int = 0
    roles: dict[int, dict[str, object]] = field(default_factory=dict)
    total: int = field(init=False)
    _lowering: Lowering = field(init=False)
    ranks: Communicators = field(init=False)
    rows: dict[int, Lowered] = field(init=False)
    _names: dict[tuple[int, int, str], bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        job = self.job
        sizes = tuple(Communicators(job, ()).size(group) for group in range(len(job.groups)))
        self._lowering = Lowering(job=job, picoseconds=self.picoseconds, sizes=sizes)
        used = _used_rows(job)
        self.rows = {row: found for row in used if (found := self._lowering(row)) is not None}
        differing = (lowered.differs for lowered in self.rows.values() if lowered.differs is not None)
        self.ranks = Communicators(job, {group for kind, group, _ in differing if kind == OpKind.COLLECTIVE})
        self._check_size()

    def _check_size(self) -> None:
        lengths = [program.unfolded_ops for program in self.job.programs]
        if (longest := max(lengths)) > MAX_ROLE_NODES:
            raise PlanError(f"a rank runs {longest:,} operations: at most {MAX_ROLE_NODES:,} are written out")
        ranks = [1 if self.per_role else len(self.ranks.ranks(n)) for n in range(len(lengths))]
        self.total = sum(ranks)
        total = sum(length * count for length, count in zip(lengths, ranks, strict=True))
        if total > MAX_NODES:
            raise PlanError(
                f"{sum(ranks):,} ranks run {total:,} operations, at most {MAX_NODES:,} are written out: "
                "write one trace a role, with --per-role"
            )

    def write(self, folder: Path) -> None:
        """The traces and groups."""
        edges = Edges(self.job)
        kept = np.zeros(len(self.job.ops), np.bool_)
        kept[list(self.rows)] = True
        for numbers in self._alike():
            template, count = self._template(ProgramTrace(edges, numbers[0], kept, self.picoseconds), numbers)
            for number in numbers:
                self.nodes += count * self._write_role(folder, number, template)
        with (folder / GROUPS).open("w", encoding="utf-8") as file:
            file.writelines(self._groups())
        if self.per_role:
            roles = [self.roles[number] for number in sorted(self.roles)]
            (folder / ROLES).write_text(json.dumps(roles) + "\n", encoding="utf-8")

    def _alike(self) -> list[list[int]]:
        """Numbers of programs, those together that run the same."""
        found: dict[bytes, list[int]] = {}
        for number, program in enumerate(self.job.programs):
            found.setdefault(program.calls.tobytes(), []).append(number)
        return list(found.values())

    def _write_role(self, folder: Path, number: int, template: Template[Differs]) -> int:
        """Writes the traces of a program's ranks; returns how many."""
        ranks = self.ranks.ranks(number).tolist()
        places = {number: ranks[0]} if self.per_role else dict(zip(ranks, ranks, strict=True))
        for place, rank in places.items():
            own = {key: self.ranks.attributes(key, rank) for key in template.keys}
            with (folder / self._file(place)).open("wb") as file:
                file.writelines(template.fill(own))
            self.written += 1
            self.progress("writing traces", self.written, self.total)
        label = self.job.programs[number].role or f"program {number}"
        self.roles[number] = {"role": label, "file": self._file(number), "ranks": ranks}
        return len(places)

    def _file(self, place: int) -> str:
        return f"{self.name}.{'role' * self.per_role}{place}.et"

    def _groups(self) -> Iterator[str]:
        separator = "{"
        for number, members in self.ranks.members():
            yield f'{separator}\n"{number}": {json.dumps(members, separators=(",", ":"))}'
            separator = ","
        yield "\n}\n" if separator == "," else "{}\n"

    def _template(self, trace: ProgramTrace, numbers: list[int]) -> tuple[Template[Differs], int]:
        """A role's trace, and how many nodes it has: never none, which a reader takes for an error."""
        template = Template[Differs]({"producer": self.job.producer or "echograph"})
        steps = list(trace)
        if self.serial is not None:
            for number in numbers:
                self.serial.add(number, steps)
        for step in steps:
            lowered = self.rows[step.row]
            template.add(
                step.number,
                self._named(step.block, step.instance, step.row),
                lowered.kind,
                step.after,
                step.waits,
                step.duration_us,
                lowered.attributes,
                lowered.differs,
            )
        self.drift_ps = max(self.drift_ps, *trace.drift_ps, key=abs)
        if not len(trace):
            idle = encode_attributes({"num_ops": 1, "tensor_size": 1, "is_cpu_op": False})
            template.add(1, encode_name("idle"), NodeType.COMP, (), (), 0, idle)
        return template, max(len(trace), 1)

    def _named(self, block: int, instance: int, row: int) -> bytes:
        """The operation after the module that runs it."""
        ops, label = self.job.ops, self.job.blocks[block].instances[instance].label
        key = (int(ops.module[row]), int(ops.name[row]), label)
        if key not in self._names:
            module, name = (self.job.strings[index] for index in key[:2])
            self._names[key] = encode_name(":".join(filter(None, (module.replace("{}", label), name))))
        return self._names[key]

    def finish(self, folder: Path, beside: list[str]) -> ChakraExport:
        """Writes what was written, and says it."""
        notes = tuple(self._notes())
        about = {
            "format": "chakra",
            "name": self.name,
            "ranks": self.job.world_size,
            "per_role": self.per_role,
            "nodes": self.nodes,
            "drift_ps": self.drift_ps,
            "beside": sorted(beside),
            "notes": notes,
        }
        (folder / MARK).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        sizes = [path.stat().st_size for path in folder.iterdir()]
        return ChakraExport(
            files=len(sizes),
            bytes=sum(sizes),
            notes=notes,
            ranks=self.job.world_size,
            nodes=self.nodes,
            drift_ps=self.drift_ps,
            one_at_a_time_ps=None if self.serial is None else self.serial.run(),
        )

    def _notes(self) -> Iterator[str]:
        drift = format_time(abs(self.drift_ps))
        yield f"whole microseconds, the rest carried on: the kernels of a stream end off by {drift} at most"
        yield "no time of the host: readers start an operation as soon as what it waits for has ended"
        changed = sorted(self._lowering.changed.items())
        yield from (f"{what} ({rows} in the graph)" for what, rows in changed)
        if len(self._streams(compute=True)) > 1:
            names = ", ".join(self._streams(compute=True))
            yield f"readers run one kernel of a rank at a time: those of {names} follow each other"
        if len(self._streams(compute=False)) > 1:
            yield "ASTRA-sim runs one communication of a rank at a time: those that overlap here do not there"
        if self.ranks.count > MOST_GROUPS:
            yield f"{self.ranks.count} groups: ASTRA-sim's numbers of their streams wrap above {MOST_GROUPS}"

    def _streams(self, *, compute: bool) -> list[str]:
        """Names of the streams that compute, or of those that communicate."""
        rows = [row for row, lowered in self.rows.items() if (lowered.kind == NodeType.COMP) == compute]
        return [self.job.streams[stream] for stream in np.unique(self.job.ops.stream[rows]).tolist()]


def _times(job: JobGraph, device: str) -> Int64:
    """Picoseconds of every row of the operation table: on the device, else imported, else 0 for views, else -1."""
    ops = job.ops
    picoseconds = ops.duration_on(device)[0]
    imported = np.flatnonzero(ops.duration_source == Source.IMPORTED)
    imported = imported[picoseconds[ops.duration.rows[imported]] == NONE]
    picoseconds[ops.duration.rows[imported]] = ops.duration.values[imported]
    picoseconds[ops.is_view & (picoseconds == NONE)] = 0
    return picoseconds


def _used_rows(job: JobGraph) -> list[int]:
    """Rows that some program runs."""
    rows: list[int] = np.flatnonzero(job.run_counts()).tolist()
    return rows


# -- the nodes of a program -----------------------------------------------------------------------------------
# The nodes that a role of a job runs, in order, with what each waits for and how long it takes.


class TraceNode(NamedTuple):
    """A node.

    Attributes:
        number: 1, 2, ... in the order of the program, which readers take for a priority.
        row: of the operation table.
        block: of the graph.
        instance: of the block.
        after: the node before it on its stream; () where it is the first.
        waits: nodes of other streams that end before it starts, ascending, but for those that it is behind anyhow.
        duration_us: whole microseconds.
    """

    number: int
    row: int
    block: int
    instance: int
    after: tuple[int, ...]
    waits: tuple[int, ...]
    duration_us: int


class ProgramTrace:
    """What one program runs.

    Work on a stream runs in order, so of the nodes of another stream that a node waits for, the last is enough;
    and an operation that has no node hands on what it waits for to the next of its stream.

    A collective also waits for the sends before it within its group: a reader that runs one communication at a
    time would otherwise hold a message back for a collective whose other members wait for that message.

    Args:
        edges: of the job.
        number: of the program.
        kept: bool [operations], which rows have a node.
        picoseconds: int64 [operations]; what is below 0 counts as 0.

    Attributes:
        drift_ps: by stream, how much longer its kernels run than they should, once all have been gone through.
    """

    def __init__(self, edges: Edges, number: int, kept: np.ndarray, picoseconds: Int64) -> None:
        self._job, self._calls = edges.job, edges.job.programs[number].calls
        self._rows = _rows(edges.job.programs[number])
        self._streams = edges.job.ops.stream[self._rows].tolist()
        self._kept = kept[self._rows].tolist()
        self._kernels = (~np.isin(edges.job.ops.kind, COMMUNICATIONS))[self._rows].tolist()
        self._kinds = edges.job.ops.kind[self._rows].tolist()
        self._groups = edges.job.ops.group[self._rows].tolist()
        self._before = _by_reader(*edges.of(number))
        self._picoseconds = np.maximum(picoseconds, 0)[self._rows].tolist()
        self.drift_ps: list[int] = [0] * len(self._job.streams)

    def __len__(self) -> int:
        return sum(self._kept)

    def __iter__(self) -> Iterator[TraceNode]:
        lengths = self._calls[:, 2] - self._calls[:, 1]
        block, instance = (np.repeat(self._calls[:, i], lengths).tolist() for i in (0, 3))
        rows, owed = self._rows.tolist(), [0] * len(self.drift_ps)
        for position, number, after, waits in self._order():
            stream, exact = self._streams[position], self._picoseconds[position]
            if self._kernels[position]:
                exact += owed[stream]
            micros = max(0, (exact + PS_PER_US // 2) // PS_PER_US)
            if self._kernels[position]:
                # Readers take 0 microseconds for a nanosecond.
                owed[stream] = exact - (micros * PS_PER_US or PS_PER_NS)
            yield TraceNode(number, rows[position], block[position], instance[position], after, waits, micros)
        self.drift_ps = [-left for left in owed]

    def _order(self) -> Iterator[tuple[int, int, tuple[int, ...], tuple[int, ...]]]:
        """(position, number, node before it on its stream, nodes it waits for) of every node."""
        streams = range(len(self.drift_ps))
        last = [0 for _ in streams]
        known: list[dict[int, int]] = [{} for _ in streams]
        inherited: list[dict[int, int]] = [{} for _ in streams]
        sources = {source for found in self._before.values() for source in found}
        sends: dict[int, dict[int, int]] = {}
        at: dict[int, dict[int, int]] = {}
        number = 0
        for position, (stream, kept) in enumerate(zip(self._streams, self._kept, strict=True)):
            needs = inherited[stream]
            for source in self._before.get(position, ()):
                _latest(needs, at[source])
            if kept:
                number += 1
                group = self._groups[position]
                if self._kinds[position] == OpKind.SEND:
                    sends.setdefault(group, {})[stream] = number
                elif self._kinds[position] == OpKind.COLLECTIVE:
                    for among, sent in sends.items():
                        if _within(self._job, among, group):
                            _latest(needs, sent)
                behind = known[stream]
                waits = {s: n for s, n in needs.items() if s != stream and n > behind.get(s, 0)}
                behind.update(waits)
                yield position, number, (last[stream],) if last[stream] else (), tuple(sorted(waits.values()))
                last[stream], inherited[stream] = number, {}
            if position in sources:
                # Whoever waits for it waits for its stream up to here, and for what has not been waited for.
                at[position] = {**inherited[stream], **({stream: last[stream]} if last[stream] else {})}


def _within(job: JobGraph, inner: int, outer: int) -> bool:
    """Whether all who are in a group together are so in another one."""
    one, other = job.groups[inner], job.groups[outer]
    if one.ranks or other.ranks:
        return bool(one.ranks) and set(one.ranks) <= set(other.ranks)
    if other.positions:
        return one.axes == other.axes and bool(one.positions) and set(one.positions) <= set(other.positions)
    return set(one.axes) <= set(other.axes)


def _latest(needs: dict[int, int], more: Mapping[int, int]) -> None:
    for stream, number in more.items():
        if number > needs.get(stream, 0):
            needs[stream] = number


def _rows(program: Program) -> Int64:
    """The rows of the operation table that a program runs, in order."""
    return expand_ranges(program.calls[:, 1], program.calls[:, 2])


def _by_reader(before: Int64, after: Int64) -> Mapping[int, Sequence[int]]:
    """For every position that waits, the positions it waits for."""
    found: dict[int, list[int]] = {}
    for source, reader in zip(before.tolist(), after.tolist(), strict=True):
        found.setdefault(reader, []).append(source)
    return found


# -- one at a time --------------------------------------------------------------------------------------------
# How long a reader takes for a job's traces that runs one kernel and one communication of a rank at a time.
#
# ASTRA-sim is one: of what is ready it starts the lowest id; a send does not wait for its receive, and a receive
# keeps nothing from running. The ranks of a program do the same, so one of each is run; a collective waits for one
# rank of every program that takes part.


MAX_SERIAL_NODES = 400_000
"""Of one rank of every program together: a run takes some microseconds a node."""

_COMPUTE, _COMMUNICATE, _RECEIVE = range(3)
_LANES = {NodeType.COMP: _COMPUTE, NodeType.RECV: _RECEIVE}


class _Meeting(NamedTuple):
    """What those who meet have in common, and how many they are; a message is told by its ends and tag."""

    key: tuple[object, ...]
    members: int


@dataclass(slots=True)
class _Role:
    """One rank of a program while it runs; nodes are counted from 0."""

    lanes: list[int]
    times: list[int]
    meets: list[_Meeting | None]
    missing: list[int]
    readers: list[list[int]]
    ready: list[list[int]] = field(default_factory=lambda: [[], [], []])
    busy: list[bool] = field(default_factory=lambda: [False, False])


class Serial:
    """A run of one rank of every program.

    Args:
        ranks: who is whose group and peer.
        rows: what the rows of the operation table become.
        picoseconds: int64 [operations], of communications how long they take.
    """

    def __init__(self, ranks: Communicators, rows: Mapping[int, Lowered], picoseconds: Int64) -> None:
        self.ranks, self.rows = ranks, rows
        self.picoseconds = picoseconds.tolist()
        places = [ranks.ranks(number).tolist() for number in range(len(ranks.job.programs))]
        self.first = [ranks_of[0] for ranks_of in places]
        self.program = {rank: number for number, ranks_of in enumerate(places) for rank in ranks_of}
        self.groups = {str(number): members for number, members in ranks.members()}
        self.roles: dict[int, _Role] = {}
        self.nodes = 0
        self.now = 0
        self.done = 0
        self.events: list[tuple[int, int, int]] = []
        self.met: dict[tuple[object, ...], deque[tuple[int, int, int]]] = defaultdict(deque)

    def add(self, number: int, steps: Iterable[TraceNode]) -> None:
        """Adds the nodes of a program, in order; beyond `MAX_SERIAL_NODES` nothing more is kept."""
        role = _Role([], [], [], [], [])
        for step in steps:
            self.nodes += 1
            if self.nodes > MAX_SERIAL_NODES:
                return
            lowered = self.rows[step.row]
            needs = {*step.after, *step.waits}
            role.lanes.append(_LANES.get(lowered.kind, _COMMUNICATE))
            kernel = lowered.kind == NodeType.COMP
            time = step.duration_us * PS_PER_US or PS_PER_NS if kernel else self.picoseconds[step.row]
            role.times.append(time)
            role.meets.append(None if kernel else self._meeting(number, lowered, step.row))
            role.missing.append(len(needs))
            role.readers.append([])
            for need in needs:
                role.readers[need - 1].append(step.number - 1)
        self.roles[number] = role

    def _meeting(self, number: int, lowered: Lowered, row: int) -> _Meeting:
        assert lowered.differs is not None
        own = self.ranks.attributes(lowered.differs, self.first[number])
        if "pg_name" in own:
            programs = frozenset(self.program[rank] for rank in self.groups[str(own["pg_name"])])
            index = int(self.ranks.job.ops.group[row])
            return _Meeting((index, programs), len(programs))
        ends = (self.program[int(str(own[name]))] for name in ("comm_src", "comm_dst"))
        return _Meeting((*ends, int(self.ranks.job.ops.group[row]), int(self.ranks.job.ops.tag[row])), 2)

    def run(self) -> int | None:
        """Picoseconds until the last node has ended; None for too many nodes, or where they wait for ever."""
        if self.nodes > MAX_SERIAL_NODES:
            return None
        for role in self.roles.values():
            for node, missing in enumerate(role.missing):
                if not missing:
                    role.ready[role.lanes[node]].append(node)
            for lane in role.ready:
                heapify(lane)
        todo = set(self.roles)
        while todo or self.events:
            for number in sorted(todo):
                self._issue(number)
            todo = set()
            if self.events:
                self.now = self.events[0][0]
            # What ends at one moment ends before anything starts.
            while self.events and self.events[0][0] == self.now:
                _, number, node = heappop(self.events)
                self._end(number, node)
                todo.add(number)
        return self.now if self.done == self.nodes else None

    def _issue(self, number: int) -> None:
        role = self.roles[number]
        while role.ready[_RECEIVE]:
            self._pass_on(number, heappop(role.ready[_RECEIVE]), sends=False)
        for lane in (_COMPUTE, _COMMUNICATE):
            if role.ready[lane] and not role.busy[lane]:
                role.busy[lane] = True
                node = heappop(role.ready[lane])
                meeting = role.meets[node]
                if meeting is None:
                    heappush(self.events, (self.now + role.times[node], number, node))
                elif len(meeting.key) == 2:
                    self._gather(number, node, meeting)
                else:
                    self._pass_on(number, node, sends=True)

    def _gather(self, number: int, node: int, meeting: _Meeting) -> None:
        came = self.met[meeting.key]
        came.append((self.now, number, node))
        if len(came) == meeting.members:
            for _, one, its in came:
                heappush(self.events, (self.now + self.roles[one].times[its], one, its))
            came.clear()

    def _pass_on(self, number: int, node: int, *, sends: bool) -> None:
        """A send ends when its bytes have arrived, and its receive when it has come, too."""
        role = self.roles[number]
        meeting = role.meets[node]
        assert meeting is not None
        at = self.now + role.times[node] if sends else self.now
        if sends:
            heappush(self.events, (at, number, node))
        mine, theirs = self.met[(*meeting.key, sends)], self.met[(*meeting.key, not sends)]
        mine.append((at, number, node))
        if theirs:
            one, other = mine.popleft(), theirs.popleft()
            _, receiver, place = other if sends else one
            heappush(self.events, (max(one[0], other[0]), receiver, place))

    def _end(self, number: int, node: int) -> None:
        role = self.roles[number]
        self.done += 1
        if role.lanes[node] != _RECEIVE:
            role.busy[role.lanes[node]] = False
        for reader in role.readers[node]:
            role.missing[reader] -= 1
            if not role.missing[reader]:
                heappush(role.ready[role.lanes[reader]], reader)

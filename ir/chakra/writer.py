"""A job as Chakra execution traces, which ASTRA-sim 2 reads: one file a rank, and the groups of all ranks.

Operations keep the order of their program, whose place is their id, since readers issue what is ready by ascending
id. Streams are chains of control dependencies; what streams wait for of each other are data dependencies.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import numpy as np

from echograph.errors import PlanError, UsageError
from echograph.ir.chakra.lowering import Lowered, Lowering
from echograph.ir.chakra.messages import NodeType, encode_attributes
from echograph.ir.chakra.ranks import Communicators, Differs
from echograph.ir.chakra.serial import Serial
from echograph.ir.chakra.template import Template, encode_name
from echograph.ir.chakra.trace import Trace
from echograph.ir.columns import NONE, Int64
from echograph.ir.edges import Edges
from echograph.ir.files import whole_folder
from echograph.ir.formats import Exported
from echograph.ir.graph import JobGraph
from echograph.ir.types import OpKind, Source
from echograph.progress import Progress, silent
from echograph.units import format_time

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
            template, count = self._template(Trace(edges, numbers[0], kept, self.picoseconds), numbers)
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

    def _template(self, trace: Trace, numbers: list[int]) -> tuple[Template[Differs], int]:
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

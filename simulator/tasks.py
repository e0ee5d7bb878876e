"""A job graph as tasks: who runs what, on which resource, in which order, waiting for what.

Every operation of a program becomes two tasks: the host issues it, then a stream of the device runs it. Work on
one resource runs in program order. Only dependencies between different resources are written down, for the others
the order of the resource stands already.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from echograph.errors import SimulationError
from echograph.ir.columns import NONE, Int8, Int32, Int64, Ragged
from echograph.ir.graph import JobGraph, Program
from echograph.ir.schedule import Schedule
from echograph.ir.types import OpKind

MAX_TASKS = 200_000_000
HOST, DEVICE = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TaskGraph:
    """Tasks of all programs, one program after the other, each in program order.

    Attributes:
        resource: int32; tasks of a resource run in the order of their numbers.
        duration: int64, picoseconds.
        deps: for each task, earlier tasks of the same program that must end first.
        join: int32; tasks with the same number >= 0 start together (a collective of several programs); -1 alone.
        program: int32, number of the task's program.
        lane: uint8, `HOST` or `DEVICE`.
        op: int64, row of the operation table.
        instance: int32, block instance.
        micro_batch: int32.
        resources: number of resources.
    """

    resource: Int32
    duration: Int64
    deps: Ragged
    join: Int32
    program: Int32
    lane: Int8
    op: Int64
    instance: Int32
    micro_batch: Int32
    resources: int

    def __len__(self) -> int:
        return len(self.resource)

    @property
    def joined(self) -> bool:
        """Whether tasks of several programs wait for each other."""
        return bool((self.join != NONE).any())


def expand(job: JobGraph, duration: Int64, host: Int64, joins: Callable[[int, int], object]) -> TaskGraph:
    """Writes all programs of a job out as tasks.

    Args:
        job: the job.
        duration: int64 [operations], picoseconds on the device.
        host: int64 [operations], picoseconds that the host takes to issue it (for `Host` work: to do it).
        joins: for a communication (program number, operation row), the key under which programs meet; None when
            all members are in the one program.

    Raises:
        SimulationError: the job has more than 200 million tasks.
    """
    total = 2 * job.unfolded_ops
    if total > MAX_TASKS:
        raise SimulationError(f"the job unfolds to {total:,} tasks, over the limit of {MAX_TASKS:,}")
    lanes = 1 + len(job.streams)
    parts = [_Expansion(job, number, program) for number, program in enumerate(job.programs)]
    columns: dict[str, list[np.ndarray]] = defaultdict(list)
    edges: list[tuple[Int64, Int64]] = []
    meetings: dict[tuple[object, int], int] = {}
    first = 0
    for number, part in enumerate(parts):
        op = part.op
        host_op = job.ops.kind[op] == OpKind.HOST
        columns["resource"].append(
            _weave(np.full(len(op), number * lanes), number * lanes + 1 + job.ops.stream[op])
        )
        columns["duration"].append(_weave(host[op], np.where(host_op, 0, duration[op])))
        for name, values in (("op", op), ("instance", part.instance), ("micro_batch", part.micro_batch)):
            columns[name].append(np.repeat(values, 2))
        columns["program"].append(np.full(2 * len(op), number))
        columns["join"].append(part.joins(joins, meetings))
        before, after = part.edges()
        lane = np.where(job.ops.kind[op[after]] == OpKind.HOST, HOST, DEVICE)
        issue = first + 2 * np.arange(len(op), dtype=np.int64)
        edges.append((issue, issue + 1))
        edges.append((first + 2 * before + 1, first + 2 * after + lane))
        first += 2 * len(op)
    return TaskGraph(
        resource=_join(columns["resource"], np.int32),
        duration=_join(columns["duration"], np.int64),
        deps=_ragged(edges, first),
        join=_join(columns["join"], np.int32),
        program=_join(columns["program"], np.int32),
        lane=np.tile(np.array([HOST, DEVICE], np.uint8), first // 2),
        op=_join(columns["op"], np.int64),
        instance=_join(columns["instance"], np.int32),
        micro_batch=_join(columns["micro_batch"], np.int32),
        resources=lanes * len(job.programs),
    )


class _Expansion:
    """One program, written out position by position."""

    def __init__(self, job: JobGraph, number: int, program: Program) -> None:
        self.job, self.number, self.schedule = job, number, Schedule(job, program)
        calls = program.calls
        lengths = calls[:, 2] - calls[:, 1]
        within = np.arange(len(self.schedule)) - np.repeat(self.schedule.starts[:-1], lengths)
        self.op: Int64 = np.repeat(calls[:, 1], lengths) + within
        self.instance = np.repeat(calls[:, 3], lengths)
        self.micro_batch = np.repeat(calls[:, 4], lengths)
        self.calls = calls

    def edges(self) -> tuple[Int64, Int64]:
        """Dependencies between streams as positions (before, after)."""
        ops = self.job.ops
        makers = self.job.maker[self.job.origin[ops.inputs.values]]
        readers = ops.inputs.rows
        crossing = (makers != NONE) & (ops.stream[makers] != ops.stream[readers])
        before = np.concatenate([makers[crossing], np.asarray(ops.deps.values, np.int64)])
        after = np.concatenate([readers[crossing], ops.deps.rows])
        order = np.argsort(after, kind="stable")
        local = self._local_edges(before[order], after[order])
        ports = self._port_edges()
        return np.concatenate([local[0], ports[0]]), np.concatenate([local[1], ports[1]])

    def _local_edges(self, before: Int64, after: Int64) -> tuple[Int64, Int64]:
        """Edges of the operation table, repeated for every call that runs the reader."""
        befores, afters = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        if len(after):
            low, high = np.searchsorted(after, self.calls[:, 1]), np.searchsorted(after, self.calls[:, 2])
            for number in np.flatnonzero(high > low).tolist():
                begin, instance, micro_batch = (int(self.calls[number, i]) for i in (1, 3, 4))
                rows = slice(low[number], high[number])
                at = self.schedule.position(
                    np.full(high[number] - low[number], instance), np.full(1, micro_batch), before[rows]
                )
                now = int(self.schedule.starts[number]) + after[rows] - begin
                for missing in np.flatnonzero(at == NONE).tolist():
                    at[missing] = self.schedule.last_position(
                        instance, int(before[rows][missing]), int(now[missing])
                    )
                befores.append(at[at != NONE])
                afters.append(now[at != NONE])
        return np.concatenate(befores), np.concatenate(afters)

    def _port_edges(self) -> tuple[Int64, Int64]:
        """Edges through ports: the maker is an operation of another block or instance."""
        job, ops = self.job, self.job.ops
        origin = job.origin[ops.inputs.values]
        ports = job.tensors.port[origin]
        rows, origins = ops.inputs.rows[ports], origin[ports]
        befores, afters = [], []
        low, high = np.searchsorted(rows, self.calls[:, 1]), np.searchsorted(rows, self.calls[:, 2])
        for number in np.flatnonzero(high > low).tolist():
            block, begin, _, instance, micro_batch = self.calls[number].tolist()
            for reader, tensor in zip(
                rows[low[number] : high[number]].tolist(),
                origins[low[number] : high[number]].tolist(),
                strict=True,
            ):
                source = job.source(block, instance, tensor)
                if source is None or ops.stream[source[2]] == ops.stream[reader]:
                    continue
                now = int(self.schedule.starts[number]) + reader - begin
                at = self._position(source[1], micro_batch, source[2], now)
                if at != NONE:
                    befores.append(at)
                    afters.append(now)
        return np.array(befores, np.int64), np.array(afters, np.int64)

    def _position(self, instance: int, micro_batch: int, op: int, before: int) -> int:
        at = int(self.schedule.position(np.array([instance]), np.array([micro_batch]), np.array([op]))[0])
        return at if at != NONE else self.schedule.last_position(instance, op, before)

    def joins(self, joins: Callable[[int, int], object], meetings: dict[tuple[object, int], int]) -> Int64:
        """A number for every task, equal for the n-th meeting of programs under one key; -1 for other tasks."""
        kinds = (OpKind.COLLECTIVE, OpKind.SEND, OpKind.RECV)
        number = np.full(2 * len(self.op), NONE, np.int64)
        seen: dict[object, int] = defaultdict(int)
        for position in np.flatnonzero(np.isin(self.job.ops.kind[self.op], kinds)).tolist():
            key = joins(self.number, int(self.op[position]))
            if key is not None:
                number[2 * position + DEVICE] = meetings.setdefault((key, seen[key]), len(meetings))
                seen[key] += 1
        return number


def _weave(host: np.ndarray, device: np.ndarray) -> np.ndarray:
    return np.column_stack([host, device]).ravel()


def _join(parts: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype)


def _ragged(edges: list[tuple[Int64, Int64]], tasks: int) -> Ragged:
    before = np.concatenate([b for b, _ in edges]) if edges else np.zeros(0, np.int64)
    after = np.concatenate([a for _, a in edges]) if edges else np.zeros(0, np.int64)
    order = np.argsort(after, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(after, minlength=tasks))]).astype(np.int64)
    return Ragged(offsets, before[order])

"""A job graph as tasks: who runs what, on which resource, in which order, waiting for what.

Every operation of a program becomes two tasks: the host issues it, then a stream of the device runs it. Work on
one resource runs in program order. Only dependencies between different resources are written down, for the others
the order of the resource stands already.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from echograph.errors import SimulationError
from echograph.ir.columns import NONE, Int32, Int64, Ragged, UInt8
from echograph.ir.graph import JobGraph
from echograph.ir.schedule import Edges
from echograph.ir.types import OpKind
from echograph.simulator.groups import RendezvousKeys, number_rendezvous, occurrences

MAX_TASKS = 200_000_000
HOST, DEVICE = 0, 1


@dataclass(frozen=True, kw_only=True, eq=False)
class TaskGraph:
    """Tasks of all programs, one program after the other, each in program order.

    Attributes:
        resource: int32; tasks of a resource run in the order of their numbers.
        duration: int64, picoseconds.
        deps: int32 values; for each task, earlier tasks of the same program that must end first.
        rendezvous: int32; tasks with the same number >= 0 start together (a collective of several programs, a
            send and its receive); -1 alone.
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
    rendezvous: Int32
    program: Int32
    lane: UInt8
    op: Int64
    instance: Int32
    micro_batch: Int32
    resources: int

    def __len__(self) -> int:
        return len(self.resource)

    @property
    def has_rendezvous(self) -> bool:
        """Whether tasks of several programs wait for each other."""
        return bool((self.rendezvous != NONE).any())

    @cached_property
    def queues(self) -> Ragged:
        """The tasks of each resource, int32, in the order in which it runs them."""
        # Sorting by 16-bit keys takes linear time.
        key = self.resource.astype(np.uint16) if self.resources <= 2**16 else self.resource
        bounds = np.cumsum([0, *np.bincount(self.resource, minlength=self.resources).tolist()])
        return Ragged(bounds, np.argsort(key, kind="stable").astype(np.int32))


def expand(job: JobGraph, duration: Int64, host: Int64, *, threads: bool = False) -> TaskGraph:
    """Writes all programs of a job out as tasks.

    Args:
        job: the job.
        duration: int64 [operations], picoseconds on the device.
        host: int64 [operations], picoseconds that the host takes to issue it (for `Host` work: to do it).
        threads: whether `Host` work has its stream to itself, as a thread, and not the host that issues.

    Raises:
        SimulationError: the job has more than 200 million tasks.
    """
    total = check_tasks(job)
    lanes = 1 + len(job.streams)
    streams, hosts = job.ops.stream.astype(np.int32), job.ops.kind == OpKind.HOST
    work = np.where(hosts, 0, duration)
    operation, instance, micro_batch = (_written_out(job, field) for field in (1, 3, 4))
    bounds = np.cumsum([0, *(program.unfolded_ops for program in job.programs)])
    program = np.repeat(np.arange(len(job.programs), dtype=np.int32), np.diff(bounds))
    rendezvous = np.full(total, NONE, np.int32)
    rendezvous[DEVICE::2] = _rendezvous(job, operation, bounds)
    issuing, stream = program * lanes, program * lanes + 1 + streams[operation]
    return TaskGraph(
        resource=_weave(np.where(hosts[operation], stream, issuing) if threads else issuing, stream),
        duration=_weave(host[operation], work[operation]),
        deps=_dependencies(job, bounds, hosts[operation]),
        rendezvous=rendezvous,
        program=np.repeat(program, 2),
        lane=np.tile(np.array([HOST, DEVICE], np.uint8), total // 2),
        op=np.repeat(operation, 2),
        instance=np.repeat(instance, 2),
        micro_batch=np.repeat(micro_batch, 2),
        resources=lanes * len(job.programs),
    )


def check_tasks(job: JobGraph) -> int:
    """How many tasks a job has.

    Raises:
        SimulationError: more than 200 million.
    """
    total = 2 * job.unfolded_ops
    if total > MAX_TASKS:
        raise SimulationError(f"the job unfolds to {total:,} tasks, over the limit of {MAX_TASKS:,}")
    return total


def _written_out(job: JobGraph, field: int) -> np.ndarray:
    """One field of all calls, for every operation that they run; `begin` counts on within a call."""
    calls = np.concatenate([p.calls for p in job.programs])
    lengths = calls[:, 2] - calls[:, 1]
    if field != 1:
        return np.repeat(calls[:, field].astype(np.int32), lengths)
    rows = np.repeat(calls[:, 1] - (np.cumsum(lengths) - lengths), lengths)
    rows += np.arange(len(rows))
    return rows


def _dependencies(job: JobGraph, bounds: Int64, hosts: np.ndarray) -> Ragged:
    """Of every device task its issue, then what other streams make for it, in order; host work waits itself."""
    edges = Edges(job)
    crossing = [edges.of(number) for number in range(len(job.programs))]
    before = np.concatenate([start + b for start, (b, _) in zip(bounds[:-1], crossing, strict=True)])
    after = np.concatenate([start + a for start, (_, a) in zip(bounds[:-1], crossing, strict=True)])
    order = np.lexsort((before, after))
    before, after = 2 * before[order] + DEVICE, after[order]
    after = 2 * after + np.where(hosts[after], HOST, DEVICE)
    lengths = np.bincount(after, minlength=2 * len(hosts))
    # The place of an edge among those of its task, which for device tasks begin with the issue.
    place = np.arange(len(after)) - (np.cumsum(lengths) - lengths)[after] + after % 2
    lengths[DEVICE::2] += 1
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    values = np.empty(int(offsets[-1]), np.int32)
    values[offsets[1:-1:2]] = np.arange(0, 2 * len(hosts), 2, dtype=np.int32)
    values[offsets[after] + place] = before
    return Ragged(offsets, values)


def _rendezvous(job: JobGraph, operation: Int64, bounds: Int64) -> Int32:
    """A number for every run, equal for the n-th rendezvous of programs under one key; -1 for the others."""
    keys = RendezvousKeys(job)
    runs, key_of, nth = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for number, (begin, end) in enumerate(pairwise(bounds.tolist())):
        here = keys.of(number)[operation[begin:end]]
        met = np.flatnonzero(here != NONE)
        runs.append(begin + met)
        key_of.append(here[met])
        # A program may hold both ends of a message: its n-th send meets its n-th receive.
        sends = job.ops.kind[operation[begin + met]] == OpKind.SEND
        nth.append(occurrences(2 * here[met] + sends))
    rendezvous = np.full(len(operation), NONE, np.int32)
    rendezvous[np.concatenate(runs)] = number_rendezvous(np.concatenate(key_of), np.concatenate(nth))
    return rendezvous


def _weave(host: np.ndarray, device: np.ndarray) -> np.ndarray:
    woven = np.empty(2 * len(host), host.dtype)
    woven[HOST::2], woven[DEVICE::2] = host, device
    return woven

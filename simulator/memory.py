"""Device memory of one rank over the step, from the graph's own tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from echograph.ir.columns import NONE, Int64
from echograph.ir.graph import JobGraph
from echograph.ir.types import TensorRole

MAX_STEPS = 20_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of one rank.

    Attributes:
        peak_bytes: the most that lives at one time, tensors alone (no allocator overhead).
        by_role: bytes at that moment, by tensor role.
        capacity_bytes: memory of the device.
    """

    peak_bytes: int
    by_role: dict[str, int]
    capacity_bytes: int

    @property
    def fits(self) -> bool:
        """Whether the peak is within the capacity."""
        return self.peak_bytes <= self.capacity_bytes


def memory(job: JobGraph, program: int, capacity_bytes: int) -> Memory | None:
    """Peak memory of a program by liveness: a tensor lives from the operation that makes it to its last reader.

    Parameters, optimizer state and buffers live through the step, gradients until its end. Tensors that share
    memory count once, with the one that owns it. None for a job that has no tensors (an imported trace), or
    whose program is beyond 20 million operations.
    """
    calls = job.programs[program].calls
    total = int((calls[:, 2] - calls[:, 1]).sum())
    if not len(job.tensors) or total > MAX_STEPS:
        return None
    first, last, ids = _lifetimes(job, program)
    size, role = _facts(job, ids)
    keep = (role == TensorRole.GRADIENT) | (role == TensorRole.PARAMETER) | (role == TensorRole.OPTIMIZER_STATE)
    keep |= role == TensorRole.BUFFER
    persistent = keep & (role != TensorRole.GRADIENT)
    first = np.where(persistent, 0, first)
    last = np.where(keep, total, last)
    change = np.zeros(total + 2, np.int64)
    np.add.at(change, first, size)
    np.add.at(change, last + 1, -size)
    at = int(np.argmax(np.cumsum(change)))
    alive = (first <= at) & (at <= last)
    by_role = {r.name.lower(): int(size[alive & (role == r)].sum()) for r in TensorRole}
    return Memory(peak_bytes=sum(by_role.values()), by_role=by_role, capacity_bytes=capacity_bytes)


def _lifetimes(job: JobGraph, program: int) -> tuple[Int64, Int64, Int64]:
    """For every memory of the program: position of its first and last use, and its tensor id."""
    inputs, outputs = job.ops.inputs, job.ops.outputs
    ids, positions = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    start = 0
    span = sum(count * len(b.instances) for (_, count), b in zip(job.tensor_bases, job.blocks, strict=True))
    owners = _Owners(job)
    for block, begin, end, instance, micro_batch in job.programs[program].calls.tolist():
        for ragged in (inputs, outputs):
            low, high = ragged.offsets[begin], ragged.offsets[end]
            tensors = job.root[ragged.values[low:high]]
            rows = np.repeat(np.arange(begin, end), ragged.lengths[begin:end])
            owner = owners.of(block, instance, tensors)
            transient = owners.transient[owner]
            ids.append(owner + np.where(transient, span * micro_batch, 0))
            positions.append(start + rows - begin)
        start += end - begin
    every, where = np.concatenate(ids), np.concatenate(positions)
    unique, inverse = np.unique(every, return_inverse=True)
    first, last = np.full(len(unique), start, np.int64), np.zeros(len(unique), np.int64)
    np.minimum.at(first, inverse, where)
    np.maximum.at(last, inverse, where)
    return first, last, unique % span


class _Owners:
    """Tensor ids of the memory behind tensors, through ports and aliases."""

    def __init__(self, job: JobGraph) -> None:
        self.job = job
        roles = np.concatenate(
            [
                np.tile(job.tensors.role[b.tensors.start : b.tensors.stop][_own(job, b.tensors)], len(b.instances))
                for b in job.blocks
            ]
        )
        self.transient = np.isin(roles, [r for r in TensorRole if not r.persistent])
        self._ports: dict[tuple[int, int, int], int] = {}

    def of(self, block: int, instance: int, tensors: Int64) -> Int64:
        base, count = self.job.tensor_bases[block]
        ids = base + instance * count + self.job.local_position[tensors]
        for at in np.flatnonzero(self.job.local_position[tensors] == NONE).tolist():
            ids[at] = self._port(block, instance, int(tensors[at]))
        return np.asarray(ids)

    def _port(self, block: int, instance: int, tensor: int) -> int:
        key = (block, instance, tensor)
        if key not in self._ports:
            where = key
            while self.job.tensors.port[where[2]]:
                bound = self.job.locate_tensor(self.job.tensor_id(*where))
                where = (bound[0], bound[1], int(self.job.root[bound[2]]))
            self._ports[key] = self.job.tensor_id(*where)
        return self._ports[key]


def _own(job: JobGraph, tensors: range) -> np.ndarray:
    return np.asarray(~job.tensors.port[tensors.start : tensors.stop])


def _facts(job: JobGraph, ids: Int64) -> tuple[Int64, Int64]:
    sizes, roles = [], []
    for block in job.blocks:
        own = _own(job, block.tensors)
        rows = slice(block.tensors.start, block.tensors.stop)
        sizes.append(np.tile(job.tensors.nbytes[rows][own], len(block.instances)))
        roles.append(np.tile(job.tensors.role[rows][own], len(block.instances)))
    return np.concatenate(sizes)[ids], np.concatenate(roles)[ids].astype(np.int64)

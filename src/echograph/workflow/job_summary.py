"""What a job graph does on each role: its mesh, work, memory, and communication by axis."""

from __future__ import annotations

from collections import Counter, defaultdict
from math import prod
from typing import Any

import numpy as np

from echograph.ir.columns import Int64
from echograph.ir.graph import JobGraph, Program
from echograph.ir.types import COMMUNICATIONS, CollectiveKind, OpKind, Payload, Phase
from echograph.simulator.memory import Memories, memory


def summarize_job(job: JobGraph) -> dict[str, Any]:
    """Mesh, roles and communications of one step; all figures are of one rank of the role."""
    runs = [job.run_counts(number) for number in range(len(job.programs))]
    memories = Memories(job) if len(job.tensors) else None
    return {
        "model": job.workload.model or job.name,
        "ranks": job.world_size,
        "mesh": {axis.name: axis.size for axis in job.mesh},
        "micro_batch": job.workload.batch_size,
        "roles": [_role(job, number, count, memories) for number, count in enumerate(runs)],
        "communication": _communication(job, runs),
    }


def _role(job: JobGraph, number: int, runs: Int64, memories: Memories | None) -> dict[str, Any]:
    program, ops = job.programs[number], job.ops
    needs = memory(job, number, 0, memories=memories, reserve=False)
    work = runs * ops.flops
    return {
        "role": program.role or f"rank {number}",
        "ranks": _ranks(job, program),
        "micro_batches": len(np.unique(program.calls[:, 4])),
        "operations": int(runs.sum()),
        "flops": {p.name.lower(): int(work[ops.phase == p].sum()) for p in Phase if (ops.phase == p).any()},
        "device_bytes": ops.moved_bytes(runs),
        "memory_bytes": None if needs is None else {"peak": needs.peak_bytes, **needs.by_role},
    }


def _ranks(job: JobGraph, program: Program) -> int:
    if not job.mesh:
        return max(1, len(program.ranks))
    return prod(axis.size for axis in job.mesh if axis.name not in program.coordinates)


def _communication(job: JobGraph, runs: list[Int64]) -> list[dict[str, Any]]:
    """Communications alike in group, kind, payload and size, with how often each role runs them."""
    ops = job.ops
    rows = np.flatnonzero(np.isin(ops.kind, COMMUNICATIONS)).tolist()
    found: dict[tuple[Any, ...], Counter[int]] = defaultdict(Counter)
    for row in rows:
        group = job.groups[int(ops.group[row])]
        kind = OpKind(int(ops.kind[row])).name.lower()
        if ops.kind[row] == OpKind.COLLECTIVE:
            kind = CollectiveKind(int(ops.variant[row])).name.lower()
        payload = Payload(int(ops.payload[row])).name.lower()
        key = (group.label, job.group_size(group), kind, payload, int(ops.nbytes[row]))
        for number, count in enumerate(runs):
            if count[row]:
                found[key][number] += int(count[row])
    names = ("axes", "group_size", "kind", "payload", "bytes_per_rank")
    return [
        {**dict(zip(names, key, strict=True)), "calls": {_name(job, n): c for n, c in sorted(calls.items())}}
        for key, calls in sorted(found.items())
    ]


def _name(job: JobGraph, number: int) -> str:
    return job.programs[number].role or f"rank {number}"

"""What a job graph does on each role: its mesh, work, memory, and communication by axis."""

from __future__ import annotations

from collections import Counter, defaultdict
from math import prod
from typing import Any

import numpy as np

from echograph.cli.app import print_line, print_table
from echograph.ir.columns import Int64
from echograph.ir.graph import JobGraph, Program
from echograph.ir.types import COMMUNICATIONS, CollectiveKind, OpKind, Payload, Phase
from echograph.simulator.memory import memory
from echograph.simulator.memory_kinds import Memories
from echograph.units import format_bytes, format_count

_MODEL_PHASES = (Phase.FORWARD, Phase.BACKWARD)


def summarize_job(job: JobGraph) -> dict[str, Any]:
    """Mesh, roles and communications of one step; all figures are of one rank of the role."""
    runs = [_runs(job, program) for program in job.programs]
    memories = Memories(job) if len(job.tensors) else None
    return {
        "model": job.workload.model or job.name,
        "ranks": job.world_size,
        "mesh": {axis.name: axis.size for axis in job.mesh},
        "micro_batch": job.workload.batch_size,
        "roles": [_role(job, number, count, memories) for number, count in enumerate(runs)],
        "communication": _communication(job, runs),
    }


def _runs(job: JobGraph, program: Program) -> Int64:
    """How often a program runs each operation of the table."""
    change = np.zeros(len(job.ops) + 1, np.int64)
    np.add.at(change, program.calls[:, 1], 1)
    np.add.at(change, program.calls[:, 2], -1)
    return np.cumsum(change[:-1])


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


def print_job(summary: dict[str, Any], *, headline: bool = True) -> None:
    """A job's roles and communications, for people."""
    if headline:
        _print_headline(summary)
    print_line("")
    print_table(
        (
            "role", "ranks", "micro-batches", "FLOPs", "recomputed", "traffic", "parameters", "gradients",
            "optimizer", "peak",
        ),
        [_role_row(role) for role in summary["roles"]],
    )  # fmt: skip
    if summary["communication"]:
        print_line("")
        rows = [_communication_row(entry, len(summary["roles"])) for entry in summary["communication"]]
        print_table(("axes", "ranks", "what", "carries", "bytes each", "calls", "bytes a step", "roles"), rows)


def _print_headline(summary: dict[str, Any]) -> None:
    mesh = " x ".join(f"{name} {size}" for name, size in summary["mesh"].items())
    print_line(f"{summary['model']} on {summary['ranks']} ranks" + (f": mesh {mesh}" if mesh else ""))


def _role_row(role: dict[str, Any]) -> tuple[object, ...]:
    needs = role["memory_bytes"] or {}
    own = sum(role["flops"].get(p.name.lower(), 0) for p in _MODEL_PHASES)
    return (
        role["role"],
        role["ranks"],
        role["micro_batches"],
        format_count(own),
        format_count(role["flops"].get("recompute", 0)),
        format_bytes(role["device_bytes"]),
        *(format_bytes(needs[k]) if k in needs else None for k in _MEMORY),
    )


_MEMORY = ("parameter", "gradient", "optimizer_state", "peak")


def _communication_row(entry: dict[str, Any], roles: int) -> tuple[object, ...]:
    calls = entry["calls"]
    low, high = min(calls.values()), max(calls.values())
    return (
        entry["axes"],
        entry["group_size"],
        entry["kind"].replace("_", "-"),
        entry["payload"].replace("_", " "),
        format_bytes(entry["bytes_per_rank"]),
        f"{low}" if low == high else f"{low} to {high}",
        format_bytes(high * entry["bytes_per_rank"]),
        "all" if len(calls) == roles else _few(list(calls)),
    )


def _few(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} to {names[-1]} ({len(names)})"

"""In numbers: a graph, a job, a model of the zoo, and the clusters and devices that there are to simulate on."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import numpy as np

from echograph.errors import UsageError
from echograph.ir.columns import Int64
from echograph.ir.graph import Graph, JobGraph, StepGraph
from echograph.ir.types import COMMUNICATIONS, CollectiveKind, OpKind, Payload, Phase, Source, TensorRole
from echograph.models import ModelEntry, dense_flops
from echograph.simulator.memory import memory
from echograph.simulator.memory.lifetimes import Allocations
from echograph.units import format_bytes


def summarize(graph: StepGraph | JobGraph) -> dict[str, Any]:
    """A graph in numbers; work is counted as often as the first program runs it."""
    runs = graph.run_counts(0) if graph.programs else np.zeros(len(graph.ops), np.int64)
    ops = graph.ops
    compute = ops.kind == OpKind.COMPUTE
    phases = {p.name.lower(): runs * (ops.phase == p) for p in Phase}
    return {
        "model": graph.workload.model or graph.name,
        "level": "job" if isinstance(graph, JobGraph) else "step",
        "parameters": graph.workload.parameters,
        "dtype": graph.workload.dtype.text,
        "batch_size": graph.workload.batch_size,
        "sequence_length": graph.workload.sequence_length,
        "optimizer": graph.workload.optimizer,
        "master_weights": graph.workload.master_weights,
        "ranks": graph.world_size,
        "mesh": {a.name: a.size for a in graph.mesh},
        "programs": len(graph.programs),
        "ops": len(ops),
        "unfolded_ops": graph.unfolded_ops,
        "views": int((runs * ops.is_view).sum()),
        "tensors": len(graph.tensors),
        "flops": {name: int((count * ops.flops).sum()) for name, count in phases.items() if count.any()},
        "device_bytes": {name: ops.moved_bytes(count) for name, count in phases.items() if count.any()},
        "tensor_bytes": _tensor_bytes(graph),
        "blocks": [
            {"name": b.name, "ops": len(b.ops), "tensors": len(b.tensors), "instances": len(b.instances)}
            for b in graph.blocks
        ],
        "durations": _durations(graph, runs * (compute & ~ops.is_view)),
        "operators": _operators(graph, runs),
    }


def _tensor_bytes(graph: StepGraph | JobGraph) -> dict[str, int]:
    totals = dict.fromkeys((r.name.lower() for r in TensorRole), 0)
    tensors = graph.tensors
    owns = (tensors.alias_of == -1) & ~tensors.port
    for block in graph.blocks:
        rows = slice(block.tensors.start, block.tensors.stop)
        for role in TensorRole:
            mine = owns[rows] & (tensors.role[rows] == role)
            totals[role.name.lower()] += sum(tensors.nbytes[rows][mine].tolist()) * len(block.instances)
    return totals


def _durations(graph: StepGraph | JobGraph, runs: np.ndarray) -> dict[str, dict[str, int]]:
    """For each device, how many of the operations run have a duration, by source."""
    ops = graph.ops
    found: dict[str, dict[str, int]] = {}
    for device in np.unique(ops.duration_device).tolist():
        mine = ops.duration_device == device
        count = {
            s.name.lower(): int(runs[ops.duration.rows[mine & (ops.duration_source == s)]].sum()) for s in Source
        }
        if any(count.values()):  # a cluster times communication alone
            found[graph.strings[device]] = {**count, "of": int(runs.sum())}
    return found


def _operators(graph: StepGraph | JobGraph, runs: np.ndarray) -> list[dict[str, Any]]:
    ops = graph.ops
    rows = []
    for name in np.unique(ops.name).tolist():
        count = runs * ((ops.name == name) & ~ops.is_view)
        if count.any():
            moved = ops.moved_bytes(count)
            flops = int((count * ops.flops).sum())
            rows.append({"name": graph.strings[name], "count": int(count.sum()), "flops": flops, "bytes": moved})
    return sorted(rows, key=lambda r: (-r["flops"], -r["bytes"], r["name"]))


def model_row(entry: ModelEntry) -> dict[str, Any]:
    """A line of the zoo. FLOPs are those of the closed form where the architecture has one, else as captured."""
    flops: dict[str, int | None]
    try:
        flops = dense_flops(entry, 1, entry.default_seq_len)._asdict()
    except UsageError:
        flops = {"forward": entry.forward_flops, "backward": entry.backward_flops}
    return {
        "name": entry.name,
        "family": entry.family,
        "architecture": entry.architecture,
        "kind": entry.kind,
        "parameters": entry.parameters,
        "sample": entry.default_seq_len,
        "default_batch_size": entry.default_batch_size,
        "flops_per_sample": flops,
        "aliases": list(entry.aliases),
        "source": entry.source,
    }


def outline(graph: Graph) -> dict[str, Any]:
    """What a graph holds, in a line; `operations` is what all ranks run, those of a listed program once each."""
    runs = (program.unfolded_ops * max(1, len(program.ranks)) for program in graph.programs)
    return {
        "name": graph.workload.model or graph.name,
        "level": "job" if isinstance(graph, JobGraph) else "step",
        "ranks": graph.world_size,
        "programs": len(graph.programs),
        "groups": len(graph.groups),
        "operations": sum(runs),
        "ops": len(graph.ops),
    }


def summarize_job(job: JobGraph) -> dict[str, Any]:
    """Mesh, roles and communications of one step; all figures are of one rank of the role."""
    runs = [job.run_counts(number) for number in range(len(job.programs))]
    allocations = Allocations(job) if len(job.tensors) else None
    return {
        "model": job.workload.model or job.name,
        "ranks": job.world_size,
        "mesh": {axis.name: axis.size for axis in job.mesh},
        "micro_batch": job.workload.batch_size,
        "roles": [_role(job, number, count, allocations) for number, count in enumerate(runs)],
        "communication": _communication(job, runs),
    }


def _role(job: JobGraph, number: int, runs: Int64, allocations: Allocations | None) -> dict[str, Any]:
    program, ops = job.programs[number], job.ops
    needs = memory(job, number, 0, allocations=allocations, reserve=False)
    work = runs * ops.flops
    return {
        "role": job.role_name(number),
        "ranks": job.rank_count(number),
        "micro_batches": len(np.unique(program.calls[:, 4])),
        "operations": int(runs.sum()),
        "flops": {p.name.lower(): int(work[ops.phase == p].sum()) for p in Phase if (ops.phase == p).any()},
        "device_bytes": ops.moved_bytes(runs),
        "memory_bytes": None if needs is None else {"peak": needs.peak_bytes, **needs.by_role},
    }


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
        {**dict(zip(names, key, strict=True)), "calls": {job.role_name(n): c for n, c in sorted(calls.items())}}
        for key, calls in sorted(found.items())
    ]


def cluster_rows(name: str | None = None) -> list[dict[str, Any]]:
    """The cluster presets, or one cluster.

    Args:
        name: a preset or a TOML file; None: all presets.

    Raises:
        UnknownNameError: no such preset.
        InputError: the file cannot be read.
    """
    from echograph.simulator.clusters import cluster_names, load_cluster

    return [
        {
            "name": c.name,
            "device": c.device,
            "gpus_per_node": c.gpus_per_node,
            "nvlink_domain_gpus": c.domain_gpus,
            "nvlink_GBps": c.nvlink_bytes_per_s / 1e9,
            "pcie_GBps": c.pcie_bytes_per_s / 1e9,
            "domain_GBps": round(c.node_fabric.bytes_per_s(c.domain_gpus) / 1e9, 2),
            "nvls": c.node_fabric.nvls is not None,
            "nics_per_node": c.network.nics_per_node,
            "nic_GBps": c.network.nic_bytes_per_s / 1e9,
            "max_gpus": c.max_gpus,
            "node_fabric": f"{c.node_fabric.name} ({c.node_fabric.about.origin})",
            "network_fabric": f"{c.network.fabric.name} ({c.network.fabric.about.origin})",
        }
        for c in map(load_cluster, [name] if name else cluster_names())
    ]


def device_rows(name: str | None = None) -> list[dict[str, Any]]:
    """The device profiles, or one.

    Args:
        name: a device or a profile file; None: all that ship.

    Raises:
        UnknownNameError: no such device.
        InputError: the file cannot be read.
    """
    from echograph.profiler.costs import device_names, load_device

    rows = []
    for d in map(load_device, [name] if name else device_names()):
        gemm, sheet = d.gemm.get("bf16"), d.datasheet
        held_out = None if gemm is None else gemm.label.held_out.long
        rows.append(
            {
                "name": d.name,
                "title": sheet.title,
                "bf16_TFLOPs": round(sheet.peak_flops_per_s.get("bf16", 0.0) / 1e12, 1),
                "memory": format_bytes(sheet.memory_bytes),
                "bandwidth_GBps": round(sheet.memory_bandwidth_bytes_per_s / 1e9),
                "matrix_products": (gemm or d.gemm["fp32"]).label.basis,
                "held_out_median_error": None if held_out is None else round(held_out.median_abs, 4),
            }
        )
    return rows

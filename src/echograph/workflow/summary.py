"""A graph, and a model of the zoo, in numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from echograph.errors import UsageError
from echograph.ir.graph import Graph, JobGraph, StepGraph
from echograph.ir.types import OpKind, Phase, Source, TensorRole
from echograph.models import ModelEntry, dense_flops


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

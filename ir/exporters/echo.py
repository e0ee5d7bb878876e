"""A measured step in the two JSON outputs of Echo's workload tracer: times by operation, and the graph.

    FOLDER/PyTorch/pytorch_ops_profiling/MODEL/PART_ops_profiling_bsB_seqS.json        {name: milliseconds}
    FOLDER/PyTorch/pytorch_graph_profiling/MODEL/PART_graph_profiling_bsB_seqS.json    [{name, op, ...}]

PART is forward, backward, or global: the whole step with the optimizer. Both files name an operation alike, by its
operator and a number where there are several. Views stand in the graph and take no time. What differs from the
tracer: operators are ATen's ("aten.addmm"), so that parameters are inputs of an operation like others instead of
`weight_*` and `bias_*`, and nothing stands in the times that is not in the graph.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from echograph.errors import PlanError
from echograph.ir.columns import NONE
from echograph.ir.files import whole_folder, write_whole
from echograph.ir.formats import Exported
from echograph.ir.graph import Graph, StepGraph
from echograph.ir.types import Compute, DType, Phase, Source
from echograph.ir.unfold import unfold

_PHASES = {
    "forward": (Phase.FORWARD,),
    "backward": (Phase.BACKWARD, Phase.RECOMPUTE),
    "global": tuple(Phase),
}
_TYPES = {
    DType.FP32: "torch.float32",
    DType.FP16: "torch.float16",
    DType.BF16: "torch.bfloat16",
    DType.FP64: "torch.float64",
    DType.FP8_E4M3: "torch.float8_e4m3fn",
    DType.FP8_E5M2: "torch.float8_e5m2",
    DType.INT64: "torch.int64",
    DType.INT32: "torch.int32",
    DType.INT16: "torch.int16",
    DType.INT8: "torch.int8",
    DType.UINT8: "torch.uint8",
    DType.BOOL: "torch.bool",
    DType.COMPLEX64: "torch.complex64",
    DType.FP4_E2M1: "torch.float4_e2m1fn_x2",
}
_PICOSECONDS_PER_MS = 1e9


def export_echo(graph: Graph, folder: Path) -> Exported:
    """Writes six files below a folder.

    Args:
        graph: a step, with measured durations.
        folder: made if there is none; else the files are added to it.

    Raises:
        PlanError: a job graph: Echo's files hold one rank's step.
        OutputError: the folder cannot be written.
    """
    if not isinstance(graph, StepGraph):
        raise PlanError("echo: its files hold the step of one device, and this is a job: give the step graph")
    flat = unfold(graph)
    nodes = list(_nodes(flat))
    times = _times(flat)
    model = flat.workload.model or flat.name or "model"
    stem = f"bs{flat.workload.batch_size}_seq{flat.workload.sequence_length}"
    written = 0
    with whole_folder(folder) as scratch:
        for name, phases in _PHASES.items():
            chosen = [node for node, op in zip(nodes, flat.ops, strict=True) if op.phase in phases]
            runtime = {node["name"]: times[node["id"]] for node in chosen if node["id"] in times}
            listed = [{key: value for key, value in node.items() if key != "id"} for node in chosen]
            for kind, content in (("ops_profiling", runtime), ("graph_profiling", listed)):
                place = scratch / "PyTorch" / f"pytorch_{kind}" / model.replace("/", "_")
                place.mkdir(parents=True, exist_ok=True)
                text = json.dumps(content, indent=1) + "\n"
                written += write_whole(place / f"{name}_{kind}_{stem}.json", [text])
    missing = len(flat.ops) - len(times)
    notes = (f"{missing} operations have no measured duration",) if missing else ()
    return Exported(files=2 * len(_PHASES), bytes=written, notes=notes)


def _times(graph: StepGraph) -> dict[int, float]:
    """Milliseconds of every operation that is measured, and 0 of every view, by operation."""
    times = {op.id: 0.0 for op in graph.ops if isinstance(op, Compute) and op.is_view}
    for op in graph.ops:
        measured = [d.picoseconds for d in op.durations if d.source is Source.MEASURED]
        if measured:
            times[op.id] = measured[0] / _PICOSECONDS_PER_MS
    return times


def _names(graph: StepGraph) -> list[str]:
    """A name for every operation: "addmm", "addmm_1", ..."""
    seen: Counter[str] = Counter()
    names = []
    for op in graph.ops:
        plain = op.name.rpartition(".")[2]
        names.append(f"{plain}_{seen[plain]}" if seen[plain] else plain)
        seen[plain] += 1
    return names


def _nodes(graph: StepGraph) -> Iterator[dict[str, Any]]:
    names = _names(graph)
    users: dict[int, list[str]] = defaultdict(list)
    makers = {tensor: int(op) for tensor, op in enumerate(graph.maker.tolist()) if op != NONE}
    for op in graph.ops:
        for tensor in dict.fromkeys(op.inputs):
            if tensor in makers:
                users[makers[tensor]].append(names[op.id])
    for op in graph.ops:
        inputs, outputs = ([graph.tensors[i] for i in side] for side in (op.inputs, op.outputs))
        attributes = op.attributes if isinstance(op, Compute) else None
        yield {
            "id": op.id,
            "name": names[op.id],
            "op": op.name,
            "module": op.module,
            "input_nodes": [names[makers[i]] for i in op.inputs if i in makers],
            "output_nodes": users[op.id],
            "input_types": [_TYPES[t.dtype] for t in inputs],
            "input_shapes": [list(t.shape) for t in inputs],
            "output_types": [_TYPES[t.dtype] for t in outputs],
            "output_shapes": [list(t.shape) for t in outputs],
            "attrs": {} if attributes is None else msgspec.to_builtins(attributes),
        }

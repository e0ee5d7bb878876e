"""A measured step in the two JSON outputs of Echo's workload tracer: times by operation, and the graph.

    FOLDER/workload_runtime/MODEL/{forward,backward,global}_bsB_seqS.json    {name: milliseconds}
    FOLDER/workload_graph/MODEL/{forward,backward,global}_bsB_seqS.json      [{name, op, input_nodes, ...}]

Both name an operation alike, so they join. `global` is the whole step, the optimizer included. Views stand in the
graph, and take no time.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from echograph.errors import OutputError, PlanError
from echograph.ir.columns import NONE
from echograph.ir.exporters import Exported
from echograph.ir.files import write_whole
from echograph.ir.graph import Graph, StepGraph
from echograph.ir.types import Compute, Phase, Source
from echograph.ir.unfold import unfold

_PHASES = {
    "forward": (Phase.FORWARD,),
    "backward": (Phase.BACKWARD, Phase.RECOMPUTE),
    "global": tuple(Phase),
}
_PICOSECONDS_PER_MS = 1e9


def export_echo(graph: Graph, folder: Path) -> Exported:
    """Writes six files below a folder.

    Args:
        graph: a step, with measured durations.
        folder: made if there is none.

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
    for name, phases in _PHASES.items():
        chosen = [node for node, op in zip(nodes, flat.ops, strict=True) if op.phase in phases]
        runtime = {node["name"]: times[node["id"]] for node in chosen if node["id"] in times}
        listed = [{key: value for key, value in node.items() if key != "id"} for node in chosen]
        for kind, content in (("workload_runtime", runtime), ("workload_graph", listed)):
            target = folder / kind / model.replace("/", "_") / f"{name}_{stem}.json"
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise OutputError(f"cannot write {target.parent}: {error.strerror or error}") from None
            written += write_whole(target, [json.dumps(content, indent=1) + "\n"])
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


def _nodes(graph: StepGraph) -> Iterator[dict[str, Any]]:
    names = [f"{op.name.rpartition('.')[2]}_{op.id}" for op in graph.ops]
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
            "input_types": [t.dtype.text for t in inputs],
            "input_shapes": [list(t.shape) for t in inputs],
            "output_types": [t.dtype.text for t in outputs],
            "output_shapes": [list(t.shape) for t in outputs],
            "attrs": {} if attributes is None else msgspec.to_builtins(attributes),
        }

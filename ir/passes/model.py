"""What a step says of its model: the FLOPs that it asks for, and its layers.

Model FLOPs, counted before passes share, pad or repeat a micro-batch, are the numerator of the model FLOPs
utilisation: those of forward and backward as the model defines them, so no plan changes them. The backward of
fused attention computes the scores of its forward again; that product is recomputation, too: for two products
forward, the gradients need four.

Layers are repeated blocks, and numbered modules beside them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from echograph.ir import types as t
from echograph.ir.columns import NONE
from echograph.ir.graph import Graph, JobGraph, Program, StepGraph
from echograph.ir.passes.gradients import DATA, REPLICATE, SHARD
from echograph.ir.types import Attention, OpKind, Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A layer of the model.

    Attributes:
        block: number of the block that it is in.
        instance: which instance of the block it is.
        rows: its forward operations, in order.
    """

    block: int
    instance: int
    rows: tuple[int, ...]


def find_layers(graph: StepGraph) -> list[Layer]:
    """The layers in the order of their first forward operation.

    Every instance of a repeated block is one, and so is what stands in the main block under a numbered module
    beside the repeated ones; where nothing repeats, what stands under any numbered module, of nested ones the
    outermost.
    """
    stems = {
        graph.strings[graph.ops.module[block.ops.start]].partition(".{}")[0]
        for block in graph.blocks[1:]
        if block.ops
    }
    found: dict[tuple[int, int, str], list[int]] = {}
    for block, begin, end, instance, _ in graph.programs[0].calls.tolist():
        for row in range(begin, end):
            if graph.ops.phase[row] != t.Phase.FORWARD:
                continue
            name = "" if block else _layer_name(graph.strings[graph.ops.module[row]], stems)
            if block or name:
                found.setdefault((block, instance, name), []).append(row)
    return [Layer(block=b, instance=i, rows=tuple(rows)) for (b, i, _), rows in found.items()]


def _layer_name(module: str, stems: set[str]) -> str:
    """The path of a module down to its layer's number; "" where it is in none."""
    parts = module.split(".")
    numbered = [(".".join(parts[:i]), part) for i, part in enumerate(parts) if part.isdigit()]
    stem, number = next((n for n in numbered if n[0] in stems or not stems), ("", ""))
    return f"{stem}.{number}".lstrip(".")


_STAGES = "pp"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlops:
    """Writes the FLOPs of a step's model into its workload.

    Attributes:
        capacity_factor: rows that an expert takes, in units of its even share, where the rest is dropped: the
            model is not asked for these; None drops none (`expert_parallel`).
    """

    name: ClassVar[str] = "model_flops"

    capacity_factor: float | None = None

    def __call__(self, graph: StepGraph) -> StepGraph:
        """The same step; nothing but its workload changes.

        Raises:
            PlanError: experts drop rows, but the step has none.
        """
        counted = graph
        if self.capacity_factor is not None and self.capacity_factor < 1:
            from echograph.ir.passes.expert_parallel import ExpertParallel

            counted = ExpertParallel(size=1, capacity_factor=self.capacity_factor)(graph)
        return replace(graph, workload=count_model_flops(counted).workload)


def count_model_flops(graph: StepGraph) -> StepGraph:
    """The step with the FLOPs of its model in its workload."""
    counted, causal = _of_program(graph, graph.programs[0])
    workload = replace(graph.workload, model_flops=counted, causal_attention_flops=causal)
    return replace(graph, workload=workload)


def count_job_flops(job: JobGraph) -> JobGraph:
    """A job that was captured as it runs, with the FLOPs of its model in its workload, where they can be told.

    Data-parallel ranks and stages compute nothing alike. Along any other axis (tensor, context, experts) a job
    does not tell what several ranks compute alike, or with padding: there the FLOPs stay unknown.
    """
    apart = (DATA, REPLICATE, SHARD, _STAGES)
    if any(axis.size > 1 and axis.name not in apart for axis in job.mesh):
        return job
    # Samples are counted in micro-batches of every replica.
    replicas = int(np.prod([axis.size for axis in job.mesh if axis.name != _STAGES], dtype=np.int64))
    counts = [np.array(_of_program(job, p), object) * job.rank_count(n) for n, p in enumerate(job.programs)]
    batches = replicas * max((len(np.unique(p.calls[:, 4])) for p in job.programs), default=1)
    counted, causal = (int(n) // batches for n in sum(counts, np.zeros(2, object)))
    return replace(job, workload=replace(job.workload, model_flops=counted, causal_attention_flops=causal))


def _of_program(graph: Graph, program: Program) -> tuple[int, int]:
    """FLOPs of the model in a program: all of them, and those in causal attention."""
    ops = graph.ops
    counted = np.isin(ops.phase, (Phase.FORWARD, Phase.BACKWARD)) & (ops.kind == OpKind.COMPUTE)
    fused = [code for code, value in enumerate(ops.attribute_values) if isinstance(value, Attention)]
    attends = counted & np.isin(ops.attributes, fused)
    others = np.concatenate([[0], np.cumsum(np.where(counted & ~attends, ops.flops, 0))])
    total = int((others[program.calls[:, 2]] - others[program.calls[:, 1]]).sum())
    rows, causal = np.flatnonzero(attends), 0
    for block, begin, end, instance, _ in program.calls.tolist():
        first, stop = np.searchsorted(rows, (begin, end)).tolist()
        for row in rows[first:stop].tolist():
            flops = _of_attention(graph, block, instance, row)
            total += flops
            attributes = ops.attribute_values[int(ops.attributes[row])]
            causal += flops if isinstance(attributes, Attention) and attributes.causal else 0
    return total, causal


def _of_attention(graph: Graph, block: int, instance: int, row: int) -> int:
    """What attention needs: of a backward one, twice what its forward takes."""
    forward = int(graph.ops.forward_op[row])
    if graph.ops.phase[row] != Phase.BACKWARD or forward == NONE:
        return int(graph.ops.flops[row])
    if forward < NONE:
        bound = graph.blocks[block].instances[instance].op_bindings[NONE - 1 - forward]
        forward = graph.locate_op(bound)[2]
    return 2 * int(graph.ops.flops[forward])

"""What a step says of its model: the FLOPs that it asks for, its layers, and its gradients.

Model FLOPs, counted before passes share, pad or repeat a micro-batch, are the numerator of the model FLOPs
utilisation: those of forward and backward as the model defines them, so no plan changes them. The backward of
fused attention computes the scores of its forward again; that product is recomputation, too: for two products
forward, the gradients need four.

Layers are repeated blocks, and numbered modules beside them.

Of gradients it says which are left to the optimizer, what is computed of all, and over which axes they add up.
Along a *data axis* every rank has its own part of the batch: other micro-batches (data- and expert-parallel
ranks), or other tokens of the same ones (context-parallel ranks). So each holds a summand of every gradient, but
for those of tensors that are divided over the axis: experts over "ep".

Their norm, and whether one has overflowed, is one scalar of all gradients together. Where gradients are divided
over ranks, each has such a scalar of its own part. So a pass that divides them adds an all-reduce of the scalar,
over its axis, right after the operations named here, and what reads the scalar reads the sum. Megatron-LM adds up
squares of norms, in which parameters that every tensor-parallel rank holds whole count on the first rank alone
(`megatron/core/optimizer/clip_grads.py`, `get_grad_norm_fp32`); squaring before and taking the root after, two
kernels of four bytes, are not counted here. Overflow flags it reduces by their maximum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import numpy as np

from echograph.errors import PlanError
from echograph.ir import types as t
from echograph.ir.builder import GraphBuilder
from echograph.ir.columns import NONE, Int64, distinct
from echograph.ir.graph import Axis, Graph, JobGraph, Program, StepGraph, kept
from echograph.ir.passes.rewrite import Call
from echograph.ir.types import Attention, OpKind, Phase, TensorRole

DATA, REPLICATE, SHARD = "dp", "dp_replicate", "dp_shard"
EXPERT, CONTEXT = "ep", "cp"
MICRO_BATCH_AXES = (DATA, REPLICATE, SHARD, EXPERT)
"""Axes whose ranks work on micro-batches of their own."""
DATA_AXES = (*MICRO_BATCH_AXES, CONTEXT)


@lru_cache(maxsize=4096)
def reduction_axes(mesh: tuple[Axis, ...], sharded: tuple[str, ...]) -> tuple[str, ...]:
    """The data axes, in the order of the mesh, whose ranks each hold a summand of a gradient.

    Args:
        mesh: of the job; axes of one rank are left out.
        sharded: axes over which the gradient is divided (`Tensor.sharded`).
    """
    return tuple(a.name for a in mesh if a.name in DATA_AXES and a.size > 1 and a.name not in sharded)


def axes_group(builder: GraphBuilder, axes: Sequence[str]) -> tuple[int, int]:
    """The group of some axes and the stream of its communicator."""
    name = "+".join(axes)
    return builder.group(name, axes=axes), builder.stream(f"comm.{name}")


ProgramPoint = tuple[int, int]
"""A place in a program: number of the call, and the operation of it that comes next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """A final gradient in one micro-batch: its id, its row, and the place from which it is ready."""

    tensor_id: int
    tensor: int
    ready: ProgramPoint


@kept
def final_gradients(graph: Graph) -> list[int]:
    """The tensors that hold the parameters' gradients when backward is done, as rows of the tensor table.

    Those are what backward makes and the optimizer reads. Roles say less: the gradients of activations may share
    their memory (a sum that flows on, unchanged), and one parameter's gradient may be a part of another's.
    """
    made = ~graph.tensors.port & (graph.maker != NONE)
    final = _read_by_optimizer(graph) & made & (graph.ops.phase[graph.maker] == t.Phase.BACKWARD)
    if final.any():
        return [int(row) for row in np.flatnonzero(final)]
    # No optimizer: a gradient may be a view of what a kernel made, and the later one is the parameter's.
    gradients = np.flatnonzero(made & (graph.tensors.role == t.TensorRole.GRADIENT))
    return list({int(graph.root[row]): int(row) for row in gradients}.values())


def adds_up(graph: Graph, gradient: int) -> bool:
    """Whether a gradient is added to a buffer where it is made, so that micro-batches add up by themselves."""
    root = int(graph.root[gradient])
    owned = graph.maker[root] == NONE and not graph.tensors.port[root]
    return bool(owned and graph.tensors.roles[root] == t.TensorRole.GRADIENT)


def _read_by_optimizer(graph: Graph) -> np.ndarray:
    """For every tensor, whether an operation of the optimizer reads it, in its own block or through a port."""
    inputs, tensors = graph.ops.inputs, graph.tensors
    read = np.zeros(len(tensors), np.bool_)
    read[inputs.values[graph.ops.phase[inputs.rows] == t.Phase.OPTIMIZER]] = True
    for block in graph.blocks:
        ports = block.tensors.start + np.flatnonzero(tensors.port[block.tensors.start : block.tensors.stop])
        for instance in block.instances:
            for port, bound in zip(ports.tolist(), instance.bindings, strict=True):
                if read[port]:
                    read[graph.locate_tensor(bound)[2]] = True
    return read


def ready_gradients(graph: Graph, calls: Int64, micro_batch: int | None = None) -> dict[int, dict[int, Gradient]]:
    """The final gradients that calls make: by micro-batch, and by id in the order in which they are made.

    Args:
        graph: of the calls.
        calls: of a program.
        micro_batch: the only one to look at; None: all.
    """
    made_by: dict[int, list[int]] = {}
    for tensor in final_gradients(graph):
        made_by.setdefault(int(graph.maker[tensor]), []).append(tensor)
    found: dict[int, dict[int, Gradient]] = {}
    runs = _runs_of(calls, np.array(sorted(made_by), np.int64), micro_batch)
    for number, (block, _, _, instance, its), op in runs:
        for tensor in made_by[op]:
            identity = graph.tensor_id(block, instance, tensor)
            found.setdefault(its, {})[identity] = Gradient(
                tensor_id=identity, tensor=tensor, ready=(number, op + 1)
            )
    return found


def updated_parameters(graph: Graph, calls: Int64) -> dict[int, int]:
    """For every parameter that calls update, by the id of its memory: the id of the last updated version."""
    outputs, inverse = graph.ops.outputs, graph.tensors.role == t.TensorRole.PARAMETER
    updates = (graph.ops.phase[outputs.rows] == t.Phase.OPTIMIZER) & inverse[outputs.values]
    made = _values_of(outputs.rows[updates], outputs.values[updates])
    found: dict[int, int] = {}
    for _, (block, _, _, instance, _), op in _runs_of(calls, distinct(outputs.rows[updates])):
        for row in made[op]:
            found[graph.tensor_id(*graph.owner(block, instance, row))] = graph.tensor_id(block, instance, row)
    return found


def _values_of(rows: Int64, values: Int64) -> dict[int, list[int]]:
    """The values of each row, in order."""
    found: dict[int, list[int]] = {}
    for row, value in zip(rows.tolist(), values.tolist(), strict=True):
        found.setdefault(row, []).append(value)
    return found


def first_reads(graph: Graph, calls: Int64, memories: set[int]) -> dict[int, ProgramPoint]:
    """Where the first micro-batch's forward pass reads each of some memories first, in the program's order."""
    inputs = graph.ops.inputs
    forward = np.flatnonzero(graph.ops.phase[inputs.rows] == t.Phase.FORWARD)
    its = forward[graph.tensors.role[graph.root[inputs.values[forward]]] == t.TensorRole.PARAMETER]
    read = _values_of(inputs.rows[its], inputs.values[its])
    found: dict[int, ProgramPoint] = {}
    first = int(calls[:, 4].min()) if len(calls) else 0
    for number, (block, _, _, instance, _), op in _runs_of(calls, distinct(inputs.rows[its]), first):
        for row in read[op]:
            where = graph.tensor_id(*graph.owner(block, instance, row))
            if where in memories:
                found.setdefault(where, (number, op))
    return found


def _runs_of(calls: Int64, ops: Int64, micro_batch: int | None = None) -> Iterator[tuple[int, Call, int]]:
    """(number of the call, the call, operation) for every run of some operations, given ascending."""
    low, high = np.searchsorted(ops, calls[:, 1]), np.searchsorted(ops, calls[:, 2])
    runs = low < high if micro_batch is None else (low < high) & (calls[:, 4] == micro_batch)
    its = np.flatnonzero(runs)
    rows: list[Call] = list(map(tuple, calls[its].tolist()))
    for number, call, begin, end in zip(its.tolist(), rows, low[its].tolist(), high[its].tolist(), strict=True):
        for op in ops[begin:end].tolist():
            yield number, call, op


def split_at_optimizer(graph: Graph, calls: Int64) -> tuple[Int64, Int64]:
    """The calls of forward and backward, and those from the first operation of the optimizer on."""
    optimizer = np.flatnonzero(graph.ops.phase == t.Phase.OPTIMIZER)
    first = np.append(optimizer, len(graph.ops))[np.searchsorted(optimizer, calls[:, 1])]
    updates = np.flatnonzero(first < calls[:, 2])
    if not len(updates):
        return calls, calls[:0]
    number = int(updates[0])
    cut = int(first[number])
    passes, update = calls[: number + 1].copy(), calls[number:].copy()
    passes[-1, 2] = update[0, 1] = cut
    return passes if passes[-1, 1] < cut else passes[:-1], update


def model_buffer_bytes(graph: Graph) -> int:
    """Bytes of all buffers that the model has, not those that its operations make."""
    total = 0
    for block in graph.blocks:
        rows = slice(block.tensors.start, block.tensors.stop)
        made = (graph.maker[rows] != NONE) | (graph.tensors.alias_of[rows] != NONE) | graph.tensors.port[rows]
        own = (graph.tensors.role[rows] == t.TensorRole.BUFFER) & ~made
        total += int(graph.tensors.nbytes[rows][own].sum()) * len(block.instances)
    return total


NORMS = ("aten._foreach_norm", "aten.linalg_vector_norm", "aten.norm")
_UNSCALE = "aten._amp_foreach_non_finite_check_and_unscale_"


def total_norms(graph: Graph) -> list[int]:
    """Operations whose (only) output is the norm of all gradients, as clipping by norm computes it.

    Such an operation is a norm of norms of gradients, whatever gathers those (`stack`) or stands between.

    Args:
        graph: a step or a job; operations of the phase OPTIMIZER count.

    Returns:
        Rows of the operation table, ascending: none without clipping, one for each program otherwise.
    """
    norms = [row for row in _optimizer_rows(graph) if graph.strings[graph.ops.name[row]] in NORMS]
    return [row for row in norms if _reads_any(graph, row, frozenset(norms))]


def overflow_flags(graph: Graph) -> list[int]:
    """Operations whose last output says whether any gradient has overflowed (fp16 with loss scaling).

    The flag is handed through the operations that unscale the gradients, each of which may raise it; the one meant
    is that after which no other does, nor an all-reduce of the flag that another pass has added.

    Args:
        graph: a step or a job; operations of the phase OPTIMIZER count.

    Returns:
        Rows of the operation table, ascending: none without loss scaling, one for each program otherwise.

    Raises:
        PlanError: the last one is in a repeated block, where only one instance completes the flag.
    """
    rows = [row for row in _optimizer_rows(graph) if graph.strings[graph.ops.name[row]] == _UNSCALE]
    reductions = (
        [row for row in _optimizer_rows(graph) if graph.ops.kinds[row] == OpKind.COLLECTIVE] if rows else []
    )
    places: set[tuple[int, int, int]] = set()
    handed_on: set[tuple[int, int, int] | None] = set()
    for row in (*rows, *reductions):
        number = int(graph.block_of_op[row])
        for instance in range(len(graph.blocks[number].instances)):
            read = {graph.source(number, instance, index) for index in graph.ops.inputs.row(row)}
            if row in rows or places & read:
                places.add((number, instance, row))
                handed_on |= read
    last = {(number, row) for number, _, row in places - handed_on}
    for number, _ in last:
        block = graph.blocks[number]
        if len(block.instances) > 1:
            raise PlanError(
                f"the overflow flag of the gradients is complete only in the last '{block.name}' of "
                f"{len(block.instances)} that are one repeated block: train in bf16, without loss scale"
            )
    return sorted(row for _, row in last)


def _optimizer_rows(graph: Graph) -> list[int]:
    found: list[int] = (graph.ops.phase == Phase.OPTIMIZER).nonzero()[0].tolist()
    return found


def _reads_any(graph: Graph, row: int, wanted: frozenset[int]) -> bool:
    """Whether some of the optimizer's operations lead from a wanted one to this one, past no gradient.

    Instances of a block are alike, so the first one stands for all.
    """
    seen: set[int] = set()
    left = [(int(graph.block_of_op[row]), 0, row)]
    while left:
        block, instance, reader = left.pop()
        for index in graph.ops.inputs.row(reader):
            if graph.tensors.roles[index] == TensorRole.GRADIENT:
                continue
            place = graph.source(block, instance, index)
            if place is None or place[2] in seen or graph.ops.phases[place[2]] != Phase.OPTIMIZER:
                continue
            if place[2] in wanted:
                return True
            seen.add(place[2])
            left.append(place)
    return False


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
    beside the repeated ones, be it of another stage (`stages.1.layers.0` where only `stages.0.layers` repeat);
    where nothing repeats, what stands under any numbered module, of nested ones the outermost.
    """
    stems = {
        _pattern(graph.strings[graph.ops.module[block.ops.start]].partition(".{}")[0])
        for block in graph.blocks[1:]
        if block.ops
    }
    found: dict[tuple[int, int, str], list[int]] = {}
    for block, begin, end, instance, _ in graph.programs[0].calls.tolist():
        for row in range(begin, end):
            if graph.ops.phases[row] != t.Phase.FORWARD:
                continue
            name = "" if block else _layer_name(graph.strings[graph.ops.module[row]], stems)
            if block or name:
                found.setdefault((block, instance, name), []).append(row)
    return [Layer(block=b, instance=i, rows=tuple(rows)) for (b, i, _), rows in found.items()]


def _layer_name(module: str, stems: set[str]) -> str:
    """The path of a module down to its layer's number; "" where it is in none."""
    parts = module.split(".")
    numbered = [(".".join(parts[:i]), part) for i, part in enumerate(parts) if part.isdigit()]
    stem, number = next((n for n in numbered if not stems or _pattern(n[0]) in stems), ("", ""))
    return f"{stem}.{number}".lstrip(".")


def _pattern(stem: str) -> str:
    """The path of a list of modules, whatever the numbers of the lists that it stands in."""
    return ".".join("*" if part.isdigit() else part for part in stem.split("."))


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
    batches = replicas * max((len(distinct(p.calls[:, 4])) for p in job.programs), default=1)
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
    if graph.ops.phases[row] != Phase.BACKWARD or forward == NONE:
        return int(graph.ops.flops[row])
    if forward < NONE:
        bound = graph.blocks[block].instances[instance].op_bindings[NONE - 1 - forward]
        forward = graph.locate_op(bound)[2]
    return 2 * int(graph.ops.flops[forward])

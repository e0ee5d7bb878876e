"""Which gradients a step leaves to its optimizer, when they are ready, and which parameters it updates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from echograph.ir import types as t
from echograph.ir.columns import NONE
from echograph.ir.graph import Graph
from echograph.ir.passes.rewrite import Call

Place = tuple[int, int]
"""A place in a program: number of the call, and the operation of it that comes next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """A final gradient in one micro-batch: its id, its row, and the place from which it is ready."""

    tensor_id: int
    tensor: int
    ready: Place


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
    return bool(owned and graph.tensors.role[root] == t.TensorRole.GRADIENT)


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


def ready_gradients(
    graph: Graph, calls: Sequence[Call], micro_batch: int | None = None
) -> dict[int, dict[int, Gradient]]:
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


def updated_parameters(graph: Graph, calls: Sequence[Call]) -> dict[int, int]:
    """For every parameter that calls update, by the id of its memory: the id of the last updated version."""
    outputs, inverse = graph.ops.outputs, graph.tensors.role == t.TensorRole.PARAMETER
    updates = (graph.ops.phase[outputs.rows] == t.Phase.OPTIMIZER) & inverse[outputs.values]
    found: dict[int, int] = {}
    for _, (block, _, _, instance, _), op in _runs_of(calls, np.unique(outputs.rows[updates])):
        for row in outputs.row(op):
            if inverse[row]:
                found[memory(graph, block, instance, row)] = graph.tensor_id(block, instance, row)
    return found


def first_reads(graph: Graph, calls: Sequence[Call], memories: set[int]) -> dict[int, Place]:
    """Where the first micro-batch's forward pass reads each of some memories first, in the program's order."""
    inputs = graph.ops.inputs
    forward = np.flatnonzero(graph.ops.phase[inputs.rows] == t.Phase.FORWARD)
    parameter = graph.tensors.role[graph.root[inputs.values[forward]]] == t.TensorRole.PARAMETER
    found: dict[int, Place] = {}
    first = min((call[4] for call in calls), default=0)
    for number, (block, _, _, instance, _), op in _runs_of(
        calls, np.unique(inputs.rows[forward[parameter]]), first
    ):
        for row in inputs.row(op):
            if graph.tensors.role[graph.root[row]] == t.TensorRole.PARAMETER:
                its = memory(graph, block, instance, row)
                if its in memories:
                    found.setdefault(its, (number, op))
    return found


def memory(graph: Graph, block: int, instance: int, row: int) -> int:
    """The id of the tensor that owns a tensor's memory, through views and ports."""
    while graph.tensors.port[row := int(graph.root[row])]:
        block, instance, row = graph.locate_tensor(graph.tensor_id(block, instance, row))
    return graph.tensor_id(block, instance, row)


def _runs_of(
    calls: Sequence[Call], ops: np.ndarray, micro_batch: int | None = None
) -> Iterator[tuple[int, Call, int]]:
    """(number of the call, the call, operation) for every run of some operations, given ascending."""
    its = [number for number, call in enumerate(calls) if micro_batch in (None, call[4])]
    bounds = np.searchsorted(ops, np.array([calls[number][1:3] for number in its], np.int64).reshape(-1, 2))
    for number, (low, high) in zip(its, bounds.tolist(), strict=True):
        for op in ops[low:high].tolist():
            yield number, calls[number], op


def split_at_optimizer(graph: Graph, calls: list[Call]) -> tuple[list[Call], list[Call]]:
    """The calls of forward and backward, and those from the first operation of the optimizer on."""
    optimizer = np.flatnonzero(graph.ops.phase == t.Phase.OPTIMIZER)
    begins, ends = np.array([call[1:3] for call in calls], np.int64).reshape(-1, 2).T
    first = np.append(optimizer, len(graph.ops))[np.searchsorted(optimizer, begins)]
    updates = np.flatnonzero(first < ends)
    if not len(updates):
        return calls, []
    number, cut = int(updates[0]), int(first[updates[0]])
    block, begin, end, instance, micro_batch = calls[number]
    before = [(block, begin, cut, instance, micro_batch)] if cut > begin else []
    return [*calls[:number], *before], [(block, cut, end, instance, micro_batch), *calls[number + 1 :]]


def buffer_bytes(graph: Graph) -> int:
    """Bytes of all buffers that the model has, not those that its operations make."""
    total = 0
    for block in graph.blocks:
        rows = slice(block.tensors.start, block.tensors.stop)
        made = (graph.maker[rows] != NONE) | (graph.tensors.alias_of[rows] != NONE) | graph.tensors.port[rows]
        own = (graph.tensors.role[rows] == t.TensorRole.BUFFER) & ~made
        total += int(graph.tensors.nbytes[rows][own].sum()) * len(block.instances)
    return total

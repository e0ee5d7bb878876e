"""Where a step computes one scalar of all its gradients together: their norm, and whether one has overflowed.

Where gradients are divided over ranks, each has such a scalar of its own part. So a pass that divides them adds an
all-reduce of the scalar, over its axis, right after the operations named here, and what reads the scalar reads the
sum. Megatron-LM adds up squares of norms, in which parameters that every tensor-parallel rank holds whole count on
the first rank alone (`megatron/core/optimizer/clip_grads.py`, `get_grad_norm_fp32`); squaring before and taking
the root after, two kernels of four bytes, are not counted here. Overflow flags it reduces by their maximum.
"""

from __future__ import annotations

from echograph.errors import PlanError
from echograph.ir.graph import Graph
from echograph.ir.types import OpKind, Phase, TensorRole

NORMS = ("aten._foreach_norm", "aten.linalg_vector_norm", "aten.norm")
_UNSCALE = "aten._amp_foreach_non_finite_check_and_unscale_"
Place = tuple[int, int, int]


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
        [row for row in _optimizer_rows(graph) if graph.ops.kind[row] == OpKind.COLLECTIVE] if rows else []
    )
    places: set[Place] = set()
    handed_on: set[Place | None] = set()
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
            if graph.tensors.role[index] == TensorRole.GRADIENT:
                continue
            place = graph.source(block, instance, index)
            if place is None or place[2] in seen or graph.ops.phase[place[2]] != Phase.OPTIMIZER:
                continue
            if place[2] in wanted:
                return True
            seen.add(place[2])
            left.append(place)
    return False

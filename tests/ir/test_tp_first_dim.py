"""Copies around what tensor-parallel ranks gather and scatter along another dimension than the first."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

pytest.importorskip("torch", reason="needs the [torch] extra")

from echograph.frontend.pytorch.spec import StepSpec
from echograph.ir import types as t
from echograph.ir.graph import StepGraph
from echograph.ir.passes.base import run
from echograph.ir.passes.precision import Precision
from echograph.ir.passes.recompute import Recompute
from echograph.ir.passes.tensor_parallel import TensorParallel
from echograph.ir.passes.tensor_parallel.first_dim import FirstDim
from echograph.ir.passes.tensor_parallel.overlap import SYMMETRIC, TpCommOverlap
from echograph.ir.verify import verify
from echograph.models import get_model
from echograph.simulator.clusters import load_cluster
from echograph.workflow.compile import compile_entry
from echograph.workflow.plan import Plan, passes

RANKS, SEQUENCE = 4, 128
ALONG = ("ALL_GATHER", "REDUCE_SCATTER")


@cache
def rank(samples: int, *, sequence: bool = True, fp8: bool = False) -> StepGraph:
    """The step of a tensor-parallel rank, of a Llama with three layers."""
    model = get_model("llama-3.2-1b").with_config(num_hidden_layers=3)
    step = compile_entry(model, StepSpec(), batch_size=samples, seq_len=SEQUENCE)
    local = TensorParallel(size=RANKS, sequence_parallel=sequence)(step)
    return Precision(dtype="fp8", gathers="fp8")(local) if fp8 else local


def ran(graph: StepGraph) -> list[t.Op]:
    return [op for _, b, e, _, _ in graph.programs[0].calls.tolist() for op in graph.ops[b:e]]


def copied(graph: StepGraph, bytes_: str = "bytes_read") -> Counter[int]:
    """Bytes that each copy reads, or writes, and how many do."""
    return Counter(getattr(op, bytes_) for op in ran(graph) if op.name == "aten.cat")


def communicated(graph: StepGraph) -> Counter[int]:
    """Bytes of each activation that is gathered or scattered, and how many are."""
    return Counter(
        op.bytes_per_rank for op in ran(graph) if isinstance(op, t.Collective) and op.collective.name in ALONG
    )


@pytest.mark.parametrize("fp8", [False, True])
def test_each_gather_and_each_scatter_of_the_sequence_has_one_copy(fp8: bool) -> None:
    """Of the whole tensor, in the type in which it is communicated; nothing else changes."""
    graph = rank(2, fp8=fp8)
    made = FirstDim()(graph)
    verify(made)
    assert copied(made) - copied(graph) == communicated(graph) != Counter()
    assert copied(made, "bytes_written") - copied(graph, "bytes_written") == communicated(graph)
    rest = Counter((op.name, op.phase, op.module) for op in ran(made) if op.name != "aten.cat")
    assert rest == Counter((op.name, op.phase, op.module) for op in ran(graph) if op.name != "aten.cat")
    if fp8:
        assert 2 * SEQUENCE * 2048 in copied(made)


def test_a_copy_stands_between_a_gather_and_its_readers_and_before_a_scatter() -> None:
    made = FirstDim()(rank(2))
    makers = {i: op for op in made.ops for i in op.outputs}
    readers = {i: op for op in reversed(list(made.ops)) for i in op.inputs}
    gathers = [op for op in made.ops if isinstance(op, t.Collective) and op.collective.name == "ALL_GATHER"]
    scatters = [op for op in made.ops if isinstance(op, t.Collective) and op.collective.name == "REDUCE_SCATTER"]
    assert gathers and scatters
    assert {readers[op.outputs[0]].name for op in gathers} == {"aten.cat"}
    assert {makers[op.inputs[0]].name for op in scatters} == {"aten.cat"}


@pytest.mark.parametrize(("samples", "sequence"), [(1, True), (2, False)])
def test_one_sample_lies_right_and_a_sum_has_no_parts(samples: int, sequence: bool) -> None:
    graph = rank(samples, sequence=sequence)
    assert copied(FirstDim()(graph)) == copied(graph)


def test_what_runs_beside_products_is_read_where_it_lies() -> None:
    """Of a layer two sums of gradients alone are copied, beside what no layer has."""
    graph = rank(2)
    beside = TpCommOverlap(dtensor=True)(graph)
    symmetric = [op for op in ran(beside) if op.name.startswith(SYMMETRIC)]
    plain = communicated(graph)
    made = FirstDim()(beside)
    verify(made)
    copies = copied(made) - copied(beside)
    assert 0 < copies.total() < plain.total() and symmetric
    scatters = [op for op in ran(made) if isinstance(op, t.Collective) and op.collective.name == "REDUCE_SCATTER"]
    of_layers = [op for op in scatters if ".{}" in op.module and not op.name.startswith(SYMMETRIC)]
    assert len(of_layers) == 2 * 3 and {op.phase for op in of_layers} == {t.Phase.BACKWARD}


def test_what_forward_gathered_is_kept_for_backward() -> None:
    """As autograd keeps it: two gathers a layer fewer, of what its two groups of column-parallel products read."""
    model = get_model("llama-3.2-1b").with_config(num_hidden_layers=3)
    step = compile_entry(model, StepSpec(), batch_size=2, seq_len=SEQUENCE)

    def gathers(again: bool, *before: Recompute) -> Counter[str]:
        graph = run(step, before, to=StepGraph)
        local = TensorParallel(size=RANKS, sequence_parallel=True, gathers_again=again)(graph)
        verify(local)
        return Counter(
            op.phase.name for op in ran(local)
            if isinstance(op, t.Collective) and op.collective.name == "ALL_GATHER" and ".{}" in op.module
        )  # fmt: skip

    for before in ((), (Recompute(policy="full"),)):
        again, kept = gathers(True, *before), gathers(False, *before)
        assert again - kept == Counter(BACKWARD=2 * 3)
        assert kept - again == Counter()


@pytest.mark.parametrize(
    ("stack", "overlap", "copies"),
    [("torchtitan", "", True), ("torchtitan", "chunks", True), ("megatron-core", "", False), ("", "", False)],
)
def test_a_plan_has_the_copies_of_its_stack(stack: str, overlap: str, copies: bool) -> None:
    plan = Plan(gpus=8, tp=4, sequence_parallel=True, stack=stack, tp_comm_overlap=overlap)
    found = {one.name: one for one in passes(plan, rank(2).workload, load_cluster("dgx-h100"))}
    assert ("tp_first_dim" in found) == copies
    ranks = found["tensor_parallel"]
    assert isinstance(ranks, TensorParallel)
    assert ranks.gathers_again == (stack != "torchtitan")

"""Tensor-parallel communication beside products: what is done is what was done, and how long a group takes."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache

import pytest

pytest.importorskip("torch", reason="needs the [torch] extra")

from echograph.errors import PlanError
from echograph.frontend.pytorch.spec import StepSpec
from echograph.ir import types as t
from echograph.ir.graph import StepGraph
from echograph.ir.passes.data_parallel import DataParallel
from echograph.ir.passes.precision import Precision
from echograph.ir.passes.recompute import Recompute
from echograph.ir.passes.tensor_parallel import TensorParallel
from echograph.ir.passes.tensor_parallel.overlap import SPLITS, SYMMETRIC, TpCommOverlap, TpCommWaits
from echograph.ir.verify import verify
from echograph.models import get_model
from echograph.simulator.clusters import load_cluster
from echograph.workflow.compile import compile_entry
from echograph.workflow.plan import Plan, passes
from echograph.workflow.predict import predict
from echograph.workflow.scenario import Scenario

RANKS = 4
NAMES = pytest.mark.parametrize("name", ["gpt2", "llama-3.2-1b"])


@cache
def ranks(name: str, *, fp8: bool = False, sequence: bool = True) -> StepGraph:
    """The step of a tensor-parallel rank, of a model with three layers."""
    layers = "n_layer" if name == "gpt2" else "num_hidden_layers"
    step = compile_entry(get_model(name).with_config(**{layers: 3}), StepSpec(), batch_size=2, seq_len=128)
    local = TensorParallel(size=RANKS, sequence_parallel=sequence)(step)
    return Precision(dtype="fp8", kept="fp8", delayed=True, gathers="fp8")(local) if fp8 else local


def ran(graph: StepGraph) -> list[t.Op]:
    return [op for _, b, e, _, _ in graph.programs[0].calls.tolist() for op in graph.ops[b:e]]


def work(graph: StepGraph) -> Counter[tuple[str, str]]:
    """FLOPs and bytes communicated, by operator and phase."""
    found: Counter[tuple[str, str]] = Counter()
    for op in ran(graph):
        found[op.name, op.phase.name] += getattr(op, "flops", 0) + getattr(op, "bytes_per_rank", 0)
    return +found


@NAMES
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("chunks", [False, True])
def test_no_work_and_no_byte_is_lost(name: str, fp8: bool, chunks: bool) -> None:
    graph = ranks(name, fp8=fp8)
    overlapped = TpCommOverlap(chunks=chunks)(graph)
    verify(overlapped)
    assert work(overlapped) == work(graph)


@pytest.mark.parametrize("fp8", [False, True])
def test_asynchronous_tensor_parallelism_moves_a_part_before_a_gather_and_adds_parts_up_after_a_scatter(
    fp8: bool,
) -> None:
    graph = ranks("llama-3.2-1b", fp8=fp8)
    made = TpCommOverlap(dtensor=True)(graph)
    verify(made)
    assert sum(work(made).values()) == sum(work(graph).values())
    names = Counter(op.name for op in ran(made))
    gathers = [op for op in ran(made) if op.name == SYMMETRIC + "all_gather"]
    shares, sums = ([op for op in ran(made) if op.name == name] for name in ("tp.share", "tp.sum"))
    assert len(shares) == len(gathers) == 3 * (2 + 2)  # what products read forward, and gradients backward
    assert names[SYMMETRIC + "reduce_scatter"] == 2 * len(sums) == 2 * 3 * 2
    part = 2 * 128 // RANKS * 2048 * 2
    assert {(op.bytes_read, op.bytes_written) for op in sums if isinstance(op, t.Compute)} == {
        (RANKS * part, part)
    }
    if not fp8:
        assert {(op.bytes_read, op.bytes_written) for op in shares if isinstance(op, t.Compute)} == {(part, part)}
    plain = Counter((op.name, op.phase) for op in ran(TpCommOverlap()(graph)) if op.name in ("tp.share", "tp.sum"))
    # What Transformer Engine gathers in backward; there casts write gradients where the others read them.
    assert plain == {("tp.share", t.Phase.BACKWARD): 3 * (2 if fp8 else 4)}


def test_a_sum_of_products_is_scattered_with_nothing_beside_it() -> None:
    """The gradient of what queries, keys and values read: products of weights' gradients are all made before."""
    made = TpCommOverlap(dtensor=True)(ranks("llama-3.2-1b"))
    ops = [op for op in backward(made) if op.module.endswith(("q_proj", "k_proj", "v_proj"))]
    scatter = next(op for op in ops if isinstance(op, t.Collective) and op.collective.name == "REDUCE_SCATTER")
    assert not scatter.name.startswith(SYMMETRIC)
    assert max(op.id for op in ops if is_product(op)) < scatter.id


@pytest.mark.parametrize("fp8", [False, True])
def test_nothing_waits_for_what_is_gathered_again_before_it_is_read(fp8: bool) -> None:
    """A view of it stands after the product of the input's gradient, beside which it is gathered."""
    ops = backward(TpCommOverlap()(ranks("llama-3.2-1b", fp8=fp8)), views=True)
    gathers = [op for op in ops if isinstance(op, t.Collective) and op.collective.name == "ALL_GATHER"]
    gather = next(op for op in gathers if op.module.endswith(("up_proj", "gate_proj")))
    product = next(op for op in ops if op.id > gather.id and is_product(op))
    readers = [op for op in ops if gather.outputs[0] in op.inputs]
    assert readers
    assert all(op.id > product.id for op in readers)


def test_kernels_wait_for_what_a_library_communicates_synchronously() -> None:
    """As Megatron-LM of 2021 did: the next kernel, whatever it reads; nothing else changes."""
    graph = ranks("gpt2", sequence=False)
    made = TpCommWaits()(graph)
    verify(made)
    assert work(made) == work(graph)
    waited = set()
    for op, after in itertools.pairwise(op for op in backward(made) if op.phase == t.Phase.BACKWARD):
        if isinstance(op, t.Collective):
            assert op.id in after.deps
            waited.add(op.module.rpartition(".")[2])
    assert waited == {"c_fc", "c_attn"}


@pytest.mark.parametrize(("stack", "overlap", "waits"), [
    ("megatron-2021", "", True), ("megatron-2021", "none", True), ("megatron-2021", "bulk", False),
    ("megatron-core", "none", False), ("", "", False),
])  # fmt: skip
def test_a_plan_waits_as_its_stack_does(stack: str, overlap: str, waits: bool) -> None:
    plan = Plan(gpus=4, tp=4, stack=stack, tp_comm_overlap=overlap)
    found = [one.name for one in passes(plan, ranks("gpt2", sequence=False).workload, load_cluster("dgx-a100"))]
    assert ("tp_comm_waits" in found) == waits


@NAMES
def test_bulk_only_changes_the_order(name: str) -> None:
    graph = ranks(name)
    overlapped = TpCommOverlap(chunks=False)(graph)
    assert Counter((op.name, op.phase, op.module) for op in ran(overlapped)) == Counter(
        (op.name, op.phase, op.module) for op in ran(graph)
    )


def backward(graph: StepGraph, *, views: bool = False) -> list[t.Op]:
    ops = (op for op in graph.ops if op.phase == t.Phase.BACKWARD and ".{}" in op.module)
    return [op for op in ops if views or not is_view(op)]


def is_view(op: t.Op) -> bool:
    return isinstance(op, t.Compute) and op.is_view


def is_product(op: t.Op) -> bool:
    return isinstance(op, t.Compute) and isinstance(op.attributes, t.Gemm)


@NAMES
def test_inputs_are_gathered_and_gradients_scattered_beside_products(name: str) -> None:
    """Of the first part of a feed-forward network: gather, inputs' gradients, scatter, weights' gradients."""
    graph = TpCommOverlap(chunks=False)(ranks(name))
    first = ("c_fc",) if name == "gpt2" else ("gate_proj", "up_proj")
    of_it = [op for op in backward(graph) if op.module.endswith(first)]
    gather = next(op for op in of_it if isinstance(op, t.Collective) and op.collective.name == "ALL_GATHER")
    scatter = next(op for op in of_it if isinstance(op, t.Collective) and op.collective.name == "REDUCE_SCATTER")
    products = [op for op in of_it if is_product(op)]
    wide = 768 if name == "gpt2" else 2048
    inputs = [op for op in products if graph.tensors[op.outputs[0]].shape == (256, wide)]
    weights = [op for op in products if op not in inputs]
    assert len(inputs) == len(weights) == len(first)
    assert gather.id < min(op.id for op in inputs)
    assert max(op.id for op in inputs) < scatter.id < min(op.id for op in weights)


def took(graph: StepGraph, ops: Iterable[t.Op], duration: Callable[[t.Op], float]) -> float:
    """How long operations take on their streams, each waiting for what it reads."""
    free: dict[int, float] = {}
    ends: dict[int, float] = {}
    for op in ops:
        makers = {int(graph.maker[graph.origin[i]]) for i in op.inputs}
        begin = max([free.get(op.stream, 0.0), *(ends[m] for m in makers if m in ends)])
        ends[op.id] = free[op.stream] = begin + duration(op)
    return max(ends.values())


def group(graph: StepGraph, *modules: str, phase: t.Phase) -> list[t.Op]:
    """The products of modules, with the gathers and scatters of these."""
    ops = [op for op in graph.ops if op.phase == phase and op.module.endswith(modules)]
    return [op for op in ops if is_product(op) or isinstance(op, t.Collective) or is_view(op)]


TIMES = pytest.mark.parametrize("compute", [1.0, 4.0, 40.0])


def times(ops: list[t.Op], compute: float, communication: float) -> Callable[[t.Op], float]:
    flops = sum(op.flops for op in ops if isinstance(op, t.Compute))
    nbytes = sum(op.bytes_per_rank for op in ops if isinstance(op, t.Collective))

    def duration(op: t.Op) -> float:
        if isinstance(op, t.Collective):
            return communication * op.bytes_per_rank / nbytes
        assert isinstance(op, t.Compute)
        return compute * op.flops / flops

    return duration


@NAMES
@TIMES
@pytest.mark.parametrize("communication", [1.0, 5.0, 30.0])
def test_a_gather_takes_what_its_chunks_beside_the_product_take(
    name: str, compute: float, communication: float
) -> None:
    """n chunks, of which the last arrives at the end: max(g, a + g / n); of queries, keys and values together."""
    graph = TpCommOverlap()(ranks(name))
    modules = ("c_attn",) if name == "gpt2" else ("q_proj", "k_proj", "v_proj")
    ops = group(graph, *modules, phase=t.Phase.FORWARD)
    step = took(graph, ops, times(ops, compute, communication))
    assert step == pytest.approx(max(compute, communication + compute / RANKS), rel=0.01)
    assert max(compute, communication) <= step * 1.01
    assert step <= compute + communication


@NAMES
@TIMES
@pytest.mark.parametrize("communication", [1.0, 5.0, 30.0])
def test_a_scatter_takes_what_its_chunks_beside_the_product_take(
    name: str, compute: float, communication: float
) -> None:
    graph = TpCommOverlap()(ranks(name))
    module = "mlp.c_proj" if name == "gpt2" else "down_proj"
    ops = group(graph, module, phase=t.Phase.FORWARD)
    step = took(graph, ops, times(ops, compute, communication))
    closed = max(compute + communication / SPLITS, compute / SPLITS + communication)
    assert step == pytest.approx(closed, rel=0.01)
    assert max(compute, communication) <= step <= compute + communication


@NAMES
@TIMES
@pytest.mark.parametrize("communication", [1.0, 5.0, 30.0])
def test_bulk_overlap_takes_between_the_longer_and_both(name: str, compute: float, communication: float) -> None:
    graph = TpCommOverlap(chunks=False)(ranks(name))
    modules = ("c_fc",) if name == "gpt2" else ("gate_proj", "up_proj")
    ops = group(graph, *modules, phase=t.Phase.BACKWARD)
    ops = [op for op in ops if not isinstance(op, t.Collective) or op.payload == t.Payload.ACTIVATION]
    step = took(graph, ops, times(ops, compute, communication))
    # Gather beside the gradient of the input, scatter beside that of the weight: halves of both.
    assert step == pytest.approx(max(compute, communication, (compute + communication) / 2), rel=0.02)


def test_the_order_of_calls_stays() -> None:
    """With full recomputation forward stands again in the call of backward; no operation leaves its call."""
    step = compile_entry(
        get_model("llama-3.2-1b").with_config(num_hidden_layers=3), StepSpec(), batch_size=2, seq_len=128
    )
    graph = TensorParallel(size=2, sequence_parallel=True)(Recompute(policy="full")(step))
    overlapped = TpCommOverlap()(graph)
    verify(overlapped)

    def phases(graph: StepGraph) -> list[set[t.Phase]]:
        return [{op.phase for op in graph.ops[b:e]} for _, b, e, _, _ in graph.programs[0].calls.tolist()]

    assert phases(overlapped) == phases(graph)
    assert work(overlapped) == work(graph)


@NAMES
def test_all_reduces_without_sequence_parallelism_stay_whole(name: str) -> None:
    graph = ranks(name, sequence=False)
    overlapped = TpCommOverlap()(graph)
    assert Counter(op.name for op in ran(overlapped) if isinstance(op, t.Collective)) == Counter(
        op.name for op in ran(graph) if isinstance(op, t.Collective)
    )


def test_a_step_without_tensor_parallelism_is_the_step_itself() -> None:
    step = compile_entry(get_model("gpt2").with_config(n_layer=2), StepSpec(), batch_size=2, seq_len=128)
    assert TpCommOverlap()(step) is step
    with pytest.raises(PlanError, match="give 2 or more"):
        TpCommOverlap(splits=1)(step)


def test_steps_get_shorter_but_not_than_without_communication() -> None:
    step = compile_entry(
        get_model("llama-3-8b").with_config(num_hidden_layers=4), StepSpec(), batch_size=1, seq_len=4096
    )
    none, bulk, chunks = (
        predict(step, Plan(gpus=8, tp=4, sequence_parallel=True, tp_comm_overlap=how))[0].step_s
        for how in ("none", "bulk", "chunks")
    )
    plan = Plan(gpus=8, tp=4, sequence_parallel=True, tp_comm_overlap="chunks")
    free = predict(step, plan, scenario=Scenario(without=("comm.tp",)))[0].step_s
    assert free < chunks < bulk < none


def test_a_job_is_made_of_it() -> None:
    job = DataParallel(replicas=2, zero=1)(TpCommOverlap()(ranks("llama-3.2-1b")))
    verify(job)

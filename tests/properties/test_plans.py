"""Whatever plan a graph is lowered to: it verifies, work is conserved, and ranks agree on what they exchange."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from fnmatch import fnmatchcase
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import Phase as HypothesisPhase
from hypothesis import strategies as st
from small_models import CONFIGS, HEADS, LAYERS, small_step

from echograph.ir.graph import JobGraph, Program, StepGraph
from echograph.ir.types import OpKind, Phase, Tensor, TensorRole
from echograph.simulator.clusters import load_cluster
from echograph.workflow.plan import Plan
from echograph.workflow.predict import lower
from echograph.workflow.summary import summarize_job

pytest.importorskip("transformers", reason="needs the [torch] extra")
pytestmark = pytest.mark.torch

CLUSTER = load_cluster("dgx-h100")


@st.composite
def plans(draw: st.DrawFn) -> tuple[str, Plan]:
    """A model and a plan that it can take."""
    model = draw(st.sampled_from(sorted(CONFIGS)))
    size = st.sampled_from([1, 2, 4])
    tp, pp = draw(size), draw(size)
    cp = draw(st.sampled_from([1, 1, 2, 4]))
    ep = draw(size) if model == "mixtral" else 1
    zero = draw(st.sampled_from([0, 1, 2, 3]))
    dp = ep * draw(size)
    assume(not (zero == 3 and ep > 1))
    vpp = draw(st.sampled_from([1, 2])) if 1 < pp <= LAYERS // 2 else 1
    counts = st.sampled_from([pp, 2 * pp, 3 * pp]) if pp > 1 else st.sampled_from([1, 2, 3])
    schedule = "" if pp == 1 or vpp > 1 else draw(st.sampled_from(["gpipe", "1f1b", "zb-h1"]))
    return model, Plan(
        gpus=tp * pp * cp * dp,
        tp=tp,
        sequence_parallel=tp > 1 and draw(st.booleans()),
        pp=pp,
        vpp=vpp,
        cp=cp,
        cp_method=draw(st.sampled_from(["ring", "all-to-all"] if tp * cp <= HEADS else ["ring"])),
        ep=ep,
        zero=zero,
        hsdp_replicas=draw(st.sampled_from([1, dp])) if zero == 3 else 1,
        schedule=schedule,
        global_batch=2 * dp * draw(counts),
        recompute=draw(st.sampled_from(["none", "none", "selective", "full", "2"])),
        overlap_param_gather=zero in (1, 2) and draw(st.booleans()),
        mesh_order=draw(st.sampled_from(["tp-cp-ep-dp-pp", "tp-pp-dp-cp-ep"])),
    )


few = settings(
    max_examples=15,
    deadline=None,
    phases=(HypothesisPhase.explicit, HypothesisPhase.generate),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
many = settings(few, max_examples=400)


@few
@given(plans())
def test_any_plan(drawn: tuple[str, Plan]) -> None:
    check(small_step(drawn[0]), drawn[1])


@pytest.mark.slow
@many
@given(plans())
def test_many_plans(drawn: tuple[str, Plan]) -> None:
    check(small_step(drawn[0]), drawn[1])


def check(graph: StepGraph, plan: Plan) -> None:
    """Lowering verifies the graph; the rest is what only the plan and the step know."""
    job = lower(graph, plan, CLUSTER)
    assert job.world_size == plan.gpus
    assert plan.global_batch is not None
    # Experts' routers are not divided: ranks that hold the whole sequence all route it.
    again = 0 if plan.sequence_parallel else plan.tp - 1
    passes = plan.global_batch / graph.workload.batch_size
    assert work(job) == pytest.approx(passes * (flops(graph) + again * flops(graph, "*.gate")))
    own = own_bytes(graph, TensorRole.PARAMETER)
    # FSDP2 divides rows, and the last of its ranks have empty ones where they do not divide.
    assert own <= parameters(job) <= own + (padding(job) if plan.zero == 3 else 0)
    assert sent(job) == received(job)
    agree(job)


def model_ops(graph: StepGraph | JobGraph, program: Program) -> np.ndarray:
    """Rows of forward and backward that a program runs, as often as it does."""
    rows = np.concatenate([np.arange(begin, end) for _, begin, end, _, _ in program.calls.tolist()])
    return np.asarray(rows[np.isin(graph.ops.phase[rows], (Phase.FORWARD, Phase.BACKWARD))])


def flops(graph: StepGraph, modules: str = "*") -> float:
    """Forward and backward FLOPs of a step, or of some of its modules."""
    rows = model_ops(graph, graph.programs[0])
    fits = np.array([fnmatchcase(name, modules) for name in graph.strings])[graph.ops.module[rows]]
    return float(graph.ops.flops[rows][fits].sum())


def ranks(job: JobGraph, program: Program) -> int:
    return prod(axis.size for axis in job.mesh if axis.name not in program.coordinates)


def work(job: JobGraph) -> float:
    """Forward and backward FLOPs of all ranks, recomputation left out."""
    return sum(ranks(job, p) * float(job.ops.flops[model_ops(job, p)].sum()) for p in job.programs)


def own_bytes(graph: StepGraph, role: TensorRole) -> int:
    tensors = graph.tensors
    own = (tensors.role == role) & ~tensors.port & (tensors.alias_of == -1)
    return sum(
        int(tensors.nbytes[b.tensors.start : b.tensors.stop][own[b.tensors.start : b.tensors.stop]].sum())
        * len(b.instances)
        for b in graph.blocks
    )


def parameters(job: JobGraph) -> int:
    """Bytes of all parameters, each part once: what a tensor's axes divide, and what its stage alone holds."""
    return sum(parts * tensor.nbytes for tensor, parts in own_parameters(job))


def padding(job: JobGraph) -> int:
    """At most a row less than one for each part of a parameter."""
    return sum((parts - 1) * tensor.nbytes // max(1, tensor.shape[0]) for tensor, parts in own_parameters(job))


def own_parameters(job: JobGraph) -> Iterator[tuple[Tensor, int]]:
    """The parameters of all blocks and instances, with the number of their parts."""
    size = {axis.name: axis.size for axis in job.mesh}
    for block in job.blocks:
        for tensor in job.tensors[block.tensors.start : block.tensors.stop]:
            if tensor.role == TensorRole.PARAMETER and not tensor.port and tensor.alias_of is None:
                for _ in block.instances:
                    yield tensor, prod(size[axis] for axis in tensor.sharded)


def links(job: JobGraph, kind: OpKind) -> Iterator[tuple[Any, ...]]:
    for program in job.programs:
        here = program.coordinates.get("pp", 0)
        for _, begin, end, _, _ in program.calls.tolist():
            for row in (begin + np.flatnonzero(job.ops.kind[begin:end] == kind)).tolist():
                group = job.groups[int(job.ops.group[row])]
                ends = (here, _peer(job, group, here, int(job.ops.peer[row])))
                route = ends if kind == OpKind.SEND else ends[::-1]
                yield group.name, route, int(job.ops.tag[row]), int(job.ops.nbytes[row]), ranks(job, program)


def _peer(job: JobGraph, group: Any, here: int, step: int) -> int:
    """The stage at the other end; within a stage (a ring over the sequence) all ranks do alike."""
    size = {axis.name: axis.size for axis in job.mesh}
    return (here + step) % size["pp"] if "pp" in group.axes else here


def sent(job: JobGraph) -> Counter[tuple[Any, ...]]:
    return Counter(links(job, OpKind.SEND))


def received(job: JobGraph) -> Counter[tuple[Any, ...]]:
    return Counter(links(job, OpKind.RECV))


def agree(job: JobGraph) -> None:
    """Programs whose ranks meet in a group issue its collectives in one order."""
    orders: dict[str, set[tuple[Any, ...]]] = defaultdict(set)
    for program in job.programs:
        mine: dict[str, list[Any]] = defaultdict(list)
        for _, begin, end, _, _ in program.calls.tolist():
            for row in (begin + np.flatnonzero(job.ops.kind[begin:end] == OpKind.COLLECTIVE)).tolist():
                group = job.groups[int(job.ops.group[row])]
                if "pp" in group.axes:
                    mine[group.name].append((int(job.ops.variant[row]), int(job.ops.nbytes[row])))
        for name, order in mine.items():
            orders[name].add(tuple(order))
    for name, different in orders.items():
        assert len(different) == 1, f"group {name}: members disagree"


def test_the_summary_of_a_job_counts_the_same_work() -> None:
    plan = Plan(gpus=16, tp=2, pp=2, global_batch=16)
    job = lower(small_step("llama"), plan, CLUSTER)
    roles = summarize_job(job)["roles"]
    assert sum(r["ranks"] * (r["flops"]["forward"] + r["flops"]["backward"]) for r in roles) == work(job)

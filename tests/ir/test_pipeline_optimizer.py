"""The optimizer across stages: clipping, loss scaling, shared parameters, launches for many tensors."""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import cache

import numpy as np
import pytest

pytest.importorskip("transformers")

from echograph.frontend.pytorch.spec import StepSpec
from echograph.ir.graph import Graph, JobGraph, StepGraph
from echograph.ir.passes.data_parallel import DataParallel
from echograph.ir.passes.pipeline import Pipeline
from echograph.ir.passes.tensor_parallel import TensorParallel
from echograph.ir.types import Collective, Compute, MultiTensor, Op, OpKind, Phase
from echograph.models import get_model
from echograph.simulator.engine.static import run
from echograph.simulator.tasks import expand
from echograph.workflow.compile import compile_entry
from echograph.workflow.predict import predict

pytestmark = pytest.mark.torch

CLIPPED = StepSpec(clip_grad_norm=1.0)
SCALED = StepSpec(dtype="fp16", clip_grad_norm=1.0)
LAYERS = 6
PLANS = [
    Pipeline(stages=2, micro_batches=2),
    Pipeline(stages=4, micro_batches=4, schedule="zb-h1"),
    Pipeline(stages=2, micro_batches=2, schedule="interleaved", chunks=3),
    Pipeline(stages=5, micro_batches=1, schedule="gpipe"),
]
TURNING = Pipeline(stages=3, micro_batches=2, schedule="zb-v", chunks=2)
"""Has both ends of the model on one stage, which may not share a weight."""
CASES = [*((name, plan) for name in ("gpt2", "llama-3-8b") for plan in PLANS), ("llama-3-8b", TURNING)]
NORM, UNSCALE = "aten._foreach_norm", "aten._amp_foreach_non_finite_check_and_unscale_"


@cache
def step(name: str, spec: StepSpec) -> StepGraph:
    changes = {"gpt2": {"n_layer": LAYERS}}.get(name, {"num_hidden_layers": LAYERS})
    return compile_entry(get_model(name).with_config(**changes), spec, batch_size=1, seq_len=64)


def ran(graph: Graph, program: int) -> list[tuple[Op, str]]:
    """What a program runs in its order, with the module of the instance."""
    found = []
    for block, begin, end, instance, _ in graph.programs[program].calls.tolist():
        label = graph.blocks[block].instances[instance].label
        found += [
            (op, op.module.replace("{}", label) if block else op.module)
            for op in (graph.ops[row] for row in range(begin, end))
            if op.phase == Phase.OPTIMIZER
        ]
    return found


def named(job: Graph, program: int, name: str) -> list[Op]:
    return [op for op, _ in ran(job, program) if op.name == name]


def completes(job: JobGraph) -> bool:
    """Whether all programs come to their end: none waits for a communication that no other takes part in."""
    zero = np.zeros(len(job.ops), np.int64)
    return bool(run(expand(job, zero, zero)).max() >= 0)


@pytest.mark.parametrize(("name", "plan"), CASES, ids=str)
def test_every_stage_adds_up_its_own_norms_and_all_of_them_agree(name: str, plan: Pipeline) -> None:
    graph = step(name, CLIPPED)
    job = plan(graph)
    norms = [len(named(job, s, NORM)) for s in range(plan.stages)]
    # A weight that the first and the last stage share counts on the first.
    assert sum(norms) == len(named(graph, 0, NORM))
    for stage in range(plan.stages):
        (stack,) = named(job, stage, "aten.stack")
        (total,) = named(job, stage, "aten.linalg_vector_norm")
        assert len(set(stack.inputs)) == norms[stage] == job.tensors[stack.outputs[0]].shape[0]
        assert total.bytes_read == 4 * norms[stage]
        (reduce,) = named(job, stage, "pp.all_reduce_norm")
        assert isinstance(reduce, Collective)
        assert reduce.bytes_per_rank == 4
        assert job.groups[reduce.group].axes == ("pp",)
        names = [op.name for op, _ in ran(job, stage)]
        at = names.index("pp.all_reduce_norm")
        assert names[at - 1 : at + 2] == ["aten.linalg_vector_norm", "pp.all_reduce_norm", "pp.wait"]
        assert max(i for i, n in enumerate(names) if n == NORM) < at < names.index("aten._foreach_mul_")
    assert completes(job)


@pytest.mark.parametrize(("name", "plan"), CASES, ids=str)
def test_the_overflow_flag_of_every_stage_is_joined_before_it_is_read(name: str, plan: Pipeline) -> None:
    graph = step(name, SCALED)
    job = plan(graph)
    shared = 1 if name == "gpt2" and plan.stages > 1 else 0
    assert sum(len(named(job, s, UNSCALE)) for s in range(plan.stages)) == len(named(graph, 0, UNSCALE)) + shared
    for stage in range(plan.stages):
        names = [op.name for op, _ in ran(job, stage)]
        at = names.index("pp.all_reduce_overflow")
        assert max(i for i, n in enumerate(names) if n == UNSCALE) < at < names.index("aten._amp_update_scale_")
        assert names.count("aten._amp_update_scale_") == names.count("aten.zeros") == 1
        flags = chain(job, stage)
        assert len(flags) == len(set(flags)) == names.count(UNSCALE)
    assert completes(job)


def chain(job: JobGraph, program: int) -> list[tuple[int, int, int]]:
    """The operations that the flag goes through, from the one that all-reduces it back to its zero."""
    place = None
    for block, begin, end, instance, _ in job.programs[program].calls.tolist():
        for row in range(begin, end):
            if job.strings[job.ops.name[row]] == "pp.all_reduce_overflow":
                place = block, instance, row
    assert place is not None
    found = []
    while place is not None and job.strings[job.ops.name[place[2]]] != "aten.zeros":
        found.append(place)
        block, instance, row = place
        reads = job.ops.inputs.row(row)
        place = job.source(block, instance, reads[min(1, len(reads) - 1)])
    return found[1:]


def updates(graph: Graph, program: int) -> Counter[tuple[str, str, int, int]]:
    """What the optimizer does to parameters, apart from scalars of all of them."""
    return Counter(
        (op.name, module, op.bytes_read, op.bytes_written)
        for op, module in ran(graph, program)
        if isinstance(op, Compute) and module
    )


@pytest.mark.parametrize("plan", [*PLANS, TURNING], ids=str)
@pytest.mark.parametrize("spec", [CLIPPED, SCALED, StepSpec(optimizer="sgd")], ids=str)
def test_every_parameter_is_updated_on_one_stage_as_without_stages(spec: StepSpec, plan: Pipeline) -> None:
    graph = step("llama-3-8b", spec)
    job = plan(graph)
    assert sum((updates(job, s) for s in range(plan.stages)), Counter()) == updates(graph, 0)


def shares(job: Graph, program: int) -> dict[str, list[bool]]:
    """For each operator with shares of a launch: whether they lead, in the order of the program."""
    found: dict[str, list[bool]] = defaultdict(list)
    for op, _ in ran(job, program):
        if isinstance(op, Compute) and isinstance(op.attributes, MultiTensor):
            found[op.name].append(op.attributes.leads)
    return found


@pytest.mark.parametrize("plan", [*PLANS, Pipeline(stages=3, layers=(0, 6, 0))], ids=str)
@pytest.mark.parametrize("name", ["gpt2", "llama-3-8b"])
def test_every_stage_bears_its_own_launches(name: str, plan: Pipeline) -> None:
    graph = step(name, SCALED)
    launches = {operator: sum(leads) for operator, leads in shares(graph, 0).items()}
    job = plan(graph)
    for stage in range(plan.stages):
        of_stage = shares(job, stage)
        once = {operator: sum(leads) for operator, leads in of_stage.items()}
        missing = {NORM} if name == "gpt2" and plan.layers and stage == 2 and NORM not in once else set()
        assert once == {k: v for k, v in launches.items() if k not in missing}


def test_stages_with_tensor_and_data_parallelism_around_them() -> None:
    graph = step("llama-3-8b", SCALED)
    inside = TensorParallel(size=2)(graph)
    job = DataParallel(replicas=2)(Pipeline(stages=2, micro_batches=2)(inside))
    assert [(a.name, a.size) for a in job.mesh] == [("pp", 2), ("dp", 2), ("tp", 2)]
    for stage in range(2):
        names = Counter(op.name for op, _ in ran(job, stage) if isinstance(op, Collective))
        assert names["pp.all_reduce_norm"] == names["pp.all_reduce_overflow"] == 1
        assert names["tp.all_reduce"] == 2
    assert completes(job)


def test_a_pipeline_that_trains_in_fp16_is_simulated() -> None:
    result, job = predict(PLANS[1](step("gpt2", SCALED)))
    assert result.breakdown.total == result.step_ps > 0
    assert int((job.ops.kind == OpKind.COLLECTIVE).sum()) == 2 * 4 + 2

"""Real graphs on a pipeline: they lower, and what a stage holds, runs, sends and takes adds up."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from pipelines import parameter_bytes

pytest.importorskip("transformers")

from echograph.frontend.pytorch.spec import StepSpec
from echograph.ir.graph import JobGraph, StepGraph
from echograph.ir.passes.pipeline import Pipeline
from echograph.ir.types import OpKind, Phase
from echograph.models import get_model
from echograph.workflow.compile import compile_entry
from echograph.workflow.predict import predict

pytestmark = pytest.mark.torch

CASES = [
    ("gpt2", Pipeline(stages=3, micro_batches=4), 50257 * 768),
    ("gpt2", Pipeline(stages=2, micro_batches=4, schedule="interleaved", chunks=3), 50257 * 768),
    ("bert-base-uncased", Pipeline(stages=3, micro_batches=6, schedule="gpipe"), 30522 * 768),
    ("llama-3-8b", Pipeline(stages=2, micro_batches=4), 0),
    ("llama-3-8b", Pipeline(stages=3, micro_batches=3), 0),
    ("t5-small", Pipeline(stages=2, micro_batches=2), 32128 * 512),
    # The embedding of encoder, decoder and head is on three stages.
    ("t5-small", Pipeline(stages=4, micro_batches=4, schedule="zb-h1", layers=(4, 3, 3, 2)), 2 * 32128 * 512),
    ("vit-b-16", Pipeline(stages=4, micro_batches=4, schedule="zb-h1"), 0),
    ("vit-b-16", Pipeline(stages=3, micro_batches=3, schedule="interleaved", chunks=4), 0),
    pytest.param("deepseek-v3", Pipeline(stages=4, micro_batches=4, schedule="zb-h1"), 0, marks=pytest.mark.slow),
]


@cache
def step(name: str) -> StepGraph:
    return compile_entry(get_model(name), StepSpec(), batch_size=2)


def flops(graph: StepGraph | JobGraph, phases: tuple[Phase, ...]) -> int:
    counted = np.where(np.isin(graph.ops.phase, phases), graph.ops.flops, 0)
    return sum(int(counted[x:y].sum()) for p in graph.programs for _, x, y, _, _ in p.calls.tolist())


@pytest.mark.parametrize(("name", "plan", "shared"), CASES)
def test_stages_add_up_to_the_model(name: str, plan: Pipeline, shared: int) -> None:
    graph = step(name)
    job = plan(graph)
    passes = (Phase.FORWARD, Phase.BACKWARD)
    assert flops(job, passes) == plan.micro_batches * flops(graph, passes)
    # A bf16 parameter has 2 bytes; what stages share is on each of them.
    parameters = sum(parameter_bytes(job, stage) for stage in range(plan.stages))
    assert parameters == 2 * (graph.workload.parameters + shared)


@pytest.mark.parametrize(("name", "plan", "shared"), CASES)
def test_the_step_is_simulated_and_its_parts_add_up(name: str, plan: Pipeline, shared: int) -> None:
    result, job = predict(plan(step(name)))
    assert result.gpus == plan.stages
    assert result.breakdown.total == result.step_ps > 0
    assert result.breakdown.bubble > 0 or plan.schedule == "zb-h1"  # where W may fill it all
    assert result.samples == 2 * plan.micro_batches
    assert bool(shared) == bool(np.any(job.ops.kind == OpKind.COLLECTIVE))


@pytest.mark.parametrize("name", ["gpt2", "bert-base-uncased", "llama-3-8b"])
def test_one_activation_goes_up_a_boundary_and_one_gradient_down(name: str) -> None:
    graph = step(name)
    job = Pipeline(stages=4)(graph)
    sends = np.flatnonzero(job.ops.kind == OpKind.SEND)
    assert len(sends) == 2 * 3
    width = {"gpt2": 768, "bert-base-uncased": 768, "llama-3-8b": 4096}[name]
    assert set(job.ops.nbytes[sends].tolist()) == {2 * graph.workload.sequence_length * width * 2}


def test_more_micro_batches_shrink_the_bubble() -> None:
    def share(micro_batches: int) -> float:
        result, _ = predict(Pipeline(stages=4, micro_batches=micro_batches)(step("gpt2")))
        return result.step_ps / micro_batches

    assert share(4) > share(8) > share(32)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_recomputation_is_part_of_the_pass_that_makes_what_is_sent(schedule: str) -> None:
    graph = compile_entry(get_model("gpt2"), StepSpec(recompute=True), batch_size=2)
    job = Pipeline(stages=3, micro_batches=4, schedule=schedule)(graph)
    again = (Phase.RECOMPUTE,)
    assert flops(job, again) == 4 * flops(graph, again) > 0
    for program in job.programs[1:]:
        waiting = dict[int, str]()  # what comes next of a micro-batch's backward pass: the receive, or the send
        for _, begin, end, _, micro_batch in program.calls.tolist():
            for row in range(begin, end):
                name = job.strings[job.ops.name[row]]
                if name == "pp.recv_backward":
                    waiting[micro_batch] = "recomputed"
                elif name == "pp.send_backward":
                    assert waiting.pop(micro_batch, "sent") != "sent" or program is job.programs[-1]
                    waiting[micro_batch] = "sent"
                elif job.ops.phase[row] == Phase.RECOMPUTE:
                    first = program is job.programs[-1] and micro_batch not in waiting
                    assert first or waiting[micro_batch] == "recomputed"


@pytest.mark.slow
def test_a_large_model_stays_small() -> None:
    graph = compile_entry(get_model("llama-3.1-405b"), StepSpec(), batch_size=1)
    job = Pipeline(stages=16, micro_batches=64)(graph)
    assert len(job.ops) < 10 * len(graph.ops)
    assert sum(len(b.instances) for b in job.blocks if len(b.ops) > 200) == 126

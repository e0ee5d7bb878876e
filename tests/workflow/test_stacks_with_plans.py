"""Every software stack under every way to spread a step: it lowers, and is simulated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from math import log, sqrt
from statistics import fmean

import pytest
from _pytest.mark import ParameterSet

pytest.importorskip("transformers")

from echograph.frontend.pytorch.spec import StepSpec
from echograph.ir.graph import StepGraph
from echograph.models import get_model
from echograph.models.stacks import stack_names
from echograph.workflow.compile import compile_entry
from echograph.workflow.plan import Plan
from echograph.workflow.predict import UNSAID_STACK, lower, predict, simulate

pytestmark = pytest.mark.torch

PLANS = {
    "sharded": Plan(gpus=8, zero=3, micro_batch=1),
    "copies of shards": Plan(gpus=8, zero=3, hsdp_replicas=2, micro_batch=1, recompute="full"),
    "tensor and pipeline parallel": Plan(gpus=8, tp=2, pp=2, micro_batch=1, global_batch=8),
    "sequence parallel, interleaved": Plan(
        gpus=8, tp=2, sequence_parallel=True, pp=2, vpp=2, schedule="interleaved", micro_batch=1, global_batch=8,
        recompute="selective",
    ),
    "context parallel": Plan(gpus=8, tp=2, cp=2, pp=2, micro_batch=1, global_batch=4, zero=1),
}  # fmt: skip


@cache
def step() -> StepGraph:
    entry = get_model("llama-3-8b").with_config(
        num_hidden_layers=4, hidden_size=256, num_attention_heads=8, num_key_value_heads=4, head_dim=32,
        intermediate_size=512, vocab_size=512,
    )  # fmt: skip
    return compile_entry(entry, StepSpec(dtype="bf16"), batch_size=1, seq_len=128)


def cases() -> Iterator[ParameterSet]:
    for plan in PLANS:
        for stack in ("", *stack_names()):
            quick = plan == "tensor and pipeline parallel" and stack in ("", "megatron-2021")
            yield pytest.param(plan, stack, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize(("plan", "stack"), list(cases()))
def test_a_step_is_spread_and_simulated(plan: str, stack: str) -> None:
    assert simulate(lower(step(), replace(PLANS[plan], stack=stack)), memory=False).step_ps > 0


def test_a_lowered_job_is_run_by_the_stack_of_its_plan() -> None:
    """As one read from a file is, of which nobody gives the plan again."""
    plan = replace(PLANS["sharded"], stack="inductor")
    job = lower(step(), plan)
    assert job.workload.stack == "inductor"
    assert simulate(job).step_ps == predict(step(), plan)[0].step_ps


@pytest.mark.slow
def test_a_step_of_no_stack_is_as_uncertain_as_stacks_differ() -> None:
    apart = []
    for model, length, plan in (
        ("llama-3.1-8b", 8192, Plan(gpus=64, zero=3, micro_batch=1, global_batch=64)),
        (
            "llama-3.1-8b", 8192,
            Plan(gpus=64, tp=8, sequence_parallel=True, zero=1, micro_batch=1, global_batch=64),
        ),
        (
            "llama-3.1-70b", 8192,
            Plan(gpus=64, tp=4, sequence_parallel=True, pp=4, zero=1, micro_batch=1, global_batch=32),
        ),
        ("gpt2-xl", 1024, Plan(gpus=8, micro_batch=8, global_batch=64)),
    ):  # fmt: skip
        graph = compile_entry(get_model(model), StepSpec(dtype="bf16"), batch_size=2, seq_len=length)
        of = {
            stack: simulate(lower(graph, replace(plan, stack=stack)), memory=False).step_ps
            for stack in ("", *stack_names())
        }
        apart += [log(step_ps / of[""]) for stack, step_ps in of.items() if stack]
    assert sqrt(fmean(x * x for x in apart)) == pytest.approx(UNSAID_STACK, abs=0.01)

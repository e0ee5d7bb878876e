"""A GPT captured from megatron-core, and the same model and plan through the compiler's own passes.

Llama-3-8B's shape with its projections fused as Megatron has them (the zoo's phi3 family has, too) and PyTorch's
RMSNorm in both: tensor-parallel over 8 ranks with sequence parallelism, 4 stages, 8 micro-batches and the
distributed optimizer over 32 ranks, 1,024 in all.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
from megatron_plans import capture, options

pytest.importorskip("transformers")

from echograph.frontend.pytorch.spec import StepSpec
from echograph.ir import types as t
from echograph.ir.graph import JobGraph
from echograph.models import get_model
from echograph.simulator.clusters import load_cluster
from echograph.workflow.compile import compile_entry
from echograph.workflow.plan import Plan
from echograph.workflow.predict import lower, predict

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("megatron") is None, reason="needs the [megatron] extra"),
]

WORLD, TENSOR, STAGES, MICRO_BATCHES, LAYERS, LENGTH = 1024, 8, 4, 8, 32, 8192
HIDDEN, CHANNELS, HEADS, KV_HEADS, VOCABULARY = 4096, 14336, 32, 8, 129_024
OPTIONS = options(
    world=WORLD, tensor=TENSOR, stages=STAGES, micro_batches=MICRO_BATCHES, layers=LAYERS, hidden=HIDDEN,
    channels=CHANNELS, heads=HEADS, kv_heads=KV_HEADS, vocabulary=VOCABULARY, length=LENGTH,
)  # fmt: skip


@cache
def captured() -> JobGraph:
    return capture(OPTIONS, WORLD)


@cache
def planned() -> JobGraph:
    from torch import nn
    from transformers.models.phi3 import modeling_phi3

    class Norm(nn.RMSNorm):
        def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
            super().__init__(hidden_size, eps=eps)

    entry = get_model("phi-3-mini").with_config(
        num_hidden_layers=LAYERS, hidden_size=HIDDEN, intermediate_size=CHANNELS, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, vocab_size=128_256, max_position_embeddings=LENGTH,
        original_max_position_embeddings=LENGTH, sliding_window=None,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_phi3, "Phi3RMSNorm", Norm)
        step = compile_entry(entry, StepSpec(clip_grad_norm=1.0), batch_size=1, seq_len=LENGTH)
    plan = Plan(
        gpus=WORLD, tp=TENSOR, pp=STAGES, sequence_parallel=True, zero=1, grad_dtype="fp32",
        global_batch=MICRO_BATCHES * WORLD // (TENSOR * STAGES),
    )  # fmt: skip
    return lower(step, plan, load_cluster(plan.cluster))


def work(job: JobGraph, stage: int) -> tuple[Counter[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """Matrix products of a stage by micro-batch, and its exchanges of activations in order.

    A product is told by its three extents, since the two compute the gradient of a weight one or the other way
    around. Collectives of 64 KiB and less are those of losses and of norms' gradients.
    """
    products: Counter[tuple[Any, ...]] = Counter()
    exchanged: list[tuple[Any, ...]] = []
    for _, begin, end, _, micro_batch in job.programs[stage].calls.tolist():
        for op in job.ops[begin:end]:
            match op:
                case t.Compute() if isinstance(op.attributes, t.Gemm):
                    a, b = (job.tensors.shape.row(i) for i in op.inputs[-2:])
                    products[micro_batch, op.phase.name, *sorted((*a, b[1]))] += 1
                case t.Collective() if job.groups[op.group].axes == ("tp",) and op.bytes_per_rank > 1 << 16:
                    if op.phase is not t.Phase.OPTIMIZER:
                        exchanged.append((micro_batch, op.phase.name, op.collective.name, op.bytes_per_rank))
    return products, exchanged


@pytest.mark.parametrize("stage", range(STAGES))
def test_products_and_exchanges_of_each_micro_batch_are_equal(stage: int) -> None:
    theirs, ours = work(captured(), stage), work(planned(), stage)
    assert sum(ours[0].values()) > 0
    assert ours[0] == theirs[0]
    assert ours[1] == theirs[1]


def test_step_times_differ_by_less_than_three_percent() -> None:
    # The plan names no stack, so what Megatron-Core's chooses (cuDNN's attention, a quicker host) is in neither.
    job = captured()
    plain = replace(job, workload=replace(job.workload, stack=""))
    theirs, ours = (predict(job)[0].step_ps for job in (plain, planned()))
    assert abs(ours - theirs) < 0.03 * theirs

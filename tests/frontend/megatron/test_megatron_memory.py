"""What a job captured from megatron-core says of its memory and its model, held against the compiled one.

Two ways of tensor, two of pipeline and four of data parallelism, sequence parallelism, the distributed optimizer.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import pytest
from megatron_plans import capture, options

pytest.importorskip("transformers")

from echograph.frontend.pytorch.spec import StepSpec
from echograph.ir.graph import JobGraph
from echograph.ir.types import TensorRole
from echograph.models import get_model
from echograph.simulator.clusters import load_cluster
from echograph.simulator.memory import memory
from echograph.workflow.compile import compile_entry
from echograph.workflow.plan import Plan
from echograph.workflow.predict import lower

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("megatron") is None, reason="needs the [megatron] extra"),
]

LAYERS, HIDDEN, CHANNELS, HEADS, KV_HEADS, VOCABULARY, LENGTH = 4, 512, 1408, 8, 4, 16384, 256
RANKS, TENSOR, STAGES, MICRO_BATCHES = 16, 2, 2, 4
OPTIONS = options(
    world=RANKS, tensor=TENSOR, stages=STAGES, micro_batches=MICRO_BATCHES, layers=LAYERS, hidden=HIDDEN,
    channels=CHANNELS, heads=HEADS, kv_heads=KV_HEADS, vocabulary=VOCABULARY, length=LENGTH,
)  # fmt: skip


@cache
def captured() -> JobGraph:
    return capture(OPTIONS, RANKS)


@cache
def compiled() -> JobGraph:
    entry = get_model("phi-3-mini").with_config(
        num_hidden_layers=LAYERS, hidden_size=HIDDEN, intermediate_size=CHANNELS, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, vocab_size=VOCABULARY, max_position_embeddings=LENGTH,
        original_max_position_embeddings=LENGTH, sliding_window=None, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    step = compile_entry(entry, StepSpec(clip_grad_norm=1.0), batch_size=1, seq_len=LENGTH)
    plan = Plan(
        gpus=RANKS, tp=TENSOR, pp=STAGES, sequence_parallel=True, zero=1, grad_dtype="fp32",
        global_batch=MICRO_BATCHES * RANKS // (TENSOR * STAGES),
    )  # fmt: skip
    return lower(step, plan, load_cluster(plan.cluster))


def test_the_whole_model_is_trained() -> None:
    """Of all stages and all tensor-parallel ranks, by the closed form, too."""
    layer = HIDDEN * (HIDDEN + 2 * HIDDEN * KV_HEADS // HEADS) + HIDDEN * HIDDEN + 3 * HIDDEN * CHANNELS
    whole = LAYERS * (layer + 2 * HIDDEN) + 2 * VOCABULARY * HIDDEN + HIDDEN
    theirs, ours = captured().workload, compiled().workload
    assert theirs.parameters == ours.parameters == whole
    assert (theirs.batch_size, theirs.sequence_length) == (ours.batch_size, ours.sequence_length) == (1, LENGTH)
    assert theirs.master_weights
    assert ours.master_weights


@pytest.mark.parametrize("stage", range(STAGES))
def test_what_lives_through_steps_takes_as_much(stage: int) -> None:
    theirs, ours = (memory(job, stage, 0, reserve=False) for job in (captured(), compiled()))
    assert theirs is not None
    assert ours is not None
    for role in ("parameter", "gradient", "optimizer_state"):
        assert theirs.by_role[role] == pytest.approx(ours.by_role[role], rel=0.005), role


def test_shares_are_told() -> None:
    """Masters and moments of matrices lie on tensor- and data-parallel ranks, those of norms on the latter."""
    job = captured()
    states = [job.tensors[row] for row in range(len(job.tensors))]
    states = [t for t in states if t.role is TensorRole.OPTIMIZER_STATE and t.alias_of is None and t.shape]
    matrices = [
        t for t in states if t.name.split(".master")[0].endswith(("linear_fc1.weight", "linear_qkv.weight"))
    ]
    norms = [t for t in states if "layernorm.weight" in t.name]
    assert matrices
    assert {t.sharded for t in matrices} == {("dp", "tp")}
    assert norms
    assert {t.sharded for t in norms} == {("dp",)}
    flat = [job.tensors[row] for row in range(len(job.tensors)) if job.tensors[row].name == "flat.0"]
    assert {t.sharded for t in flat} == {("tp",)}

"""Ten of Megatron-LM's own tests, with the arguments that the example of megatron-core takes of them.

Megatron-LM itself is no part of megatron-core's package; the layers, schedules and optimizers that its tests run
are. Held against closed forms: the parameters of a GPT, and what mixed precision keeps of each between steps.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the [torch] extra")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "frontend" / "megatron"))

from megatron_plans import capture

from echograph.workflow.predict import predict

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("megatron") is None, reason="needs the [megatron] extra"),
]

WORLD, LAYERS, HIDDEN, LENGTH, VOCABULARY, EXPERTS = 8, 12, 512, 1024, 50304, 8
BASE = (
    f"--num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads 8 --seq-length {LENGTH} "
    f"--micro-batch-size 4 --global-batch-size 32 --padded-vocab-size {VOCABULARY} --bf16 "
    "--position-embedding-type learned_absolute --accumulate-allreduce-grads-in-fp32 "
    "--disable-gloo-process-groups --transformer-impl transformer_engine"
)
OVERLAPPED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
WORKSPACES = 256 * 2**20
"""Libraries' own, and the last gradients' and logits' remains, hold no more."""
OF_EXPERTS = f"--num-experts {EXPERTS} --moe-router-topk 2 --disable-bias-linear"
TESTS = {
    "gpt3_mcore_te_tp1_pp1_dist_optimizer": "--use-distributed-optimizer",
    "gpt3_mcore_te_tp1_pp1_uniform_full_recompute": "--recompute-granularity full",
    "gpt3_mcore_tp1_pp1_dist_optimizer_overlap": f"--transformer-impl local {OVERLAPPED}",
    "gpt3_mcore_te_tp1_pp4_vp1": "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1",
    "gpt3_mcore_tp1_pp2": "--transformer-impl local --pipeline-model-parallel-size 2",
    "gpt3_mcore_te_tp2_pp2_cp2": "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
    "--context-parallel-size 2 --sequence-parallel",
    "gpt3_mcore_te_tp2_pp2_unfused": "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
    "--attention-backend unfused",
    "gpt3_mcore_te_tp4_pp1_dist_optimizer_overlap": f"--tensor-model-parallel-size 4 {OVERLAPPED}",
    "gpt3_mcore_te_tp2_pp1_te_8experts2parallel": "--tensor-model-parallel-size 2 --sequence-parallel "
    f"--expert-model-parallel-size 2 {OF_EXPERTS}",
    "gpt3_moe_mcore_te_ep8": f"--expert-model-parallel-size 8 --moe-grouped-gemm {OF_EXPERTS}",
}
assert len(TESTS) == 10


def parameters(experts: bool) -> int:
    """Of the whole model: embeddings, positions, and layers of two norms, attention and a feed-forward part."""
    attention, forward, norms = 4 * HIDDEN**2, 8 * HIDDEN**2, 4 * HIDDEN
    layer = attention + norms + (EXPERTS * (forward + HIDDEN) if experts else forward + 9 * HIDDEN)
    return (VOCABULARY + LENGTH) * HIDDEN + LAYERS * layer + 2 * HIDDEN


@pytest.mark.parametrize("test", TESTS)
def test_a_test_is_captured_and_simulated(test: str) -> None:
    job = capture(f"{BASE} {TESTS[test]}", WORLD)
    experts = "experts" in TESTS[test]
    assert job.workload.parameters == pytest.approx(parameters(experts), rel=0.001)
    result, _ = predict(job)
    assert result.memory is not None
    rest = list(result.memory.at_rest.values())[-1]
    assert 0 < rest < list(result.memory.programs.values())[-1]
    assert result.step_ps > 0
    if "pp1" in test and not experts:
        parallel = 4 if "tp4" in test else 1
        replicas = WORLD // parallel if "dist" in test else 1
        # bf16 weights and fp32 gradients; of fp32 masters and two moments each replica has its part, if divided.
        whole = (
            LENGTH * HIDDEN + LAYERS * 6 * HIDDEN + 2 * HIDDEN
        )  # positions, norms, biases behind what is added up
        of_rank = whole + (parameters(experts=False) - whole) / parallel
        expected = of_rank * (2 + 4 + 12 / replicas)
        assert 0.98 * expected <= rest <= 1.02 * expected + WORKSPACES

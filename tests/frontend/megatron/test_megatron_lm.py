"""Megatron-LM's own pretrain_gpt.py, unedited; `MEGATRON_LM` names a checkout of the tag core_v0.16.1.

It is no part of megatron-core's package, and so not of the tests that run everywhere.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the [torch] extra")

from echograph.frontend.megatron.adapter import MegatronAdapter
from echograph.frontend.scripts.capture import capture_script
from echograph.frontend.scripts.run import Script
from echograph.frontend.scripts.world import World
from echograph.workflow.predict import predict

CHECKOUT = os.environ.get("MEGATRON_LM", "")

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("megatron") is None, reason="needs the [megatron] extra"),
    pytest.mark.skipif(not CHECKOUT, reason="needs a checkout of Megatron-LM, named by MEGATRON_LM"),
]

SMALL = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 256 --max-position-embeddings 256 "
    "--micro-batch-size 1 --tokenizer-type NullTokenizer --vocab-size 1000 --bf16 --lr 1e-4 --train-iters 10 "
    "--eval-interval 10 --eval-iters 1"
)
EXPERTS = (
    "--moe-token-dispatcher-type alltoall --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 128 "
    "--disable-bias-linear"
)
OVERLAPPED = "--sequence-parallel --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
PLANS = {
    "local": "--mock-data --transformer-impl local --tensor-model-parallel-size 2 "
    "--pipeline-model-parallel-size 2",
    "interleaved": "--mock-data --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
    f"--global-batch-size 8 --num-layers-per-virtual-pipeline-stage 1 {OVERLAPPED}",
    "recomputed": "--tensor-model-parallel-size 2 --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1 --mock-data",
    "experts": f"--expert-model-parallel-size 4 --expert-tensor-parallel-size 1 --tensor-model-parallel-size 2 "
    f"--moe-grouped-gemm --moe-permute-fusion --mock-data {EXPERTS} {OVERLAPPED}",
    "fp8": "--mock-data --tensor-model-parallel-size 2 --fp8-format hybrid --fp8-recipe tensorwise "
    f"--fp8-param-gather {OVERLAPPED}",
    "graphs": "--mock-data --tensor-model-parallel-size 2 --cuda-graph-impl local --te-rng-tracker",
    "experts beside another micro-batch": f"--expert-model-parallel-size 4 --expert-tensor-parallel-size 1 "
    f"--tensor-model-parallel-size 2 --sequence-parallel --moe-grouped-gemm --mock-data --global-batch-size 16 "
    f"--overlap-moe-expert-parallel-comm {EXPERTS}",
    "flex": "--expert-model-parallel-size 8 --moe-grouped-gemm --mock-data --moe-router-dtype fp32 "
    f"{EXPERTS.replace('alltoall', 'flex')}",
    "muon": "--mock-data --optimizer muon",
    "data elsewhere": "--data-path 0.5 /none/a 0.5 /none/b --split 99,1,0 --save /none/c --save-interval 100 "
    "--exit-signal-handler",
}


@pytest.mark.parametrize("plan", PLANS)
def test_its_own_script_is_captured_and_simulated(plan: str) -> None:
    script = Script(path=Path(CHECKOUT) / "pretrain_gpt.py", arguments=f"{SMALL} {PLANS[plan]}".split())
    job = capture_script(script, World(size=8), MegatronAdapter()).graph
    result, _ = predict(job)  # type: ignore[arg-type]
    assert result.step_ps > 0

"""Megatron's collectives and messages, captured without ranks, are those of real ranks over gloo, one by one."""

from __future__ import annotations

import json
import os
import subprocess
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the [torch] extra")

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(find_spec("megatron") is None, reason="needs the [megatron] extra"),
]

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "examples" / "megatron-gpt" / "pretrain.py"
RANK = Path(__file__).with_name("megatron_rank.py")
SMALL = "--num-layers 2 --bf16 --train-iters 2 --distributed-backend gloo --disable-gloo-process-groups"
LLAMA = "--normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights"
PLANS = {
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "tp2 sequence": (2, "--tensor-model-parallel-size 2 --sequence-parallel --accumulate-allreduce-grads-in-fp32"),
    "pp2": (2, "--pipeline-model-parallel-size 2 --global-batch-size 4"),
    "pp2 interleaved": (
        2,
        "--pipeline-model-parallel-size 2 --num-layers 4 --num-layers-per-virtual-pipeline-stage 1 "
        "--global-batch-size 4",
    ),
    "tp2 pp2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --global-batch-size 2"),
    "tp2 dp2": (
        4,
        "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer --global-batch-size 4 "
        f"{LLAMA}",
    ),
    "dp2 overlapped": (
        2,
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --global-batch-size 4 "
        f"--ddp-bucket-size 30000 {LLAMA}",
    ),
    "dp2 all-reduced": (2, "--overlap-grad-reduce --ddp-bucket-size 30000 --global-batch-size 4"),
    "cp2": (2, "--context-parallel-size 2"),
    "ep2": (
        2,
        "--expert-model-parallel-size 2 --num-experts 4 --moe-expert-capacity-factor 1.0 "
        "--moe-pad-expert-input-to-capacity",
    ),
    "tp2 sequence, Transformer Engine": (
        2,
        "--tensor-model-parallel-size 2 --sequence-parallel --transformer-impl transformer_engine",
    ),
    "recomputed in full": (2, "--tensor-model-parallel-size 2 --recompute-granularity full"),
    "recomputed selectively": (2, "--tensor-model-parallel-size 2 --recompute-granularity selective"),
}


def recorded(ranks: int, arguments: list[str], folder: Path, python: Path) -> list[list[list[Any]]]:
    """What each of the real ranks communicated in its second step."""
    command = [
        python, "-m", "torch.distributed.run", "--standalone", "--no-python", "--nproc-per-node", str(ranks),
        python, str(RANK), str(folder), str(SCRIPT), *arguments,
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def captured(ranks: int, arguments: list[str]) -> list[list[list[Any]]]:
    """The same of each rank, run alone."""
    from echograph.frontend.megatron.adapter import MegatronAdapter
    from echograph.frontend.scripts.recorder import COMMUNICATION
    from echograph.frontend.scripts.run import Script, run_script
    from echograph.frontend.scripts.world import World

    found = []
    for rank in range(ranks):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            script = Script(path=SCRIPT, arguments=arguments)
            run = run_script(script, World(rank=rank, size=ranks), MegatronAdapter())
        calls = [
            (n.meta["phase"], n.meta[COMMUNICATION]) for n in run.recorder.graph.nodes if COMMUNICATION in n.meta
        ]
        # The parts of a result stand for the call that made it.
        calls = list({id(call): (phase, call) for phase, call in calls}.values())
        found.append(
            [
                [phase, c.op, list(c.ranks), c.nbytes, str(c.dtype).removeprefix("torch."), c.peer]
                for phase, c in calls
            ]
        )
    return found


@pytest.mark.parametrize(
    "plan", [plan if plan == "tp2 sequence" else pytest.param(plan, marks=pytest.mark.slow) for plan in PLANS]
)
def test_captured_calls_are_those_of_real_ranks(plan: str, tmp_path: Path, warm: Path) -> None:
    ranks, options = PLANS[plan]
    arguments = [*SMALL.split(), *options.split()]
    theirs, ours = recorded(ranks, arguments, tmp_path, warm / "python"), captured(ranks, arguments)
    for rank in range(ranks):
        assert len(theirs[rank]) > 0
        assert ours[rank] == theirs[rank], rank

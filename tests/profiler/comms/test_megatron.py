"""The tracer counts what Megatron communicates as the flight recorder does, and messages as Megatron asks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the [torch] extra")

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("megatron") is None, reason="needs the [megatron] extra"),
]

SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "megatron-gpt" / "pretrain.py"
RANKS, MICRO_BATCHES = 4, 3


def test_counts_of_tensor_and_pipeline_parallelism_are_those_of_other_counters(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}",
        str(Path(__file__).with_name("megatron_steps.py")), str(tmp_path), str(SCRIPT), "--num-layers", "2",
        "--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2", "--sequence-parallel",
        "--bf16", "--global-batch-size", str(MICRO_BATCHES), "--train-iters", "2", "--distributed-backend", "gloo",
        "--disable-gloo-process-groups",
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_FR_BUFFER_SIZE": "4096"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(RANKS):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        messages = {op: found["traced"].pop(op) for op in ("send", "recv")}
        assert found["traced"] == found["flown"]
        assert min(found["flown"][kind] for kind in ("all_reduce", "all_gather")) > MICRO_BATCHES
        assert messages == found["messages"] == {"send": MICRO_BATCHES, "recv": MICRO_BATCHES}

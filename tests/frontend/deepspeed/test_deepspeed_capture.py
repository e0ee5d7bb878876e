"""What DeepSpeed communicates in a step: captured without ranks, and written down on two real ones over gloo."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the [torch] extra")

from echograph.ir import serde
from echograph.ir.types import Collective

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the [deepspeed] extra"),
    pytest.mark.skipif(find_spec("transformers") is None, reason="needs the [huggingface] extra"),
]

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[2] / "examples" / "deepspeed-gpt2"
SMALL = ("--layers", "2", "--hidden", "64", "--heads", "2", "--vocabulary", "512", "--length", "16")
CHECKPOINTED = (*SMALL, "--activation-checkpointing")
# Small enough that the small model has several buckets, gathers ahead, and gathers again in the backward pass.
MANY_BUCKETS = {
    "stage": 3, "reduce_bucket_size": 20000, "stage3_prefetch_bucket_size": 20000,
    "stage3_param_persistence_threshold": 100, "stage3_max_live_parameters": 60000,
    "stage3_max_reuse_distance": 1000,
}  # fmt: skip
OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
FP32: dict[str, Any] = {}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int, tuple[str, ...]]] = {
    "zero0-fp32": ({"stage": 0}, FP32, 1, SMALL),
    "zero1-accumulated-buckets": ({"stage": 1, "reduce_bucket_size": 20000}, BF16, 2, SMALL),
    "zero2-accumulated-buckets": ({"stage": 2, "reduce_bucket_size": 20000}, BF16, 2, SMALL),
    "zero3": ({"stage": 3}, BF16, 1, SMALL),
    "zero3-accumulated-buckets": (MANY_BUCKETS, BF16, 2, SMALL),
    "zero3-checkpointed": (MANY_BUCKETS, BF16, 2, CHECKPOINTED),
    "zero3-fp32": (MANY_BUCKETS, FP32, 1, SMALL),
    "zero2-offload": ({"stage": 2, **OFFLOADED}, BF16, 2, SMALL),
    "zero3-offload": ({**MANY_BUCKETS, **OFFLOADED}, BF16, 1, SMALL),
}
"""name -> zero_optimization, precision, micro-batches, arguments of the script."""
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64", "uint8": "uint8"}


def configure(path: Path, zero: dict[str, Any], precision: dict[str, Any], micro_batches: int) -> Path:
    value = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        **precision,
    }
    path.write_text(json.dumps(value))
    return path


def run(folder: Path, *command: str) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True, timeout=1500, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what two real ranks told of all cases, and with what was captured of them."""
    folder = tmp_path_factory.mktemp("deepspeed")
    cases = {}
    for name, (zero, precision, micro_batches, arguments) in CASES.items():
        config = configure(folder / f"{name}.json", zero, precision, micro_batches)
        cases[name] = [str(EXAMPLE / "train.py"), "--deepspeed_config", str(config), *arguments]
    (folder / "cases.json").write_text(json.dumps(cases))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    ranks = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port))
    run(folder, *ranks, str(HERE / "deepspeed_ranks.py"), str(folder))
    run(folder, str(HERE / "deepspeed_captures.py"), str(folder))
    return folder


def captured_calls(path: Path) -> list[list[Any]]:
    """Operation, size of the group, bytes, type and phase of each collective of the one role, in program order."""
    job = serde.load(path)
    (program,) = job.programs
    found = []
    for _, begin, end, _, _ in program.calls.tolist():
        for op in (job.ops[i] for i in range(begin, end)):
            if isinstance(op, Collective):
                assert job.groups[op.group].axes == ("dp",)
                operation = op.name.rpartition(".")[2]
                found.append([operation, job.world_size, op.bytes_per_rank, op.dtype.text, op.phase.name.lower()])
    return found


def real_calls(path: Path, name: str) -> list[list[Any]]:
    """The same of a real rank's second step."""
    return [_told(*call) for call in json.loads(path.read_text())[name][1]]


def _told(operation: str, group: str, nbytes: int, dtype: str, phase: str) -> list[Any]:
    ranks = group.partition("#")[0].split(",")
    return [operation, len(ranks), nbytes, DTYPES[dtype], phase]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_step_communicates_what_it_does_on_real_ranks(name: str, both: Path) -> None:
    first, second = (real_calls(both / f"steps.{rank}.json", name) for rank in range(2))
    assert first == second
    assert len(first) > 0
    assert captured_calls(both / f"{name}.pb") == first

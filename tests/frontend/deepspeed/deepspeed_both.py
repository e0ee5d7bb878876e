"""Runs scripts of DeepSpeed on real ranks over gloo, captures them without, and reads what both wrote down."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

from echograph.frontend.deepspeed.adapter import DeepSpeedAdapter

HERE = Path(__file__).parent
Call = list[Any]
"""Operation, ranks of its group, bytes, type, the other rank of a message (or -1), phase."""
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
FP32: dict[str, Any] = {}
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def configure(path: Path, zero: dict[str, Any], precision: dict[str, Any], micro_batches: int) -> Path:
    """Writes a configuration of DeepSpeed."""
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


def told_of(cases: dict[str, list[str]], folder: Path, programs: Path, size: int = 2) -> Path:
    """The folder, in which real ranks, and captures of the same scripts, have written down what they communicate.

    Args:
        cases: name -> script and its arguments.
        folder: where to.
        programs: the folder of `python`.
        size: ranks.
    """
    (folder / "cases.json").write_text(json.dumps(cases))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    python = str(programs / "python")
    ranks = (
        "-m", "torch.distributed.run", "--no-python", "--nproc-per-node", str(size), "--master-port", str(port),
    )  # fmt: skip
    run(folder, python, *ranks, python, str(HERE / "deepspeed_ranks.py"), str(folder))
    run(folder, python, str(HERE / "deepspeed_captures.py"), str(folder), str(size))
    return folder


def run(folder: Path, *command: str) -> str:
    """What a command prints."""
    env = {**os.environ, **_ENVIRONMENT}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def echo(program: Path, *arguments: str) -> str:
    """What one of the project's commands prints."""
    return run(Path.cwd(), str(program), *arguments)


def real_calls(folder: Path, name: str, rank: int) -> list[Call]:
    """What a real rank communicated in the step that is captured, in order."""
    step = json.loads((folder / f"steps.{rank}.json").read_text())[name][DeepSpeedAdapter.steady_step - 1]
    return [[operation, _ranks(group), *rest] for operation, group, *rest in step]


def captured_calls(folder: Path, name: str, rank: int) -> list[Call]:
    """The same of a capture that was run as this rank."""
    calls: list[Call] = json.loads((folder / "captured.json").read_text())[name][rank]
    return calls


def _ranks(group: str) -> list[int]:
    """The ranks of a group as the tracer writes it: "0,2", or "0-3" of a range."""
    found: list[int] = []
    for part in group.partition("#")[0].split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found

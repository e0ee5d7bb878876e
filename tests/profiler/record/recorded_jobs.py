"""Runs a script on several ranks over gloo with `echoprof record` on, as a user would."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

PROGRAMS = Path(__file__).with_name("programs")
EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(
    *command: object, check: bool = True, timeout_s: float = 300, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A command to its end, with everything that it started."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment}
    words = [str(word) for word in command]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert not check or process.returncode == 0, (out + err)[-6000:]
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def tool(name: str, *arguments: object, **named: Any) -> subprocess.CompletedProcess[str]:
    """`echoc`, `echosim` or `echoprof`."""
    return run(sys.executable, "-c", f"from echograph.cli.{name} import main; main()", *arguments, **named)


def record(
    folder: Path, *script: object, steps: tuple[int, int] = (2, 4), ranks: int = 2, **named: Any
) -> subprocess.CompletedProcess[str]:
    """Records steps of a script, with its arguments, on some ranks of this machine."""
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        ranks,
        "--master-port",
        free_port(),
    ]
    window = ["--start-step", steps[0], "--end-step", steps[1], "--dir", folder]
    return tool("echoprof", "record", *window, "--", *launch, *script, **named)


def metadata(folder: Path, rank: int = 0) -> dict[str, Any]:
    """What a rank's folder says of itself."""
    value: dict[str, Any] = json.loads((folder / str(rank) / "metadata.json").read_text())
    return value

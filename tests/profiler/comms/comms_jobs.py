"""Runs a function of `workers.py` on several ranks, each a process of its own, over gloo on this machine."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

WORKERS = Path(__file__).with_name("workers.py")
TIMEOUT_S = 120


def run_job(
    name: str, folder: Path, programs: Path, ranks: int = 2, check: bool = True, **environment: str
) -> list[Any]:
    """What the function of each rank answered; None for a rank that did not live to answer."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks), "TORCH_FR_BUFFER_SIZE": "4096"}
    (folder / "traces").mkdir()
    processes = []
    for rank in range(ranks):
        with (folder / f"{name}.{rank}.log").open("wb") as log:
            command = [programs / "python", str(WORKERS), name, str(folder)]
            own = {**env, "RANK": str(rank), **environment}
            processes.append(subprocess.Popen(command, env=own, stdout=log, stderr=log))
    try:
        status = [process.wait(TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    logs = [(folder / f"{name}.{rank}.log").read_text(errors="replace") for rank in range(ranks)]
    assert not check or status == [0] * ranks, "\n".join(logs)[-6000:]
    answers = [folder / f"{name}.{rank}.answer" for rank in range(ranks)]
    return [json.loads(answer.read_text()) if answer.exists() else None for answer in answers]

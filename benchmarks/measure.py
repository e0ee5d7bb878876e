"""Whole processes timed from outside: medians of several runs, and the peak memory that the system accounted."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

BIN = Path(sys.executable).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Medians over the runs of one command.

    Attributes:
        wall_s: from start to end.
        cpu_s: user and system time.
        peak_MiB: largest resident set of the process.
        runs: how many runs.
    """

    wall_s: float
    cpu_s: float
    peak_MiB: float
    runs: int


def measure(command: list[str], *, runs: int = 3, cwd: Path | None = None) -> Run:
    """Runs a command several times after none to warm up; the first run counts like the others.

    Raises:
        RuntimeError: the command failed.
    """
    walls, cpus, peaks = [], [], []
    for _ in range(runs):
        began = time.perf_counter()
        process = subprocess.Popen(command, cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        walls.append(time.perf_counter() - began)
        if status:
            raise RuntimeError(f"{' '.join(command)} failed")
        cpus.append(usage.ru_utime + usage.ru_stime)
        peaks.append(usage.ru_maxrss / 1024)
    return Run(wall_s=statistics.median(walls), cpu_s=statistics.median(cpus), peak_MiB=max(peaks), runs=runs)


def echo(name: str, *arguments: str) -> list[str]:
    """The command line of one of our commands."""
    return [str(BIN / name), *arguments]

"""Runs all benchmarks: python -m benchmarks."""

from __future__ import annotations

import subprocess
import sys

ALL = (
    "commands",
    "capture",
    "scripts",
    "engines",
    "large_graph",
    "plans",
    "steps",
    "memory",
    "traces",
    "chakra",
    "comms",
    "testbed",
)


def main() -> None:
    """One benchmark after the other, each in a process of its own."""
    for name in ALL:
        print(f"\n== benchmarks.{name}", flush=True)
        subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=True)


if __name__ == "__main__":
    main()

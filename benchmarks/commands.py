"""How long the commands take, as a user waits for them.

python -m benchmarks.commands [--runs 3]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.measure import echo, measure

MODELS = ("bert-base-uncased", "gpt2", "llama-3.1-8b", "gpt3-175b")


def main() -> None:
    """Prints one line a command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        print(f"{'command':<64} {'wall s':>7} {'cpu s':>7} {'MiB':>6} {'KiB written':>11}")
        for model in MODELS:
            command = echo("echoc", "compile", "--model", model, "-o", f"{model}.pb")
            _print(command, runs, folder, folder / f"{model}.pb")
        for model in MODELS:
            _print(echo("echosim", "run", f"{model}.pb", "--gpus", "1024"), runs, folder, None)
        plan = ("--gpus", "1024", "--tp", "8", "--pp", "8", "--global-batch", "512")
        _print(echo("echosim", "run", "gpt3-175b.pb", *plan), runs, folder, None)
        _print(echo("echosim", "--help"), runs, folder, None)


def _print(command: list[str], runs: int, folder: Path, written: Path | None) -> None:
    result = measure(command, runs=runs, cwd=folder)
    size = f"{written.stat().st_size / 1024:.0f}" if written else ""
    words = " ".join([Path(command[0]).name, *command[1:]])
    print(f"{words:<64} {result.wall_s:7.2f} {result.cpu_s:7.2f} {result.peak_MiB:6.0f} {size:>11}", flush=True)


if __name__ == "__main__":
    main()

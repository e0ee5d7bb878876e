"""How long the commands take, as a user waits for them.

python -m benchmarks.commands [--runs 3]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.measure import echo, measure

MODELS = ("bert-base-uncased", "gpt2", "llama-3.1-8b", "gpt3-175b", "llama-3.1-405b")
GPT3 = ("gpt3-175b.pb", "--gpus", "1024", "--tp", "8", "--pp", "8", "--global-batch", "1536")
LLAMA = (
    *("llama-3.1-405b.pb", "--gpus", "16384", "--tp", "8", "--pp", "16"),
    *("--sequence-parallel", "--global-batch", "2048"),
)
"""96 micro-batches of GPT-3 on 1,024 GPUs; 16 of Llama 3.1 405B on 16,384."""


def main() -> None:
    """Prints one line a command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        print(f"{'command':<112} {'wall s':>7} {'cpu s':>7} {'MiB':>6} {'KiB written':>11}")
        for model in MODELS:
            command = echo("echoc", "compile", "--model", model, "-o", f"{model}.pb")
            _print(command, runs, folder, folder / f"{model}.pb")
        for model in MODELS:
            _print(echo("echosim", "run", f"{model}.pb", "--gpus", "1024"), runs, folder, None)
        _print(echo("echoc", "lower", *LLAMA, "-o", "job.pb"), runs, folder, folder / "job.pb")
        for plan in (GPT3, LLAMA):
            for ranks in ("roles", "all"):
                _print(echo("echosim", "run", *plan, "--ranks", ranks), runs, folder, None)
        _print(echo("echosim", "--help"), runs, folder, None)


def _print(command: list[str], runs: int, folder: Path, written: Path | None) -> None:
    result = measure(command, runs=runs, cwd=folder)
    size = f"{written.stat().st_size / 1024:.0f}" if written else ""
    words = " ".join([Path(command[0]).name, *command[1:]])
    print(f"{words:<112} {result.wall_s:7.2f} {result.cpu_s:7.2f} {result.peak_MiB:6.0f} {size:>11}", flush=True)


if __name__ == "__main__":
    main()

"""Steps predicted without a GPU beside the same steps measured on one.

python -m benchmarks.gpu_beside [--graphs FOLDER] [--only NAME ...]

Captures the runs of benchmarks/gpu_steps.py, or takes FOLDER/NAME.pb where they are; predicts each on one GPU of a
DGX H200; and prints time and peak memory beside those in benchmarks/measured/h200_steps.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
MEASURED = HERE / "measured" / "h200_steps.json"
CLUSTER = "dgx-h200"


def predicted(name: str, folder: Path) -> dict[str, Any]:
    """What `echosim run --json` says of a run's captured step."""
    graph = folder / f"{name}.pb"
    if not graph.exists():
        script = ["--script", str(HERE / "gpu_steps.py"), "--world-size", "1", "-o", str(graph), "--", name]
        _command("echoc", "capture", "torch", *script)
    found: dict[str, Any] = json.loads(_command("echosim", "run", str(graph), "--cluster", CLUSTER, "--json"))
    return found


def _command(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "echograph", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout


def main() -> None:
    """Prints a line for each run, and the mean error of time and memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=Path, help="where captured steps are, or go")
    parser.add_argument("--only", nargs="*", help="of the runs")
    given = parser.parse_args()
    table = json.loads(MEASURED.read_text(encoding="utf-8"))
    names = given.only or list(table["steps"])
    print(f"{table['device']}, {table['date']}, torch {table['torch']}")
    print("| run | measured | predicted | error | peak memory, measured | predicted | error |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    errors, peaks = list[float](), list[float]()
    with tempfile.TemporaryDirectory() as made:
        for name in names:
            runs = table["steps"][name]
            step_s, peak = median(run["step_s"] for run in runs), runs[0]["peak_bytes"]
            found = predicted(name, given.graphs or Path(made))
            errors.append(found["step_time_s"] / step_s - 1.0)
            peaks.append(found["memory"]["peak_bytes"] / peak - 1.0)
            print(
                f"| {name} | {step_s * 1e3:.1f} ms | {found['step_time_s'] * 1e3:.1f} ms | {errors[-1]:+.1%} "
                f"| {peak / 2**30:.2f} GiB | {found['memory']['peak_bytes'] / 2**30:.2f} GiB | {peaks[-1]:+.1%} |"
            )
    print(f"mean error: time {_mean(errors):.1%}, peak memory {_mean(peaks):.1%}")


def _mean(errors: list[float]) -> float:
    return sum(map(abs, errors)) / len(errors)


if __name__ == "__main__":
    main()

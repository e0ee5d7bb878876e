"""Kernels beside a collective: does any simple model of their slowdown beat "none"?

python -m benchmarks.overlap

Reads overlap_slowdown.csv.gz of the measured tables (ECHOGRAPH_DATA, default ../shared/data): kernels of fp32
training steps on one GPU of 108 SMs, timed alone and with a collective under way during a part of their time, with
the counters of a profiler. What is predicted is the duration from the one alone; 1 + slowdown x part overlapped.

Kernels are split into five folds by name and counters, so that the repetitions of one kernel are in one fold, and
each is predicted by models that have not seen it. Models: none; one slowdown for all; one for each of memory-bound
and compute-bound kernels (by which throughput is higher); one that is linear in both throughputs. Each is fitted
once to the median (least absolute error) and once to the mean (total time).
"""

from __future__ import annotations

import csv
import gzip
import os
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import numpy as np
import numpy.typing as npt

DATA = Path(os.environ.get("ECHOGRAPH_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
FOLDS = 5
Floats = npt.NDArray[np.float64]
Model = Callable[[Floats, Floats, Floats], Callable[[Floats], Floats]]


def main() -> None:
    """Prints each model's errors on kernels that it has not seen."""
    path = DATA / "overlap_slowdown.csv.gz"
    if not path.exists():
        print(f"no measured tables at {DATA}: set ECHOGRAPH_DATA")
        return
    with gzip.open(path, "rt", newline="") as file:
        rows = [row for row in csv.DictReader(file) if float(row["overlap_ratio"]) > 0]
    alone, beside, part = (
        np.array([float(row[name]) for row in rows]) for name in ("ground_truth", "duration", "overlap_ratio")
    )
    throughput = np.array([[float(row["Compute throughput"]), float(row["DRAM throughput"])] for row in rows])
    fold = np.array([crc32(_kernel(row).encode()) % FOLDS for row in rows])
    print(
        f"{len(rows)} kernels that a collective overlapped, {len({_kernel(row) for row in rows})} different ones"
    )
    print(f"{'model':34}{'<= 5 %':>8}{'<= 10 %':>9}{'<= 15 %':>9}{'mean abs':>10}{'total time':>12}")
    for name, model in MODELS.items():
        predicted = np.empty(len(rows))
        for number in range(FOLDS):
            seen = fold != number
            slowdown = model(throughput[seen], part[seen], beside[seen] / alone[seen] - 1)
            predicted[~seen] = alone[~seen] * (1 + part[~seen] * np.maximum(0, slowdown(throughput[~seen])))
        off = np.abs(predicted / beside - 1)
        shares = "".join(f"{np.mean(off <= bar):{width}.0%}" for bar, width in ((0.05, 8), (0.1, 9), (0.15, 9)))
        print(f"{name:34}{shares}{off.mean():10.1%}{predicted.sum() / beside.sum() - 1:+12.1%}")


def _kernel(row: dict[str, str]) -> str:
    return row["kDemangledName"] + row["Compute throughput"] + row["DRAM throughput"]


def _none(throughput: Floats, part: Floats, excess: Floats) -> Callable[[Floats], Floats]:
    return lambda asked: np.zeros(len(asked))


def _one(centre: Callable[[Floats], float]) -> Model:
    def fit(throughput: Floats, part: Floats, excess: Floats) -> Callable[[Floats], Floats]:
        value = centre(excess / part)
        return lambda asked: np.full(len(asked), value)

    return fit


def _by_bound(centre: Callable[[Floats], float]) -> Model:
    def fit(throughput: Floats, part: Floats, excess: Floats) -> Callable[[Floats], Floats]:
        in_memory = throughput[:, 1] > throughput[:, 0]
        values = [centre((excess / part)[in_memory == kind]) for kind in (False, True)]
        return lambda asked: np.where(asked[:, 1] > asked[:, 0], values[1], values[0])

    return fit


def _linear(throughput: Floats, part: Floats, excess: Floats) -> Callable[[Floats], Floats]:
    def terms(values: Floats) -> Floats:
        return np.column_stack([np.ones(len(values)), values / 100])

    weights = np.linalg.lstsq(terms(throughput) * part[:, None], excess, rcond=None)[0]
    return lambda asked: terms(asked) @ weights


def _median(values: Floats) -> float:
    return float(np.median(values))


def _trimmed(values: Floats) -> float:
    """The mean without the largest and smallest twentieth: a few small kernels wait 30 times their own time."""
    low, high = np.quantile(values, (0.05, 0.95))
    return float(values[(low <= values) & (values <= high)].mean())


MODELS: dict[str, Model] = {
    "none": _none,
    "one slowdown, median": _one(_median),
    "one slowdown, mean": _one(_trimmed),
    "memory- or compute-bound, median": _by_bound(_median),
    "memory- or compute-bound, mean": _by_bound(_trimmed),
    "linear in both throughputs": _linear,
}

if __name__ == "__main__":
    main()

"""Steps that vTrain publishes as measured on one node, against vTrain's own table of all-reduces.

python -m benchmarks.computed_steps CLONE

CLONE is one of VIA-Research/vTrain. Two steps that ran and differ in their number of replicas alone differ by what
the all-reduce of their gradients took in two runs, no two of which are alike. In this table they differ by what
vTrain's simulator looks up: the time its table of nccl-tests has for the first stage's parameters, rounded to a
MiB, or that size over the table's last bandwidth. Prints in how many pairs, and how far the worst is off.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path

MIB, MS = 2**20, 1e6
VOCABULARY, POSITIONS, BYTES = 50257, 1024, 2
LARGEST = 1024
"""MiB of the table's last line."""

Times = dict[int, tuple[float, float]]
"""MiB -> nanoseconds, and GB/s."""


def main() -> None:
    """Counts pairs of rows whose difference is the table's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", type=Path)
    clone = parser.parse_args().clone
    tables = {gpus: read_times(clone / f"trace/a100/AR_GPU{gpus}_1M_1024M_LUT") for gpus in range(2, 9)}
    steps: dict[tuple[float, ...], dict[int, float]] = defaultdict(dict)
    with (clone / "data" / "ground_truth_single.csv").open(newline="", encoding="utf-8-sig") as file:
        for line in list(csv.reader(file))[1:]:
            _, batch, micro, hidden, _, layers, _, tp, dp, pp, ms = map(float, line)
            steps[hidden, layers, tp, pp, micro, batch / dp / micro][int(dp)] = ms
    off = []
    for (hidden, layers, tp, pp, *_), by_replicas in steps.items():
        size = first_stage_bytes(int(hidden), layers / pp, int(tp), alone=pp == 1)
        for one, other in combinations(sorted(by_replicas), 2):
            looked_up = all_reduce_ms(tables, size, other) - all_reduce_ms(tables, size, one)
            off.append(abs(by_replicas[other] - by_replicas[one] - looked_up))
    near = sum(ms < 1e-5 for ms in off)
    print(f"{near} of {len(off)} pairs differ by what the table has, within 10 ns; the worst by {max(off):.1e} ms")


def read_times(path: Path) -> Times:
    """One of vTrain's tables: what an all-reduce of so many MiB takes."""
    lines = [line.split(",") for line in path.read_text(encoding="utf-8").split()[1:]]
    return {int(line[0]) // MIB: (float(line[-2]), float(line[-1])) for line in lines}


def first_stage_bytes(hidden: int, layers: float, tp: int, *, alone: bool) -> float:
    """Parameters of a first stage as vTrain's simulator counts them (`src/predictor.py`), the last's if alone."""
    words = VOCABULARY // tp * hidden
    layer = 6 * hidden + (12 * hidden * hidden + 7 * hidden) / tp
    return BYTES * (layers * layer + words + POSITIONS * hidden + (words if alone else 0))


def all_reduce_ms(tables: Mapping[int, Times], size: float, replicas: int) -> float:
    """What vTrain's simulator looks up for gradients of so many bytes."""
    if replicas == 1:
        return 0.0
    times, mib = tables[replicas], round(size / MIB)
    if mib in times:
        return times[mib][0] / MS
    return mib / (times[LARGEST][1] * 1024) * 1e3


if __name__ == "__main__":
    main()

"""Whole training steps against published measurements, and what peers say of the same rows.

python -m benchmarks.steps [--every 1] [--jobs 2]

Reads ground_truth.csv and peer_predictions.csv of the measured tables (ECHOGRAPH_DATA, default ../shared/data),
and holds predictions against them as `echosim validate` does: all rows, or every n-th of the large families. Says
how much processor time that took, which is what counts on a machine that others use as well.
Nothing is fitted to a step time.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from pathlib import Path

from echograph.workflow.validation.run import predict_rows
from echograph.workflow.validation.score import by_family, read_peers
from echograph.workflow.validation.table import read_measured_steps
from echograph.workflow.validation.validate import Validation

DATA = Path(os.environ.get("ECHOGRAPH_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
WHOLE = ("kor22", "sc21t1", "sc21t2")
SAMPLED = ("vtrainM", "bloom", "mpt", "titan", "mlperf")


def main() -> None:
    """Prints the errors by family, the worst rows and what was skipped."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="of the large families' rows, take each n-th")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    arguments = parser.parse_args()
    table = DATA / "ground_truth.csv"
    if not table.exists():
        print(f"no measured tables at {DATA}: set ECHOGRAPH_DATA")
        return
    rows = read_measured_steps(table, WHOLE, ("A", "B"))
    rows += [
        row for name in SAMPLED for row in read_measured_steps(table, (name,), ("A", "B"))[:: arguments.every]
    ]
    began = time.perf_counter()
    outcomes = predict_rows(rows, arguments.jobs)
    families = by_family(outcomes, read_peers(DATA / "peer_predictions.csv"))
    print(Validation(outcomes=tuple(outcomes), families=families))
    used = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print(
        f"{len(rows)} rows in {time.perf_counter() - began:.0f} s with {arguments.jobs} processes, "
        f"{used:.0f} s of processor time"
    )


if __name__ == "__main__":
    main()

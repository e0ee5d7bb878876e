"""Reads a graph, simulates it, and prints what its critical path consists of.

python examples/critical_path.py [GRAPH] [GPUS]
"""

from __future__ import annotations

import sys
from collections import Counter

from echograph.ir import serde
from echograph.ir.timeline import Lane
from echograph.units import format_time
from echograph.workflow.plan import Plan
from echograph.workflow.predict import predict


def main(path: str = "graph.pb", gpus: str = "64") -> None:
    """Prints the time on the path by operator, longest first."""
    result, job = predict(serde.load(path), Plan(gpus=int(gpus)))
    timeline = result.timeline
    time_ps: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for row in timeline.critical_path().tolist():
        lane = Lane(int(timeline.lane[row])).name.lower()
        name = f"{job.strings[job.ops.name[timeline.op[row]]]} ({lane})"
        time_ps[name] += int(timeline.duration[row])
        count[name] += 1
    print(
        f"{result.model} on {gpus} GPUs: {format_time(result.step_ps)}, {count.total()} tasks on the critical path"
    )
    for name, total in time_ps.most_common(12):
        print(f"  {format_time(total):>9} {total / result.step_ps:6.1%}  {count[name]:4} x {name}")


if __name__ == "__main__":
    main(*sys.argv[1:])

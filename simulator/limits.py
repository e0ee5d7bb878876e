"""What limits a step: how much shorter it becomes when one kind of work becomes a little faster.

The tasks of the critical path follow each other without a gap, from the start of the step to its end. Making one
kind of work faster by a small fraction shortens the step by that fraction of its time on the path: the parts of
the path are the derivatives of the step time. (Of several paths of one length the engine reports one; then the
derivative is that of making the work slower.) Where every rank is simulated, the path ends where another rank is
waited for; what lies before is put to `OTHER_RANKS`.
"""

from __future__ import annotations

import numpy as np

from echograph.ir.graph import JobGraph
from echograph.ir.timeline import Lane, Timeline
from echograph.simulator.families import HOST, family_of

OTHER_RANKS = "other ranks"


def limits(job: JobGraph, timeline: Timeline) -> dict[str, int]:
    """Picoseconds of each family on the critical path, the largest first; they add up to the step time."""
    path = timeline.critical_path()
    family, names = family_of(job)
    host = timeline.lane[path] == Lane.HOST
    number = np.where(host, len(names), family[timeline.op[path]])
    total = np.bincount(number, weights=timeline.duration[path].astype(np.float64), minlength=len(names) + 1)
    before = timeline.makespan - int(total.sum()) if len(path) else 0
    found = {OTHER_RANKS: before} if before > 0 else {}
    found |= {name: round(value) for name, value in zip((*names, HOST), total.tolist(), strict=True) if value > 0}
    return dict(sorted(found.items(), key=lambda item: -item[1]))

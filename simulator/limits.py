"""What limits a step: how much shorter it becomes when one kind of work becomes a little faster.

The tasks of the critical path follow each other without a gap, from the start of the step to its end. Making one
kind of work faster by a small fraction shortens the step by that fraction of its time on the path: the parts of
the path are the derivatives of the step time. (Of several paths of one length the engine reports one; then the
derivative is that of making the work slower.) Where every rank is simulated, the path of one rank ends where
another one is waited for; `ranks.rank_path` follows it there. What lies before all that it has looked at is put to
`OTHER_RANKS`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from echograph.ir.columns import Int64
from echograph.ir.graph import JobGraph
from echograph.ir.timeline import Lane, Timeline
from echograph.ir.types import COMMUNICATIONS, Attention, Convolution, Gemm

OTHER_RANKS = "other ranks"


def limits(job: JobGraph, timeline: Timeline) -> dict[str, int]:
    """Picoseconds of each family on the critical path, the largest first; they add up to the step time."""
    path = timeline.critical_path()
    side = (timeline.lane[path] != Lane.HOST).astype(np.int64)
    number = families(job)[side, timeline.op[path]]
    total = np.bincount(number, weights=timeline.duration[path].astype(np.float64))
    return largest_first(job, total, timeline.makespan if len(path) else 0)


def families(job: JobGraph) -> Int64:
    """Int64 [2, rows]: the family of every row's task on the host, which is the last one, and on the device."""
    family, names = family_of(job)
    return np.stack([np.full(len(family), len(names)), family])


def largest_first(job: JobGraph, total: npt.NDArray[Any], step_ps: int) -> dict[str, int]:
    """The parts of a critical path by name.

    Args:
        job: the job.
        total: picoseconds by number of the family, as of `families`.
        step_ps: the step; what the parts leave of it is put to `OTHER_RANKS`.
    """
    names = (*family_of(job)[1], HOST)
    before = step_ps - int(total.sum())
    found = {OTHER_RANKS: before} if before > 0 else {}
    found |= {name: round(value) for name, value in zip(names, total.tolist(), strict=False) if value > 0}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


HOST = "host"
KERNELS = ("matrix products", "attention", "convolutions", "other kernels")
_KINDS = (Gemm, Attention, Convolution)


def family_of(job: JobGraph) -> tuple[Int64, tuple[str, ...]]:
    """Family of every row of the operation table, and the names of the families.

    Kernels fall into matrix products, attention, convolutions and others; communications into one family for the
    axes of their group ("tp communication"). What the host issues is no row: its family is `HOST`.
    """
    ops = job.ops
    of_attribute = [next((i for i, k in enumerate(_KINDS) if isinstance(a, k)), 3) for a in ops.attribute_values]
    family = np.array([*of_attribute, 3])[ops.attributes].astype(np.int64)
    communicates = np.isin(ops.kind, COMMUNICATIONS)
    names = [group.label for group in job.groups]
    labels = tuple(dict.fromkeys(names))
    number = np.array([labels.index(name) for name in names] or [0])
    family[communicates] = len(KERNELS) + number[ops.group[communicates]]
    return family, (*KERNELS, *(f"{label} communication" for label in labels))

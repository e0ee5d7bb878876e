"""Which kernels an operator ran, from a trace of operators and one of kernels on the same clock."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from echograph.errors import DataError
from echograph.ir.columns import NONE, Int64
from echograph.profiler.analyses.table import Table, from_rows
from echograph.profiler.byteprofile.events import Events
from echograph.profiler.byteprofile.names import COMPUTATION, UPDATES, Label
from echograph.units import PS_PER_MS

_KERNELS = frozenset({"kernel", "Kernel", "gpu_memcpy", "gpu_memset", "Memcpy", "Memset"})
_HALF = 2


def mapping(operators: Events, kernels: Events, *, offset: int = 0) -> Table:
    """The kernels that ran while an operator did, at least half of their time.

    One row an operator and kernel: `operator`, `kernel`, `count`, `total_ms` and `per_operator`, how many of them
    one run of the operator has on average. A kernel within several operators is that of the one that it overlaps
    longest; of equals, that of the one that starts last.

    Args:
        operators: events of FW., BW. and STEP or UPDATE; others are left out.
        kernels: events; where some have a category of device work, only these.
        offset: picoseconds that are added to the kernels' times.

    Raises:
        DataError: there is no operator, or no kernel.
    """
    wanted = operators.rows(operators.where(lambda label: label.category in COMPUTATION | UPDATES))
    device = kernels.where(lambda label: label.category in _KERNELS)
    work = kernels.rows(device) if len(device) else kernels.rows(kernels.where(_is_no_operator))
    for what, found in (("operators (FW., BW., STEP)", wanted), ("kernels", work)):
        if not len(found):
            raise DataError(f"nothing to map: the trace has no {what}: give one of operators, then one of kernels")
    owner = _owners(wanted, work.start + (work.origin - wanted.origin) + offset, work.duration)
    counted: dict[tuple[int, int], list[int]] = defaultdict(list)
    for row in np.flatnonzero(owner >= 0).tolist():
        counted[int(wanted.label[owner[row]]), int(work.label[row])].append(int(work.duration[row]))
    runs = np.bincount(wanted.label)
    codes, first = np.unique(wanted.label, return_index=True)
    place = dict(zip(codes.tolist(), first.tolist(), strict=True))
    rows = [
        (
            wanted.labels[operator].name,
            work.labels[kernel].name,
            len(times),
            sum(times) / PS_PER_MS,
            len(times) / int(runs[operator]),
        )
        for (operator, kernel), times in sorted(counted.items(), key=lambda item: place[item[0][0]])
    ]
    outside = int((owner < 0).sum())
    notes = [f"{outside} of {len(work)} kernels ran outside all operators"] * bool(outside)
    titles = ("operator", "kernel", "count", "total_ms", "per_operator")
    return from_rows(titles, rows, (*operators.notes, *kernels.notes, *notes))


def _owners(operators: Events, start: Int64, duration: Int64) -> Int64:
    """The row of the operator that each kernel ran within, or -1.

    Args:
        operators: events.
        start: of the kernels, picoseconds of the operators' clock.
        duration: of the kernels.
    """
    order = np.argsort(operators.start, kind="stable")
    begins, ends = operators.start[order], operators.end[order]
    # Until when any operator up to each lasts: further back than where this is over, none overlaps.
    lasting = np.maximum.accumulate(ends)
    found = np.full(len(start), NONE, np.int64)
    last = np.searchsorted(begins, start + duration, "right") - 1
    for row, (begin, lasts, at) in enumerate(zip(start.tolist(), duration.tolist(), last.tolist(), strict=True)):
        most, place = -1, NONE
        while at >= 0 and lasting[at] >= begin:
            shared = min(begin + lasts, int(ends[at])) - max(begin, int(begins[at]))
            if shared > most:
                most, place = shared, at
            at -= 1
        if place != NONE and most * _HALF >= lasts:
            found[row] = order[place]
    return found


def _is_no_operator(label: Label) -> bool:
    return label.category not in COMPUTATION | UPDATES

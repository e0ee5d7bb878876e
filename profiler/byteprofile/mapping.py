"""Which kernels an operator ran, from a trace of operators and one of kernels on the same clock."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from echograph.errors import DataError
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
    order = np.argsort(wanted.start, kind="stable")
    start, end = wanted.start[order], wanted.end[order]
    # Until when any operator up to each lasts: further back than where this is over, none overlaps.
    lasting = np.maximum.accumulate(end)
    moved = work.start + (work.origin - wanted.origin) + offset
    counted: dict[tuple[str, str], list[int]] = defaultdict(list)
    outside = 0
    for row, begin in enumerate(moved.tolist()):
        over = begin + int(work.duration[row])
        best, place = -1, -1
        at = int(np.searchsorted(start, over, "right")) - 1
        while at >= 0 and lasting[at] >= begin:
            shared = min(over, int(end[at])) - max(begin, int(start[at]))
            if shared > best:
                best, place = shared, at
            at -= 1
        if place < 0 or best * _HALF < over - begin:
            outside += 1
            continue
        operator = wanted.labels[wanted.label[order[place]]].name
        counted[operator, work.labels[work.label[row]].name].append(over - begin)
    runs: dict[str, int] = defaultdict(int)
    for code, number in zip(*np.unique(wanted.label, return_counts=True), strict=True):
        runs[wanted.labels[code].name] += int(number)
    first = {
        name: place for place, name in enumerate(dict.fromkeys(wanted.labels[c].name for c in wanted.label[order]))
    }
    rows = [
        (operator, kernel, len(times), sum(times) / PS_PER_MS, len(times) / runs[operator])
        for (operator, kernel), times in sorted(counted.items(), key=lambda item: first[item[0][0]])
    ]
    notes = [f"{outside} of {len(work)} kernels ran outside all operators"] * bool(outside)
    titles = ("operator", "kernel", "count", "total_ms", "per_operator")
    return from_rows(titles, rows, (*operators.notes, *kernels.notes, *notes))


def _is_no_operator(label: Label) -> bool:
    return label.category not in COMPUTATION | UPDATES

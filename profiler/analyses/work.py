"""What ran on the devices of each rank, and of what kind it was."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from echograph.profiler.traces.kernel_names import communicates
from echograph.profiler.traces.trace import COPIES, SETS, WAITS, Trace

US = 1_000_000


class KernelKind(IntEnum):
    """What a kernel is for."""

    COMPUTATION = 0
    COMMUNICATION = 1
    MEMORY = 2
    OTHER = 3


# Copies and sets are told first: some profilers name them after the call ("hipMemcpyAsync").
_MEMORY = re.compile(r"(cuda|hip)?(Memcpy|Memset)|dma(?![a-z])")


def kind_of_name(name: str) -> KernelKind:
    """What a kernel, copy or set is for, by its name."""
    if _MEMORY.match(name):
        return KernelKind.MEMORY
    if communicates(name):
        return KernelKind.COMMUNICATION
    return KernelKind.OTHER if name in WAITS else KernelKind.COMPUTATION


def kernel_kinds(trace: Trace) -> npt.NDArray[np.int8]:
    """The `KernelKind` of each row, as if it ran on a device: by its category, if that tells, or by its name."""
    kind = np.full(len(trace.strings) + 1, KernelKind.OTHER, np.int8)
    for code in np.unique(trace.name):
        kind[code] = kind_of_name(trace.strings[code])
    return np.where(trace.of_category(COPIES | SETS), np.int8(KernelKind.MEMORY), kind[trace.name])


def device_work(traces: Mapping[int, Trace], notes: list[str]) -> Iterator[tuple[int, Trace]]:
    """Each rank's kernels, copies and sets, as a trace of these rows alone, by start.

    Waits of a stream are no work, though profilers put them on the device's tracks.

    Args:
        traces: by rank.
        notes: gets a line for each rank that has no such row.
    """
    for rank, trace in traces.items():
        rows = np.flatnonzero(trace.on_device)
        if not len(rows):
            notes.append(f"rank {rank}: nothing ran on a device while it was profiled")
            continue
        yield rank, trace.rows(rows[np.argsort(trace.start[rows], kind="stable")])

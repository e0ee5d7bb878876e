"""Which call on the host launched which work on a device: they share a correlation number."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from echograph.ir.columns import Int64
from echograph.profiler.traces.trace import NONE, WAITS, Bool, Trace


class Launches(NamedTuple):
    """Pairs of rows, in the order of the work's rows; a launched CUDA graph stands once for each of its kernels.

    Attributes:
        calls: the call on the host.
        works: what it launched.
    """

    calls: Int64
    works: Int64


def of_device_queue(trace: Trace) -> Bool:
    """Which rows are on a device's side: work, and waits of a stream."""
    queued: Bool = ((trace.stream >= 0) & (trace.correlation >= 0)) | trace.named(WAITS)
    return queued


def launches(trace: Trace) -> Launches:
    """Every row on a device's side whose launching call is in the trace, with that call.

    Where several calls have one correlation number, the last counts.
    """
    queued = of_device_queue(trace)
    calls = np.flatnonzero(~queued & (trace.correlation > 0))
    calls = calls[np.argsort(trace.correlation[calls], kind="stable")]
    works = np.flatnonzero(queued & (trace.correlation > 0))
    if not len(calls):
        return Launches(calls, calls)
    keys = trace.correlation[calls]
    at = np.searchsorted(keys, trace.correlation[works], "right") - 1
    found = (at >= 0) & (keys[at] == trace.correlation[works])
    return Launches(calls[at[found]], works[found])


def launch_of_rows(trace: Trace) -> Int64:
    """For each row the call that launched it, or -1."""
    found = launches(trace)
    calls = np.full(len(trace), NONE, np.int64)
    calls[found.works] = found.calls
    return calls

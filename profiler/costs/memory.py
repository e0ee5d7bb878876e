"""Seconds of memory-bound kernels: bytes over the bandwidth that their kind reaches, and a launch floor."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from echograph.errors import UnavailableError, UnknownNameError
from echograph.profiler.costs.cost import CostEstimate, make_cost
from echograph.profiler.costs.device import DeviceProfile

KINDS = ("elementwise", "copy", "norm", "softmax", "reduction", "gather", "optimizer")
"""norm and softmax work on rows; gather is an embedding or its gradient; optimizer updates many tensors."""

DEFAULT_ROW_BYTES = 8192.0


def memory_bound(
    device: DeviceProfile,
    kind: str,
    *,
    bytes_read: npt.ArrayLike,
    bytes_written: npt.ArrayLike,
    row_bytes: npt.ArrayLike = DEFAULT_ROW_BYTES,
) -> CostEstimate:
    """Cost of one memory-bound kernel.

    Args:
        device: the profile to ask.
        kind: one of `KINDS`.
        bytes_read: what it must read, each operand once.
        bytes_written: what it must write.
        row_bytes: bytes of one normalised row (norm and softmax slow down once a row outgrows the registers).

    Raises:
        UnknownNameError: no such kind.
        UnavailableError: the device has no model of it.
        ValueError: a size is negative.
    """
    model = device.memory.get(kind)
    if model is None:
        if kind in KINDS:
            raise UnavailableError(
                f"device {device.name} has no model of memory-bound kind '{kind}'", device.memory
            )
        raise UnknownNameError("memory-bound kind", kind, device.memory)
    moved = np.asarray(bytes_read, dtype=np.float64) + np.asarray(bytes_written, dtype=np.float64)
    if np.any(~(moved >= 0)):
        raise ValueError("bytes read and written are numbers >= 0")
    row = np.log2(np.maximum(np.asarray(row_bytes, dtype=np.float64), 1.0))
    fraction = np.interp(row, np.log2(model.row_bytes), model.bandwidth_fraction)
    bandwidth = device.datasheet.memory_bandwidth_bytes_per_s
    seconds = np.asarray(device.memory_launch_s + moved / (bandwidth * fraction))
    return make_cost(seconds, model.label.spread, model.label.spread_short, model.label.source)

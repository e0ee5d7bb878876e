"""Seconds of memory-bound kernels: bytes over the bandwidth that their kind reaches, and a launch floor."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from echograph.errors import UnavailableError, UnknownNameError
from echograph.profiler.costs.cost import CostEstimate, make_cost
from echograph.profiler.costs.device import DeviceProfile

KINDS = (
    *("elementwise", "broadcast", "copy", "norm", "norm_backward", "softmax", "reduction", "gather", "optimizer"),
)
"""broadcast is elementwise with an operand that is repeated along rows or columns, in a kernel made for any shape;
norm and softmax work on rows; gather is an embedding or its gradient; optimizer updates many tensors."""

LIKE = {"broadcast": "elementwise", "norm_backward": "norm"}
"""What stands for a kind that a device has no model of."""

DEFAULT_ROW_BYTES = 8192.0


def memory_bound(
    device: DeviceProfile,
    kind: str,
    *,
    bytes_read: npt.ArrayLike,
    bytes_written: npt.ArrayLike,
    row_bytes: npt.ArrayLike = DEFAULT_ROW_BYTES,
    library: str = "",
) -> CostEstimate:
    """Cost of one memory-bound kernel.

    Args:
        device: the profile to ask.
        kind: one of `KINDS`.
        bytes_read: what it must read, each operand once.
        bytes_written: what it must write.
        row_bytes: bytes of one normalised row (norm and softmax slow down once a row outgrows the registers).
        library: whose kernel it is ("cudnn", "compiled"), where the device has a model of it; else PyTorch's own.

    Raises:
        UnknownNameError: no such kind.
        UnavailableError: the device has no model of it.
        ValueError: a size is negative.
    """
    names = (f"{kind}:{library}", kind, LIKE.get(kind, kind))
    model = next((found for name in names if (found := device.memory.get(name)) is not None), None)
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
    if model.moved_bytes:
        size = np.log2(np.maximum(moved, 1.0))
        fraction = fraction * np.interp(size, np.log2(model.moved_bytes), model.moved_scale)
    bandwidth = device.datasheet.memory_bandwidth_bytes_per_s
    seconds = np.asarray(device.memory_launch_s + moved / (bandwidth * fraction))
    return make_cost(seconds, model.label.spread, model.label.spread_short, model.label.source)

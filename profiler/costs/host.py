"""Time of the CPU thread that feeds the device: a step of many small kernels is bound by it."""

from __future__ import annotations

from echograph.profiler.costs.cost import CostEstimate
from echograph.profiler.costs.device import DeviceProfile

SPREAD = 0.5
"""Assumed: hosts of one device kind differ by about this much (processor, framework version, tracing)."""


def launch(device: DeviceProfile) -> CostEstimate:
    """CPU time of one kernel launch call."""
    return _cost(device, device.host.launch_s)


def framework_op(device: DeviceProfile) -> CostEstimate:
    """CPU time of one eager framework operation that launches one kernel, the launch call included."""
    return _cost(device, device.host.op_s)


def _cost(device: DeviceProfile, seconds: float) -> CostEstimate:
    return CostEstimate(seconds, SPREAD, "fitted" if device.host.source == "measured" else "analytical")

"""From an operation's shape to its duration on a device: seconds, their spread, and where they come from.

Predicting needs numpy and msgspec alone; the profiles in `profiler/devices` are made by `profiler/fit`.
"""

from echograph.profiler.costs.attention import attention_backward, attention_forward
from echograph.profiler.costs.device import (
    CostEstimate,
    DeviceProfile,
    device_names,
    load_device,
    memory_bound,
)
from echograph.profiler.costs.gemm import convolution, gemm, grouped_gemm

__all__ = [
    "CostEstimate",
    "DeviceProfile",
    "attention_backward",
    "attention_forward",
    "convolution",
    "device_names",
    "gemm",
    "grouped_gemm",
    "load_device",
    "memory_bound",
]

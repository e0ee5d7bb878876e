"""From an operation's shape to its duration on a device: seconds, their spread, and where they come from.

Predicting needs numpy and msgspec alone; the profiles in `profiler/devices` are made by `profiler/fit`.
"""

from echograph.profiler.costs.attention import attention_backward, attention_forward
from echograph.profiler.costs.convolution import convolution
from echograph.profiler.costs.cost import CostEstimate
from echograph.profiler.costs.device import DeviceProfile, device_names, load_device
from echograph.profiler.costs.gemm import gemm, grouped_gemm
from echograph.profiler.costs.host import framework_op, launch
from echograph.profiler.costs.memory import memory_bound

__all__ = [
    "CostEstimate",
    "DeviceProfile",
    "attention_backward",
    "attention_forward",
    "convolution",
    "device_names",
    "framework_op",
    "gemm",
    "grouped_gemm",
    "launch",
    "load_device",
    "memory_bound",
]

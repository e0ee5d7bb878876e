"""PyTorch's element-wise kernels for any shape or type, which instructions limit before memory does.

Where an operand is repeated along the result, or types differ, a kernel finds the place of each element by
divisions, or loads and stores one element at a time through a conversion (`elementwise_kernel` with an offset
calculator, `unrolled_elementwise_kernel`). So it takes as long an element whatever the type is. Measured, in
clocks of a multiprocessor an element:

- bf16 to fp32, 67,108,864 elements on an A100 in 362.46 us (pytorch/pytorch#195542): 0.82;
- fp32 to fp16, before these copies were vectorised, 536,870,912 elements on an H100 PCIe in 2.2248 ms
  (pytorch/pytorch#137053): 0.83;
- `prelu` with a weight a column, 1,024 x 10,240 in fp16 on an H200 at 1.18 TB/s (tile-ai/TileOPs#500): 0.82;
- a sum and an unfused RMS norm of fp32 on an H100, of whose kernels two repeat an operand and the others move 24
  bytes an element (linkedin/Liger-Kernel, 2,048 x 32,768 in 0.983 ms): 0.85;
- unfused RMS norms of bf16 on an A100, where two repeat one, one converts to fp32 and the others move 18 bytes an
  element (2,048 x 32,768 in 1.919 ms): 0.94.
"""

from __future__ import annotations

from echograph.profiler.costs.device import Datasheet

CLOCKS = 0.82
SPREAD = 0.1
"""Relative one-sigma error: the five differ from it by 0.13 at most."""


def unrolled_seconds(sheet: Datasheet, elements: float) -> float:
    """Seconds that such a kernel takes at least.

    Args:
        sheet: of the device.
        elements: of the result.
    """
    return CLOCKS * elements / (sheet.sm_count * sheet.clock_hz)

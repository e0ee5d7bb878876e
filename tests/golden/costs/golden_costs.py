"""Costs of kernels of every kind on devices of every kind, as they were when they were last looked at.

`python tests/golden/costs/golden_costs.py` writes `costs.json` anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from echograph.profiler.costs import (
    attention_backward,
    attention_forward,
    convolution,
    gemm,
    grouped_gemm,
    load_device,
    memory_bound,
)
from echograph.profiler.costs.device import MEMORY_KINDS, CostEstimate, DeviceProfile

STORED = Path(__file__).with_name("costs.json")
DEVICES = ("v100-sxm2", "a100-sxm-80", "h100-sxm", "b200", "mi300x", "l40s")
# Rows, columns, depth: square, skinny, tiny, unaligned, far beyond what was measured.
SIZES = np.array(
    [(4096, 4096, 4096), (8192, 1024, 4096), (16, 8192, 8192), (8, 8, 8), (1000, 999, 1001), (50000, 50257, 12288)]
).T
ATTENTION = (
    {"batch": 4, "heads": 16, "seq": 2048, "head_dim": 64},
    {"batch": 1, "heads": 32, "seq": 8192, "head_dim": 128, "kv_heads": 8},
    {"batch": 2, "heads": 8, "seq": 512, "kv_seq": 2048, "head_dim": 96},
    {"batch": 1, "heads": 16, "seq": 4096, "head_dim": 192, "v_head_dim": 128},
    {"batch": 1, "heads": 1, "seq": 128, "head_dim": 40},
)
IMAGES = (
    {
        "batch": 32,
        "in_channels": 64,
        "out_channels": 256,
        "kernel": 1,
        "in_positions": 3136,
        "out_positions": 3136,
    },
    {
        "batch": 32,
        "in_channels": 128,
        "out_channels": 128,
        "kernel": 9,
        "in_positions": 3136,
        "out_positions": 784,
    },
    {
        "batch": 8,
        "in_channels": 96,
        "out_channels": 96,
        "kernel": 9,
        "in_positions": 784,
        "out_positions": 784,
        "groups": 96,
    },
    {
        "batch": 1,
        "in_channels": 3,
        "out_channels": 768,
        "kernel": 256,
        "in_positions": 50176,
        "out_positions": 196,
    },
)
PASSES = ("forward", "input_gradient", "weight_gradient")


def costs() -> dict[str, dict[str, list[Any]]]:
    """Kernel -> [microseconds, spread, source], by device."""
    return {name: {what: _figures(cost) for what, cost in _costs(load_device(name))} for name in DEVICES}


def _figures(cost: CostEstimate) -> list[Any]:
    seconds, spread = (np.asarray(v, np.float64) for v in (cost.seconds, cost.spread))
    return [
        *(float(f"{v:.10g}") for v in (seconds * 1e6).ravel()),
        *(float(f"{v:.6g}") for v in spread.ravel()),
        cost.source,
    ]


def _costs(device: DeviceProfile) -> Iterator[tuple[str, CostEstimate]]:
    for dtype, layout in product(device.gemm, ("TN", "NN", "NT")):
        yield f"gemm {dtype} {layout}", gemm(device, *SIZES, dtype=dtype, layout=layout)
    for dtype in device.gemm:
        yield f"gemm {dtype} batched", gemm(device, *SIZES, batch=12, dtype=dtype)
        yield f"gemm {dtype} added", gemm(device, *SIZES, dtype=dtype, accumulator_bytes=4.0, quantize=False)
    for kernel, (number, shape), causal in product(device.attention, enumerate(ATTENTION), (True, False)):
        what = f"{kernel} {number} {'causal' if causal else 'full'}"
        yield f"attention {what}", attention_forward(device, **shape, causal=causal, kernel=kernel)
        if device.attention[kernel].backward is not None:
            yield f"attention backward {what}", attention_backward(device, **shape, causal=causal, kernel=kernel)
    dtype = "bf16" if "bf16" in device.gemm else "fp16"
    for (number, image), pass_ in product(enumerate(IMAGES), PASSES):
        yield f"convolution {number} {pass_}", convolution(device, **image, pass_=pass_, dtype=dtype)
    # The scales of the profiles that ship are 1, which would hide how they are used.
    grouped = msgspec.structs.replace(device.grouped, scale={p: 1.5 + i for i, p in enumerate(PASSES)})
    scaled = msgspec.structs.replace(device, grouped=grouped)
    for pass_ in PASSES:
        yield (
            f"grouped {pass_}",
            grouped_gemm(scaled, [100, 4096, 0, 16], 14336, 4096, pass_=pass_, dtype=dtype, accumulator_bytes=4.0),
        )
    sizes = np.array([0, 1e3, 1e6, 1e9])
    for kind, row in product(MEMORY_KINDS, (512.0, 8192.0, 524288.0)):
        yield (
            f"{kind} rows {row:g}",
            memory_bound(device, kind, bytes_read=sizes, bytes_written=sizes / 2, row_bytes=row),
        )


if __name__ == "__main__":
    STORED.write_text(
        json.dumps(costs(), indent=1).replace(",\n   ", ", ").replace("[\n   ", "[").replace("\n  ]", "]") + "\n"
    )

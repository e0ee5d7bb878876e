r"""The backward pass of attention that adds in one order, so that the same inputs give the same bits.

In any order, blocks of keys add to the queries' gradient as they come. In one order they may not:

- FlashAttention-2 (csrc/flash_attn/src/flash_bwd_launch_template.h: gridDimx; flash_api.cpp: nsplits) starts
  G = ceil(SMs / (batch heads)) thread blocks a head, each of which goes through every G-th block of 128 keys and adds
  to a gradient of its own in fp32. One fits on an SM (144 KiB of shared memory), so that they run in
  ceil(G batch heads / SMs) waves, of which the last is mostly empty. The G gradients are filled with zeros before,
  and added up after. On H100 the formula says 8.0 ms of 2 x 8,192 tokens with 16 causal heads of 128, where 8.28 ms
  were measured (Dao-AILab/flash-attention, pull request 1893) and 4.56 ms is the model of any order.
- cuDNN on Hopper writes what the scores' gradients are to memory, in 16 bits, and multiplies them by the keys apart
  (NVIDIA/cudnn-frontend, scaled_dot_product_flash_attention.h: use_dp_workspace). That the rest takes as long as
  before, and that nothing is written of what the mask hides, is assumed.
- Others order the additions and wait for each other: what their authors measured, of both, is taken for all shapes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from echograph.profiler.costs.device import Datasheet, FloatArray

KEYS_A_BLOCK = 128.0
SPREAD = 0.1
"""Relative one-sigma error beyond that of any order. Assumed: twice what the one measured shape is off, rounded up."""

_WAITING = {
    ("cudnn", "blackwell"): 1.17,
    ("flash3", "hopper"): 1.21,
    ("flash4", "blackwell"): 1.10,
}
"""Time in one order over that in any: cuDNN 9.22, the median of 40 pairs of bf16 with heads of 128 on GB200 and GB300
(NVIDIA/cudnn-frontend, benchmark/sdpa_benchmark_training/results; 0.94 to 1.09 with heads of 192); FlashAttention-3,
2.900 over 2.391 ms (Dao-AILab/flash-attention, pull request 1893); FlashAttention-4, 2.505 over 2.274 ms (2280)."""


def in_one_order(
    kernel: str,
    sheet: Datasheet,
    seconds: FloatArray,
    *,
    b: FloatArray,
    h: FloatArray,
    q: FloatArray,
    kv: FloatArray,
    d: FloatArray,
    seen: FloatArray,
) -> FloatArray:
    """Seconds of a backward pass in one order.

    Args:
        kernel: of the pass.
        sheet: of the device.
        seconds: of the pass in any order.
        b: batch.
        h: query heads.
        q: queries.
        kv: keys.
        d: head dim.
        seen: keys that a query's tile visits on average.
    """
    if kernel in ("flash1", "flash2"):
        return _by_splits(sheet, seconds, b * h, q, kv, d)
    if kernel == "cudnn" and sheet.architecture == "hopper":
        return np.asarray(seconds + 2.0 * 2.0 * b * h * q * seen / sheet.memory_bandwidth_bytes_per_s)
    return np.asarray(seconds * _WAITING.get((kernel, sheet.architecture), 1.0))


def is_possible(kernel: str, architecture: str, dropout: float, deterministic: bool) -> bool:
    """Whether a library has an attention for training with these on an architecture.

    Source: NVIDIA/TransformerEngine, pytorch/attention/dot_product_attention/utils.py (get_attention_backend) and
    common/fused_attn/fused_attn.cpp (nvte_get_fused_attn_backend): FlashAttention-3 and -4 have no dropout; cuDNN
    has no fixed order before Hopper, on Blackwell none with dropout (without since 9.18.1), and on its consumer
    parts none.
    """
    if kernel in ("flash3", "flash4"):
        return not dropout
    if kernel != "cudnn" or not deterministic:
        return True
    return architecture == "hopper" or (architecture == "blackwell" and not dropout)


def _by_splits(
    sheet: Datasheet, seconds: FloatArray, heads: FloatArray, q: FloatArray, kv: FloatArray, d: FloatArray
) -> FloatArray:
    splits = np.ceil(sheet.sm_count / heads)
    waves = np.ceil(splits * heads / sheet.sm_count)
    blocks = np.ceil(kv / KEYS_A_BLOCK)
    longer = waves * sheet.sm_count / heads * np.ceil(blocks / splits) / blocks
    # Zeros are written, and what is added up is read; in any order there is one gradient, made and read as well.
    more: npt.ArrayLike = 2.0 * 4.0 * (splits - 1.0) * heads * q * d / sheet.memory_bandwidth_bytes_per_s
    return np.asarray(seconds * np.maximum(1.0, longer) + more)

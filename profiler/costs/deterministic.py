r"""The backward pass of attention that adds in one order, so that the same inputs give the same bits.

In any order, blocks of keys add to the queries' gradient as they come. In one order they may not:

- FlashAttention-2 (csrc/flash_attn/src/flash_bwd_launch_template.h: gridDimx; flash_api.cpp: nsplits) starts
  G = ceil(SMs / (batch heads)) thread blocks a head, each of which goes through every G-th block of 128 keys and
  adds to a gradient of its own in fp32. One fits on an SM (144 KiB of shared memory); they start in order as SMs
  become free, and since they are a few more than SMs, most of these wait for a second one on some. The G gradients
  are filled with zeros before, and added up after; PyTorch, whose deterministic algorithms fill all memory that is
  asked for, writes them once more before these zeros. On H100 this says 8.0 ms, 0.2 of it for that, of 2 x 8,192
  tokens with 16 causal heads of 128, where 8.28 ms were measured (Dao-AILab/flash-attention, pull request 1893,
  which does not say whether memory was filled); in any order 4.56 ms.
- cuDNN on Hopper writes what the scores' gradients are to memory, in 16 bits, and multiplies them by the keys
  apart (NVIDIA/cudnn-frontend, scaled_dot_product_flash_attention.h: use_dp_workspace). That the rest takes as
  long as before, that nothing is written of what the mask hides, and that PyTorch fills this memory before, as it
  does with deterministic algorithms, is assumed.
- Others order the additions and wait for each other: what their authors measured, of both, is taken for all
  shapes.
"""

from __future__ import annotations

from heapq import heapreplace
from math import ceil

import numpy as np
import numpy.typing as npt

from echograph.profiler.costs.device import Datasheet, FloatArray
from echograph.profiler.costs.releases import library_of

KEYS_A_BLOCK = 128.0
FP32, BF16 = 4.0, 2.0
"""Bytes of an element."""
SPREAD = 0.1
"""Relative one-sigma error beyond that of any order. Assumed: twice what the measured shape is off, rounded up."""

_WAITING = {
    ("cudnn", "blackwell"): 1.17,
    ("flash3", "hopper"): 1.21,
    ("flash4", "blackwell"): 1.10,
}
"""Time in one order over that in any: cuDNN 9.22, the median of 40 pairs of bf16 with heads of 128 on GB200 and
GB300 (NVIDIA/cudnn-frontend, benchmark/sdpa_benchmark_training/results; 0.94 to 1.09 with heads of 192);
FlashAttention-3, 2.900 over 2.391 ms (Dao-AILab/flash-attention, pull request 1893); FlashAttention-4, 2.505 over
2.274 ms (pull request 2280)."""


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
    causal: bool | npt.NDArray[np.bool_],
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
        causal: whether queries see only the keys up to their own position.
    """
    bandwidth, kernel = sheet.memory_bandwidth_bytes_per_s, library_of(kernel)
    if kernel in ("flash1", "flash2"):
        splits = np.ceil(sheet.sm_count / (b * h))
        longer = _longest_over_mean(sheet.sm_count, b * h, np.ceil(kv / KEYS_A_BLOCK), causal)
        # In any order there is one gradient, which is made and read as well, and not filled.
        moved = FP32 * (2.0 * (splits - 1.0) + splits) * b * h * q * d
        return np.asarray(seconds * longer + moved / bandwidth)
    if kernel == "cudnn" and sheet.architecture == "hopper":
        filled, used = 1.0, np.where(causal, 1.0, 2.0)  # written and read
        return np.asarray(seconds + BF16 * b * h * q * kv * (filled + used) / bandwidth)
    return np.asarray(seconds * _WAITING.get((kernel, sheet.architecture), 1.0))


def is_possible(kernel: str, architecture: str, dropout: float, deterministic: bool) -> bool:
    """Whether a library has an attention for training with these on an architecture.

    Source: NVIDIA/TransformerEngine, pytorch/attention/dot_product_attention/utils.py (get_attention_backend) and
    common/fused_attn/fused_attn.cpp (nvte_get_fused_attn_backend): FlashAttention-3 and -4 have no dropout; cuDNN
    has no fixed order before Hopper, on Blackwell none with dropout (without since 9.18.1), and on its consumer
    parts none.
    """
    kernel = library_of(kernel)
    if kernel in ("flash3", "flash4"):
        return not dropout
    if kernel != "cudnn" or not deterministic:
        return True
    return architecture == "hopper" or (architecture == "blackwell" and not dropout)


@np.vectorize(otypes=[np.float64])
def _longest_over_mean(sms: int, heads: float, blocks: float, causal: bool) -> float:
    """How long all thread blocks of FlashAttention-2 take, over what they would if all SMs worked to the end."""
    splits = ceil(sms / heads)
    work = [
        sum(blocks - at if causal else blocks for at in range(first, int(blocks), splits))
        for first in range(splits)
    ]
    free = [0.0] * sms
    for thread_block in work * int(heads):
        heapreplace(free, free[0] + thread_block)
    return max(1.0, max(free) * sms / max(1.0, sum(work) * heads))

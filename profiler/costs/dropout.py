"""What attention takes longer for dropping some of its scores (dropout inside of a fused kernel).

Random numbers are drawn anew in both passes, beside the kernel's exponentials, on units that these do not leave
idle (Ma, Liu, Krashinsky, arXiv 2410.07531: fused, they are hardly hidden). So instructions for integers are added
that each score takes, at the rate that CUDA's programming guide has for them on every architecture here, 64 a
clock and SM. They are counted in FlashAttention-2 (csrc/flash_attn/src: philox.cuh, dropout.h,
flash_bwd_kernel.h), and other kernels' are taken to be as many.

Not fitted. FlashAttention-4 on GB200 (Dao-AILab/flash-attention, pull request 2597) reaches 75 to 85 % of its rate
forward and 60 to 70 % backward with dropout; this says 63 to 69 and 72 to 78 %, and both passes together a tenth
less than measured.
"""

from __future__ import annotations

from echograph.profiler.costs.device import Datasheet, FloatArray

DRAWN = 7 * 4 / 16
"""Seven rounds of two wide products and two exclusive ors give 16 bytes, one a score."""
FORWARD = DRAWN + 3 / 2
"""Two 16-bit probabilities at a time: bytes are widened, compared, and taken as a mask."""
BACKWARD = DRAWN + 5.5
"""Of fp32: a byte taken out, compared, a sign set by it; a sign tested and a gradient selected; half a maximum
with 0 where probabilities become 16 bits."""
PER_CLOCK = 64.0
"""Integer instructions that an SM ends in a clock (CUDA C++ programming guide, arithmetic instructions)."""
SPREAD = 0.1
"""Relative one-sigma error beyond that of attention without. Assumed: what both passes are off there."""


def dropout_seconds(sheet: Datasheet, scores: FloatArray, *, backward: bool) -> FloatArray:
    """Seconds that a pass takes longer.

    Args:
        sheet: of the device.
        scores: of queries and keys that the kernel looks at.
        backward: which pass.
    """
    return scores * ((BACKWARD if backward else FORWARD) / (PER_CLOCK * sheet.sm_count * sheet.clock_hz))

"""What dropout takes that is inside of a fused kernel: of attention's scores, or of what a compiler fuses.

Random numbers are drawn anew in both passes, beside the kernel's exponentials, on units that these do not leave
idle (Ma, Liu, Krashinsky, arXiv 2410.07531: fused, they are hardly hidden). So instructions for integers are added
that each score takes, at the rate that CUDA's programming guide has for them on every architecture here, 64 a
clock and SM. They are counted in FlashAttention-2 (csrc/flash_attn/src: philox.cuh, dropout.h,
flash_bwd_kernel.h), and other kernels' are taken to be as many.

Not fitted. FlashAttention-4 on GB200 (Dao-AILab/flash-attention, pull request 2597) reaches 75 to 85 % of its rate
forward and 60 to 70 % backward with dropout; this says 63 to 69 and 72 to 78 %, and both passes together a tenth
less than measured.

A kernel that `torch.compile` makes draws a whole number of Philox's for each element and uses a quarter of it
(Triton's `tl.rand`: ten rounds). Such a kernel moves memory meanwhile: the longer of both counts. Where it moves 7
bytes an element, as of 16 bits and a residual, drawing takes about as long on A100 and H100, and twice as long on
GB200.
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


COMPILED = 10 * 4.0
"""Ten rounds of two wide products and two exclusive ors, an element."""


def drawn_seconds(sheet: Datasheet, elements: float) -> float:
    """Seconds that a compiler's kernel takes for drawing, at least.

    Args:
        sheet: of the device.
        elements: that are dropped, or not.
    """
    return elements * COMPILED / (PER_CLOCK * sheet.sm_count * sheet.clock_hz)


def dropout_seconds(sheet: Datasheet, scores: FloatArray, *, backward: bool) -> FloatArray:
    """Seconds that a pass takes longer.

    Args:
        sheet: of the device.
        scores: of queries and keys that the kernel looks at.
        backward: which pass.
    """
    return scores * ((BACKWARD if backward else FORWARD) / (PER_CLOCK * sheet.sm_count * sheet.clock_hz))

"""Fits what stands in for attention in hybrid models: a causal convolution, and a recurrence over chunks.

Tables time the kernels of Qwen3.5-397B's gated delta rule as it is served: 64 heads of 128, whose queries and
keys are 16 heads', after a convolution of all 12,288 channels (the layer's recurrent state is [64, 128, 128]). A
shape is timed for several numbers of tensor-parallel ranks, without saying which: the longest time of a shape
that has all five is the whole layer's.

Mamba-2's own scan is in no table. It is as long as the gated delta rule's FLOPs at the same rate, both being
chunks of products in Triton's kernels whose states go through memory: labelled analytical, with the spread of a
guess.
"""

from __future__ import annotations

import numpy as np

from echograph.profiler.costs.device import (
    SHORT_KERNEL_S,
    Datasheet,
    FloatArray,
    Label,
    MemoryModel,
    ScanModel,
)
from echograph.profiler.fit.memory import FLAT_ROW
from echograph.profiler.fit.regression import held_out, score, spreads
from echograph.profiler.fit.table import KernelTable

MODEL = "Qwen/Qwen3.5-397B-A17B"
LIBRARY = "sglang"
CONVOLUTION, SCAN = "causal_conv1d_fn", "chunk_gated_delta_rule"
RANKS = 5
HEADS, HEAD_DIM, CHANNELS, CHUNK = 64.0, 128.0, 12288.0, 64.0
FLOPS_OF_A_TOKEN = HEADS * (2.0 * CHUNK * 5.0 * HEAD_DIM + 6.0 * HEAD_DIM**2)
"""Of each head: five products of a chunk's length and a head's, and three with the state (Yang et al. 2024,
arXiv:2412.06464, section 3.3)."""
BYTES_OF_A_TOKEN = 2.0 * 2.0 * CHANNELS
OTHER_RECURRENCE_SPREAD = 0.5
"""Assumed, for a recurrence that is not the one that was measured."""


def fit_scans(
    rows: KernelTable, sheet: Datasheet, launch_s: float, basis: str
) -> tuple[MemoryModel, ScanModel] | None:
    """The convolution and the recurrence of one device; None where the table does not have both."""
    found = {kernel: _whole_layers(rows, kernel) for kernel in (CONVOLUTION, SCAN)}
    if not all(len(seconds) for _, _, seconds in found.values()):
        return None
    batch, length, seconds = found[CONVOLUTION]
    hidden = held_out(batch, length)
    moved = BYTES_OF_A_TOKEN * batch * length / sheet.memory_bandwidth_bytes_per_s
    reach = float(np.median((moved / (seconds - launch_s))[~hidden]))
    error = score((launch_s + moved / reach)[hidden], seconds[hidden])
    spread, spread_short = spreads(error, floor=0.1)
    convolution = MemoryModel(
        label=Label(source="fitted", basis=basis, spread=spread, spread_short=spread_short, held_out=error),
        row_bytes=[FLAT_ROW],
        bandwidth_fraction=[round(reach, 4)],
    )
    batch, length, seconds = found[SCAN]
    ideal = FLOPS_OF_A_TOKEN * batch * length / sheet.peak_flops_per_s["bf16"]
    label = Label(
        source="analytical",
        basis=f"assumed: FLOPs at the rate of a gated delta rule; {basis}",
        spread=OTHER_RECURRENCE_SPREAD,
        spread_short=OTHER_RECURRENCE_SPREAD,
    )
    return convolution, ScanModel(label=label, peak="bf16", efficiency=round(float(np.median(ideal / seconds)), 4))


def _whole_layers(rows: KernelTable, kernel: str) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Batch, length and seconds of the shapes that were timed for every number of ranks."""
    library = np.char.find(rows.text["source"].names, LIBRARY)[rows.text["source"].codes] >= 0
    mask = rows.text["notes"].among([MODEL]) & rows.text["kernel"].among([kernel]) & library
    part = rows.where(mask)
    shapes, of = np.unique(np.stack([part.number["batch"], part.number["seq"]]), axis=1, return_inverse=True)
    seconds = part.seconds()
    longest = np.zeros(shapes.shape[1])
    np.maximum.at(longest, of.ravel(), seconds)
    kept = (np.bincount(of.ravel(), minlength=shapes.shape[1]) == RANKS) & (longest >= SHORT_KERNEL_S)
    return shapes[0][kept], shapes[1][kept], longest[kept]

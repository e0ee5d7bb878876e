"""What batches of narrow products take: attention as PyTorch runs it unfused, charted as a whole.

The dense tables begin at 256 columns and a depth of 256; the products of attention have a head's 64 or 128 of one
of them, and their model is an extrapolation. The charts of Dao (2023, FlashAttention-2) hold "PyTorch" beside the
fused kernels: six batched products forward and backward, a softmax each way, copies of the operands. What the
chart takes beyond the models of softmax and copies is put to the products. Charts without a mask alone are used:
masking adds kernels.
"""

from __future__ import annotations

import msgspec
import numpy as np

from echograph.profiler.costs.cost import FloatArray
from echograph.profiler.costs.device import Datasheet, GemmModel, MemoryModel
from echograph.profiler.costs.gemm import gemm_seconds, narrowness
from echograph.profiler.fit.table import KernelTable

LABEL = "PyTorch;"
PASSES = 3.5
"""Forward and backward are charted as so many times the FLOPs of forward."""
COPIES = 9
"""Of an operand's size: queries, keys and values before the products, the output, and their gradients."""
MIN_ROWS = 6


def fit_batched(
    table: KernelTable, gpus: list[str], model: GemmModel, memory: dict[str, MemoryModel], sheet: Datasheet
) -> GemmModel | None:
    """The model with the factor on batches of narrow products; None where no chart of the device has them."""
    rows = table.select(gpus=gpus, ops=["attn_fwd_bwd"])
    unfused = np.char.startswith(rows.text["notes"].astype(str), LABEL) & (rows.text["causal"] == "no")
    rows = rows.where(unfused)
    if len(rows) < MIN_ROWS:
        return None
    batch, seq, heads, dim = (rows.number[name] for name in ("batch", "seq", "heads", "head_dim"))
    seconds = 4.0 * PASSES * batch * seq**2 * heads * dim / (rows.number["tflops"] * 1e12)
    products = seconds - _rest(batch * heads, seq, dim, memory, sheet)
    modelled = _products(model, sheet, batch * heads, seq, dim)
    narrow = narrowness(seq, seq, dim)
    scale = float(np.exp(np.median(np.log(products / modelled) / narrow)))
    spread = float(np.std(np.log(products / modelled) - narrow * np.log(scale)))
    return msgspec.structs.replace(model, batched_scale=round(scale, 3), batched_spread=round(spread, 3))


def _products(
    model: GemmModel, sheet: Datasheet, count: FloatArray, seq: FloatArray, dim: FloatArray
) -> FloatArray:
    """Two products of scores' size and four of a head's, forward and backward together."""
    scores = gemm_seconds(model, sheet, count, seq, seq, dim)
    heads = gemm_seconds(model, sheet, count, seq, dim, seq)
    return np.asarray(2.0 * scores + 4.0 * heads)


def _rest(
    count: FloatArray, seq: FloatArray, dim: FloatArray, memory: dict[str, MemoryModel], sheet: Datasheet
) -> FloatArray:
    """Softmax, which moves the scores twice forward and three times backward, and copies."""
    softmax, copy = memory["softmax"], memory["copy"]
    reach = np.interp(np.log2(2.0 * seq), np.log2(softmax.row_bytes), softmax.bandwidth_fraction)
    scores, operand = 2.0 * count * seq**2, 2.0 * count * seq * dim
    moved = 5.0 * scores / reach + COPIES * 2.0 * operand / copy.bandwidth_fraction[0]
    return np.asarray(moved / sheet.memory_bandwidth_bytes_per_s)

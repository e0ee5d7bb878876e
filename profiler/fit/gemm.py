"""Fits a `GemmModel` to measured matrix products.

First the physical parameters (some thirty numbers for thousands of rows) by robust least squares on log time, from
one fixed start; then a correction on a coarse grid of log shapes, by ridge regression with a smoothness penalty.

Batches of narrow products are charted as a whole, in attention as PyTorch runs it unfused: the dense tables begin
at 256 columns and a depth of 256; the products of attention have a head's 64 or 128 of one of them, and their
model is an extrapolation. The charts of Dao (2023, FlashAttention-2) hold "PyTorch" beside the fused kernels: six
batched products forward and backward, a softmax each way, copies of the operands. What the chart takes beyond the
models of softmax and copies is put to the products. Charts without a mask alone are used: masking adds kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from echograph.errors import MissingExtraError
from echograph.profiler.costs.cost import FloatArray
from echograph.profiler.costs.device import Alignment, Datasheet, GemmModel, Grid, Label, MemoryModel, Quantize
from echograph.profiler.costs.gemm import LIMIT, corners, gemm_seconds, narrowness, physical_seconds
from echograph.profiler.fit.regression import (
    OUTLIER,
    held_out,
    logit,
    minimize,
    score,
    sigmoid,
    spreads,
    subsample,
    weights,
)
from echograph.profiler.fit.table import KernelTable

GRID_PASSES = 4


def fit_grid(
    knots: Sequence[Sequence[float]],
    sizes: Sequence[FloatArray],
    error: FloatArray,
    weight: FloatArray,
    *,
    smoothness: float,
    ridge: float,
) -> Grid:
    """The grid that explains log errors best, pulled to zero and to its neighbours.

    Args:
        knots: increasing sizes along each of three axes.
        sizes: three arrays [rows].
        error: log(measured / modelled), [rows].
        weight: trust in each row, [rows].
        smoothness: price of a difference between neighbours, per octave.
        ridge: price of a correction.

    Raises:
        MissingExtraError: scipy is not installed.
    """
    try:
        import scipy.sparse as sparse
        from scipy.sparse.linalg import spsolve
    except ImportError as reason:
        raise MissingExtraError("scipy", "fit", "fitting a device profile") from reason
    flat, part, _ = corners(knots, sizes)
    shape = tuple(len(axis) for axis in knots)
    count, rows = int(np.prod(shape)), len(error)
    design = sparse.csr_matrix((part.ravel(), (np.tile(np.arange(rows), 8), flat.ravel())), shape=(rows, count))
    start, end, price = _neighbours(knots, shape)
    pairs = np.tile(np.arange(len(start)), 2)
    differences = sparse.csr_matrix(
        (np.concatenate([price, -price]), (pairs, np.concatenate([start, end]))), shape=(len(start), count)
    )
    penalty = smoothness * differences.T @ differences + ridge * sparse.eye(count)
    trust, values = weight.copy(), np.zeros(count)
    for _ in range(GRID_PASSES):
        weighted = sparse.diags(trust**2)
        values = spsolve((design.T @ weighted @ design + penalty).tocsc(), design.T @ (trust**2 * error))
        trust = weight / np.sqrt(1.0 + ((error - design @ values) / OUTLIER) ** 2)
    limited = np.clip(np.rint(values * 1000.0), -LIMIT * 1000.0, LIMIT * 1000.0)
    first, second, third = ([float(v) for v in axis] for axis in knots)
    return Grid(knots=(first, second, third), permille=limited.astype(int).tolist())


def _neighbours(
    knots: Sequence[Sequence[float]], shape: tuple[int, ...]
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Flat indices of adjacent knots and the root of the price of their difference."""
    index = np.arange(int(np.prod(shape))).reshape(shape)
    start, end, price = [], [], []
    for axis, values in enumerate(knots):
        low = np.take(index, range(shape[axis] - 1), axis)
        octaves = np.diff(np.log2(np.asarray(values, dtype=np.float64)))
        along = octaves.reshape([-1 if a == axis else 1 for a in range(len(shape))])
        start.append(low.ravel())
        end.append(np.take(index, range(1, shape[axis]), axis).ravel())
        price.append(np.broadcast_to(1.0 / np.sqrt(along), low.shape).ravel())
    return np.concatenate(start), np.concatenate(end), np.concatenate(price)


TILES = {
    "ampere": ((128, 256), (256, 128), (128, 128), (128, 64), (64, 128), (64, 64), (256, 64), (64, 256)),
    "hopper": (
        *((128, 256), (256, 128), (128, 128), (128, 192), (192, 128)),
        *((64, 256), (256, 64), (128, 64), (64, 128), (64, 64)),
    ),
    "blackwell": (
        *((256, 256), (128, 256), (256, 128), (128, 128), (256, 192), (192, 256)),
        *((128, 64), (64, 128), (64, 64)),
    ),
}
"""Output tiles that the vendor's library is known to choose from, by architecture."""

LEAST_EFFICIENCY = 1e-3
BEST_BANDWIDTH = 0.92
"""No measured kernel of any device streams faster than this share of the datasheet's bandwidth."""

MOST_THROTTLE = 0.5
"""No clock is taken to fall further than to two thirds, however long the product."""

MOST_SPLIT_S = 1e-5
"""Splitting k costs at most one more short kernel, the one that adds the slices up."""

SPLITS = (1, 2, 3, 4, 6, 8, 16, 32, 64, 128, 256)

M_KNOTS = (256, 512, 1024, 2048, 4096, 8192, 32768)
NK_KNOTS = (256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 65536)
SMOOTHNESS = 1.0
RIDGE = 0.3

ALIGNMENT = Alignment(
    operand={2: 1.45, 4: 1.25, 8: 1.1, 16: 1.0},
    output={2: 1.1, 4: 1.05, 8: 1.0, 16: 1.0},
    source="assumed: one H100 row of pytorch float8_experimental#145 (8193 x 2501 x 5008 bf16: 509 TFLOP/s, "
    "some 1.45 times slower than aligned neighbours) for odd operands; the rest is interpolated by guess",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Products:
    """Measured products: sizes and seconds, each [rows]."""

    batch: FloatArray
    m: FloatArray
    n: FloatArray
    k: FloatArray
    seconds: FloatArray

    def shape(self) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        """Sizes in the order of the cost functions."""
        return self.batch, self.m, self.n, self.k

    def take(self, index: npt.NDArray[np.bool_] | npt.NDArray[np.intp]) -> Products:
        """The rows of an index or mask."""
        return Products(
            batch=self.batch[index],
            m=self.m[index],
            n=self.n[index],
            k=self.k[index],
            seconds=self.seconds[index],
        )


def fit_gemm(
    rows: Products, sheet: Datasheet, *, peak: str, element_bytes: float, basis: str, with_grid: bool = True
) -> GemmModel:
    """Fits one dtype of one device; the shipped model has seen only the rows that are not held out.

    Args:
        rows: measured products.
        sheet: the device's datasheet.
        peak: which datasheet peak the efficiencies refer to.
        element_bytes: bytes of one operand element.
        basis: what the label says of the rows.
        with_grid: also fit the residual grid (needs a dense table).
    """
    hidden = held_out(*rows.shape())
    seen = rows.take(~hidden)
    fp8 = element_bytes < 2
    tiles = TILES.get(sheet.architecture, TILES["ampere"])
    few = seen.take(subsample(len(seen.m)))
    moved = _moved(few, element_bytes)
    weight, log_time = weights(few.seconds), np.log(few.seconds)

    def residuals(p: FloatArray) -> FloatArray:
        model = _unpack(p, tiles, peak, element_bytes, fp8)
        return np.asarray(weight * (np.log(physical_seconds(model, sheet, *few.shape(), moved)) - log_time))

    model = _unpack(minimize(residuals, _start(tiles, fp8)), tiles, peak, element_bytes, fp8)
    if with_grid:
        model = msgspec.structs.replace(model, residual=_fit_residual(model, sheet, seen))
    error = score(gemm_seconds(model, sheet, *rows.take(hidden).shape()), rows.seconds[hidden])
    spread, spread_short = spreads(error)
    label = Label(source="fitted", basis=basis, spread=spread, spread_short=spread_short, held_out=error)
    return msgspec.structs.replace(model, label=label, alignment=ALIGNMENT)


def _moved(rows: Products, element_bytes: float) -> FloatArray:
    b, m, n, k = rows.shape()
    return np.asarray(b * ((m * k + k * n) * element_bytes + m * n * max(2.0, element_bytes)))


def _fit_residual(model: GemmModel, sheet: Datasheet, rows: Products) -> Grid:
    moved = _moved(rows, model.element_bytes)
    error = np.log(rows.seconds / physical_seconds(model, sheet, *rows.shape(), moved))
    return fit_grid(
        (M_KNOTS, NK_KNOTS, NK_KNOTS),
        [rows.batch * rows.m, rows.n, rows.k],
        error,
        weights(rows.seconds),
        smoothness=SMOOTHNESS,
        ridge=RIDGE,
    )


def _start(tiles: tuple[tuple[int, int], ...], fp8: bool) -> FloatArray:
    """Where the search starts: large tiles 90 % efficient and small ones less, for they load more per FLOP."""
    launch = 12e-6 if fp8 else 4e-6
    reuse = np.asarray([2.0 * a * b / (a + b) for a, b in tiles])
    efficiency = 0.95 * reuse / (reuse + 25.0)
    shared = [np.log(launch), logit(0.9), 2.0, np.log(0.5), logit(0.2), 1.5, logit(0.1), np.log(1e12)]
    cast = [np.log(1.7e-12), np.log(1.2e-12), np.log(1.2e7), 1.0] if fp8 else []
    return np.concatenate([logit(efficiency), np.full(len(tiles), np.log(150.0)), shared, cast])


def _unpack(
    p: FloatArray, tiles: tuple[tuple[int, int], ...], peak: str, element_bytes: float, fp8: bool
) -> GemmModel:
    """The model of a parameter vector; positive numbers are searched as logs, fractions as logits."""
    count = len(tiles)
    launch, band, rounding, traffic, split, power, throttle, at_flops = p[2 * count : 2 * count + 8].tolist()
    return GemmModel(
        label=Label(source="fitted", basis="", spread=0.0, spread_short=0.0),
        peak=peak,
        element_bytes=element_bytes,
        tiles=list(tiles),
        # A tile that no row is of may be searched to nothing: a profile has no such number.
        efficiency=_significant(np.maximum(sigmoid(p[:count]), LEAST_EFFICIENCY)),
        overhead_k=_significant(_exp(np.minimum(p[count : 2 * count], 20.0))),
        splits=list(SPLITS),
        split_traffic=_round(_exp(traffic)),
        split_s=_round(MOST_SPLIT_S * sigmoid(split)),
        wave_rounding=_round(sigmoid(rounding)),
        launch_s=_round(_exp(launch)),
        bandwidth_fraction=_round(BEST_BANDWIDTH * sigmoid(band)),
        overlap_power=_round(1.0 + _exp(power)),
        throttle=_round(MOST_THROTTLE * sigmoid(throttle)),
        throttle_flops=_round(_exp(at_flops)),
        quantize=_quantize(p[-4:]) if fp8 else None,
    )


def _exp(x: float | FloatArray) -> FloatArray:
    """The exponential of what no row holds back may be searched to, still a number that a file can hold."""
    return np.asarray(np.exp(np.minimum(x, 60.0)))


def _quantize(p: FloatArray) -> Quantize:
    cached, streamed, knee, sharp = _exp(p).tolist()
    return Quantize(
        launch_s=0.0,
        cached_s_per_element=_round(cached),
        streamed_s_per_element=_round(streamed),
        knee_elements=_round(knee),
        sharpness=_round(sharp),
    )


def _round(value: float | FloatArray) -> float:
    return float(f"{float(value):.10g}")


def _significant(values: FloatArray) -> list[float]:
    return [_round(v) for v in values.tolist()]


LABEL = "PyTorch;"
CHARTED_PASSES = 3.5
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
    seconds = 4.0 * CHARTED_PASSES * batch * seq**2 * heads * dim / (rows.number["tflops"] * 1e12)
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

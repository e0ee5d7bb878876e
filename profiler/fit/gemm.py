"""Fits a `GemmModel` to measured matrix products.

First the physical parameters (some thirty numbers for thousands of rows) by robust least squares on log time, from
one fixed start; then a correction on a coarse grid of log shapes, by ridge regression with a smoothness penalty.

Batches of narrow products are charted as a whole, in attention as PyTorch runs it unfused: the dense tables begin
at 256 columns and a depth of 256; the products of attention have a head's 64 or 128 of one of them, and their
model is an extrapolation. The charts of Dao (2023, FlashAttention-2) hold "PyTorch" beside the fused kernels: six
batched products forward and backward, a softmax each way, copies of the operands. What the chart takes beyond the
models of softmax and copies is put to the products. Charts without a mask alone are used: masking adds kernels.

A second source tells about layouts, accumulation, expert groups, and sustained clocks. Its absolute times differ
from the table's (another board, other power limits), so only ratios within it are used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from echograph.profiler.costs.device import (
    Alignment,
    Datasheet,
    FloatArray,
    GemmModel,
    Grid,
    GroupedModel,
    HeldOut,
    Label,
    MemoryModel,
    Quantize,
)
from echograph.profiler.costs.gemm import (
    accumulate_seconds,
    accumulator_traffic,
    correction_sizes,
    gemm_seconds,
    narrowness,
    physical_seconds,
    tile_rows,
)
from echograph.profiler.fit.grid import finely, fit_grid, limited, may_fall
from echograph.profiler.fit.regression import (
    first_rows,
    held_out,
    judged,
    logit,
    minimize,
    misfit,
    score,
    sigmoid,
    spreads,
    subsample,
    weights,
)
from echograph.profiler.fit.table import KernelTable

TILES = {
    "ampere": ((128, 256), (256, 128), (128, 128), (128, 64), (64, 128), (64, 64), (256, 64), (64, 256)),
    "hopper": (
        *((128, 256), (256, 128), (128, 128), (128, 192), (192, 128)),
        *((64, 256), (256, 64), (128, 64), (64, 128), (64, 64)),
    ),
    "blackwell": (
        *((256, 256), (128, 256), (256, 128), (128, 128), (256, 192), (192, 256), (128, 192), (192, 128)),
        *((256, 64), (64, 256), (128, 64), (64, 128), (64, 64), (128, 32)),
    ),
}
"""Output tiles that the vendor's library is known to choose from, by architecture; those of others (volta, ada,
cdna3) are assumed to be Ampere's."""

SINGLE_TILES = (
    *((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64)),
    *((128, 32), (32, 128), (64, 32), (32, 64), (32, 32)),
)
"""Those of fp32 without tensor cores: volta_sgemm_128x32_nt, ampere_sgemm_32x32_sliced1x4_tn and their like in
public traces of V100 and A100 (facebookresearch/HolisticTraceAnalysis), and CUTLASS's of 256 x 128."""

SINGLE_K_STEPS = (32, 64, 128)
"""In steps of which the same kernels may go through k. Each is fitted, and the best kept: batches of products of a
depth of 64, 96 and 128 take 0.97, 0.99 and 1 times as long on A100, 0.58, 0.99 and 1 on H100."""

CACHE_OUTRUNS = ("ada", "blackwell-rtx")
"""Architectures with GDDR memory, whose cache is several times as fast: a product that is timed over and over
takes what its operands in the cache take. With HBM the rows do not tell (H100 bf16, folds of what is fitted: 3.5 %
either way), and none is fitted."""

LEAST_EFFICIENCY = 1e-3
BEST_BANDWIDTH = 0.92
"""No measured kernel of any device streams faster than this share of the datasheet's bandwidth."""

MOST_THROTTLE = 0.5
"""No clock is taken to fall further than to two thirds, however long the product."""

MOST = 1e3
"""What a parameter that no row holds back is cut at: a profile has no larger factor."""

MOST_SPLIT_S = 1e-5
"""Splitting k costs at most one more short kernel, the one that adds the slices up."""

SPLITS = (1, 2, 3, 4, 6, 8, 16, 32, 64, 128, 256)

M_KNOTS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
BATCHED_KNOTS = tuple(2**power for power in range(8, 24, 3))
NK_KNOTS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536)
NARROW_KNOTS = (64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192, 16384, 65536)
"""A table of batches has up to millions of rows in all, and heads' sizes, where tiles are filled in part."""
SMOOTHNESS = 0.3
RIDGE = 0.1

ALIGNMENT = Alignment(
    operand={2: 1.45, 4: 1.25, 8: 1.1, 16: 1.0},
    output={2: 1.1, 4: 1.05, 8: 1.0, 16: 1.0},
    source="assumed: one H100 row of pytorch float8_experimental#145 (8193 x 2501 x 5008 bf16: 509 TFLOP/s, "
    "some 1.45 times slower than aligned neighbours) for odd operands; the rest is interpolated by guess",
)

_UNALIGNED = "benchmarks/measured/h200_unaligned.csv (2026-11-27, one H200, torch 2.11.0, CUDA 13.0): medians"

ALIGNMENTS = {
    "fp32": Alignment(
        operand={16: 1.0},
        output={16: 1.0},
        source=f"{_UNALIGNED}: within 4 % of aligned ones, whatever their sizes",
    ),
    "bf16": Alignment(
        operand={2: 5.2, 4: 2.9, 8: 3.0, 16: 1.0},
        output={2: 7.3, 4: 2.7, 8: 2.7, 16: 1.0},
        source=f"{_UNALIGNED} of 4,096 a side, and of 2,048 x 8,192 x 1,024",
    ),
}
"""Of products on Hopper, by peak: those that are not aligned run kernels of Turing's instructions (sm75)."""


def alignment_of(architecture: str, peak: str) -> Alignment:
    """Slowdown of unaligned products: measured on Hopper, taken to be alike on Blackwell, else assumed."""
    return ALIGNMENTS.get(peak, ALIGNMENT) if architecture in ("hopper", "blackwell") else ALIGNMENT


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

    def distinct(self) -> Products:
        """Each measurement once."""
        return self.take(first_rows(*self.shape(), self.seconds))


def fit_gemm(
    rows: Products,
    sheet: Datasheet,
    *,
    peak: str,
    element_bytes: float,
    basis: str,
    with_grid: bool = True,
    between_libraries: float = 0.0,
    launch_s: float | None = None,
    slowed_as: GemmModel | None = None,
) -> GemmModel:
    """Fits one dtype of one device; the shipped model has seen only the rows that are not held out.

    Args:
        rows: measured products.
        sheet: the device's datasheet.
        peak: which datasheet peak the efficiencies refer to.
        element_bytes: bytes of one operand element.
        basis: what the label says of the rows.
        with_grid: also fit the residual grid (needs a dense table).
        between_libraries: spread of the libraries that were measured, which the model's is not below.
        launch_s: of a launch, where the rows do not tell it.
        slowed_as: the model whose large products slow down as these do, where the rows have none.
    """
    hidden = held_out(*rows.shape())
    seen = rows.take(~hidden)
    fp8 = element_bytes < 2
    single = peak == "fp32"
    tiles = SINGLE_TILES if single else TILES.get(sheet.architecture, TILES["ampere"])
    cached = sheet.architecture in CACHE_OUTRUNS
    few = seen.take(subsample(len(seen.m)))
    moved = _moved(few, element_bytes)
    weight, log_time = weights(few.seconds), np.log(few.seconds)

    def model_of(p: FloatArray, step: int) -> GemmModel:
        model = msgspec.structs.replace(unpack(p[: len(first)], tiles, peak, element_bytes, fp8), k_step=step)
        if cached:
            share, room = float(sigmoid(p[-2])), float(_exp(p[-1]))
            model = msgspec.structs.replace(
                model, traffic_cached=_round(share), cache_share=_round(min(room, MOST))
            )
        if slowed_as is not None:
            throttle, flops = slowed_as.throttle, slowed_as.throttle_flops
            model = msgspec.structs.replace(model, throttle=throttle, throttle_flops=flops)
        return model if launch_s is None else msgspec.structs.replace(model, launch_s=launch_s)

    def residuals(p: FloatArray, step: int) -> FloatArray:
        seconds = physical_seconds(model_of(p, step), sheet, *few.shape(), moved)
        return np.asarray(weight * (np.log(seconds) - log_time))

    def fitted(step: int) -> tuple[float, GemmModel]:
        best = minimize(lambda p: residuals(p, step), np.concatenate([first, [0.0, 0.0]]) if cached else first)
        return misfit(residuals(best, step)), model_of(best, step)

    first = start(tiles, fp8)
    _, model = min(map(fitted, SINGLE_K_STEPS if single else (0,)), key=lambda found: found[0])
    if with_grid:
        model = msgspec.structs.replace(model, residual=_fit_residual(model, sheet, seen))
    error = score(gemm_seconds(model, sheet, *rows.take(hidden).shape()), rows.seconds[hidden])
    spread, spread_short = spreads(error, floor=max(0.01, between_libraries))
    label = Label(
        source="fitted",
        basis=basis,
        spread=spread,
        spread_short=spread_short,
        held_out=error,
        between_libraries=between_libraries,
    )
    return msgspec.structs.replace(model, label=label, alignment=alignment_of(sheet.architecture, peak))


def _moved(rows: Products, element_bytes: float) -> FloatArray:
    b, m, n, k = rows.shape()
    return np.asarray(b * ((m * k + k * n) * element_bytes + m * n * max(2.0, element_bytes)))


def _fit_residual(model: GemmModel, sheet: Datasheet, rows: Products) -> Grid:
    moved = _moved(rows, model.element_bytes)
    error = np.log(rows.seconds / physical_seconds(model, sheet, *rows.shape(), moved))
    batched = bool(np.any(rows.batch > 1))
    knots = (BATCHED_KNOTS, NARROW_KNOTS, NARROW_KNOTS) if batched else (M_KNOTS, NK_KNOTS, NK_KNOTS)
    return fit_grid(
        knots,
        [(correction_sizes(model, *rows.shape()), 1.0)],
        error,
        weights(rows.seconds),
        smoothness=SMOOTHNESS,
        ridge=RIDGE,
        falls=product_falls(model, sheet, knots),
    )


def product_falls(model: GemmModel, sheet: Datasheet, knots: Sequence[Sequence[float]]) -> FloatArray:
    """By how much the correction of products may fall (`grid.may_fall`): alone, and in batches of one row each."""

    def seconds_of(b: FloatArray, m: FloatArray, n: FloatArray, k: FloatArray) -> FloatArray:
        some = Products(batch=b, m=m, n=n, k=k, seconds=m)
        return physical_seconds(model, sheet, *some.shape(), _moved(some, model.element_bytes))

    def alone(m: FloatArray, n: FloatArray, k: FloatArray) -> FloatArray:
        return seconds_of(np.ones_like(m), m, n, k)

    def row_by_row(m: FloatArray, n: FloatArray, k: FloatArray) -> FloatArray:
        return seconds_of(np.maximum(1.0, m / tile_rows(model)), np.ones_like(m), n, k)

    return falls_of(knots, [alone, row_by_row])


def falls_of(
    knots: Sequence[Sequence[float]], times: Sequence[Callable[[FloatArray, FloatArray, FloatArray], FloatArray]]
) -> FloatArray:
    """By how much a correction over rows, columns and depth may fall (`grid.may_fall`).

    Args:
        knots: of the grid along each axis.
        times: seconds of products without a correction, which all have to grow with it.
    """
    # Below the first knots the correction stays, and the time has to grow there as well.
    sizes = np.meshgrid(*(finely([1.0, *axis]) for axis in knots), indexing="ij")
    # All at once would take gigabytes: a plane has as many candidates as there are tiles times slices.
    planes = list(zip(*sizes, strict=True))
    return may_fall(knots, sizes, [np.log(np.stack([seconds(*plane) for plane in planes])) for seconds in times])


def lent(model: GemmModel, sheet: Datasheet, label: Label) -> GemmModel:
    """A model on another device's datasheet, whose correction falls by no more than the formula grows there."""
    grid = model.residual
    if grid is not None:
        grid = limited(grid, product_falls(msgspec.structs.replace(model, residual=None), sheet, grid.knots))
    return msgspec.structs.replace(model, label=label, residual=grid)


def start(tiles: tuple[tuple[int, int], ...], fp8: bool) -> FloatArray:
    """Where the search starts: large tiles 90 % efficient and small ones less, for they load more per FLOP."""
    launch = 12e-6 if fp8 else 4e-6
    reuse = np.asarray([2.0 * a * b / (a + b) for a, b in tiles])
    efficiency = 0.95 * reuse / (reuse + 25.0)
    shared = [np.log(launch), logit(0.9), 2.0, np.log(0.5), logit(0.2), 1.5, logit(0.1), np.log(1e12)]
    cast = [np.log(1.7e-12), np.log(1.2e-12), np.log(1.2e7), 1.0] if fp8 else []
    return np.concatenate([logit(efficiency), np.full(len(tiles), np.log(150.0)), shared, cast])


def unpack(
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
        split_traffic=_round(np.minimum(_exp(traffic), MOST)),
        split_s=_round(MOST_SPLIT_S * sigmoid(split)),
        wave_rounding=_round(sigmoid(rounding)),
        launch_s=_round(_exp(launch)),
        bandwidth_fraction=_round(BEST_BANDWIDTH * sigmoid(band)),
        overlap_power=_round(np.minimum(1.0 + _exp(power), MOST)),
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
        knee_elements=_round(max(knee, 1.0)),
        sharpness=_round(min(sharp, MOST)),
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
    rows = rows.where(rows.text["notes"].starting(LABEL) & rows.text["causal"].among(["no"]))
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


SUSTAINED_FLOPS = 1.5e11
"""Products larger than this run long enough, back to back, for the clock to fall."""

MIN_TRAFFIC_SHARE = 0.03
"""A product whose accumulator moves less than this share of its time cannot tell what the traffic costs."""

STAGES = {"fwd": "forward", "bwd_grad_act": "input_gradient", "bwd_grad_w": "weight_gradient"}
GROUP = re.compile(r"ng=(\d+), M=(\d+), N=(\d+), K=(\d+),.*main_grad_dtype=(\w+), stage=(\w+),")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layouts:
    """Time over a forward product's, by layout, and the share of an accumulator's traffic that adds to it."""

    transposed: dict[str, float]
    exposure: float


def dense_products(table: KernelTable, layout: str, out_dtype: str = "bf16") -> Products:
    """Dense products of one layout."""
    part = table.select(ops=["matmul"], dtypes=[out_dtype])
    part = part.where(part.text["layout"].among([layout]))
    number = part.number
    return Products(batch=number["batch"], m=number["m"], n=number["n"], k=number["k"], seconds=part.seconds())


def log_ratio(model: GemmModel, sheet: Datasheet, rows: Products) -> FloatArray:
    """log(measured / modelled) of each row, operands in their dtype already."""
    return np.asarray(np.log(rows.seconds / gemm_seconds(model, sheet, *rows.shape(), quantize=False)))


def fit_layouts(table: KernelTable, model: GemmModel, sheet: Datasheet) -> Layouts:
    """What a transposed read and an fp32 accumulation cost, beyond what the shape explains."""
    forward = _by_shape(model, sheet, dense_products(table, "TN"))
    inputs = _by_shape(model, sheet, dense_products(table, "NN"))
    weight = _by_shape(model, sheet, dense_products(table, "NT"))
    into_fp32 = _by_shape(model, sheet, dense_products(table, "NT", "fp32"))
    # The input gradient of (m, n, k) is a product (m, k, n); the weight gradient is (n, k, m).
    read = [value - forward[m, k, n] for (m, n, k), value in inputs.items() if (m, k, n) in forward]
    plain = [value - forward[k, m, n] for (m, n, k), value in weight.items() if (k, m, n) in forward]
    # Where no weight gradient was timed without an fp32 accumulator, the layout itself is taken to be free.
    transposed = float(np.exp(np.median(plain))) if plain else 1.0
    exposed = []
    for (m, n, k), value in into_fp32.items():
        traffic = float(accumulator_traffic(m * n)) / sheet.memory_bandwidth_bytes_per_s
        modelled = _seconds(model, sheet, m, n, k)
        if (k, m, n) in forward and traffic > MIN_TRAFFIC_SHARE * modelled:
            exposed.append(modelled * (np.exp(value) - np.exp(forward[k, m, n]) * transposed) / traffic)
    return Layouts(
        transposed={"NN": round(float(np.exp(np.median(read))), 3), "NT": round(transposed, 3)},
        exposure=round(max(0.0, float(np.median(exposed))), 3) if exposed else 1.0,
    )


def _seconds(model: GemmModel, sheet: Datasheet, m: float, n: float, k: float) -> float:
    sizes = (np.asarray([v]) for v in (1.0, m, n, k))
    return float(gemm_seconds(model, sheet, *sizes)[0])


def _by_shape(model: GemmModel, sheet: Datasheet, rows: Products) -> dict[tuple[float, float, float], float]:
    shapes = zip(rows.m.tolist(), rows.n.tolist(), rows.k.tolist(), strict=True)
    return dict(zip(shapes, log_ratio(model, sheet, rows).tolist(), strict=True))


def sustained_slowdown(table: KernelTable, model: GemmModel, sheet: Datasheet) -> float:
    """How much longer large products take in the second source than modelled (a median ratio)."""
    rows = dense_products(table, "TN")
    large = 2.0 * rows.m * rows.n * rows.k > SUSTAINED_FLOPS
    return round(float(np.exp(np.median(log_ratio(model, sheet, rows)[large]))), 3)


def calibrate_products(model: GemmModel, sheet: Datasheet, rows: Products, basis: str) -> GemmModel:
    """A relative's model with one number of its own: the median ratio over the rows it may see."""
    ratio, modelled = log_ratio(model, sheet, rows), gemm_seconds(model, sheet, *rows.shape(), quantize=False)
    scale, error = judged(
        lambda seen: float(np.exp(np.median(ratio[seen]))), lambda by: modelled * by, rows.shape(), rows.seconds
    )
    model = msgspec.structs.replace(model, time_scale=round(model.time_scale * scale, 4))
    spread, spread_short = spreads(error, floor=0.05)
    label = Label(source="fitted", basis=basis, spread=spread, spread_short=spread_short, held_out=error)
    return msgspec.structs.replace(model, label=label)


def fit_grouped(table: KernelTable, model: GemmModel, sheet: Datasheet, basis: str) -> GroupedModel:
    """The time of a group over the sum of its products, against dense products of the same source."""
    level = float(np.exp(np.median(log_ratio(model, sheet, dense_products(table, "TN")))))
    found: dict[str, list[tuple[float, float, bool]]] = {name: [] for name in STAGES.values()}
    part = table.select(ops=["group_matmul"])
    for note, rate in zip(part.text["notes"].tolist(), part.number["tflops"].tolist(), strict=True):
        match = GROUP.match(note)
        if match is None:
            continue
        groups, m, n, k = (float(match[i]) for i in range(1, 5))
        seconds = 2.0 * groups * m * n * k / (rate * 1e12) / level
        name, fp32 = STAGES[match[6]], match[5] == "fp32" and match[6] == "bwd_grad_w"
        single = _single(model, sheet, name, m, n, k)
        single += float(accumulate_seconds(model, sheet, np.asarray(n * k))) if fp32 else 0.0
        hidden = bool(held_out(*(np.asarray([v]) for v in (groups, m, n, k)))[0])
        found[name].append((groups * single, seconds, hidden))
    scale = {
        name: round(float(np.median([s / p for p, s, hidden in rows if not hidden])), 3)
        for name, rows in found.items()
    }
    tested = [(p * scale[name], s) for name, rows in found.items() for p, s, hidden in rows if hidden]
    error = _score(tested)
    spread, spread_short = spreads(error, floor=0.1)
    label = Label(source="fitted", basis=basis, spread=spread, spread_short=spread_short, held_out=error)
    return GroupedModel(label=label, scale=scale)


def _single(model: GemmModel, sheet: Datasheet, name: str, m: float, n: float, k: float) -> float:
    sizes = {"forward": (m, n, k), "input_gradient": (m, k, n), "weight_gradient": (n, k, m)}[name]
    layout = {"forward": "TN", "input_gradient": "NN", "weight_gradient": "NT"}[name]
    return _seconds(model, sheet, *sizes) * model.transposed_scale.get(layout, 1.0)


def _score(pairs: list[tuple[float, float]]) -> HeldOut:
    predicted, measured = np.asarray(pairs).reshape(-1, 2).T
    return score(predicted, measured)

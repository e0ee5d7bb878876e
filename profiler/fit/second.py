"""What a second source tells about products: layouts, accumulation, expert groups, and sustained clocks.

Its absolute times differ from the table's (another board, other power limits), so only ratios within it are used.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec
import numpy as np

from echograph.profiler.costs.cost import FloatArray
from echograph.profiler.costs.device import Datasheet, GemmModel, GroupedModel, HeldOut, Label
from echograph.profiler.costs.gemm import ACCUMULATOR_BYTES, accumulate_seconds, gemm_seconds
from echograph.profiler.fit.gemm import Products
from echograph.profiler.fit.regression import held_out, score, spreads
from echograph.profiler.fit.table import KernelTable

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


def dense(table: KernelTable, layout: str, out_dtype: str = "bf16") -> Products:
    """Dense products of one layout."""
    part = table.select(ops=["matmul"], dtypes=[out_dtype])
    part = part.where(part.text["layout"] == layout)
    number = part.number
    return Products(batch=number["batch"], m=number["m"], n=number["n"], k=number["k"], seconds=part.seconds())


def log_ratio(model: GemmModel, sheet: Datasheet, rows: Products) -> FloatArray:
    """log(measured / modelled) of each row, operands in their dtype already."""
    return np.asarray(np.log(rows.seconds / gemm_seconds(model, sheet, *rows.shape(), quantize=False)))


def layouts(table: KernelTable, model: GemmModel, sheet: Datasheet) -> Layouts:
    """What a transposed read and an fp32 accumulation cost, beyond what the shape explains."""
    forward = _by_shape(model, sheet, dense(table, "TN"))
    inputs = _by_shape(model, sheet, dense(table, "NN"))
    weight = _by_shape(model, sheet, dense(table, "NT"))
    into_fp32 = _by_shape(model, sheet, dense(table, "NT", "fp32"))
    # The input gradient of (m, n, k) is a product (m, k, n); the weight gradient is (n, k, m).
    read = [value - forward[m, k, n] for (m, n, k), value in inputs.items() if (m, k, n) in forward]
    plain = [value - forward[k, m, n] for (m, n, k), value in weight.items() if (k, m, n) in forward]
    # Where no weight gradient was timed without an fp32 accumulator, the layout itself is taken to be free.
    transposed = float(np.exp(np.median(plain))) if plain else 1.0
    exposed = []
    for (m, n, k), value in into_fp32.items():
        traffic = ACCUMULATOR_BYTES * m * n / sheet.memory_bandwidth_bytes_per_s
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
    rows = dense(table, "TN")
    large = 2.0 * rows.m * rows.n * rows.k > SUSTAINED_FLOPS
    return round(float(np.exp(np.median(log_ratio(model, sheet, rows)[large]))), 3)


def calibrate(model: GemmModel, sheet: Datasheet, rows: Products, basis: str) -> GemmModel:
    """A relative's model with one number of its own: the median ratio over the rows it may see."""
    hidden = held_out(*rows.shape())
    scale = float(np.exp(np.median(log_ratio(model, sheet, rows)[~hidden])))
    model = msgspec.structs.replace(model, time_scale=round(model.time_scale * scale, 4))
    error = score(gemm_seconds(model, sheet, *rows.take(hidden).shape()), rows.seconds[hidden])
    spread, spread_short = spreads(error, floor=0.05)
    label = Label(source="fitted", basis=basis, spread=spread, spread_short=spread_short, held_out=error)
    return msgspec.structs.replace(model, label=label)


def fit_grouped(table: KernelTable, model: GemmModel, sheet: Datasheet, basis: str) -> GroupedModel:
    """The time of a group over the sum of its products, against dense products of the same source."""
    level = float(np.exp(np.median(log_ratio(model, sheet, dense(table, "TN")))))
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

"""Fits experts' products in one launch to measured layers of experts.

Tables time a layer as it is served: tokens are put in the experts' order, one launch for the products of gate
and up, the activation, one launch for the product down, and the sum of what each token gets from its experts.
The products are a `GemmModel` whose batch is the experts, so that small groups share a wave. What stands around
them is fitted beside it and not shipped: a time, a time an expert (offsets, layouts of scales), and multiples of
the bytes that three steps move at least. These are told apart because ranks that share the experts still cast and
write every token, while each sorts and activates its own alone.

Rows of equal loads are fitted. In those whose loads follow a power law each expert's own load is not known. A
layer that fits into the cache as a whole is timed inside it, over and over, as no training step finds it: it is
left out. The library's tuner picks kernels once for all token counts of a layer, and its pick differs from run to
run: where a device of the same chip was measured, layers that took longer here than there, beside the ratio of the
two, are not fitted. They still judge the fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from echograph.profiler.costs.device import (
    SHORT_KERNEL_S,
    Datasheet,
    FloatArray,
    GemmModel,
    Grid,
    HeldOut,
    Label,
    as_floats,
)
from echograph.profiler.costs.gemm import accumulate_seconds, group_sizes, grouped_seconds
from echograph.profiler.fit.gemm import GROUP, NK_KNOTS, STAGES, falls_of, start, unpack
from echograph.profiler.fit.grid import fit_grid, limited
from echograph.profiler.fit.regression import (
    disagreement,
    held_out,
    minimize,
    score,
    spreads,
    subsample,
    weights,
)
from echograph.profiler.fit.table import NEEDED, KernelTable

KERNELS = ("moe_torch_flow_cutlass", "deepgemm")
"""Whose layers are fitted: the grouped products of CUTLASS, and of DeepGEMM for blocks of FP8 where CUTLASS has
none; both are what training has. Of the newest version; its distance from the others is in the spread."""
TILES = ((256, 128), (128, 256), (128, 128), (64, 128), (64, 64))
ROW_KNOTS = tuple(2.0**power for power in range(3, 14))
COUNTS = (1.0, 8.0, 64.0, 512.0)
"""Experts of a rank: of as many each the time has to grow with their sizes."""
FEW = 3000
SMOOTHNESS, RIDGE = 0.03, 0.01
"""Of the correction, chosen by folds of the rows that are fitted."""
SLIP = 0.05
"""Log of how much longer a layer takes than on the same chip, from which on the tuner is held to have slipped.
Half of the layers are within 0.015 of the median, and NVFP4's on B200 fall into two heaps, some 0.2 apart."""
AROUND_START = (np.log(3e-5), np.log(1e-8), 0.3, 0.3, 0.3)
"""Where the search of what stands around the products starts: logs of seconds, seconds an expert, multiples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayers:
    """Measured layers of gated experts on one rank: sizes and seconds, each [rows].

    Attributes:
        tokens: of the rank before they are routed.
        experts: of the rank.
        rows: tokens of each expert.
        hidden: size of a token.
        inner: of an expert's two widened products each, on this rank.
        seconds: measured.
    """

    tokens: FloatArray
    experts: FloatArray
    rows: FloatArray
    hidden: FloatArray
    inner: FloatArray
    seconds: FloatArray

    def sizes(self) -> tuple[FloatArray, ...]:
        """What makes two layers the same."""
        return self.tokens, self.experts, self.rows * 64.0, self.hidden, self.inner

    def working_set(self, element_bytes: float) -> FloatArray:
        """Bytes of weights, tokens and what is between them, each once, [rows]."""
        routed = self.experts * self.rows
        weights = 3.0 * self.experts * self.hidden * self.inner * element_bytes
        return np.asarray(
            weights + 4.0 * self.tokens * self.hidden + routed * (4.0 * self.hidden + 6.0 * self.inner)
        )

    def take(self, index: npt.NDArray[np.bool_] | npt.NDArray[np.intp]) -> ExpertLayers:
        """The rows of an index or mask."""
        return ExpertLayers(**{name: getattr(self, name)[index] for name in self.__dataclass_fields__})


def layers(table: KernelTable) -> ExpertLayers:
    """The rows as layers whose loads are equal."""
    number = table.number
    held = np.maximum(1.0, number["experts"] / number["ep"])
    return ExpertLayers(
        tokens=number["m"],
        experts=held,
        rows=number["m"] * number["topk"] / number["experts"],
        hidden=number["n"],
        inner=number["k"] / number["tp"],
        seconds=table.seconds(),
    )


def layers_of_library(table: KernelTable) -> KernelTable:
    """Of layers those that are fitted: balanced ones of the one library."""
    return table.where(table.text["kernel"].among(KERNELS) & table.text["balance"].among(["balanced"]))


def fit_experts(
    table: KernelTable,
    sheet: Datasheet,
    *,
    peak: str,
    element_bytes: float,
    launch_s: float,
    basis: str,
    same_chip: KernelTable | None = None,
) -> GemmModel:
    """Products of experts of one dtype.

    Args:
        table: layers of one device and dtype, of any library and balance.
        sheet: the device's datasheet.
        peak: which datasheet peak the efficiencies refer to.
        element_bytes: bytes of one operand element.
        launch_s: of one launch.
        basis: what the label says of the rows.
        same_chip: layers of another device of this chip, which tell slips of the tuner.

    Raises:
        MissingExtraError: scipy is not installed.
    """
    versions = layers_of_library(table)
    apart = disagreement(layers(versions).sizes(), versions.text["source"].codes, versions.seconds())
    newest = _newest(versions)
    every = layers(newest)
    kept = (every.seconds >= SHORT_KERNEL_S) & (every.working_set(element_bytes) > sheet.l2_bytes)
    slipped = _slips(newest, _newest(layers_of_library(same_chip)))[kept] if same_chip is not None else False
    every = every.take(kept)
    hidden = held_out(*every.sizes())
    seen = every.take(~hidden & ~np.asarray(slipped))
    few = seen.take(subsample(len(seen.rows), FEW))
    weight, log_time = weights(few.seconds), np.log(few.seconds)
    parts = len(AROUND_START)

    def model_of(p: FloatArray) -> GemmModel:
        model = unpack(p[:-parts], TILES, peak, element_bytes, fp8=False)
        return msgspec.structs.replace(model, splits=[1], launch_s=launch_s)

    def residuals(p: FloatArray) -> FloatArray:
        return np.asarray(weight * (np.log(_layer(model_of(p), sheet, few, p[-parts:])) - log_time))

    best = minimize(residuals, np.concatenate([start(TILES, fp8=False), AROUND_START]))
    model, around = model_of(best), best[-parts:]
    model = msgspec.structs.replace(model, residual=_fit_residual(model, sheet, seen, around))
    tested = every.take(hidden)
    held: HeldOut = score(_layer(model, sheet, tested, around), tested.seconds)
    spread, spread_short = spreads(held, floor=max(0.01, apart))
    label = Label(
        source="fitted",
        basis=f"{basis}; {_removed(around)}",
        spread=spread,
        spread_short=spread_short,
        held_out=held,
        between_libraries=apart,
    )
    return msgspec.structs.replace(model, label=label)


def _newest(versions: KernelTable) -> KernelTable:
    return versions.where(versions.text["source"].among([max(versions.text["source"].counts(), default="")]))


def _slips(here: KernelTable, there: KernelTable) -> npt.NDArray[np.bool_]:
    """True of layers that took longer here than on another device of the chip, beside the median of the two."""
    measured = dict(zip(_shapes(there), there.seconds().tolist(), strict=True))
    other = np.asarray([measured.get(shape, np.nan) for shape in _shapes(here)])
    longer = np.log(here.seconds() / other)
    return np.asarray(longer - np.nanmedian(longer) > SLIP)


def _shapes(table: KernelTable) -> list[tuple[float, ...]]:
    return list(zip(*(table.number[size].tolist() for size in NEEDED[("fused_experts",)]), strict=True))


def _products(rows: ExpertLayers) -> tuple[tuple[FloatArray, ...], tuple[FloatArray, ...]]:
    """Count, rows, columns and depth of a layer's two launches."""
    return (
        (rows.experts, rows.rows, 2.0 * rows.inner, rows.hidden),
        (rows.experts, rows.rows, rows.hidden, rows.inner),
    )


def _moved_around(rows: ExpertLayers, element_bytes: float) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Bytes that must move around the products: of every token, of those routed here, of the activation.

    Every token is read, cast and written; those routed here are copied in and read once more to be summed; the
    activation reads two and writes one.
    """
    routed = rows.experts * rows.rows
    return (
        (4.0 + element_bytes) * rows.tokens * rows.hidden,
        (2.0 + 2.0 * element_bytes) * routed * rows.hidden,
        (4.0 + element_bytes) * routed * rows.inner,
    )


def _layer(model: GemmModel, sheet: Datasheet, rows: ExpertLayers, around: FloatArray) -> FloatArray:
    """Seconds of whole layers."""
    once, each, *multiples = np.exp(around).tolist()
    moved = zip(multiples, _moved_around(rows, model.element_bytes), strict=True)
    rest = once + each * rows.experts + sum(x * part for x, part in moved) / sheet.memory_bandwidth_bytes_per_s
    return np.asarray(rest + sum(grouped_seconds(model, sheet, *sizes) for sizes in _products(rows)))


def _fit_residual(model: GemmModel, sheet: Datasheet, rows: ExpertLayers, around: FloatArray) -> Grid:
    """What the rows say of the products beyond the physical model, each as far as it makes the layer's time."""
    whole = _layer(model, sheet, rows, around)
    products, knots = _products(rows), (ROW_KNOTS, NK_KNOTS, NK_KNOTS)
    return fit_grid(
        knots,
        [(sizes[1:], grouped_seconds(model, sheet, *sizes) / whole) for sizes in products],
        np.log(rows.seconds / whole),
        weights(rows.seconds),
        smoothness=SMOOTHNESS,
        ridge=RIDGE,
        falls=_falls(model, sheet, knots),
    )


def _falls(model: GemmModel, sheet: Datasheet, knots: Sequence[Sequence[float]]) -> FloatArray:
    """By how much the correction of a group may fall (`grid.may_fall`), of few experts and of many."""

    def group_of(count: float) -> Callable[[FloatArray, FloatArray, FloatArray], FloatArray]:
        return lambda m, n, k: grouped_seconds(model, sheet, *as_floats(count, m, n, k))

    return falls_of(knots, [group_of(count) for count in COUNTS])


def lent_group(model: GemmModel, sheet: Datasheet, label: Label) -> GemmModel:
    """A group's model on another datasheet, whose correction falls by no more than the formula grows there."""
    grid = model.residual
    if grid is not None:
        grid = limited(grid, _falls(msgspec.structs.replace(model, residual=None), sheet, grid.knots))
    return msgspec.structs.replace(model, label=label, residual=grid)


def _removed(around: FloatArray) -> str:
    once, each, *multiples = np.exp(around).tolist()
    times = ", ".join(f"{x:.1f}" for x in multiples)
    return (
        f"{once * 1e6:.0f} us, {each * 1e6:.2f} us an expert, and {times} times the bytes of tokens, of those "
        "routed and of the activation removed"
    )


def fit_passes(table: KernelTable, model: GemmModel, sheet: Datasheet) -> dict[str, float]:
    """What backward groups take over what the model of forward ones says of their sizes, from a second source.

    Its level is not this source's, so that its own forward groups are the measure.
    """
    found: dict[str, list[float]] = {name: [] for name in STAGES.values()}
    part = table.select(ops=["group_matmul"])
    for note, rate in zip(part.text["notes"].tolist(), part.number["tflops"].tolist(), strict=True):
        match = GROUP.match(note)
        if match is None:
            continue
        count, m, n, k = (float(match[i]) for i in range(1, 5))
        name = STAGES[match[6]]
        sizes = as_floats(count, *group_sizes(name, m, n, k))
        seconds = grouped_seconds(model, sheet, *sizes, with_residual=name != "weight_gradient")
        if match[5] == "fp32" and name == "weight_gradient":
            seconds = seconds + accumulate_seconds(model, sheet, np.asarray(count * n * k))
        found[name].append(2.0 * count * m * n * k / (rate * 1e12) / float(seconds))
    level = float(np.median(found["forward"]))
    return {
        name: round(float(np.median(ratios)) / level, 3) for name, ratios in found.items() if name != "forward"
    }

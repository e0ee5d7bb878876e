"""Fits memory-bound kinds: the fraction of the datasheet bandwidth that their kernels reach.

Each time is read as an overhead of the source's timer plus bytes over bandwidth; the overhead (some 10 us a row)
is no property of the kernel and is not shipped.

Kernels of training are timed on more devices, without such an overhead: casts to FP8, which read two bytes an
element and write one (elementwise, by the bytes moved); norms forward and backward as PyTorch, its compiler and
cuDNN have them, which move two and three times a tensor; lookups of an embedding.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from echograph.profiler.costs.device import (
    SHORT_KERNEL_S,
    Datasheet,
    FloatArray,
    HeldOut,
    Label,
    MemoryModel,
    column_waves,
)
from echograph.profiler.fit.regression import disagreement, held_out, judged, minimize, score, spreads
from echograph.profiler.fit.table import KernelTable

OPERANDS = {
    **dict.fromkeys(("add", "div", "mul", "pow"), 3.0),
    **dict.fromkeys(("addu", "divu", "mulu", "powu", "gelu", "relu", "tanh"), 2.0),
}
"""Tensors that an elementwise op reads and writes (the names ending in u take a scalar)."""

ROWWISE = {"norm": "ln", "softmax": "softmax"}
ELEMENT_BYTES = 4.0
GATHER_FRACTION = 0.7
FLAT_ROW = 8192.0


def fit_memory(table: KernelTable, bandwidth_bytes_per_s: float, basis: str) -> dict[str, MemoryModel]:
    """Models of every kind from fp32 rows of [m x n] ops; kinds without rows borrow, and say so."""
    elementwise = table.select(ops=OPERANDS)
    operands = np.asarray([OPERANDS[op] for op in elementwise.text["op"].tolist()])
    models = {"elementwise": _fit(elementwise, operands, bandwidth_bytes_per_s, basis, by_row=False)}
    for kind, op in ROWWISE.items():
        rows = table.select(ops=[op])
        models[kind] = _fit(rows, np.full(len(rows), 2.0), bandwidth_bytes_per_s, basis, by_row=True)
    return models | borrowed(models["elementwise"])


def borrowed(elementwise: MemoryModel) -> dict[str, MemoryModel]:
    """Kinds that no table measures, assumed from the elementwise one."""
    reach = elementwise.bandwidth_fraction[0]
    reasons = {
        "copy": (reach, "assumed: as elementwise"),
        "reduction": (reach, "assumed: as elementwise"),
        "optimizer": (reach, "assumed: as elementwise, over all operands of the multi-tensor update"),
        "gather": (
            GATHER_FRACTION * reach,
            f"assumed: {GATHER_FRACTION} of elementwise, rows being scattered",
        ),
    }
    return {
        kind: MemoryModel(
            label=Label(source="analytical", basis=reason, spread=0.15, spread_short=0.3),
            row_bytes=[FLAT_ROW],
            bandwidth_fraction=[round(fraction, 4)],
        )
        for kind, (fraction, reason) in reasons.items()
    }


def _fit(rows: KernelTable, operands: FloatArray, bandwidth: float, basis: str, *, by_row: bool) -> MemoryModel:
    m, n, seconds = rows.number["m"], rows.number["n"], rows.seconds()
    moved = operands * m * n * ELEMENT_BYTES
    row = n * ELEMENT_BYTES
    knots = np.unique(row) if by_row else np.asarray([FLAT_ROW])
    hidden = held_out(m, n, operands)

    def predict(p: FloatArray) -> FloatArray:
        fraction = np.interp(np.log2(row), np.log2(knots), np.exp(p[1:]))
        return np.asarray(np.exp(p[0]) + moved / (bandwidth * fraction))

    def residuals(p: FloatArray) -> FloatArray:
        return np.asarray(np.log(predict(p) / seconds)[~hidden])

    best = minimize(residuals, np.concatenate([[np.log(1e-5)], np.full(len(knots), np.log(0.7))]))
    error: HeldOut = score(predict(best)[hidden], seconds[hidden])
    spread, spread_short = spreads(error, floor=0.05)
    note = f"{basis}; timer overhead of {np.exp(best[0]) * 1e6:.0f} us a row removed"
    return MemoryModel(
        label=Label(source="fitted", basis=note, spread=spread, spread_short=spread_short, held_out=error),
        row_bytes=[float(k) for k in knots],
        bandwidth_fraction=[round(float(f), 4) for f in np.minimum(1.0, np.exp(best[1:]))],
    )


CAST, CAST_BYTES = "static_scaled_fp8_quant", 3.0
"""The cast whose kernel moves vectors, as elementwise kernels of libraries do, and its bytes an element."""
MOVED_KNOTS = tuple(2.0**power * 1e6 for power in (5, 6, 7, 8, 9, 10, 12))
SAME_CAST = "torch_ops"
"""The same cast in another library."""
MOST_FRACTION = 0.95


def fit_casts(rows: KernelTable, sheet: Datasheet, launch_s: float, basis: str) -> MemoryModel:
    """The elementwise kind from casts to FP8 of [m x k], by the bytes that they move.

    Args:
        rows: casts of one device, of any library.
        sheet: its datasheet.
        launch_s: what a memory-bound kernel of the device is taken to cost beside its bytes.
        basis: what the label says of the rows.
    """
    # Tensors smaller than the cache are timed inside it.
    outside = CAST_BYTES * rows.number["m"] * rows.number["k"] > sheet.l2_bytes
    every = rows.where(outside & rows.text["kernel"].among([CAST, SAME_CAST]))
    m, k = every.number["m"], every.number["k"]
    apart = disagreement((m, k), every.text["kernel"].codes, every.seconds())
    own = every.where(every.text["kernel"].among([CAST]))
    m, k, seconds = own.number["m"], own.number["k"], own.seconds()
    moved, hidden = CAST_BYTES * m * k, held_out(m, k)
    knots = np.asarray([size for size in MOVED_KNOTS if size >= float(np.min(moved))])
    start = np.full(len(knots), np.log(0.8))

    def predict(p: FloatArray) -> FloatArray:
        fraction = np.exp(np.interp(np.log2(moved), np.log2(knots), p))
        return np.asarray(launch_s + moved / (sheet.memory_bandwidth_bytes_per_s * fraction))

    best = minimize(lambda p: np.asarray(np.log(predict(p) / seconds)[~hidden]), start)
    best = np.minimum(best, np.log(MOST_FRACTION))
    error = score(predict(best)[hidden], seconds[hidden])
    spread, spread_short = spreads(error, floor=max(0.05, apart))
    reach = float(np.exp(np.max(best)))
    return MemoryModel(
        label=Label(
            source="fitted",
            basis=basis,
            spread=spread,
            spread_short=spread_short,
            held_out=error,
            between_libraries=apart,
        ),
        row_bytes=[FLAT_ROW],
        bandwidth_fraction=[round(reach, 4)],
        moved_bytes=knots.tolist(),
        moved_scale=[round(float(scale), 4) for scale in np.exp(best) / reach],
    )


NORMS = {"pytorch": "", "torch_compile": ":compiled", "cudnn": ":fused"}
"""The libraries of norms by their cell, and what follows the kind in the name of their model."""
NORM_TENSORS = {"fwd": 2.0, "bwd": 3.0}
"""Tensors of its size that a norm of bf16 moves: backward reads two and writes one."""
TWO_KERNELS = 5.0
"""Those of torch.compile's backward: the kernel that adds up the gradient of the weights reads two once more."""
ROW_KNOTS = (256.0, 8192.0, 32768.0, 131072.0, 262144.0)


def fit_norms(
    rows: KernelTable, sheet: Datasheet, bandwidth: float, launch_s: float, basis: str
) -> dict[str, MemoryModel]:
    """RMS norms forward and backward by library, from rows of [m x n] in bf16, timed at a bandwidth."""
    models = {}
    for part, tensors in NORM_TENSORS.items():
        for library, suffix in NORMS.items():
            of = rows.where(rows.text["part"].among([part]) & rows.text["kernel"].among([library]))
            of = of.where(of.seconds() >= SHORT_KERNEL_S)
            if len(of) >= MIN_NORMS:
                name = ("norm" if part == "fwd" else "norm_backward") + suffix
                moved = TWO_KERNELS if name == "norm_backward:compiled" else tensors
                note = f"{basis} ({library}, {part})"
                models[name] = _fit_norm(of, moved, sheet, bandwidth, launch_s, note, ENDINGS.get(name, ""))
    return models


MIN_NORMS = 6


ENDINGS = {"norm_backward": "column_cycles", "norm_backward:fused": "finish_s"}
"""How the kernel that adds up the gradient of the weights takes its time, by model: PyTorch's by the rows that
each block of columns reads; cuDNN's, which adds up what blocks of rows have left, the same whatever the size.
torch.compile's is told by its bytes (`TWO_KERNELS`)."""
ENDING_START = {"column_cycles": 5.0, "finish_s": 5e-6}


def _fit_norm(
    rows: KernelTable, tensors: float, sheet: Datasheet, bandwidth: float, launch_s: float, basis: str, ending: str
) -> MemoryModel:
    m, n = rows.number["m"], rows.number["n"]
    waves = m * column_waves(n, sheet.sm_count) / sheet.clock_hz
    beside = {"column_cycles": waves, "finish_s": np.ones(len(rows))}.get(ending)
    return _by_rows(
        2.0 * n, tensors * m * n * 2.0, (m, n), rows.seconds(), bandwidth, launch_s, basis, ending, beside
    )


def _by_rows(
    row_bytes: FloatArray,
    moved: FloatArray,
    sizes: Sequence[FloatArray],
    seconds: FloatArray,
    bandwidth: float,
    launch_s: float,
    basis: str,
    ending: str = "",
    beside: FloatArray | None = None,
) -> MemoryModel:
    """The fraction of the bandwidth by the length of a row, and the time of an `ending`, in units of `beside`."""
    # Rows shorter than this tell how long the ending takes; they cannot tell what their bytes do as well.
    least = np.min(row_bytes) if beside is None else LEAST_KNOT
    knots = [knot for knot in ROW_KNOTS if least <= knot <= np.max(row_bytes)]

    def predict(p: FloatArray) -> FloatArray:
        fraction = np.exp(np.interp(np.log2(row_bytes), np.log2(knots), p[: len(knots)]))
        taken = launch_s + moved / (bandwidth * fraction)
        return np.asarray(taken if beside is None else taken + np.exp(p[-1]) * beside)

    def fit(seen: npt.NDArray[np.bool_]) -> FloatArray:
        def residuals(p: FloatArray) -> FloatArray:
            # A dozen rows do not tell each knot's rate: neighbours are pulled together.
            return np.concatenate([np.log(predict(p) / seconds)[seen], TOGETHER * np.diff(p[: len(knots)])])

        start = np.full(len(knots), np.log(0.5))
        if beside is not None:
            start = np.append(start, np.log(ENDING_START[ending]))
        best = minimize(residuals, start)
        best[: len(knots)] = np.minimum(best[: len(knots)], np.log(MOST_FRACTION))
        return best

    best, error = judged(fit, predict, sizes, seconds)
    spread, spread_short = spreads(error, floor=0.1)
    model = MemoryModel(
        label=Label(source="fitted", basis=basis, spread=spread, spread_short=spread_short, held_out=error),
        row_bytes=knots,
        bandwidth_fraction=[round(float(f), 4) for f in np.exp(best[: len(knots)])],
    )
    if beside is None:
        return model
    return msgspec.structs.replace(model, **{ending: float(f"{np.exp(best[-1]):.4g}")})


LEAST_KNOT = 8192.0
TOGETHER = 0.1


def fit_gather(rows: KernelTable, bandwidth: float, launch_s: float, basis: str) -> MemoryModel:
    """Lookups of an embedding of two bytes an element: [m x n] read and written."""
    m, n, seconds = rows.number["m"], rows.number["n"], rows.seconds()
    moved, hidden = 4.0 * m * n, held_out(m, n)
    fraction = moved / (bandwidth * np.maximum(seconds - launch_s, 1e-9))
    long = seconds >= SHORT_KERNEL_S
    reach = float(np.median(fraction[long & ~hidden]))
    error = score(launch_s + moved[hidden] / (bandwidth * reach), seconds[hidden])
    spread, spread_short = spreads(error, floor=0.1)
    return MemoryModel(
        label=Label(source="fitted", basis=basis, spread=spread, spread_short=spread_short, held_out=error),
        row_bytes=[FLAT_ROW],
        bandwidth_fraction=[round(reach, 4)],
    )


LOSS = re.compile(r'vocab size \(V\)=(\d+) \{"S": (\d+), "B": (\d+), "TP": 1\}')
LOSS_TENSORS = 3.0
"""Of the logits' size that a fused cross-entropy moves: both passes read them, one writes their gradient."""
MIN_LOSSES = 4


def fit_loss(rows: KernelTable, bandwidth: float, launch_s: float, basis: str) -> MemoryModel | None:
    """Fused cross-entropies of bf16 logits, whose one kernel makes loss and gradient; None of too few rows."""
    found = [LOSS.match(note) for note in rows.text["notes"].tolist()]
    rows = rows.where(np.asarray([match is not None for match in found], dtype=np.bool_))
    sizes = [match.groups() for match in found if match is not None]
    if len(rows) < MIN_LOSSES:
        return None
    classes, samples, length = np.asarray(sizes, dtype=np.float64).T
    moved, seconds = LOSS_TENSORS * 2.0 * samples * length * classes, rows.seconds()
    return _by_rows(2.0 * classes, moved, (samples * length, classes), seconds, bandwidth, launch_s, basis)

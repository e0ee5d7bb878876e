"""Fits memory-bound kinds: the fraction of the datasheet bandwidth that their kernels reach.

Each time is read as an overhead of the source's timer plus bytes over bandwidth; the overhead (some 10 us a row)
is no property of the kernel and is not shipped.
"""

from __future__ import annotations

import numpy as np

from echograph.profiler.costs.cost import FloatArray
from echograph.profiler.costs.device import HeldOut, Label, MemoryModel
from echograph.profiler.fit.regression import held_out, minimize, score, spreads
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

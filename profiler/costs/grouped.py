"""Seconds of the products of all local experts of a mixture: one product per expert, run back to back."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from echograph.errors import UnknownNameError
from echograph.profiler.costs.cost import Cost, make_cost
from echograph.profiler.costs.device import DeviceProfile
from echograph.profiler.costs.gemm import gemm, gemm_model

PASSES = {"forward": "TN", "input_gradient": "NN", "weight_gradient": "NT"}


def grouped_gemm(
    device: DeviceProfile,
    rows: npt.ArrayLike,
    n: float,
    k: float,
    *,
    pass_: str = "forward",
    dtype: str = "bf16",
    accumulate: bool = False,
) -> Cost:
    """Cost of C_e[rows_e, n] = A_e[rows_e, k] B_e[k, n] over the experts e of one rank.

    Args:
        device: the profile to ask.
        rows: tokens of each local expert, [experts]; an expert without tokens costs nothing.
        n: outputs of an expert.
        k: inputs of an expert.
        pass_: "forward"; "input_gradient" (sums over n, gives k); "weight_gradient" (sums over the rows).
        dtype: of the operands.
        accumulate: weight gradients are added into fp32.

    Raises:
        UnknownNameError: no such pass or dtype.
        UnavailableError: the device has no units for this dtype, or no model of them.
    """
    if pass_ not in PASSES:
        raise UnknownNameError("pass", pass_, PASSES)
    busy = np.asarray(rows, dtype=np.float64).ravel()
    busy = busy[busy > 0]
    label = device.grouped.label
    source = label.source if gemm_model(device, dtype).label.source == "fitted" else "analytical"
    if not len(busy):
        return make_cost(np.asarray(0.0), label.spread, label.spread_short, source)
    sizes: dict[str, tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike]] = {
        "forward": (busy, n, k),
        "input_gradient": (busy, k, n),
        "weight_gradient": (n, k, busy),
    }
    single = gemm(device, *sizes[pass_], dtype=dtype, layout=PASSES[pass_], accumulate=accumulate)
    seconds = np.asarray(np.sum(single.seconds) * device.grouped.scale[pass_])
    return make_cost(seconds, label.spread, label.spread_short, source)

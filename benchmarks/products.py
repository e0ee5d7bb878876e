"""How far the errors of products cancel: of a layer's products together, beside those of one.

python -m benchmarks.products

Reads kernels2/gemm.csv.gz of the measured tables (ECHOGRAPH_DATA, default ../shared/data). A layer is drawn as
four linear layers of one width with the same rows, forward and input gradient: products (m, n, k) and (m, k, n) of
the table, of at least 0.1 ms, at least 1,024 long each way. Each product's error is the logarithm of its time over
the shipped model's, the layer's their mean by time. With a correlation r of the errors of two products, a layer's
variance is r + (1 - r) p of one product's, where p is the sum of the squares of the products' parts of the time.
`simulator.limits.PRODUCTS_CORRELATION` is the largest r, rounded up.
"""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

import numpy as np

from echograph.profiler.costs import load_device
from echograph.profiler.costs.gemm import gemm_seconds
from echograph.profiler.fit.table import KernelTable, read_table

DATA = Path(os.environ.get("ECHOGRAPH_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
TABLES = (
    *(("a100-sxm-80", "A100-SXM4-80GB", "bfloat16", "bf16"), ("h100-sxm", "H100-SXM5-80GB", "bfloat16", "bf16")),
    *(("h100-sxm", "H100-SXM5-80GB", "fp8", "fp8"), ("b200", "B200-SXM", "bfloat16", "bf16")),
    *(("b200", "B200-SXM", "fp8", "fp8"), ("gb200", "GB200", "fp8", "fp8")),
    *(("gb300", "GB300", "bfloat16", "bf16"), ("gb300", "GB300", "nvfp4", "nvfp4")),
)
"""Device, as the table spells it and the type, and our own word of that."""
LAYERS, LINEARS = 6, 4
LEAST, LONG_S, ODD = 1024.0, 1e-4, 0.5
"""The least dimension and time of a product, and the error from which on a row is taken for a slip."""


def correlation(table: KernelTable, device: str, model: str) -> tuple[int, float, float, float]:
    """Of one device and type: layers drawn, the error of one product, of a layer, and the correlation."""
    profile, number = load_device(device), table.number
    m, n, k = (number[size] for size in ("m", "n", "k"))
    seconds = table.seconds()
    error = np.log(seconds / gemm_seconds(profile.gemm[model], profile.datasheet, np.ones(len(m)), m, n, k))
    kept = (np.minimum(np.minimum(m, n), k) >= LEAST) & (seconds > LONG_S) & (np.abs(error) < ODD)
    at = {
        shape: row for row, shape in enumerate(zip(m.tolist(), n.tolist(), k.tolist(), strict=True)) if kept[row]
    }
    others: dict[tuple[float, float], list[float]] = defaultdict(list)
    for rows, columns, depth in at:
        if (rows, depth, columns) in at:
            others[rows, depth].append(columns)
    random = np.random.default_rng(0)
    one, together, parts = list[float](), list[float](), list[float]()
    for (rows, width), columns in others.items():
        for _ in range(LAYERS if len(columns) >= LINEARS else 0):
            drawn = random.choice(columns, LINEARS, replace=False)
            of = [at[rows, c, width] for c in drawn] + [at[rows, width, c] for c in drawn]
            part = seconds[of] / seconds[of].sum()
            one.append(float((part * error[of] ** 2).sum()))
            together.append(float((part * error[of]).sum()) ** 2)
            parts.append(float((part**2).sum()))
    single, layer, alike = (float(np.mean(values)) for values in (one, together, parts))
    return len(one), single**0.5, layer**0.5, (layer / single - alike) / (1.0 - alike)


def main() -> None:
    """Prints a line for each device and type."""
    path = DATA / "kernels2" / "gemm.csv.gz"
    if not path.exists():
        print(f"no measured tables at {DATA}: set ECHOGRAPH_DATA")
        return
    table = read_table(path)
    table = table.where(table.text["source"].starting("PyPI aiconfigurator"))
    print(f"{'device':12}{'type':8}{'layers':>7}{'one':>7}{'layer':>7}{'correlation':>13}")
    for device, gpu, dtype, model in TABLES:
        found = correlation(table.select(ops=["gemm"], gpus=[gpu], dtypes=[dtype]), device, model)
        print(f"{device:12}{model:8}{found[0]:7}{found[1]:7.1%}{found[2]:7.1%}{found[3]:13.2f}")


if __name__ == "__main__":
    main()

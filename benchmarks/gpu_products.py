"""Matrix products that no fit has seen, measured on one GPU, beside their predictions.

python -m benchmarks.gpu_products                    predictions beside benchmarks/measured/h200_*.csv
python benchmarks/gpu_products.py --measure OUT.csv  on a GPU: such tables anew, OUT.csv and OUT_unaligned.csv

`tn` is a forward product, x [m, k] by the transpose of a weight [n, k]; `nn` the gradient of an input, `nt` that
of a weight. Times are medians of seven launches by CUDA events, which add some two microseconds, with the cache
emptied before each (unaligned ones of the committed table: of five, without).
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

MEASURED = Path(__file__).resolve().parent / "measured"
LAYOUTS = ("tn", "nn", "nt")
ROWS = (512, 1024, 2048, 4096, 8192)
WEIGHTS = ((768, 768), (3072, 768), (768, 3072), (1024, 4096), (4096, 1024), (2304, 768))
WEIGHTS += ((4096, 4096), (11008, 4096), (4096, 11008), (1600, 6400), (2560, 2560), (1280, 5120))
VOCABULARIES = (50257, 50304, 30522, 32000, 32001, 49408, 128256, 51865)
LONG_FLOPS = 1e11

Shape = tuple[str, str, int, int, int]
"""Type, layout, rows, columns, depth."""


def shapes() -> Iterable[Shape]:
    """Products of layers of 768 to 11,008."""
    for dtype, rows, (columns, depth), layout in product(("fp32", "bf16", "tf32"), ROWS, WEIGHTS, LAYOUTS):
        yield dtype, layout, rows, columns, depth


def unaligned() -> Iterable[Shape]:
    """Products a little larger than 4,096 a side in one dimension, and those of vocabularies."""
    for dtype, layout, more, dimension in product(("bf16", "fp32", "tf32"), LAYOUTS, (0, 1, 2, 4, 8), range(3)):
        sizes = [4096, 4096, 4096]
        sizes[dimension] += more
        if more or not dimension:
            yield dtype, layout, sizes[0], sizes[1], sizes[2]
    for words, hidden in product(VOCABULARIES, (768, 2048)):
        yield "bf16", "tn", 8192, words, hidden
        yield "bf16", "nn", 8192, hidden, words
        yield "bf16", "nt", words, hidden, 8192


def measure(out: Path, which: Iterable[Shape]) -> None:
    """Times products on this machine's GPU."""
    import torch

    other = torch.empty(100 * 2**20, dtype=torch.uint8, device="cuda")
    with out.open("w", newline="", encoding="utf-8") as lines:
        writer = csv.writer(lines, lineterminator="\n")
        writer.writerow(("dtype", "layout", "m", "n", "k", "us"))
        for dtype, layout, m, n, k in which:
            torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
            a, b = _operands(dtype, layout, m, n, k)
            torch.mm(a, b)
            events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(7)]
            torch.cuda._sleep(400_000)  # the host gets ahead
            for before, behind in events:
                other.fill_(1)
                before.record()
                torch.mm(a, b)
                behind.record()
            torch.cuda.synchronize()
            us = median(before.elapsed_time(behind) * 1e3 for before, behind in events)
            writer.writerow((dtype, layout, m, n, k, f"{us:.2f}"))


def _operands(dtype: str, layout: str, m: int, n: int, k: int) -> tuple[Any, Any]:
    import torch

    def filled(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(
            rows, columns, device="cuda", dtype=torch.bfloat16 if dtype == "bf16" else torch.float32
        )

    a = filled(k, m).t() if layout == "nt" else filled(m, k)
    return a, filled(n, k).t() if layout == "tn" else filled(k, n)


def compare(device_name: str, table: Path) -> None:
    """Prints by type and layout the median of predicted over measured, and of its distance from 1."""
    from echograph.profiler.costs import gemm, load_device

    device, ratios = load_device(device_name), dict[tuple[str, str], list[tuple[float, bool]]]()
    with table.open(newline="", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            m, n, k = (int(row[size]) for size in "mnk")
            cost = gemm(device, m, n, k, dtype=row["dtype"], layout=row["layout"].upper())
            kind = ratios.setdefault((row["dtype"], row["layout"]), [])
            kind.append((float(cost.seconds) * 1e6 / float(row["us"]), 2.0 * m * n * k >= LONG_FLOPS))
    for (dtype, layout), each in sorted(ratios.items()):
        long = [ratio for ratio, is_long in each if is_long]
        print(
            f"{table.stem} {dtype} {layout}: {len(each)} rows, predicted over measured "
            f"{median(ratio for ratio, _ in each):.2f}, of {len(long)} from {LONG_FLOPS / 1e12:g} TFLOP on "
            f"{median(long):.2f}; error {median(abs(ratio - 1.0) for ratio, _ in each):.1%}"
        )


def main() -> None:
    """Compares the committed tables, or measures others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=Path, help="measure on this machine's GPU into a table")
    given = parser.parse_args()
    if given.measure:
        measure(given.measure, shapes())
        measure(given.measure.with_stem(f"{given.measure.stem}_unaligned"), unaligned())
        return
    for name in ("products", "unaligned"):
        compare("h200", MEASURED / f"h200_{name}.csv")


if __name__ == "__main__":
    main()

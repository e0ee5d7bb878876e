"""A table of kernels whose every time is a formula's, so that what a fit should find is known."""

from __future__ import annotations

import csv
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from echograph.profiler.costs import DeviceProfile, load_device
from echograph.profiler.costs.attention import attention_shape, pass_seconds
from echograph.profiler.costs.device import AttentionModel, Datasheet, GemmModel
from echograph.profiler.costs.gemm import gemm_seconds

Row = dict[str, Any]
COLUMNS = (
    "source", "gpu", "op", "dtype", "m", "n", "k", "layout", "batch", "seq", "heads", "kv_heads", "head_dim",
    "causal", "latency_ms", "tflops", "notes",
)  # fmt: skip
CARD, BOARD, TWIN = "A100-SXM4-80GB", "NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"
CHARTED = "H100-SXM5-80GB"
BOARD_BYTES_PER_S = 1935e9
REACH = {"add": 0.8, "gelu": 0.8, "ln": 0.6, "softmax": 0.7}
"""Shares of the board's bandwidth that memory-bound kernels are made to reach."""
TIMER_S = 2e-5
TRANSPOSED = {"NN": 1.06, "NT": 1.12}
"""What layouts are made to cost, over a forward product."""
GROUPED = {"fwd": 1.2, "bwd_grad_act": 1.3, "bwd_grad_w": 1.4}
"""What groups are made to cost, over the sum of their products."""
BATCHED = 1.5
"""What batches of narrow products are made to cost."""
SLOWER = 1.1
"""The second source's clock."""


def write_table(path: Path) -> None:
    """Writes every kind of row that a fit of an A100 reads."""
    device = load_device("a100-sxm-80")
    model, sheet = msgspec.structs.replace(device.gemm["bf16"], residual=None), device.datasheet
    rows = [*_products(model, sheet), *_memory(), *_second(model, sheet), *_dense_attention(device)]
    rows += [*_charts(device), *_unfused(device)]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows({"source": "made"} | row for row in rows)


def _time(model: GemmModel, sheet: Datasheet, *sizes: float) -> float:
    batch, m, n, k = (np.asarray([size]) for size in sizes)
    return float(gemm_seconds(model, sheet, batch, m, n, k, quantize=False)[0])


def _products(model: GemmModel, sheet: Datasheet) -> list[Row]:
    sizes = np.rint(2.0 ** np.random.default_rng(5).uniform(8, 14, (400, 3)) / 64) * 64
    return [
        {"gpu": CARD, "op": "gemm", "dtype": "bf16", "m": m, "n": n, "k": k,
         "latency_ms": 1e3 * _time(model, sheet, 1.0, m, n, k)}
        for m, n, k in sizes.tolist()
    ]  # fmt: skip


def _memory() -> list[Row]:
    rows = []
    for op, (m, n) in product(REACH, product(2 ** np.arange(9, 17), 2 ** np.arange(7, 14))):
        moved = (3.0 if op == "add" else 2.0) * float(m) * float(n) * 4.0
        seconds = TIMER_S + moved / (BOARD_BYTES_PER_S * REACH[op])
        rows.append({"gpu": BOARD, "op": op, "dtype": "fp32", "m": m, "n": n, "latency_ms": 1e3 * seconds})
    return rows


def _second(model: GemmModel, sheet: Datasheet) -> list[Row]:
    """Products in three layouts, and groups of experts."""
    rows: list[Row] = []
    for m, n, k in product((4096, 8192), (4096, 12288), (4096, 8192)):
        # The input gradient of (m, n, k) is a product (m, k, n), the weight gradient one (n, k, m).
        for layout, sizes in (("TN", (m, n, k)), ("NN", (m, k, n)), ("NT", (n, k, m))):
            slower = SLOWER * TRANSPOSED.get(layout, 1.0)
            rows.append(
                {"gpu": TWIN, "op": "matmul", "dtype": "bf16", "layout": layout, "batch": 1}
                | dict(zip("mnk", sizes, strict=True))
                | {"latency_ms": 1e3 * slower * _time(model, sheet, 1.0, *sizes)}
            )
    for groups, m, (n, k) in product((4, 8), (1024, 2048, 4096), ((4096, 2048), (2048, 4096), (4096, 4096))):
        for stage, sizes in (("fwd", (m, n, k)), ("bwd_grad_act", (m, k, n)), ("bwd_grad_w", (n, k, m))):
            layout = {"fwd": "TN", "bwd_grad_act": "NN", "bwd_grad_w": "NT"}[stage]
            one = _time(model, sheet, 1.0, *sizes) * TRANSPOSED.get(layout, 1.0)
            rate = 2.0 * m * n * k / (SLOWER * GROUPED[stage] * one) / 1e12
            note = f"ng={groups}, M={m}, N={n}, K={k}, made, main_grad_dtype=bf16, stage={stage}, made"
            rows.append({"gpu": TWIN, "op": "group_matmul", "dtype": "bf16", "tflops": rate, "notes": note})
    return rows


def _attention(
    device: DeviceProfile, model: AttentionModel, sizes: tuple[int, ...], causal: bool, passes: str
) -> tuple[Row, float]:
    batch, seq, heads, dim = sizes
    shape = attention_shape(batch, heads, seq, dim)
    seconds = 0.0
    for which in passes.split("+"):
        kernel = model.forward if which == "fwd" else model.backward
        assert kernel is not None
        made = pass_seconds(
            model, kernel, device.datasheet, shape, causal=np.asarray(causal), backward=which == "bwd"
        )
        seconds += float(made)
    cells = {"batch": batch, "seq": seq, "heads": heads, "kv_heads": heads, "head_dim": dim}
    return cells | {"causal": "yes" if causal else "no"}, seconds


def _dense_attention(device: DeviceProfile) -> list[Row]:
    rows = []
    for sizes in product((1, 2, 4, 8, 16), (512, 1024, 2048, 4096, 8192, 16384), (8, 16, 32), (64, 128, 256)):
        for causal in (True, False):
            cells, seconds = _attention(device, device.attention["trtllm"], sizes, causal, "fwd")
            rows.append(cells | {"gpu": CARD, "op": "attn_fwd", "dtype": "bf16", "latency_ms": 1e3 * seconds})
    return rows


def _charts(device: DeviceProfile) -> list[Row]:
    """Charts of forward and of both passes together, of 16,384 tokens and 2,048 columns."""
    rows = []
    wholly = load_device("h100-sxm")
    asked = (
        (CHARTED, wholly, "flash2", "FlashAttention2", "fwd"),
        (CHARTED, wholly, "flash2", "FlashAttention2", "fwd+bwd"),
        (CARD, device, "flash2", "FlashAttention2", "fwd+bwd"),
    )
    for gpu, on, kernel, title, passes in asked:
        for seq, dim, causal in product(2 ** np.arange(9, 15), (64, 128), (True, False)):
            sizes = (16384 // int(seq), int(seq), 2048 // dim, dim)
            cells, seconds = _attention(on, on.attention[kernel], sizes, causal, passes)
            pairs = float(seq) ** 2 * (0.5 if causal else 1.0)
            flops = (1.0 if passes == "fwd" else 3.5) * 4.0 * sizes[0] * sizes[2] * pairs * dim
            op = "attn_fwd" if passes == "fwd" else "attn_fwd_bwd"
            rate = flops / seconds / 1e12
            rows.append(
                cells | {"gpu": gpu, "op": op, "dtype": "fp16/bf16", "tflops": rate, "notes": f"{title}; made"}
            )
    return rows


def _unfused(device: DeviceProfile) -> list[Row]:
    """A chart of attention that is not fused: six products, a softmax each way, and copies of the operands."""
    model = msgspec.structs.replace(device.gemm["bf16"], residual=None)
    sheet, rows = device.datasheet, []
    for seq, dim in product(2 ** np.arange(9, 14), (64, 128)):
        batch, heads = 16384 // int(seq), 2048 // dim
        count, length, width = float(batch * heads), float(seq), float(dim)
        products = 2.0 * _time(model, sheet, count, length, length, width)
        products += 4.0 * _time(model, sheet, count, length, width, length)
        scores, operand = 2.0 * count * length**2, 2.0 * count * length * width
        moved = 5.0 * scores / REACH["softmax"] + 18.0 * operand / REACH["add"]
        rest = moved / sheet.memory_bandwidth_bytes_per_s
        rate = 14.0 * count * length**2 * width / (BATCHED * products + rest) / 1e12
        rows.append({
            "gpu": CARD, "op": "attn_fwd_bwd", "dtype": "fp16/bf16", "batch": batch, "seq": seq, "heads": heads,
            "kv_heads": heads, "head_dim": dim, "causal": "no", "tflops": rate, "notes": "PyTorch; made",
        })  # fmt: skip
    return rows

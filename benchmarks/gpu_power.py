"""Power, clock and time of kernels that run for long on one GPU, and what they tell of energies.

python -m benchmarks.gpu_power                      energies, from benchmarks/measured/h200_power.csv
python benchmarks/gpu_power.py --measure OUT.csv    on a GPU: that table anew

A row of the table is a run of one to five seconds, of which the latter half counts: kernels in turn, with or
without rests between them; mean times of a kernel by CUDA events; mean power and clock as NVML samples them every
9 ms. With rests as long as its kernels a board is below its limit, at its full clock, and the energy of a kernel
is what it draws over the whole turn, less what it draws at rest.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

TABLE = Path(__file__).resolve().parent / "measured" / "h200_power.csv"
SIZE = 8192
PRODUCT_FLOPS = 2.0 * SIZE**3
ATTENTION_FLOPS = 4.0 * 2 * 32 * 8192**2 * 128 / 2.0
"""Of a forward pass of 2 x 32 heads of 128 over 8,192 tokens, whose mask hides half; backward takes 2.5 times."""

COPY_J_PER_BYTE = 9.8e-11
SAMPLER = """
import sys, time, pynvml as n
n.nvmlInit(); board = n.nvmlDeviceGetHandleByIndex(0)
with open(sys.argv[1], "w", buffering=1) as out:
    while True:
        power = n.nvmlDeviceGetFieldValues(board, [186])[0].value.uiVal
        joules, clock = n.nvmlDeviceGetTotalEnergyConsumption(board), n.nvmlDeviceGetClockInfo(board, 1)
        out.write(f"{time.monotonic()},{power},{joules},{clock},{n.nvmlDeviceGetTemperature(board, 0)}\\n")
        time.sleep(0.004)
"""


def rows_of(table: Path = TABLE) -> dict[str, dict[str, Any]]:
    """Runs by name: watts (the mean of two counters), MHz, and milliseconds by kind of kernel."""
    found: dict[str, dict[str, Any]] = {}
    with table.open(newline="", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            times = dict(part.split("=") for part in row["mean_ms"].split())
            watts = mean((float(row["power_W"]), float(row["energy_W"])))
            found[row["run"]] = {"W": watts, "MHz": float(row["sm_clock_MHz"]), "ms": times}
    return found


def energies(runs: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Joules of a FLOP at the full clock, by kind; and the watts at rest.

    Args:
        runs: as `rows_of` reads them.
    """
    rest_W = runs["rest alone"]["W"]

    def joules(name: str, kind: str) -> float:
        run = runs[name]
        kernel, rest = (float(run["ms"][key]) / 1e3 for key in (kind, "rest"))
        return float(run["W"]) * (kernel + rest) - rest_W * (kernel + rest)

    def least(prefix: str, kind: str, rests: tuple[str, ...], moved: float, flops: float) -> float:
        drawn = median(joules(f"{prefix} rest {rest}", kind) for rest in rests)
        return (drawn - moved * COPY_J_PER_BYTE) / flops

    matrix = float(SIZE**2)
    found = {"rest W": rest_W}
    found["bf16"] = least("products 8192", "mm", ("4.0", "2.0", "1.0"), 6.0 * matrix, PRODUCT_FLOPS)
    for name in ("fp8", "fp8 row"):
        found[name] = least(name, "mm", ("2.0", "1.0"), 4.0 * matrix, PRODUCT_FLOPS)
    for name in ("flash", "cudnn"):
        forward, backward = (
            least(f"{name} {way}", key, ("4.0", "1.5"), 0.0, ATTENTION_FLOPS * times)
            for way, key, times in (("forward", "fwd", 1.0), ("backward", "bwd", 2.5))
        )
        found[f"{name} forward"], found[f"{name} backward"] = forward, backward
        found[name] = (forward + 2.5 * backward) / 3.5
    return found


class Board:
    """One GPU, whose power is sampled by a process of its own while kernels run."""

    def __init__(self, log: Path) -> None:
        import torch

        self.torch, self.log, self.rows = torch, log, list[tuple[Any, ...]]()
        self._sampler = subprocess.Popen([sys.executable, "-c", SAMPLER, str(log)])

    def close(self) -> None:
        """Ends the samples."""
        self._sampler.terminate()

    def rest(self, milliseconds: float) -> Callable[[], None]:
        """A kernel that waits, at a clock of some 2 GHz."""
        return lambda: self.torch.cuda._sleep(int(milliseconds * 2e6))

    def repeat(self, name: str, turn: list[tuple[str, Callable[[], Any], int]], seconds: float) -> None:
        """Kernels in turn for so long: kind, what launches it, how often in a row."""
        cuda = self.torch.cuda
        for _, launch, _ in turn:
            launch()
        cuda.synchronize()
        began, marks, waiting = time.monotonic(), list[list[tuple[str, Any]]](), list[Any]()
        while time.monotonic() - began < seconds:
            events = list[tuple[str, Any]]()
            for kind, launch, count in [*turn, ("", lambda: None, 1)]:
                for _ in range(count):
                    events.append((kind, cuda.Event(enable_timing=True)))
                    events[-1][1].record()
                    launch()
            marks.append(events)
            waiting.append(events[-1][1])
            if len(waiting) * len(events) > 60:  # the host stays some 60 kernels ahead
                waiting.pop(0).synchronize()
        cuda.synchronize()
        times: dict[str, list[float]] = {}
        for events in marks[len(marks) // 2 :]:
            for (kind, first), (_, after) in pairwise(events):
                times.setdefault(kind, []).append(first.elapsed_time(after))
        self._write(
            name, " ".join(f"{kind}={mean(each):.4f}" for kind, each in times.items()), began, time.monotonic()
        )

    def _write(self, name: str, times: str, began: float, ended: float) -> None:
        middle = (began + ended) / 2
        with self.log.open(encoding="utf-8") as lines:
            samples = [[float(cell) for cell in line.split(",")] for line in lines if line.count(",") == 4]
        seen = [sample for sample in samples if middle <= sample[0] <= ended]
        drawn = (seen[-1][2] - seen[0][2]) / 1e3 / (seen[-1][0] - seen[0][0])
        power, clock = mean(s[1] for s in seen) / 1e3, mean(s[3] for s in seen)
        self.rows.append((name, times, round(power, 1), round(drawn, 1), round(clock), round(seen[-1][4])))
        print(*self.rows[-1], flush=True)


def measure(out: Path) -> None:
    """Products, copies and attention, alone, in turns and with rests; and kernels without tensor cores."""
    import torch

    board = Board(out.with_suffix(".log"))
    a, b, c = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    wide = torch.randn(2**30, device="cuda", dtype=torch.bfloat16)
    other = torch.empty_like(wide)

    def product() -> None:
        torch.mm(a, b, out=c)

    def copy() -> None:
        other.copy_(wide)

    board.repeat("rest alone", [("rest", board.rest(2.0), 1)], 2.0)
    board.repeat("products", [("mm", product, 1)], 4.0)
    board.repeat("copies", [("cp", copy, 1)], 3.0)
    for count in (1, 4, 16, 64, 256):
        turn = [("mm", product, count), ("cp", copy, count)]
        board.repeat(f"products and copies in turns of {count}", turn, 3.0 if count < 200 else 5.0)
    board.repeat("one product, three copies", [("mm", product, 1), ("cp", copy, 3)], 2.5)
    board.repeat("three products, one copy", [("mm", product, 3), ("cp", copy, 1)], 2.5)
    for rest in (4.0, 2.0, 1.0, 0.5, 0.25):
        board.repeat(f"products 8192 rest {rest}", [("mm", product, 1), ("rest", board.rest(rest), 1)], 2.0)
    for name, launch in [*_fp8(a, b), *_attention()]:
        for rest in (4.0, 2.0, 1.5, 1.0, 0.5):
            board.repeat(f"{name} rest {rest}", [("mm", launch, 1), ("rest", board.rest(rest), 1)], 1.5)
        board.repeat(f"{name} rest 0.0", [("mm", launch, 1)], 1.5)
    for name, launch in _without_tensor_cores(a, b):
        board.repeat(name, [("k", launch, 4)], 0.8)
    board.close()
    with out.open("w", newline="", encoding="utf-8") as lines:
        writer = csv.writer(lines, lineterminator="\n")
        writer.writerow(("run", "mean_ms", "power_W", "energy_W", "sm_clock_MHz", "celsius"))
        writer.writerows(board.rows)


def _fp8(a: Any, b: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    import torch

    left, right = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t().contiguous().t()
    one, rows = torch.ones((), device="cuda"), torch.ones(SIZE, 1, device="cuda")
    scaled = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
    yield "fp8", lambda: torch._scaled_mm(left, right, scale_a=one, scale_b=one, **scaled)
    yield "fp8 row", lambda: torch._scaled_mm(left, right, scale_a=rows, scale_b=rows.t(), **scaled)


def _attention() -> Iterator[tuple[str, Callable[[], Any]]]:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    shape = (2, 32, 8192, 128)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):

        def forward(backend: Any = backend) -> Any:
            with sdpa_kernel([backend]):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

        out = forward()
        gradient = torch.randn_like(out)
        yield f"{name} forward", forward

        def backward(out: Any = out, gradient: Any = gradient) -> Any:
            return torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)

        yield f"{name} backward", backward


def _without_tensor_cores(x: Any, y: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    import torch

    some, single = torch.nn.functional, x.float()
    weight, labels = torch.ones(SIZE, device="cuda", dtype=x.dtype), torch.arange(SIZE, device="cuda")
    yield "copy bf16", x.clone
    yield "cast to fp32", x.float
    yield "cast to bf16", lambda: single.to(x.dtype)
    yield "add bf16", lambda: x + y
    yield "mul fp32", lambda: single * single
    yield "silu bf16", lambda: some.silu(x)
    yield "gelu bf16", lambda: some.gelu(x)
    yield "dropout bf16", lambda: some.dropout(x, 0.1)
    yield "softmax bf16", lambda: torch.softmax(x, -1)
    yield "cross entropy fp32", lambda: some.cross_entropy(single, labels)
    yield "layer norm bf16", lambda: some.layer_norm(x, (SIZE,), weight, weight)
    yield "rms norm bf16", lambda: some.rms_norm(x, (SIZE,), weight)
    yield "mul mixed", lambda: x * single


def main() -> None:
    """Prints energies of the committed table, or measures one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=Path, help="measure on this machine's GPU into a table")
    given = parser.parse_args()
    if given.measure:
        measure(given.measure)
        return
    for name, value in energies(rows_of()).items():
        print(f"{name}: {value:.1f} W" if name.endswith("W") else f"{name}: {value * 1e12:.2f} pJ a FLOP")


if __name__ == "__main__":
    main()

"""How much longer earlier releases of cuDNN's attention take than the one that profiles have.

    python -m benchmarks.attention_releases CLONE

CLONE: of NVIDIA/cudnn-frontend with its history, whose benchmarks of each release are read. A row's time over what
the fitted release is modelled to take at its shape, for sequences that both tables have: on Hopper of 4,096 to
32,768 tokens, on Blackwell, whose older tables time PyTorch's calls, of 16,384 and 32,768.
"""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from echograph.profiler.costs import attention_backward, attention_forward, load_device

LONGEST = 32_768


class Table(NamedTuple):
    """One file of one commit: the device, the shortest sequence that counts, the names of its columns."""

    release: str
    device: str
    file: str
    shortest: int
    columns: Mapping[str, str]


_RATES = {"batch": "Batch", "seq": "Sequence length"}
_APRIL = {
    "heads": "Number of heads", "causal": "causal",
    "forward": "cudnn BF16 (TFlops/s fwd)", "backward": "cudnn BF16 (TFlops/s bwd)",
}  # fmt: skip
_SEPTEMBER = {
    "heads": "Heads", "causal": "Causal",
    "forward": "cuDNN BF16 FWD (TFLOPs/s)", "backward": "cuDNN BF16 BWD (TFLOPs/s)",
}  # fmt: skip
_TIMES = {
    "batch": "batch_size", "seq": "q_seqlen", "heads": "num_q_heads", "kv_heads": "num_kv_heads",
    "causal": "is_causal", "forward_ms": "forward_time", "backward_ms": "backward_time",
}  # fmt: skip
_JUNE = "benchmark/sdpa_benchmark_bf16_training/artifacts/sdpa_benchmark_results_NVIDIA_B200.csv"
_OCTOBER = "benchmark/sdpa_benchmark_training/artifacts/sdpa_bf16_benchmark_results_NVIDIA_{}.csv"
TABLES = (
    Table("cudnn-2024", "h200", "b740542:benchmark/benchmark_results.csv", 4096, _RATES | _APRIL),
    Table("cudnn-2024", "h200", "de355c7:benchmark/benchmark_results.csv", 4096, _RATES | _SEPTEMBER),
    Table("cudnn-2025", "b200", f"f937055:{_JUNE}", 16_384, _TIMES),
    Table("cudnn-2025", "b200", f"0b1577c:{_OCTOBER.format('B200')}", 16_384, _TIMES),
    Table("cudnn-2025", "gb300", f"0b1577c:{_OCTOBER.format('GB300')}", 16_384, _TIMES),
)
_BACKENDS = ("pyt_cudnn", None)


def ratios(table: Table, text: str) -> Iterator[tuple[float, float]]:
    """Forward and backward of each row over the model's."""
    device, names = load_device(table.device), table.columns
    for row in csv.DictReader(text.splitlines()):
        seq, heads = int(row[names["seq"]]), int(row[names["heads"]])
        if not table.shortest <= seq <= LONGEST or row.get("backend") not in _BACKENDS:
            continue
        batch, causal = int(row[names["batch"]]), row[names["causal"]] == "True"
        flops = 4.0 * batch * heads * seq * seq * 128 / (2.0 if causal else 1.0)
        if "forward_ms" in names:
            forward, backward = (float(row[names[f"{part}_ms"]]) / 1e3 for part in ("forward", "backward"))
        else:
            forward, backward = (
                flops * times / float(row[names[part]]) / 1e12
                for part, times in (("forward", 1.0), ("backward", 2.5))
            )
        shape = {"batch": batch, "heads": heads, "seq": seq, "head_dim": 128, "causal": causal}
        kv_heads = int(row[names["kv_heads"]]) if "kv_heads" in names else heads
        yield (
            forward / float(attention_forward(device, kernel="cudnn", kv_heads=kv_heads, **shape).seconds),
            backward / float(attention_backward(device, kernel="cudnn", kv_heads=kv_heads, **shape).seconds),
        )


def main(arguments: Sequence[str]) -> None:
    """Prints the medians of each table and of each release."""
    found: dict[str, list[tuple[float, float]]] = {}
    for table in TABLES:
        command = ["git", "-C", arguments[0], "show", table.file]
        rows = list(ratios(table, subprocess.run(command, capture_output=True, text=True, check=True).stdout))
        found.setdefault(table.release, []).extend(rows)
        print(table.file.partition(":")[0], table.device, *_medians(rows))
    for release, rows in found.items():
        print(release, *_medians(rows), f"of {len(rows)} rows")


def _medians(rows: Sequence[tuple[float, float]]) -> tuple[str, str]:
    forward, backward = zip(*rows, strict=True)
    return f"forward {median(forward):.2f}", f"backward {median(backward):.2f}"


if __name__ == "__main__":
    main(sys.argv[1:])

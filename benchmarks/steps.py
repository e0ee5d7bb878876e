"""Whole training steps against published measurements, and what peers say of the same rows.

python -m benchmarks.steps [--every 25]

Reads ground_truth.csv and peer_predictions.csv of the measured tables (ECHOGRAPH_DATA, default ../shared/data).
Every row runs the same way: the GPT of its shape, fp16 (bf16 with a pipeline), Adam with fp32 master weights,
unfused attention, full recomputation where the row says so, its tensor, pipeline and data parallelism with DDP's
buckets, on dgx-a100. Nothing is fitted to a step time.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
from collections import defaultdict
from functools import cache
from pathlib import Path

from echograph.cli.compose import compile_entry, predict
from echograph.errors import EchoError
from echograph.frontend.pytorch.step import StepDType, StepSpec
from echograph.ir.graph import StepGraph
from echograph.models import get_model
from echograph.simulator.result import Result

DATA = Path(os.environ.get("ECHOGRAPH_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
FAMILIES = ("sc21t1", "vtrainM", "vtrainS")
PEERS = ("calculon", "simumax")
Row = dict[str, str]


def main() -> None:
    """Prints every row, then the errors by family."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=25, help="of vTrain's rows, take each n-th")
    every = parser.parse_args().every
    if not (DATA / "ground_truth.csv").exists():
        print(f"no measured tables at {DATA}: set ECHOGRAPH_DATA")
        return
    errors: dict[tuple[str, str], list[float]] = defaultdict(list)
    peers = _peers()
    for row in _rows(every):
        try:
            result = _predict(row)
        except EchoError as error:
            print(f"{row['id']:<13} skipped: {error}")
            continue
        measured, predicted = float(row["step_time_s"]), result.step_ps / 1e12
        family = row["id"].split("-")[0]
        errors[family, "echograph"].append(predicted / measured - 1)
        for peer in PEERS:
            if (peer, row["id"]) in peers:
                errors[family, peer].append(peers[peer, row["id"]])
        print(
            f"{row['id']:<13} measured {measured:8.4f} s  predicted {predicted:8.4f} s  "
            f"{predicted / measured - 1:+7.1%}"
        )
    print(f"\n{'family':<9} {'tool':<10} {'rows':>4} {'mean abs':>9} {'median abs':>10} {'bias':>7}")
    for (family, tool), values in sorted(errors.items()):
        off = [abs(v) for v in values]
        print(
            f"{family:<9} {tool:<10} {len(values):>4} {statistics.mean(off):>9.1%} "
            f"{statistics.median(off):>10.1%} {statistics.mean(values):>+7.1%}"
        )


def _rows(every: int) -> list[Row]:
    with (DATA / "ground_truth.csv").open(newline="") as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if row["id"].split("-")[0] in FAMILIES
            and (row["cp"] or "1", row["zero_stage"] or "0") == ("1", "0")
            and "A100" in row["gpu_type"]
        ]
    few = [row for row in rows if row["id"].startswith("sc21")]
    return few + [row for row in rows if not row["id"].startswith("sc21")][::every]


def _peers() -> dict[tuple[str, str], float]:
    with (DATA / "peer_predictions.csv").open(newline="") as file:
        return {(row["tool"], row["id"]): float(row["err"]) for row in csv.DictReader(file) if row["err"]}


def _predict(row: Row) -> Result:
    # Loss scaling combines all stages, so a pipeline runs in bf16; kernels cost the same in both.
    dtype = "fp16" if row["pp"] == "1" else "bf16"
    shape = (row[key] for key in ("hidden", "layers", "heads", "vocab", "seq_len", "micro_batch", "recompute"))
    result, _ = predict(
        _graph(dtype, *shape),
        cluster="dgx-a100",
        gpus=int(row["n_gpus"]),
        global_batch=int(row["global_batch"]),
        tp=int(row["tp"]),
        pp=int(row["pp"]),
        vpp=int(row["vpp"] or 1),
    )
    return result


@cache
def _graph(
    dtype: StepDType, hidden: str, layers: str, heads: str, vocab: str, seq_len: str, batch: str, recompute: str
) -> StepGraph:
    entry = get_model("megatron-gpt-1.7b").with_config(
        n_embd=int(hidden), n_layer=int(layers), n_head=int(heads), vocab_size=int(vocab), n_positions=int(seq_len)
    )
    spec = StepSpec(dtype=dtype, recompute=recompute == "full")
    return compile_entry(entry, spec, batch_size=int(batch), seq_len=int(seq_len), attention="eager")


if __name__ == "__main__":
    main()

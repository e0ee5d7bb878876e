"""Peak memory of whole training steps against published figures.

python -m benchmarks.memory [--only titan-001,bloom-034] [--by-role]

Reads ground_truth.csv of the measured tables (ECHOGRAPH_DATA, default ../shared/data). Compared is what each
source reports:

- torchtitan: `max_reserved` of PyTorch's allocator, with expandable segments (its launch script sets them).
- BLOOM: nvidia-smi on the fullest node, in whole GB, during the second iteration (BigScience's chronicles of
  tr11-176B-ml, which also state that loaded kernels take 1,573 MiB there). Up to 27 February 2022 gradients added
  up in 16 bit, after it in fp32 (same chronicles, "Rebalancing layers", where embeddings take a layer's slot).
  Beside the communicators of a step's tensors Megatron-DeepSpeed has those of all ranks (Megatron-LM's barriers
  and the time of its start), of a replica's ranks (DeepSpeed's norm of the gradients, stage_1_and_2.py:
  model_parallel_group) and of a pipeline (its loss, pipe/engine.py: _aggregate_total_loss).

torchtitan compiles the loss with the model since April 2025 (pytorch/torchtitan pull request 1033), not before.

Nothing is fitted to a memory figure. What a row's source does not say is assumed as `_plan` and `_entry` write.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import statistics
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from echograph.errors import EchoError
from echograph.frontend.pytorch.spec import StepSpec
from echograph.ir.graph import StepGraph
from echograph.models import get_model
from echograph.models.catalog import ModelEntry
from echograph.models.stacks import load_stack
from echograph.simulator.clusters import load_cluster
from echograph.simulator.memory import Memory, Runtime, largest_memory
from echograph.workflow.compile import compile_entry
from echograph.workflow.plan import Plan
from echograph.workflow.predict import lower

DATA = Path(os.environ.get("ECHOGRAPH_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
GIB = 2**30
# Rows of the chronicles' section "Rebalancing layers" and after, and the one before it that balances embeddings.
FP32_GRADIENTS = range(121, 138)
BALANCED = (119, *FP32_GRADIENTS)
SAME_PLAN = (
    "model",
    "layers",
    "hidden",
    "seq_len",
    "heads",
    "n_gpus",
    "tp",
    "pp",
    "vpp",
    "dp",
    "recompute",
    "precision",
    "zero_stage",
    "source",
)
Row = dict[str, str]


def main() -> None:
    """Prints every row that has a figure, then the errors by family."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="ids of rows, with commas")
    parser.add_argument("--by-role", action="store_true", help="print what is alive at the peak")
    arguments = parser.parse_args()
    if not (DATA / "ground_truth.csv").exists():
        print(f"no measured tables at {DATA}: set ECHOGRAPH_DATA")
        return
    errors: dict[str, list[float]] = defaultdict(list)
    rows = _rows(set(arguments.only.split(",")) - {""})
    for row in rows:
        label, measured = row["id"], _measured(row)
        try:
            memory = predict(row)
        except EchoError as error:
            print(f"{label:<10} {measured:6.1f} GiB  skipped: {error}", flush=True)
            continue
        predicted = reported(row, memory) / GIB
        doubt = contradicted(row, rows)
        errors[f"{family(row)} (contradicted)" if doubt else family(row)].append(predicted / measured - 1)
        print(
            f"{label:<10} measured {measured:6.1f}  predicted {predicted:6.1f} GiB "
            f"{predicted / measured - 1:+7.1%}  (allocated {memory.peak_bytes / GIB:.1f}, {memory.program})"
            f"{f'; {doubt} took less with a larger micro-batch' if doubt else ''}",
            flush=True,
        )
        if arguments.by_role:
            print("   ", {name: round(nbytes / GIB, 2) for name, nbytes in memory.by_role.items() if nbytes})
            print("   ", "\n    ".join(memory.lines(8)))
    for name, values in sorted(errors.items()):
        off = [abs(v) for v in values]
        print(
            f"{name:<20} rows {len(values):>3}  mean abs {statistics.mean(off):6.1%}  worst {max(off):6.1%}  "
            f"bias {statistics.mean(values):+6.1%}"
        )


def _rows(only: set[str]) -> list[Row]:
    with (DATA / "ground_truth.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["peak_mem_gib"]]
    return [row for row in rows if (row["id"] in only if only else _says_enough(row))]


def _says_enough(row: Row) -> bool:
    """Whether a row's source says what is recomputed and how large a batch is: memory is a guess without."""
    return bool(row["recompute"] and row["global_batch"])


def contradicted(row: Row, rows: list[Row]) -> str:
    """The row of the same plan with larger micro-batches and a tenth less memory; "" for most rows."""
    same = [name for name in row if name in SAME_PLAN]
    for other in rows:
        if all(other[name] == row[name] for name in same) and row["micro_batch"] and other["micro_batch"]:
            larger = int(other["micro_batch"]) > int(row["micro_batch"])
            if larger and _measured(other) < 0.9 * _measured(row):
                return other["id"]
    return ""


def family(row: Row) -> str:
    """Whose figure it is."""
    return row["id"].split("-")[0]


def _measured(row: Row) -> float:
    """GiB. The chronicles' GB are thousands of nvidia-smi's MiB: their 80 GB would not fit an A100 as GiB."""
    return float(row["peak_mem_gib"]) * (1000 / 1024 if family(row) == "bloom" else 1)


def reported(row: Row, memory: Memory) -> int:
    """The figure that the row's source reports."""
    if family(row) == "titan" and memory.reserved_bytes is not None:
        return memory.reserved_bytes
    return memory.device_bytes


def predict(row: Row) -> Memory:
    """Memory of the rank that needs most."""
    plan = _plan(row)
    graph = _graph(_entry(row), int(row["seq_len"]), "eager" if row["attention"].startswith("unfused") else "sdpa")
    capacity = int(re.findall(r"(\d+)GB", row["gpu_type"])[0]) * GIB
    memory = largest_memory(lower(graph, plan, load_cluster(plan.cluster)), capacity, _runtime(row))
    assert memory is not None
    return memory


def _compiles_loss(row: Row) -> bool:
    """Whether a report of torchtitan, whose month its file's name has, is of a compiled loss."""
    month = re.search(r"_(20\d{4})_", row["source"])
    return bool(family(row) == "titan" and "compile" in row["notes"] and month and int(month[1]) >= 202504)


def _runtime(row: Row) -> Runtime:
    if family(row) == "titan":
        return Runtime(expandable_segments=True)
    return replace(
        Runtime(),
        cuda_context_bytes=1573 * 2**20,
        cublas_workspace_bytes=(8 * 2**20, 8 * 2**20),
        other_communicators=load_stack("megatron-deepspeed").other_communicators,
    )


def _plan(row: Row) -> Plan:
    """The row's plan. Where torchtitan's names no micro-batch: as many as stages, its documented default."""
    number = int(row["id"].split("-")[1])
    bloom = family(row) == "bloom"
    in_fp32 = number in FP32_GRADIENTS if bloom else int(row["pp"] or 1) > 1
    pp, vpp, layers = int(row["pp"] or 1), int(row["vpp"] or 1), int(row["layers"])
    local_batch = int(row["global_batch"] or 0) // int(row["dp"] or 1)
    stages = ""
    if bloom and number in BALANCED:
        even = (layers + 2) // pp
        stages = ",".join(str(even - (stage in (0, pp - 1))) for stage in range(pp))
    return Plan(
        gpus=int(row["n_gpus"]),
        cluster="dgx-a100" if bloom else "dgx-h100",
        tp=int(row["tp"] or 1),
        pp=pp,
        vpp=vpp,
        cp=int(row["cp"] or 1),
        sequence_parallel=row["sequence_parallel"] == "yes",
        zero=3 if row["zero_stage"] == "fsdp3" else int(row["zero_stage"] or 0),
        stage_layers=stages,
        micro_batch=int(row["micro_batch"] or max(1, local_batch // (pp * vpp))),
        global_batch=int(row["global_batch"]) if row["global_batch"] else None,
        recompute={"full": "full", "selective(op)": "selective-op"}.get(row["recompute"], "none"),
        loss="fused" if _compiles_loss(row) else "eager",
        precision="fp8" if row["precision"] == "fp8" else "",
        # Whose optimizer keeps 16-bit gradients beside their sums.
        stack="megatron-deepspeed" if bloom and in_fp32 else "",
        # FSDP2 adds whole gradients up in the type that it reduces them in: fp32, torchtitan's default.
        grad_dtype="fp32" if in_fp32 else "",
    )


def _entry(row: Row) -> ModelEntry:
    """The row's model. BLOOM: without dropout and, for want of it, with learned positions instead of ALiBi."""
    if family(row) == "titan":
        return get_model(row["model"].lower().replace(" ", "-"))
    return get_model("megatron-gpt-1.7b").with_config(
        n_embd=int(row["hidden"]),
        n_layer=int(row["layers"]),
        n_head=int(row["heads"]),
        vocab_size=int(row["vocab"]),
        n_positions=int(row["seq_len"]),
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )


_COMPILED: dict[str, StepGraph] = {}


def _graph(entry: ModelEntry, seq_len: int, attention: str) -> StepGraph:
    """The step of two samples, compiled once for each architecture; plans take other micro-batches of it."""
    key = f"{entry} {seq_len} {attention}"
    if key not in _COMPILED:
        _COMPILED[key] = compile_entry(
            entry, StepSpec(dtype="bf16"), batch_size=2, seq_len=seq_len, attention=attention
        )
    return _COMPILED[key]


if __name__ == "__main__":
    main()

"""Lowered jobs of stored graphs under plans of every kind, as they were when they were last looked at.

`python tests/golden/jobs/golden_jobs.py` writes `jobs.json` anew. A record counts what a job holds, and has the
digest of its text, which two jobs share only if they are the same; of a plan that is refused, it has the words.
To see what a change has done to a job, compare its text before and after:
`python tests/golden/jobs/golden_jobs.py NAME`.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from echograph.errors import EchoError
from echograph.ir.graph import Graph, StepGraph
from echograph.ir.passes.annotate import ForgetCommunication
from echograph.ir.passes.context_parallel import ContextParallel
from echograph.ir.passes.data_parallel import DataParallel
from echograph.ir.passes.depth import Depth
from echograph.ir.passes.expert_parallel import ExpertParallel
from echograph.ir.passes.extent import MicroBatch
from echograph.ir.passes.fold import Fold
from echograph.ir.passes.fully_shard import FullyShard
from echograph.ir.passes.fuse import Fuse
from echograph.ir.passes.fuse_loss import FuseLoss
from echograph.ir.passes.mesh import MeshOrder, OneCommunicator, ResizeAxes, UnfoldRanks
from echograph.ir.passes.pipeline import Pipeline
from echograph.ir.passes.precision import Precision
from echograph.ir.passes.recompute import Recompute
from echograph.ir.passes.tensor_parallel import TensorParallel
from echograph.ir.serde import load
from echograph.ir.text import to_text
from echograph.ir.types import CollectiveKind, DType, OpKind, Phase
from echograph.ir.unfold import unfold
from echograph.simulator.clusters import load_cluster
from echograph.workflow.plan import Plan
from echograph.workflow.predict import lower

HERE = Path(__file__).parent
GRAPHS = HERE.parent / "predictions" / "graphs"
PREDICTED = HERE.parent / "predictions" / "plans.txt"
STORED = HERE / "jobs.json"
MIB = 2**20

Passes = tuple[Callable[[Any], Any], ...]


def _at_limits() -> dict[str, tuple[str, Passes]]:
    """Options at the ends of their ranges and beyond: the words of a refusal have the range."""
    ranges: dict[str, tuple[int, int, Callable[[int], Passes]]] = {
        "tensor parallel": (1, 1024, lambda n: (TensorParallel(size=n),)),
        "vocabulary multiple": (1, 50257, lambda n: (TensorParallel(size=3, vocab_multiple=n),)),
        "context parallel": (1, 4096, lambda n: (ContextParallel(size=n),)),
        "experts": (1, 4096, lambda n: (ExpertParallel(size=n),)),
        "stages": (1, 4096, lambda n: (Pipeline(stages=n),)),
        "micro-batches of stages": (1, 65_536, lambda n: (Pipeline(stages=97, micro_batches=n),)),
        "passes of a stage": (
            2, 100_000, lambda n: (Pipeline(stages=4, micro_batches=40, chunks=n, schedule="interleaved"),),
        ),
        "replicas": (1, 10_000_000, lambda n: (DataParallel(replicas=n),)),
        "shards": (1, 10_000_000, lambda n: (FullyShard(replicas=n),)),
        "micro-batches": (1, 65_536, lambda n: (DataParallel(replicas=1, micro_batches=n, zero=9),)),
        "layers": (40, 10_000, lambda n: (Depth(layers=n),)),
        "samples": (1, 2**20, lambda n: (MicroBatch(size=n),)),
        "shared layers": (1, 40, lambda n: (Recompute(policy="full", every=n),)),
    }  # fmt: skip
    return {
        f"{what} of {size}": ("gpt3", of(size))
        for what, (least, most, of) in ranges.items()
        for size in dict.fromkeys((least - 1, least, most, most + 1))
    }


PASSED: dict[str, tuple[str, Passes]] = {
    "deeper": ("llama", (Depth(layers=37),)),
    "deeper-tied": ("gpt2-xl", (Depth(layers=50), Pipeline(stages=5, micro_batches=5))),
    "fused": ("llama", (Fuse(),)),
    "fused-bert": ("bert", (Fuse(), Recompute(policy="full", every=2, early_stop=False))),
    "fused-t5": ("t5", (Fuse(),)),
    "fused-resnet": ("resnet", (Fuse(),)),
    "fused-mixtral": ("mixtral", (Fuse(),)),
    "fold-anew": ("vit", (unfold, Fold())),
    "fold-anew-t5": ("t5", (unfold, Fold())),
    "fold-anew-resnet": ("resnet", (unfold, Fold())),
    "unbalanced-ring": ("llama", (ContextParallel(size=4, load_balance=False),)),
    "delayed-fp8": ("llama", (Precision(dtype="fp8", delayed=True),)),
    "kept-fp8": ("llama", (TensorParallel(size=2), Precision(dtype="fp8", kept="fp8"))),
    "small-buckets": ("bert", (DataParallel(replicas=3, bucket_bytes=9 * MIB, first_bucket_bytes=2 * MIB),)),
    "copied-buckets": (
        "resnet",
        (DataParallel(replicas=2, micro_batches=3, gradient_as_bucket_view=False, broadcast_buffers=False),),
    ),
    "all-reduced": ("gpt2-xl", (DataParallel(replicas=4, zero=2, reduce_scatter=False, micro_batches=2),)),
    "every-micro-batch": (
        "gpt2-xl", (FullyShard(replicas=6, shard=3, micro_batches=2, reduce_every_micro_batch=True),),
    ),
    "last-micro-batch": (
        "gpt2-xl",
        (FullyShard(replicas=4, micro_batches=3, reduce_every_micro_batch=False, reduce_dtype=DType.FP32),),
    ),
    "silent": ("gpt3", (Pipeline(stages=2, micro_batches=2), DataParallel(replicas=2), ForgetCommunication())),
    "no-depth": ("llama", (Depth(layers=31),)),
    "no-depth-kinds": ("t5", (Depth(layers=8),)),
    "no-depth-mixed": ("mixtral", (Depth(layers=33),)),
    "no-second-share": ("gpt3", (TensorParallel(size=2), TensorParallel(size=2))),
    "no-ranks": ("gpt3", (TensorParallel(size=0),)),
    "no-policy": ("gpt3", (Recompute(policy="full", every=0),)),
    **{f"one-sample-{graph}": (graph, (MicroBatch(size=1),)) for graph in ("bert", "resnet", "t5", "vit")},
    **{f"seven-samples-{graph}": (graph, (MicroBatch(size=7),)) for graph in ("bert", "gpt2-xl", "resnet")},
    "reordered": (
        "gpt3",
        (
            TensorParallel(size=2), Pipeline(stages=2, micro_batches=4), FullyShard(replicas=6, shard=3),
            MeshOrder(order=("pp", "dp", "ep", "tp")),
        ),
    ),
    "resized": ("bert", (DataParallel(replicas=3, zero=0), ResizeAxes(sizes={"dp": 7, "tp": 2}))),
    "written-out": (
        "bert",
        (TensorParallel(size=2), Pipeline(stages=2, micro_batches=3), DataParallel(replicas=3), UnfoldRanks()),
    ),
    "no-order": ("bert", (TensorParallel(size=2), DataParallel(replicas=2), MeshOrder(order=("dp", "pp")))),
    "no-resizing": ("bert", (DataParallel(replicas=3, zero=1), ResizeAxes(sizes={"dp": 7}))),
    "no-resized-stages": ("bert", (Pipeline(stages=2), DataParallel(replicas=2), ResizeAxes(sizes={"pp": 3}))),
    **{
        f"no-heads-{graph}-{size}": (graph, (ContextParallel(size=size, method="all_to_all"),))
        for graph, size in (("llama", 64), ("llama", 3), ("mixtral", 64), ("phi", 64), ("qwen-moe", 8), ("vit", 5))
    },
    **_at_limits(),
    "one-communicator": ("gpt3", (TensorParallel(size=2), FullyShard(replicas=2), OneCommunicator())),
}  # fmt: skip
"""Graph and passes, of what no plan asks for."""

WAYS: dict[str, Passes] = {
    "tp": (TensorParallel(size=2),),
    "tp-sp": (TensorParallel(size=4, sequence_parallel=True, vocab_multiple=1), Precision(grad_dtype="fp32")),
    "cp": (ContextParallel(size=2),),
    "cp-heads": (ContextParallel(size=2, method="all_to_all"), TensorParallel(size=2)),
    "ep": (ExpertParallel(size=4),),
    "ep-tp": (
        TensorParallel(size=2),
        ExpertParallel(size=2, imbalance=1.25),
        DataParallel(replicas=2, micro_batches=2),
    ),
    "ep-zero": (Precision(grad_dtype="fp32"), ExpertParallel(size=8), DataParallel(replicas=3, zero=2)),
    "pp": (Pipeline(stages=2, micro_batches=3), DataParallel(replicas=2)),
    "pp-vpp": (
        Pipeline(stages=2, micro_batches=4, chunks=2, schedule="interleaved"),
        DataParallel(replicas=3, zero=1),
    ),
    "pp-zb": (
        Recompute(policy="full", every=2),
        TensorParallel(size=2),
        Pipeline(stages=3, micro_batches=3, schedule="zb-h1"),
        DataParallel(replicas=2),
    ),
    "pp-zero3": (Pipeline(stages=2, micro_batches=2, schedule="gpipe"), FullyShard(replicas=4, shard=2)),
    "zero1": (DataParallel(replicas=3, zero=1, micro_batches=2, overlap_param_gather=True),),
    "zero2": (TensorParallel(size=2), DataParallel(replicas=4, zero=2, micro_batches=2, bucket_bytes=200_000)),
    "zero3": (FullyShard(replicas=5, micro_batches=2),),
    "recompute": (Recompute(policy="selective"), DataParallel(replicas=2, bucket_bytes=100_000)),
    "recompute-op": (Recompute(policy="selective_op"), TensorParallel(size=2, sequence_parallel=True)),
    "shared-recompute": (TensorParallel(size=2, sequence_parallel=True), Recompute(policy="selective_op")),
    "ep-recompute": (ExpertParallel(size=2), Recompute(policy="selective_op")),
    "fused": (Fuse(),),
    "fused-loss": (MicroBatch(size=4), FuseLoss(), DataParallel(replicas=2, gradient_as_bucket_view=True)),
    "fp8": (Precision(dtype="fp8"), DataParallel(replicas=2, micro_batches=3)),
    "mxfp8": (Precision(dtype="mxfp8", grad_dtype="fp32"), TensorParallel(size=2), FullyShard(replicas=2)),
    "bf16": (Precision(dtype="bf16"),),
    "one-sample": (MicroBatch(size=1), Fuse()),
    "deeper": (Depth(layers=9), Pipeline(stages=2, micro_batches=2)),
}
"""What is made of each of the small graphs beside this file, of those with experts alone what begins with "ep"."""
WITH_EXPERTS = ("deepseek", "experts", "experts-watched", "gpt-oss", "qwen-moe")


class Case(NamedTuple):
    """A job: its name, a stored graph, and what is made of it."""

    name: str
    graph: str
    make: Callable[[StepGraph], Graph]


def cases() -> dict[str, Case]:
    """What `jobs.txt`, the predictions' `plans.txt`, `PASSED` and `WAYS` say."""
    found, plans, cluster = dict[str, Case](), set[str](), load_cluster("dgx-h100")
    for path in (PREDICTED, HERE / "jobs.txt"):
        for name, graph, *words in filter(
            None, (shlex.split(x, comments=True) for x in path.read_text().splitlines())
        ):
            plan = _plan_of(words)
            # Predictions differ in more than their plans; of those that share one, the first will do.
            if f"{graph} {plan}" not in plans:
                plans.add(f"{graph} {plan}")
                found[name] = Case(name, graph, lambda step, plan=plan: lower(step, plan, cluster))
    for name, (graph, passes) in PASSED.items():
        found[name] = Case(name, graph, lambda step, passes=passes: _passed(step, passes))
    for path in sorted((HERE / "graphs").glob("*.pb")):
        for way, passes in WAYS.items():
            if way.startswith("ep") and path.stem not in WITH_EXPERTS:
                continue
            name = f"{path.stem} {way}"
            found[name] = Case(name, path.stem, lambda step, passes=passes: _passed(step, passes))
    return found


def _passed(graph: Any, passes: Passes) -> Graph:
    for each in passes:
        graph = each(graph)
    return graph


def _plan_of(words: list[str]) -> Plan:
    """The plan among options of `echosim run`."""
    kinds, given = {field.name: str(field.type) for field in fields(Plan)}, dict[str, Any]()
    for at, word in enumerate(words):
        name = word.removeprefix("--").replace("-", "_")
        switch = name.removeprefix("no_")
        if not word.startswith("--") or name == "cluster":
            continue
        if "bool" in kinds.get(switch, ""):
            given[switch] = name == switch
        elif name in kinds:
            kind: type = next((k for k in (int, float) if k.__name__ in kinds[name]), str)
            given[name] = kind(words[at + 1])
    return Plan(**given)


def made(case: Case) -> Graph:
    """The job of a case."""
    its_own = HERE / "graphs" / f"{case.graph}.pb"
    return case.make(_stored(its_own if its_own.exists() else GRAPHS / f"{case.graph}.pb"))


@cache
def _stored(path: Path) -> StepGraph:
    step = load(path)
    assert isinstance(step, StepGraph)
    return step


def record(case: Case) -> dict[str, Any]:
    """What the job of a case holds, or why there is none."""
    try:
        return contents(made(case))
    except EchoError as error:
        return {"refused": str(error)}


def contents(job: Graph) -> dict[str, Any]:
    """What a job holds, each block's operations and tensors counted once, and its digest."""
    ops, digest = job.ops, hashlib.sha256()
    # What a job is does not depend on what its passes are called.
    for line in to_text(replace(job, passes=())):
        digest.update(line.encode())
    sent = Counter[str]()
    for row in np.flatnonzero(ops.kind == OpKind.COLLECTIVE).tolist():
        kind, group = CollectiveKind(ops.variant[row]), job.groups[ops.group[row]]
        sent[f"{kind.name.lower()} {group.name}"] += int(ops.nbytes[row])
    phases = [(phase.name.lower(), ops.phase == phase) for phase in Phase]
    return {
        "mesh": " ".join(f"{axis.name}={axis.size}" for axis in job.mesh),
        "programs": len(job.programs),
        "calls": sum(len(program.calls) for program in job.programs),
        "operations": {name: int(of.sum()) for name, of in phases if of.any()},
        "flops": {name: int(ops.flops[of].sum()) for name, of in phases if ops.flops[of].any()},
        "read": int(ops.bytes_read.sum()),
        "written": int(ops.bytes_written.sum()),
        "collectives": dict(sorted(sent.items())),
        "messages": int(ops.nbytes[ops.kind == OpKind.SEND].sum()),
        "tensors": len(job.tensors),
        "tensor bytes": int(job.tensors.nbytes.sum()),
        "digest": digest.hexdigest()[:16],
    }


if __name__ == "__main__":
    every = cases()
    if sys.argv[1:]:
        sys.stdout.writelines(to_text(made(every[sys.argv[1]])))
    else:
        records = {name: record(case) for name, case in every.items()}
        text = ",\n".join(f"{json.dumps(name)}: {json.dumps(what)}" for name, what in records.items())
        STORED.write_text(f"{{\n{text}\n}}\n")
        print(f"{len(records)} jobs")

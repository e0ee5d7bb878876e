"""Small jobs simulated in every way, as it came out when it was last looked at.

`python tests/golden/simulations/golden_simulations.py` writes `simulations.json` anew. The durations of kernels
are whole picoseconds, all different, so a record is the same everywhere: a step's figures, and digests of all else
that a result says, of what ran when, and of what the memory holds. Where ranks jitter, six digits are compared.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.append(str(Path(__file__).parents[2] / "simulator"))

from layered import layered_step

from echograph.ir.builder import GraphBuilder
from echograph.ir.graph import Axis, JobGraph
from echograph.ir.passes.annotate import Annotate
from echograph.ir.passes.data_parallel import DataParallel
from echograph.ir.passes.fold import Fold
from echograph.ir.passes.fully_shard import FullyShard
from echograph.ir.passes.pipeline import Pipeline
from echograph.ir.passes.recompute import Recompute
from echograph.ir.types import CollectiveKind, DType, OpKind, Phase, Source, TensorRole
from echograph.simulator.clusters import Cluster, SlowNode, load_cluster
from echograph.simulator.goodput import Reliability, goodput
from echograph.simulator.host import IssueTimes
from echograph.simulator.limits import Scale
from echograph.simulator.memory import Runtime, memory
from echograph.simulator.ranks import EveryRank
from echograph.simulator.result import Result
from echograph.simulator.simulate import simulate

STORED = Path(__file__).parent / "simulations.json"
US = 1_000_000
EAGER = IssueTimes(op_ps=4 * US, launch_ps=3 * US, spread=0.5)
BLOCKING = IssueTimes(op_ps=9 * US, launch_ps=3 * US, blocking=True)
WAITING = IssueTimes(op_ps=2 * US, launch_ps=US, communication_ps=11 * US, waits=True)
GIB = 2**30


def timed(job: JobGraph, device: str) -> JobGraph:
    """The job with durations from 5 to 100 microseconds, no two neighbours alike, of three errors."""
    rows = np.arange(len(job.ops))
    works = (job.ops.kind == OpKind.COMPUTE) & ~job.ops.is_view
    return Annotate(
        device=device,
        picoseconds=np.where(works, 5 * US + 1_000_003 * (rows * 37 % 95) + rows, -1).astype(np.int64),
        source=np.where(rows % 3, Source.FITTED, Source.ANALYTICAL).astype(np.uint8),
        spread=(0.03125 * (1 + rows % 3)).astype(np.float32),
        samples=np.zeros(len(rows), np.int64),
    )(job)


def _staged(layers: int, stages: int, schedule: str, *, chunks: int = 1, micro_batches: int = 0) -> JobGraph:
    micro_batches = micro_batches or 2 * stages
    return Pipeline(stages=stages, micro_batches=micro_batches, schedule=schedule, chunks=chunks)(
        Fold()(layered_step(layers))
    )


def _by_hand() -> JobGraph:
    """A job that begins with a collective that names no tensors, told by a token that a kernel reads."""
    builder = GraphBuilder(name="by hand", streams=("compute", "comm"))
    builder.mesh = (Axis(name="dp", size=16),)
    group = builder.group("dp", axes=("dp",))
    token = builder.tensor("token", (1,), DType.BOOL, TensorRole.ACTIVATION)
    made = [builder.tensor("made", (4096, 1024), DType.BF16, TensorRole.ACTIVATION) for _ in range(2)]
    builder.collective(
        "sum", CollectiveKind.REDUCE_SCATTER, group=group, bytes_per_rank=48 << 20, dtype=DType.BF16, stream=1,
        outputs=(token,), phase=Phase.BACKWARD,
    )  # fmt: skip
    work: dict[str, Any] = {"flops": 1, "bytes_read": 1, "bytes_written": 1}
    builder.compute("first", outputs=made[:1], phase=Phase.FORWARD, **work)
    builder.compute("second", inputs=(token, made[0]), outputs=made[1:], phase=Phase.FORWARD, **work)
    builder.compute("third", inputs=made, phase=Phase.BACKWARD, forward_op=1, **work)
    builder.program([(0, 0, 4, 0, 0)], role="rank")
    return builder.build(JobGraph)


JOBS: dict[str, Callable[[], JobGraph]] = {
    "by hand": _by_hand,
    "alone": lambda: DataParallel(replicas=1)(Fold()(layered_step(3))),
    "unfolded": lambda: DataParallel(replicas=16)(layered_step(3)),
    "replicas": lambda: DataParallel(replicas=24, micro_batches=3, bucket_bytes=3 << 20)(Fold()(layered_step(5))),
    "zero-1": lambda: DataParallel(replicas=8, zero=1, overlap_param_gather=True)(Fold()(layered_step(4))),
    "zero-2": lambda: DataParallel(replicas=16, zero=2, micro_batches=2)(Fold()(layered_step(4))),
    "sharded": lambda: FullyShard(replicas=16, micro_batches=2)(Fold()(layered_step(4))),
    "hybrid": lambda: FullyShard(replicas=32, shard=8, reshard_after_forward=False)(Fold()(layered_step(4))),
    "recomputed": lambda: DataParallel(replicas=2)(Recompute(policy="full", every=2)(Fold()(layered_step(6)))),
    "gpipe": lambda: DataParallel(replicas=4)(_staged(4, 2, "gpipe")),
    "1f1b": lambda: DataParallel(replicas=4)(_staged(8, 4, "1f1b")),
    "interleaved": lambda: DataParallel(replicas=2)(_staged(8, 2, "interleaved", chunks=2)),
    "zero-bubble": lambda: DataParallel(replicas=2)(_staged(6, 3, "zb-h1")),
    "long": lambda: DataParallel(replicas=2)(_staged(4, 2, "1f1b", micro_batches=24)),
}


class Case(NamedTuple):
    """A job, where it runs, and how that is simulated."""

    job: str
    host: IssueTimes = EAGER
    cluster: str = "dgx-h100"
    worse: tuple[SlowNode, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def digits(self) -> int:
        """Of numbers that are compared; 0: all."""
        return 6 if any(isinstance(value, EveryRank) and value.jitter for _, value in self.options) else 0


def _case(
    job: str, /, host: IssueTimes = EAGER, cluster: str = "dgx-h100", worse: Any = (), **options: Any
) -> Case:
    return Case(job, host, cluster, tuple(worse), tuple(options.items()))


CLUSTERS = ("ethernet-100g", "gb200-nvl72", "jean-zay-a100")
SLOW_NODE = SlowNode(node=1, compute=0.8)
LONGER = tuple(Scale(selector=what, factor=by) for what, by in (("compute", 0.5), ("comm", 4.0), ("host", 0.25)))
STRAGGLERS, JITTER = EveryRank(slow={1: 1.5, 3: 0.75}), EveryRank(jitter=0.05, seed=3, draws=3)
WAYS: dict[str, tuple[tuple[str, ...], Callable[[str], Case]]] = {
    "": (tuple(JOBS), _case),
    ", task by task": (("replicas", "1f1b", "sharded", "zero-bubble"), lambda job: _case(job, engine="static")),
    ", by events": (("unfolded", "1f1b"), lambda job: _case(job, engine="events")),
    ", blocking": (("alone", "1f1b"), lambda job: _case(job, BLOCKING)),
    ", waiting": (("1f1b", "interleaved", "long"), lambda job: _case(job, WAITING)),
    ", every rank": (
        ("replicas", "1f1b", "hybrid"), lambda job: _case(job, ranks=EveryRank(), trace_ranks=(0, 3)),
    ),
    ", stragglers": (
        ("zero-2", "gpipe", "interleaved", "sharded"),
        lambda job: _case(job, ranks=STRAGGLERS, trace_ranks=(3,)),
    ),
    ", jitter": (("replicas", "1f1b"), lambda job: _case(job, ranks=JITTER)),
    ", a slow node": (("replicas", "hybrid"), lambda job: _case(job, worse=(SLOW_NODE,), ranks=EveryRank())),
    ", scaled": (("zero-1", "1f1b"), lambda job: _case(job, scales=LONGER)),
    ", no gathers": (
        ("sharded",), lambda job: _case(job, scales=(Scale(selector="collective:all_gather", factor=0.0),)),
    ),
}  # fmt: skip
CASES = {f"{job}{way}": case(job) for way, (jobs, case) in WAYS.items() for job in jobs} | {
    f"{job}, on {cluster}": _case(job, cluster=cluster)
    for job in ("replicas", "hybrid", "gpipe")
    for cluster in CLUSTERS
}


@cache
def _job(name: str, device: str) -> JobGraph:
    return timed(JOBS[name](), device)


@cache
def _cluster(name: str) -> Cluster:
    return load_cluster(name)


def simulated(case: Case) -> Result:
    """The result of a case."""
    cluster = _cluster(case.cluster).with_degraded(case.worse)
    return simulate(
        _job(case.job, cluster.device), cluster, case.host, peak_flops_per_s=1e12, **dict(case.options)
    )


def record(case: Case) -> dict[str, Any]:
    """What is written down of a case."""
    result = simulated(case)
    found = result.to_json()
    del found["simulation"]["wall_s"]
    failures = Reliability(node_mtbf_s=1e6, checkpoint_s=30, restart_s=200)
    found["failures"] = goodput(found["step_time_s"], max(1, result.gpus // 8), failures).to_json()
    timelines = [result.timeline, *([] if result.traced is None else [result.traced])]
    ran = [[getattr(t, name).tolist() for name in ("lane", "op", "start", "duration", "cause")] for t in timelines]
    kept = {
        "step_ps": result.step_ps, "interval_ps": list(result.interval_ps), "engine": result.engine,
        "limits_ps": result.limits, "ends_last": found["breakdown_of"],
    }  # fmt: skip
    return {
        **_rounded(kept, case.digits),
        "peak_bytes": 0 if result.memory is None else result.memory.peak_bytes,
        "result": _digest(_rounded(found, case.digits or 9)),
        "ran": _digest(_rounded(ran, case.digits)),
    }


def memories(name: str) -> dict[str, Any]:
    """What the memory of each program of a job holds, with either kind of allocator, and on too small a device."""
    job, found = _job(name, "h100-sxm"), dict[str, Any]()
    for program, its in enumerate(job.programs):
        for expandable in (False, True):
            held = memory(job, program, 80 * GIB, Runtime(expandable_segments=expandable))
            assert held is not None
            tight = memory(job, program, held.device_bytes - (1 << 21), Runtime(expandable_segments=expandable))
            assert tight is not None
            found[f"{its.role}{' expandable' if expandable else ''}"] = {
                "peak_bytes": held.peak_bytes, "reserved_bytes": held.reserved_bytes, "by_role": held.by_role,
                "curve": _digest(held.curve), "contributors": _digest(held.lines(20)), "fits_tightly": tight.fits,
                "overhead_bytes": held.overhead_bytes,
            }  # fmt: skip
    return found


def _rounded(value: Any, digits: int) -> Any:
    if isinstance(value, dict):
        return {str(key): _rounded(each, digits) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each, digits) for each in value]
    return float(f"{value:.{digits}g}") if digits and isinstance(value, int | float) else value


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


MEMORIES = tuple(job for job in JOBS if job not in ("gpipe", "zero-bubble", "long"))


def records() -> dict[str, dict[str, Any]]:
    """All that is written down."""
    return {
        **{name: record(case) for name, case in CASES.items()},
        **{f"memory of {name}": memories(name) for name in MEMORIES},
    }


if __name__ == "__main__":
    text = ",\n".join(f"{json.dumps(name)}: {json.dumps(what)}" for name, what in records().items())
    STORED.write_text(f"{{\n{text}\n}}\n")

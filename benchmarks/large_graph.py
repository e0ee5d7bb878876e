"""A graph of two million operations, as a real trace becomes: build, verify, save, load and simulate it.

python -m benchmarks.large_graph [--ops 2000000]
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

from echograph.ir import serde
from echograph.ir.builder import GraphBuilder
from echograph.ir.graph import Axis, JobGraph
from echograph.ir.types import CollectiveKind, DType, Duration, Payload, Phase, Source, TensorRole
from echograph.simulator.clusters import load_cluster
from echograph.simulator.host import HostTimes
from echograph.simulator.simulate import simulate

COLLECTIVE_EVERY = 50


def build(ops: int) -> JobGraph:
    """A job of one rank with kernels, their tensors, and collectives on a second stream, all timed."""
    builder = GraphBuilder(name="two million", streams=("compute", "comm.dp"))
    builder.mesh = (Axis(name="dp", size=8),)
    group = builder.group("dp", axes=("dp",))
    kernel = Duration(device="trace", picoseconds=12_345_678, source=Source.IMPORTED, samples=1)
    transfer = Duration(device="trace", picoseconds=98_765_432, source=Source.IMPORTED, samples=1)
    last = builder.tensor("x", (8, 1024), DType.BF16, TensorRole.INPUT)
    for number in range(ops):
        if number % COLLECTIVE_EVERY == COLLECTIVE_EVERY - 1:
            builder.collective(
                "ncclDevKernel_AllReduce", CollectiveKind.ALL_REDUCE, group=group, bytes_per_rank=1 << 20,
                dtype=DType.BF16, payload=Payload.GRADIENT, inputs=(last,), stream=1, durations=(transfer,),
            )  # fmt: skip
            continue
        made = builder.tensor("activation", (8, 1024), DType.BF16, TensorRole.ACTIVATION)
        builder.compute(
            "aten.mm", phase=Phase.FORWARD, module="layer", inputs=(last,), outputs=(made,), flops=1 << 24,
            bytes_read=16384, bytes_written=16384, durations=(kernel,),
        )  # fmt: skip
        last = made
    return builder.build(JobGraph)


def main() -> None:
    """Prints seconds of each stage and the peak memory as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ops", type=int, default=2_000_000)
    ops = parser.parse_args().ops
    seconds: dict[str, float] = {}
    clock = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal clock
        now = time.perf_counter()
        seconds[name] = round(now - clock, 2)
        clock = now

    graph = build(ops)
    lap("build_and_verify")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.pb"
        size = serde.save(graph, path)
        lap("save")
        del graph
        loaded = serde.load(path)
        lap("load_and_verify")
    assert isinstance(loaded, JobGraph)
    result = simulate(loaded, load_cluster("dgx-h100"), HostTimes(op_ps=5_000_000, launch_ps=3_000_000))
    lap("simulate")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        json.dumps(
            {
                "ops": ops, "bytes": size, "seconds": seconds, "total_s": round(sum(seconds.values()), 1),
                "peak_memory_GiB": round(peak / 2**30, 2), "tasks": result.tasks, "engine": result.engine,
            }
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()

"""Jobs that communicate, and simulating them at flow level, for the tests of it."""

from __future__ import annotations

from dataclasses import replace

from layered import layered_step, timed

from echograph.ir.builder import GraphBuilder
from echograph.ir.graph import Axis, JobGraph
from echograph.ir.passes.data_parallel import DataParallel
from echograph.ir.passes.fold import Fold
from echograph.ir.passes.pipeline import Pipeline
from echograph.ir.types import CollectiveKind, DType
from echograph.simulator.clusters import Cluster, DegradedLink
from echograph.simulator.collectives import CollectiveName
from echograph.simulator.durations import durations
from echograph.simulator.flows import Flows, alone, flows
from echograph.simulator.host import HostTimes
from echograph.simulator.network.topology import Topology
from echograph.simulator.result import Result
from echograph.simulator.simulate import simulate
from echograph.simulator.tasks import expand

US = 1_000_000
IDLE = HostTimes(op_ps=0, launch_ps=0)
HOST = HostTimes(op_ps=4_000_000, launch_ps=3_000_000)
MIB = 2**20
KIND_OF = {
    "all_reduce": CollectiveKind.ALL_REDUCE,
    "all_gather": CollectiveKind.ALL_GATHER,
    "reduce_scatter": CollectiveKind.REDUCE_SCATTER,
    "all_to_all": CollectiveKind.ALL_TO_ALL,
    "broadcast": CollectiveKind.BROADCAST,
    "reduce": CollectiveKind.REDUCE,
    "barrier": CollectiveKind.BARRIER,
}


def communications(
    mesh: dict[str, int], *what: tuple[CollectiveName, str, int, int], chained: bool = False
) -> JobGraph:
    """A job that only communicates: (kind, axis, bytes, stream), each after the one before if chained."""
    builder = GraphBuilder(streams=tuple(f"stream {i}" for i in range(1 + max(w[3] for w in what))))
    builder.mesh = tuple(Axis(name=name, size=size) for name, size in mesh.items())
    groups = {axis: builder.group(axis, axes=(axis,)) for axis in dict.fromkeys(w[1] for w in what)}
    for kind, axis, nbytes, stream in what:
        deps = [builder.op_count() - 1] if chained and builder.op_count() else []
        builder.collective(
            *(kind, KIND_OF[kind]), group=groups[axis], bytes_per_rank=nbytes, dtype=DType.BF16, stream=stream,
            deps=deps,
        )  # fmt: skip
    builder.program([(0, 0, builder.op_count(), 0, 0)], role="all")
    return builder.build(JobGraph)


def run(job: JobGraph, cluster: Cluster, **options: object) -> Result:
    return simulate(job, cluster, IDLE, memory=False, **{"network": "flows", **options})


def shared(job: JobGraph, cluster: Cluster, host: HostTimes = IDLE) -> Flows:
    links = Topology(cluster=cluster, gpus=job.world_size)
    times = durations(job, cluster, alone(links))
    tasks = expand(job, times.picoseconds, host.issue(job))
    return flows(job, tasks, times, links)


def step_alone(kind: CollectiveName, nbytes: int, ranks: range, cluster: Cluster) -> float:
    links = Topology(cluster=cluster, gpus=cluster.max_gpus)
    return alone(links)(kind, nbytes, ranks).seconds


def worse(cluster: Cluster, link: str, bandwidth: float) -> Cluster:
    return replace(cluster, degraded=(DegradedLink(link=link, bandwidth=bandwidth),))


def listed(ranks: range, kind: CollectiveName, nbytes: int) -> JobGraph:
    """One group of ranks communicates twice, on two streams that wait for each other; nobody else is there."""
    builder = GraphBuilder(streams=("one", "two"))
    last, ops = [], []
    group = builder.group("group", ranks=tuple(ranks))
    for stream in (0, 1):
        ops.append(
            builder.collective(
                kind, KIND_OF[kind], group=group, bytes_per_rank=nbytes, dtype=DType.BF16, stream=stream, deps=last
            )
        )
        last = ops[-1:]
    for rank in ranks:
        builder.program([(0, 0, 2, 0, 0)], role=f"rank {rank}", ranks=[rank])
    return builder.build(JobGraph)


def pipelined(gpus: int, where: Cluster) -> JobGraph:
    staged = Pipeline(stages=4, micro_batches=6)(Fold()(layered_step(8)))
    return timed(DataParallel(replicas=gpus // 4)(staged), where.device, 20 * US)


def forward(stages: int) -> JobGraph:
    """One long message from each stage to the next one, eight pipelines on eight GPUs a node."""
    builder = GraphBuilder(streams=("send", "recv"))
    builder.mesh = (Axis(name="pp", size=stages), Axis(name="dp", size=8))
    group = builder.group("pp", axes=("pp",))
    nbytes, calls = 2**33, []
    for stage in range(stages):
        first = builder.op_count()
        if stage:
            builder.recv("recv", group=group, peer=-1, tag=0, nbytes=nbytes, stream=1)
        if stage < stages - 1:
            builder.send("send", group=group, peer=1, tag=0, nbytes=nbytes, stream=0)
        calls.append([(0, first, builder.op_count(), 0, 0)])
    for stage, its in enumerate(calls):
        builder.program(its, role=f"stage {stage}", coordinates={"pp": stage})
    return builder.build(JobGraph)


def around(size: int) -> JobGraph:
    """One long message from each rank of one role to the second next one."""
    builder = GraphBuilder(streams=("send", "recv"))
    builder.mesh = (Axis(name="cp", size=size), Axis(name="dp", size=8))
    group = builder.group("cp", axes=("cp",))
    builder.send("send", group=group, peer=2, tag=0, nbytes=2**33, stream=0)
    builder.recv("recv", group=group, peer=-2, tag=0, nbytes=2**33, stream=1)
    builder.program([(0, 0, 2, 0, 0)], role="all")
    return builder.build(JobGraph)

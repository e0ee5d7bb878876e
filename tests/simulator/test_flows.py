"""Flow level: collectives alone take their closed form, and what shares a link shares its bandwidth."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layered import layered_step, timed

from echograph.errors import SimulationError, UnknownNameError, UsageError
from echograph.ir.builder import GraphBuilder
from echograph.ir.graph import Axis, JobGraph
from echograph.ir.passes.data_parallel import DataParallel
from echograph.ir.passes.fold import fold
from echograph.ir.passes.fully_shard import FullyShard
from echograph.ir.passes.pipeline import Pipeline
from echograph.ir.passes.unfold_ranks import UnfoldRanks
from echograph.ir.types import CollectiveKind, DType, Duration, OpKind, Source
from echograph.simulator import fidelity
from echograph.simulator.clusters import Cluster, DegradedLink, SlowNode, cluster_names, load_cluster
from echograph.simulator.collectives import KINDS, Kind, collective_time
from echograph.simulator.durations import durations, meeting
from echograph.simulator.flows import Flows, alone, flows
from echograph.simulator.host import Host
from echograph.simulator.network.topology import Topology
from echograph.simulator.ranks import EveryRank, Mesh
from echograph.simulator.result import Result
from echograph.simulator.simulate import simulate
from echograph.simulator.tasks import expand
from echograph.units import to_ps, to_s

US = 1_000_000
IDLE = Host(op_ps=0, launch_ps=0)
HOST = Host(op_ps=4_000_000, launch_ps=3_000_000)
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


def communications(mesh: dict[str, int], *what: tuple[Kind, str, int, int], chained: bool = False) -> JobGraph:
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


def shared(job: JobGraph, cluster: Cluster, host: Host = IDLE) -> Flows:
    links = Topology(cluster=cluster, gpus=job.world_size)
    times = durations(job, cluster, alone(links))
    tasks = expand(job, times.picoseconds, host.issue(job), lambda number, row: meeting(job, number, row))
    return flows(job, tasks, times, links)


def step_alone(kind: Kind, nbytes: int, ranks: range, cluster: Cluster) -> float:
    links = Topology(cluster=cluster, gpus=cluster.max_gpus)
    return alone(links)(kind, nbytes, ranks).seconds


def worse(cluster: Cluster, link: str, bandwidth: float) -> Cluster:
    return replace(cluster, degraded=(DegradedLink(link=link, bandwidth=bandwidth),))


def listed(ranks: range, kind: Kind, nbytes: int) -> JobGraph:
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


@settings(deadline=None, max_examples=200)
@given(
    cluster=st.sampled_from(cluster_names()).map(load_cluster),
    kind=st.sampled_from([kind for kind in KINDS if kind != "send_recv"]),
    nbytes=st.integers(0, 2**36),
    ranks=st.integers(2, 24),
    stride=st.sampled_from([1, 2, 4, 8, 16]),
)
def test_a_collective_alone_is_never_slowed(
    cluster: Cluster, kind: Kind, nbytes: int, ranks: int, stride: int
) -> None:
    members = range(0, ranks * stride, stride)
    job = listed(members, kind, nbytes)
    found = simulate(job, cluster, IDLE, memory=False, network="flows")
    assert found.step_ps == 2 * to_ps(step_alone(kind, nbytes, members, cluster))
    closed = collective_time(kind, nbytes, cluster.place(members), cluster).seconds
    assert found.step_ps <= 2 * to_ps(closed)


@pytest.mark.parametrize("cluster", cluster_names())
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "all_to_all", "broadcast", "barrier"])
@pytest.mark.parametrize("nbytes", [8, MIB, 256 * MIB])
def test_one_collective_at_a_time_is_its_closed_form_to_the_picosecond(
    cluster: str, kind: Kind, nbytes: int
) -> None:
    where = load_cluster(cluster)
    job = communications({"dp": 256}, (kind, "dp", nbytes, 0), (kind, "dp", nbytes, 1), chained=True)
    found = alone(Topology(cluster=where, gpus=256))(kind, nbytes, range(256))
    # Of two streams that need more than half of a link each, the engine must see that they do not meet.
    assert (shared(job, where).sharing.route >= 0).any() == (
        max(found.node_s, found.network_s) > found.seconds / 2
    )
    expected = to_ps(found.seconds)
    assert run(job, where).step_ps == 2 * expected
    if all(level.oversubscription == 1 for level in where.network.levels):
        assert 2 * expected == simulate(job, where, IDLE, memory=False).step_ps


def test_a_level_that_a_group_fills_alone_bounds_it() -> None:
    """All ranks of two leaves send half of their bytes to the other one, which its links up do not quite bear."""
    where = load_cluster("ethernet-100g")
    place = where.place(range(256))
    ports = collective_time("all_to_all", 2**30, place, where, network_bytes_per_s=12.5e9)
    bound = step_alone("all_to_all", 2**30, range(256), where)
    climbs, uplink = 2**30 * 128 * 128 / 256, 16 * 12.5e9 * 0.8 / 2
    assert bound > ports.seconds
    assert bound == pytest.approx(climbs / uplink, rel=0.01)


@pytest.mark.parametrize("cluster", ["dgx-h100", "azure-nd-a100-v4", "aws-p5", "gb200-nvl72"])
@pytest.mark.parametrize("shape", ["data-parallel", "sharded", "pipelined"])
def test_with_a_nic_a_gpu_and_one_communication_at_a_time_flows_are_the_closed_form(
    cluster: str, shape: str
) -> None:
    where, step = load_cluster(cluster), fold(layered_step(4))
    job = {
        "data-parallel": lambda: DataParallel(replicas=144)(step),
        "sharded": lambda: FullyShard(replicas=144, shard=144)(step),
        "pipelined": lambda: Pipeline(stages=2, micro_batches=1)(step),
    }[shape]()
    job = timed(job, where.device, 30 * US)
    closed = simulate(job, where, HOST, memory=False)
    both = simulate(job, where, HOST, memory=False, network="flows")
    assert (both.step_ps, both.breakdown) == (closed.step_ps, closed.breakdown)
    assert both.interval_ps == closed.interval_ps
    assert (both.network, closed.network) == ("flows", "closed-form")
    forced = simulate(job, where, HOST, memory=False, network="flows", engine="events")
    assert (forced.step_ps, forced.engine) == (both.step_ps, "events")


@pytest.mark.parametrize("nodes", [2, 8])
def test_siblings_on_shared_nics_take_what_the_closed_form_assumes(nodes: int) -> None:
    where = load_cluster("jean-zay-a100")
    job = communications({"dp": nodes, "tp": 8}, ("all_reduce", "dp", 256 * MIB, 0))
    closed = simulate(job, where, IDLE, memory=False).step_ps
    alone_s = step_alone("all_reduce", 256 * MIB, range(0, 8 * nodes, 8), where)
    found = run(job, where)
    assert found.step_ps == pytest.approx(closed, rel=0.03)
    assert found.step_ps > 1.9 * to_ps(alone_s)
    assert found.links[0].utilisation == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather"])
def test_siblings_over_an_oversubscribed_leaf_take_what_the_closed_form_assumes(kind: Kind) -> None:
    """One rank of each group a leaf, so that all they send climbs."""
    where = load_cluster("ethernet-100g")
    job = communications({"dp": 4, "rest": 128}, (kind, "dp", 256 * MIB, 0))
    closed = simulate(job, where, IDLE, memory=False).step_ps
    assert run(job, where).step_ps == pytest.approx(closed, rel=0.03)


def test_two_groups_on_one_nic_take_twice_as_long() -> None:
    """Two GPUs a node behind one NIC, and messages long enough that nothing else counts."""
    where = load_cluster("ethernet-100g")
    where = replace(where, gpus_per_node=2, domain_gpus=2)
    both = communications({"dp": 4, "tp": 2}, ("all_gather", "dp", 2**33, 0))
    one = communications({"dp": 4, "tp": 2}, ("all_gather", "tp", 8, 0), ("all_gather", "dp", 2**33, 0))
    by_itself = to_ps(step_alone("all_gather", 2**33, range(0, 8, 2), where))
    assert run(both, where).step_ps == pytest.approx(2 * by_itself, rel=2e-3)
    assert run(one, where).step_ps > 2 * by_itself * 0.99


def test_two_streams_on_one_nic_share_it_while_both_run() -> None:
    """The shorter one has half of the NIC until it ends, the longer one then all of it."""
    where = load_cluster("dgx-h100")
    long, short = 2**34, 2**33
    job = communications({"dp": 4, "tp": 8}, ("all_gather", "dp", long, 0), ("all_gather", "dp", short, 1))
    seconds = [step_alone("all_gather", size, range(0, 32, 8), where) for size in (long, short)]
    assert run(job, where).step_ps == pytest.approx(to_ps(sum(seconds)), rel=1e-3)
    alone_then = communications({"dp": 4, "tp": 8}, ("all_gather", "dp", long, 0), ("all_gather", "dp", short, 0))
    assert run(alone_then, where).step_ps == sum(map(to_ps, seconds))


@pytest.mark.parametrize("factor", [0.5, 0.1])
@pytest.mark.parametrize("kind", ["all_gather", "all_reduce"])
def test_a_degraded_nic_slows_its_ring_by_the_closed_form(factor: float, kind: Kind) -> None:
    where = load_cluster("dgx-h100")
    job = communications({"dp": 4, "tp": 8}, (kind, "dp", 2**33, 0))
    place = where.place(range(0, 32, 8))
    slow = collective_time(kind, 2**33, place, where, algorithm="ring", network_bytes_per_s=factor * 50e9).seconds
    healthy = collective_time(kind, 2**33, place, where, algorithm="ring", network_bytes_per_s=50e9).seconds
    usual = run(job, where).step_ps
    assert usual == pytest.approx(to_ps(healthy), rel=1e-3)
    for link in ("node 2 nic 5", "node 2 nic 5 out", "node 0 nic 5 in"):
        found = run(job, worse(where, link, factor), network="auto")
        assert found.step_ps == pytest.approx(to_ps(slow), rel=2e-3)
        assert found.degraded == (f"{link} at {factor:.0%}",)
        assert (found.engine, found.network) == ("events", "flows")
    assert run(job, worse(where, "leaf 0 rail 5", factor)).step_ps == usual


def test_a_degraded_nic_slows_its_group_alone() -> None:
    where = load_cluster("dgx-h100")
    job = communications({"dp": 4, "tp": 8}, ("all_gather", "dp", 2**30, 0))
    ranks = run(job, worse(where, "node 2 nic 5", 0.5)).ranks
    assert ranks is not None
    slow = np.flatnonzero(ranks.end_ps > ranks.end_ps.min())
    assert slow.tolist() == [5, 13, 21, 29]


def test_degraded_links_are_never_left_out_in_silence() -> None:
    where = worse(load_cluster("dgx-h100"), "node 0 nic 0", 0.5)
    job = communications({"dp": 16}, ("all_reduce", "dp", MIB, 0))
    with pytest.raises(UsageError, match="'node 0 nic 0' is degraded"):
        run(job, where, network="closed-form")
    with pytest.raises(UsageError, match="engine 'static'"):
        run(job, where, engine="static")
    with pytest.raises(SimulationError, match="'node 0 nic 0' is degraded"):
        durations(job, where)
    with pytest.raises(UsageError, match="no link 'node 0 nic 8'"):
        run(job, worse(where, "node 0 nic 8", 0.5))


def test_a_slow_node_computes_slower() -> None:
    where = load_cluster("dgx-h100")
    job = timed(DataParallel(replicas=16)(fold(layered_step(4))), where.device, 300 * US)
    slow = simulate(job, replace(where, slow_nodes=(SlowNode(node=1, compute=0.5),)), HOST, memory=False)
    named = simulate(job, where, HOST, memory=False, ranks=EveryRank(slow=dict.fromkeys(range(8, 16), 2.0)))
    assert slow.step_ps == named.step_ps > simulate(job, where, HOST, memory=False).step_ps
    assert slow.degraded == ("node 1 computes at 50%",)
    assert slow.network == "closed-form"


def pipelined(gpus: int, where: Cluster) -> JobGraph:
    staged = Pipeline(stages=4, micro_batches=6)(fold(layered_step(8)))
    return timed(DataParallel(replicas=gpus // 4)(staged), where.device, 20 * US)


@pytest.mark.parametrize("cluster", ["jean-zay-a100", "ethernet-100g", "dgx-h100"])
def test_utilisation_is_at_most_one_and_symmetric_ranks_end_together(cluster: str) -> None:
    where = load_cluster(cluster)
    for job in (
        timed(DataParallel(replicas=128)(fold(layered_step(4))), where.device, 20 * US),
        timed(FullyShard(replicas=128, shard=8)(fold(layered_step(4))), where.device, 20 * US),
    ):
        found = simulate(job, where, HOST, memory=False, network="flows")
        assert found.links
        assert all(0 < link.utilisation <= 1 + 1e-9 for link in found.links)
        assert found.ranks is not None
        assert len(np.unique(found.ranks.end_ps)) == 1
        assert found.breakdown.total == found.step_ps


def test_the_engine_carries_what_the_routes_say() -> None:
    from echograph.simulator.engine.columns import alone as apart
    from echograph.simulator.engine.events import run_columns

    where = load_cluster("jean-zay-a100")
    job = pipelined(128, where)
    links = Topology(cluster=where, gpus=128)
    times = durations(job, where, alone(links))
    tasks = expand(job, times.picoseconds, HOST.issue(job), lambda number, row: meeting(job, number, row))
    its = flows(job, tasks, times, links)
    columns = apart(tasks, np.zeros(len(tasks), np.int32), np.ones((1, 32)))
    place, places = Mesh(job).places(tasks)
    carried = run_columns(tasks, replace(columns, place=place, places=places), its.sharing).carried
    simulated = carried > 0
    assert simulated.any()
    assert carried[simulated] == pytest.approx(its.carried[simulated], rel=1e-6)


def test_written_out_ranks_share_links_as_columns_do() -> None:
    where = load_cluster("jean-zay-a100")
    job = pipelined(32, where)
    folded = simulate(job, where, HOST, memory=False, network="flows")
    unfolded = simulate(UnfoldRanks()(job), where, HOST, memory=False, network="flows")
    assert unfolded.step_ps == pytest.approx(folded.step_ps, abs=1000)
    assert folded.ranks is not None and unfolded.ranks is not None
    assert np.abs(folded.ranks.end_ps - unfolded.ranks.end_ps).max() <= 1000


def test_two_runs_give_the_same_bytes() -> None:
    where = worse(load_cluster("jean-zay-a100"), "node 1 nic 2", 0.7)
    job = pipelined(64, where)
    noisy = {"ranks": EveryRank(jitter=0.1, seed=3, draws=2, slow={5: 1.2})}
    records = [simulate(job, where, HOST, memory=False, **noisy).to_json() for _ in range(2)]
    for record in records:
        record["simulation"].pop("wall_s")
    assert json.dumps(records[0]) == json.dumps(records[1])
    assert records[0]["simulation"] | {"tasks": 0} == {
        "engine": "events", "network": "flows", "ranks": 64, "tasks": 0,
    }  # fmt: skip
    assert len(records[0]["links"]) == 5
    assert set(records[0]["links"][0]) == {"name", "alike", "utilisation", "bytes"}


def test_an_imported_duration_carries_the_bytes_of_the_model() -> None:
    """Two groups with measured times share a NIC that one of them fills."""
    where = replace(load_cluster("ethernet-100g"), gpus_per_node=2, domain_gpus=2)
    builder = GraphBuilder(streams=("comm",))
    builder.mesh = (Axis(name="dp", size=4), Axis(name="tp", size=2))
    group = builder.group("dp", axes=("dp",))
    nbytes, bandwidth = 2**30, 12.5e9 * 0.8
    least = to_ps(3 / 4 * nbytes / bandwidth)
    took = (Duration(device="trace", picoseconds=int(1.5 * least), source=Source.IMPORTED),)
    builder.collective(
        "gather", CollectiveKind.ALL_GATHER, group=group, bytes_per_rank=nbytes, dtype=DType.BF16, durations=took
    )
    builder.program([(0, 0, 1, 0, 0)], role="all")
    job = builder.build(JobGraph)
    assert simulate(job, where, IDLE, memory=False).step_ps == int(1.5 * least)
    volume = alone(Topology(cluster=where, gpus=8))("all_gather", nbytes, range(0, 8, 2)).network_s
    assert run(job, where).step_ps == pytest.approx(to_ps(2 * volume), rel=1e-6)


def test_timelines_of_chosen_ranks() -> None:
    where = worse(load_cluster("dgx-h100"), "node 2 nic 5", 0.2)
    job = pipelined(64, where)
    found = simulate(job, where, HOST, memory=False, trace_ranks=(0, 21, 63))
    traced, ranks = found.traced, found.ranks
    assert traced is not None and ranks is not None
    assert traced.programs == ("rank 0", "rank 21", "rank 63")
    for number, rank in enumerate((0, 21, 63)):
        mine = traced.program == number
        assert traced.end[mine].max() == ranks.end_ps[rank]
        assert np.isin(traced.cause[mine & (traced.cause >= 0)], np.flatnonzero(mine)).all()
    known = traced.cause >= 0
    assert (traced.start[known] == traced.end[traced.cause[known]]).all()
    roles = simulate(job, load_cluster("dgx-h100"), HOST, memory=False, trace_ranks=(17,))
    assert roles.traced is not None
    mine = roles.timeline.program == 1
    assert np.array_equal(roles.traced.start, roles.timeline.start[mine])
    with pytest.raises(SimulationError, match="no rank 64 to trace: give ranks from 0 to 63"):
        simulate(job, where, HOST, memory=False, trace_ranks=(64,))


def test_busy_time_is_that_of_the_links_as_they_were() -> None:
    where = load_cluster("jean-zay-a100")
    job = communications({"dp": 8, "tp": 8}, ("all_reduce", "dp", 256 * MIB, 0))
    found = run(job, where)
    assert found.collectives["dp"]["busy_s"] == pytest.approx(to_s(found.step_ps))


def test_what_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    where = load_cluster("dgx-h100")
    job = communications({"dp": 16}, ("all_reduce", "dp", MIB, 0))
    monkeypatch.setattr(fidelity, "MAX_EVENTS", 31)
    with pytest.raises(SimulationError, match="32 tasks of all ranks are over the event engine") as caught:
        run(job, where, engine="events")
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(fidelity, "MAX_EVENTS", 64)
    with pytest.raises(SimulationError, match=r"32 tasks of all ranks, 3 times, are over"):
        run(job, where, engine="events", ranks=EveryRank(draws=3, jitter=0.1))
    with pytest.raises(UnknownNameError, match="did you mean 'flows'"):
        run(job, where, network="flow")


def test_messages_of_a_pipeline_share_a_nic_with_gradients() -> None:
    where = load_cluster("jean-zay-a100")
    job = pipelined(128, where)
    kinds = job.ops.kind
    assert (kinds == OpKind.SEND).any() and (kinds == OpKind.COLLECTIVE).any()
    its = shared(job, where, HOST)
    names = {its.topology.kind(link) for link in np.flatnonzero(its.carried).tolist()}
    assert names == {"gpu", "nic"}


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


@pytest.mark.parametrize(
    ("job", "link", "slowed"),
    [
        (forward(4), "node 0 nic 5 out", [5, 13]),
        (forward(4), "node 0 nic 5 in", []),
        (forward(4), "node 2 nic 5 in", [13, 21]),
        (forward(4), "node 3 nic 5 out", []),
        (forward(4), "leaf 0", []),
        (around(5), "node 1 nic 5 out", [13, 29]),
        (around(5), "node 1 nic 5 in", [13, 37]),
    ],
)
def test_a_message_loads_its_senders_way_out_and_its_receivers_way_in(
    job: JobGraph, link: str, slowed: list[int]
) -> None:
    where = load_cluster("dgx-h100")
    healthy, found = run(job, where).ranks, run(job, worse(where, link, 0.5)).ranks
    assert healthy is not None and found is not None
    ratio = found.end_ps / healthy.end_ps
    assert np.flatnonzero(ratio > 1.9).tolist() == slowed
    assert (ratio[np.setdiff1d(np.arange(job.world_size), slowed)] == 1).all()


def test_a_message_between_listed_ranks_has_its_way_too() -> None:
    builder = GraphBuilder(streams=("comm",))
    group = builder.group("pair", ranks=(8, 21))
    builder.send("send", group=group, peer=1, tag=0, nbytes=2**33)
    builder.recv("recv", group=group, peer=-1, tag=0, nbytes=2**33)
    for number, rank in enumerate((8, 21)):
        builder.program([(0, number, number + 1, 0, 0)], role=f"rank {rank}", ranks=[rank])
    job, where = builder.build(JobGraph), load_cluster("dgx-h100")
    names = [link.name for link in run(job, where).links]
    assert names == ["node 1 nic 0 out", "leaf 0 rail 0 up"]  # of those used alike, the first
    usual = run(job, where).step_ps
    for link, ratio in (("node 1 nic 0 out", 2), ("node 2 nic 5 in", 2), ("node 2 nic 5 out", 1)):
        assert run(job, worse(where, link, 0.5)).step_ps == pytest.approx(ratio * usual, rel=1e-3)

"""Flow level: collectives alone take their closed form, and what shares a link shares its bandwidth."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from flow_jobs import (
    HOST,
    IDLE,
    MIB,
    US,
    communications,
    listed,
    pipelined,
    run,
    shared,
    step_alone,
    worse,
)
from hypothesis import given
from hypothesis import strategies as st
from layered import layered_step, timed

from echograph.errors import SimulationError, UnknownNameError
from echograph.ir.builder import GraphBuilder
from echograph.ir.graph import Axis, JobGraph
from echograph.ir.passes.data_parallel import DataParallel
from echograph.ir.passes.fold import Fold
from echograph.ir.passes.fully_shard import FullyShard
from echograph.ir.passes.mesh import UnfoldRanks
from echograph.ir.passes.pipeline import Pipeline
from echograph.ir.types import CollectiveKind, DType, Duration, Source
from echograph.simulator import simulate as simulation
from echograph.simulator.clusters import Cluster, cluster_names, load_cluster
from echograph.simulator.collectives import KINDS, CollectiveName, collective_time
from echograph.simulator.durations import durations
from echograph.simulator.engine.columns import apart
from echograph.simulator.flows import alone, flows
from echograph.simulator.network.topology import Topology
from echograph.simulator.ranks import EveryRank, Mesh
from echograph.simulator.simulate import simulate
from echograph.simulator.tasks import expand
from echograph.units import to_ps, to_s


@given(
    cluster=st.sampled_from(cluster_names()).map(load_cluster),
    kind=st.sampled_from([kind for kind in KINDS if kind != "send_recv"]),
    nbytes=st.integers(0, 2**36),
    ranks=st.integers(2, 24),
    stride=st.sampled_from([1, 2, 4, 8, 16]),
)
def test_a_collective_alone_is_never_slowed(
    cluster: Cluster, kind: CollectiveName, nbytes: int, ranks: int, stride: int
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
    cluster: str, kind: CollectiveName, nbytes: int
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
    where, step = load_cluster(cluster), Fold()(layered_step(4))
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
def test_siblings_over_an_oversubscribed_leaf_take_what_the_closed_form_assumes(kind: CollectiveName) -> None:
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


@pytest.mark.parametrize("cluster", ["jean-zay-a100", "ethernet-100g", "dgx-h100"])
def test_utilisation_is_at_most_one_and_symmetric_ranks_end_together(cluster: str) -> None:
    where = load_cluster(cluster)
    for job in (
        timed(DataParallel(replicas=128)(Fold()(layered_step(4))), where.device, 20 * US),
        timed(FullyShard(replicas=128, shard=8)(Fold()(layered_step(4))), where.device, 20 * US),
    ):
        found = simulate(job, where, HOST, memory=False, network="flows")
        assert found.links
        assert all(0 < link.utilisation <= 1 + 1e-9 for link in found.links)
        assert found.ranks is not None
        assert len(np.unique(found.ranks.end_ps)) == 1
        assert found.breakdown.total == found.step_ps


def test_the_engine_carries_what_the_routes_say() -> None:
    from echograph.simulator.engine.events import run_columns

    where = load_cluster("jean-zay-a100")
    job = pipelined(128, where)
    links = Topology(cluster=where, gpus=128)
    times = durations(job, where, alone(links))
    tasks = expand(job, times.picoseconds, HOST.issue(job))
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


def test_busy_time_is_that_of_the_links_as_they_were() -> None:
    where = load_cluster("jean-zay-a100")
    job = communications({"dp": 8, "tp": 8}, ("all_reduce", "dp", 256 * MIB, 0))
    found = run(job, where)
    assert found.collectives["dp"]["busy_s"] == pytest.approx(to_s(found.step_ps))


def test_what_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    where = load_cluster("dgx-h100")
    job = communications({"dp": 16}, ("all_reduce", "dp", MIB, 0))
    monkeypatch.setattr(simulation, "MAX_EVENTS", 31)
    with pytest.raises(SimulationError, match="32 tasks of all ranks are over the event engine") as caught:
        run(job, where, engine="events")
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(simulation, "MAX_EVENTS", 64)
    with pytest.raises(SimulationError, match=r"32 tasks of all ranks, 3 times, are over"):
        run(job, where, engine="events", ranks=EveryRank(draws=3, jitter=0.1))
    with pytest.raises(UnknownNameError, match="did you mean 'flows'"):
        run(job, where, network="flow")

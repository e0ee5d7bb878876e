"""Flow level: degraded links, slow nodes, the ways of messages, and the timelines of ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from flow_jobs import (
    HOST,
    MIB,
    US,
    around,
    communications,
    forward,
    pipelined,
    run,
    shared,
    worse,
)
from layered import layered_step, timed

from echograph.errors import SimulationError, UsageError
from echograph.ir.builder import GraphBuilder
from echograph.ir.graph import JobGraph
from echograph.ir.passes.data_parallel import DataParallel
from echograph.ir.passes.fold import Fold
from echograph.ir.types import OpKind
from echograph.simulator.clusters import SlowNode, load_cluster
from echograph.simulator.collectives import CollectiveName, collective_time
from echograph.simulator.durations import durations
from echograph.simulator.ranks import EveryRank
from echograph.simulator.simulate import simulate
from echograph.units import to_ps


@pytest.mark.parametrize("factor", [0.5, 0.1])
@pytest.mark.parametrize("kind", ["all_gather", "all_reduce"])
def test_a_degraded_nic_slows_its_ring_by_the_closed_form(factor: float, kind: CollectiveName) -> None:
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
    job = timed(DataParallel(replicas=16)(Fold()(layered_step(4))), where.device, 300 * US)
    slow = simulate(job, replace(where, slow_nodes=(SlowNode(node=1, compute=0.5),)), HOST, memory=False)
    named = simulate(job, where, HOST, memory=False, ranks=EveryRank(slow=dict.fromkeys(range(8, 16), 2.0)))
    assert slow.step_ps == named.step_ps > simulate(job, where, HOST, memory=False).step_ps
    assert slow.degraded == ("node 1 computes at 50%",)
    assert slow.network == "closed-form"


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


def test_messages_of_a_pipeline_share_a_nic_with_gradients() -> None:
    where = load_cluster("jean-zay-a100")
    job = pipelined(128, where)
    kinds = job.ops.kind
    assert (kinds == OpKind.SEND).any() and (kinds == OpKind.COLLECTIVE).any()
    its = shared(job, where, HOST)
    names = {its.topology.kind(link) for link in np.flatnonzero(its.carried).tolist()}
    assert names == {"gpu", "nic"}

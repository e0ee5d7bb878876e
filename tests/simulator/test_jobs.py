"""Several jobs on one fabric: what they lose to each other by closed forms, and nothing elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from flow_jobs import HOST, IDLE, MIB, communications, pipelined, run, worse

from echograph.errors import PlanError, SimulationError
from echograph.ir.graph import JobGraph
from echograph.simulator.clusters import Cluster, load_cluster
from echograph.simulator.durations import durations
from echograph.simulator.engine import Roles
from echograph.simulator.flows import alone
from echograph.simulator.host import IssueTimes
from echograph.simulator.jobs import PlacedJob, Storage, simulate_together
from echograph.simulator.network.topology import Topology
from echograph.units import to_ps, to_s

REDUCE = communications({"dp": 2, "tp": 8}, ("all_reduce", "dp", 512 * MIB, 0))
"""Over two nodes, by all of their NICs; the uplink of a leaf is all that one job asks for."""
PIPELINE = pipelined(32, load_cluster("dgx-h100"))


def leaves(oversubscription: float = 2.0) -> Cluster:
    """Leaves of two nodes whose uplinks bear what one node sends."""
    cluster = load_cluster("dgx-h100")
    low, high = cluster.network.levels[0], cluster.network.levels[-1]
    levels = (replace(low, gpus=16, oversubscription=1.0), replace(high, oversubscription=oversubscription))
    return replace(cluster, network=replace(cluster.network, rails=1, levels=levels))


def nodes(*numbers: int) -> list[int]:
    return [8 * node + gpu for node in numbers for gpu in range(8)]


def placed(
    name: str,
    job: JobGraph,
    gpus: Sequence[int],
    cluster: Cluster,
    storage: Storage = Storage(),  # noqa: B008
    host: IssueTimes = IDLE,
) -> PlacedJob:
    where = np.array(gpus)
    times = durations(job, cluster, alone(Topology(cluster=cluster, gpus=cluster.max_gpus), where))
    roles = Roles(job=job, times=times, issue=host.issue(job), host=host)
    return PlacedJob(name=name, roles=roles, gpus=where, storage=storage)


def test_two_equal_all_reduces_on_one_uplink_have_half_of_it_each() -> None:
    cluster = leaves()
    pair = [placed("a", REDUCE, nodes(0, 2), cluster), placed("b", REDUCE, nodes(1, 3), cluster)]
    (a, b), contended = simulate_together(pair, cluster)
    assert a.shared_ps == b.shared_ps and a.alone_ps == b.alone_ps == a.step_ps
    (up,) = contended
    assert (up.name, up.alike, up.nbytes["a"]) == ("leaf 0 up", 4, up.nbytes["b"])
    # The uplink carries both at its full rate from the first byte to the last.
    topology = Topology(cluster=cluster, gpus=32)
    uplink = topology.capacity[topology.find("leaf 0 up")[0][0]]
    assert to_s(int(a.shared_ps)) == pytest.approx(2 * up.nbytes["a"] / uplink, rel=1e-6)
    assert a.slowdown == pytest.approx(2, rel=0.01)
    assert up.utilisation == pytest.approx(1, rel=1e-6)


def test_with_uplinks_for_all_they_leave_each_other_alone() -> None:
    cluster = leaves(1.0)
    pair = [placed("a", REDUCE, nodes(0, 2), cluster), placed("b", REDUCE, nodes(1, 3), cluster)]
    shares, contended = simulate_together(pair, cluster)
    assert all(share.shared_ps == share.alone_ps for share in shares) and not contended


def test_jobs_apart_take_what_each_takes_alone_to_the_picosecond() -> None:
    cluster = leaves()
    jobs = [PIPELINE, REDUCE, communications({"dp": 64}, ("all_gather", "dp", 64 * MIB, 0))]
    at, parts = 0, []
    for number, job in enumerate(jobs):
        count = -(-job.world_size // 16) * 2
        parts.append(placed(f"{number}", job, nodes(*range(at, at + count))[: job.world_size], cluster, host=HOST))
        at += count
    shares, contended = simulate_together(parts, cluster)
    assert not contended
    assert [share.shared_ps for share in shares] == [share.alone_ps for share in shares]


@pytest.mark.parametrize("job", [REDUCE, PIPELINE, communications({"dp": 16}, ("all_to_all", "dp", MIB, 0))])
def test_alone_on_the_first_gpus_a_job_takes_what_a_lone_simulation_says(job: JobGraph) -> None:
    cluster = leaves()
    (share,), _ = simulate_together([placed("a", job, range(job.world_size), cluster)], cluster)
    assert share.step_ps == share.alone_ps == share.shared_ps == run(job, cluster).step_ps


def test_a_short_job_repeats_its_step_while_a_long_one_runs() -> None:
    cluster = leaves()
    short = communications({"dp": 2, "tp": 8}, ("all_reduce", "dp", 32 * MIB, 0))
    long, brief = simulate_together(
        [placed("long", REDUCE, nodes(0, 2), cluster), placed("brief", short, nodes(1, 3), cluster)], cluster
    )[0]
    # Both are on the uplink all the time, so both are slowed as if they were alike.
    assert long.steps == 1 and brief.steps >= 15
    assert long.slowdown == pytest.approx(2, rel=0.02) and brief.slowdown == pytest.approx(2, rel=0.06)


def test_a_worse_link_slows_the_job_that_has_it_alone_as_well() -> None:
    cluster = worse(leaves(), "node 0", 0.5)
    pair = [placed("a", REDUCE, nodes(0, 2), cluster), placed("b", REDUCE, nodes(1, 3), cluster)]
    a, b = simulate_together(pair, cluster)[0]
    assert a.alone_ps == pytest.approx(2 * b.alone_ps, rel=0.01)


GB = 10**9
STEP_S = to_s(simulate_together([placed("a", REDUCE, nodes(0, 1), leaves())], leaves())[0][0].step_ps)


@pytest.mark.parametrize("read", [0.5, 1.0, 3.0])
def test_a_step_ends_no_sooner_than_the_next_samples_are_there(read: float) -> None:
    cluster, storage = leaves(), Storage(bytes_per_s=GB, read_bytes=read * STEP_S * GB)
    (share,), _ = simulate_together([placed("a", REDUCE, nodes(0, 1), cluster, storage)], cluster)
    assert share.step_ps == to_ps(STEP_S)
    assert share.alone_ps == pytest.approx(to_ps(STEP_S) * max(1.0, read), rel=1e-9)


def test_reads_of_two_jobs_share_the_storage() -> None:
    cluster, storage = leaves(1.0), Storage(bytes_per_s=GB, read_bytes=2 * STEP_S * GB)
    pair = [placed("a", REDUCE, nodes(0, 1), cluster, storage), placed("b", REDUCE, nodes(2, 3), cluster, storage)]
    shares, contended = simulate_together(pair, cluster)
    assert [link.name for link in contended] == ["storage"]
    assert contended[0].utilisation == pytest.approx(1, rel=1e-9)
    for share in shares:
        assert share.shared_ps == pytest.approx(2 * share.alone_ps, rel=1e-9)


@pytest.mark.parametrize("every", [1, 4])
def test_a_checkpoint_stops_the_job_once_in_so_many_steps(every: int) -> None:
    cluster, storage = leaves(), Storage(bytes_per_s=GB, checkpoint_bytes=GB, every=every)
    (share,), _ = simulate_together([placed("a", REDUCE, nodes(0, 1), cluster, storage)], cluster)
    assert share.alone_ps == pytest.approx(share.step_ps + to_ps(1.0) / every, rel=1e-9)
    assert share.steps == every


def test_what_would_take_for_ever_is_refused() -> None:
    cluster = leaves(1.0)
    slow = placed("a", REDUCE, nodes(0, 1), cluster, Storage(bytes_per_s=1.0, read_bytes=1e9))
    with pytest.raises(SimulationError, match=r"a: what a step reads or writes takes .* 13 days"):
        simulate_together([slow], cluster)
    # A day of reading beside steps of a millisecond: some hundred million of these.
    slow = placed("a", REDUCE, nodes(0, 1), cluster, Storage(bytes_per_s=1.0, read_bytes=1e5))
    with pytest.raises(SimulationError, match="give smaller jobs, or some whose steps are more alike"):
        simulate_together([slow, placed("b", REDUCE, nodes(2, 3), cluster)], cluster)


def test_ranks_that_lie_unlike_or_on_one_gpu_are_refused() -> None:
    cluster = leaves()
    with pytest.raises(PlanError, match="tp groups lie differently on the nodes"):
        job = communications({"dp": 4, "tp": 4}, ("all_reduce", "tp", MIB, 0))
        simulate_together([placed("a", job, [*range(2), *range(8, 22)], cluster)], cluster)
    with pytest.raises(PlanError, match="GPU 8 is given to two ranks"):
        pair = [placed("a", REDUCE, nodes(0, 1), cluster), placed("b", REDUCE, nodes(1, 2), cluster)]
        simulate_together(pair, cluster)

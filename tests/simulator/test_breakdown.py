"""Whose step is split into parts, and how the parts differ between ranks."""

from __future__ import annotations

import numpy as np
import pytest
from layered import layered_step, timed

from echograph.ir.graph import JobGraph
from echograph.ir.passes.data_parallel import DataParallel
from echograph.ir.passes.fold import Fold
from echograph.ir.passes.mesh import UnfoldRanks
from echograph.ir.passes.pipeline import Pipeline
from echograph.simulator.breakdown import Breakdown, breakdown, breakdowns, spread
from echograph.simulator.clusters import load_cluster
from echograph.simulator.host import HostTimes
from echograph.simulator.ranks import EveryRank
from echograph.simulator.simulate import simulate

CLUSTER = load_cluster("dgx-h100")
HOST = HostTimes(op_ps=4_000_000, launch_ps=3_000_000)


def job(stages: int = 3, replicas: int = 4, micro_batches: int = 6) -> JobGraph:
    staged = Pipeline(stages=stages, micro_batches=micro_batches, schedule="1f1b", chunks=1)(
        Fold()(layered_step(6))
    )
    return timed(DataParallel(replicas=replicas)(staged), CLUSTER.device, 30_000_000)


def flat(parts: Breakdown) -> list[int]:
    return list(parts.flat().values())


@pytest.mark.parametrize("engine", ["auto", "events"])
def test_the_spread_is_that_of_all_roles(engine: str) -> None:
    one = job()
    result = simulate(one, CLUSTER, HOST, engine=engine)
    of_roles = [breakdown(one, result.timeline, number) for number in range(3)]
    assert breakdowns(one, result.timeline) == of_roles
    assert {parts.total for parts in of_roles} == {result.step_ps}
    assert result.breakdown == of_roles[result.ends_last.stage or 0]
    assert result.spread.mean.total == result.step_ps
    table = np.array([flat(parts) for parts in of_roles])
    assert flat(result.spread.least) == table.min(axis=0).tolist()
    assert flat(result.spread.most) == table.max(axis=0).tolist()
    assert np.abs(np.array(flat(result.spread.mean)) - table.mean(axis=0)).max() < table.shape[1]
    assert result.spread.ranks == one.world_size == 12


def test_the_mean_goes_over_ranks_not_over_roles() -> None:
    few, many = (
        Breakdown(compute=c, exposed_communication={"dp": 10 - c}, host=0, bubble=0, wait=0) for c in (2, 8)
    )
    found = spread([few, many], [1, 3])
    assert (found.ranks, found.mean.total) == (4, 10)
    assert found.mean.compute in (6, 7)
    assert (found.least.compute, found.most.compute) == (2, 8)


def test_the_mean_of_roles_is_that_of_the_job_written_out() -> None:
    folded, alone = (simulate(one, CLUSTER, HOST) for one in (job(), UnfoldRanks()(job())))
    assert folded.step_ps == alone.step_ps
    assert flat(folded.spread.mean) == flat(alone.spread.mean)
    assert (folded.spread.least, folded.spread.most) == (alone.spread.least, alone.spread.most)


def test_the_role_that_ends_last_is_named() -> None:
    one = job()
    result = simulate(one, CLUSTER, HOST)
    ends = [int(result.timeline.end[result.timeline.program == number].max()) for number in range(3)]
    last = result.ends_last
    assert last.stage == int(np.argmax(ends))
    assert last.name == one.programs[last.stage].role
    assert last.ranks == 4
    # The pipeline is the slowest axis of the mesh.
    assert last.rank == one.lowest_rank(last.stage) == 4 * last.stage


def test_where_every_rank_is_simulated_it_is_a_rank_that_is_named() -> None:
    result = simulate(job(), CLUSTER, HOST, ranks=EveryRank(slow={6: 2.0}))
    assert result.ranks is not None
    assert result.ranks.end_ps[result.ends_last.rank] == result.step_ps
    assert result.spread.ranks == 3
    assert result.path is not None
    assert result.path.ranks[0].rank == 6
    assert sum(result.limits.values()) == result.step_ps
    record = result.to_json()
    assert record["limits_by_rank"][0]["slower"] == 2.0
    parts = record["breakdown_mean_s"]
    total = sum(parts["exposed_communication"].values()) + sum(
        parts[k] for k in ("compute", "bubble", "wait", "host")
    )
    assert total == pytest.approx(record["step_time_s"])

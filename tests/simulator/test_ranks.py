"""Every rank: folded and written-out jobs agree, slow ranks slow those that wait for them."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import pytest
import reference_engine as reference
from layered import layered_step, timed

from echograph.errors import PlanError, SimulationError, UsageError
from echograph.ir.builder import GraphBuilder
from echograph.ir.graph import Axis, JobGraph
from echograph.ir.passes import mesh
from echograph.ir.passes.data_parallel import DataParallel
from echograph.ir.passes.fold import Fold
from echograph.ir.passes.fully_shard import FullyShard
from echograph.ir.passes.mesh import UnfoldRanks
from echograph.ir.passes.pipeline import Pipeline
from echograph.ir.types import CollectiveKind, DType, Duration, OpKind, Source
from echograph.simulator.clusters import load_cluster
from echograph.simulator.durations import durations
from echograph.simulator.engine import static
from echograph.simulator.engine.machine_code import compiled
from echograph.simulator.host import IssueTimes
from echograph.simulator.limits import KERNELS
from echograph.simulator.ranks import MOST_TOLD, EveryRank, Mesh, RankPath, rank_path, run_every_rank
from echograph.simulator.simulate import check_effort, left_over, simulate
from echograph.simulator.tasks import TaskGraph, expand

CLUSTER = load_cluster("dgx-h100")
HOST = IssueTimes(op_ps=4_000_000, launch_ps=3_000_000)
US = 1_000_000


def data_parallel(**options: int) -> JobGraph:
    return DataParallel(**options)(Fold()(layered_step(4)))


def pipelined(stages: int, replicas: int, micro_batches: int, **options: object) -> JobGraph:
    staged = Pipeline(stages=stages, micro_batches=micro_batches, **options)(Fold()(layered_step(4)))
    return DataParallel(replicas=replicas)(staged)


def ring(size: int, replicas: int) -> JobGraph:
    """Ranks on a ring that work, and pass their work on three times, in data-parallel copies."""
    b = GraphBuilder(streams=("compute", "send", "recv", "dp"))
    b.mesh = (Axis(name="dp", size=replicas), Axis(name="cp", size=size))
    group, copies = b.group("cp", axes=("cp",)), b.group("dp", axes=("dp",))
    last = b.compute("work", flops=1)
    for hop in range(3):
        send = b.send("send", group=group, peer=1, tag=0, nbytes=2**20, stream=1, deps=[last])
        recv = b.recv("recv", group=group, peer=-1, tag=0, nbytes=2**20, stream=2, deps=[last])
        last = b.compute("work", flops=1 + hop, deps=[recv])
        last = b.compute("more", flops=1 + hop, deps=[send, last])
    b.collective(
        "sum", CollectiveKind.ALL_REDUCE, group=copies, bytes_per_rank=8, dtype=DType.FP32, stream=3, deps=[last]
    )
    b.program([(0, 0, b.op_count(), 0, 0)], role="all")
    return b.build(JobGraph)


JOBS = {
    "data-parallel": lambda: data_parallel(replicas=8),
    "accumulating": lambda: data_parallel(replicas=2, micro_batches=3),
    "hybrid sharded": lambda: FullyShard(replicas=8, shard=4)(Fold()(layered_step(4))),
    "pipeline": lambda: pipelined(4, 1, 6),
    "pipelines": lambda: pipelined(2, 4, 5),
    "interleaved": lambda: pipelined(2, 8, 4, schedule="interleaved", chunks=2),
    "rings": lambda: ring(4, 3),
}


def expanded(job: JobGraph) -> tuple[JobGraph, TaskGraph]:
    job = timed(job, CLUSTER.device, 30 * US)
    times = durations(job, CLUSTER)
    kernels = np.where(job.ops.kind == OpKind.COMPUTE, times.picoseconds * (1 + np.arange(len(job.ops)) % 7), 0)
    picoseconds = np.where(kernels > 0, kernels, times.picoseconds)
    return job, expand(job, picoseconds, HOST.issue(job))


def written_out(job: JobGraph, every: EveryRank) -> tuple[np.ndarray, np.ndarray]:
    """Start and end of all tasks, a row for each rank, by the event engine on one program a rank."""
    job, tasks = expanded(UnfoldRanks()(job))
    slower = np.array([every.slow.get(rank, 1.0) for rank in range(job.world_size)])[tasks.program]
    kernel = (tasks.lane == 1) & (job.ops.kind[tasks.op] == OpKind.COMPUTE)
    duration = np.where(kernel, np.rint(tasks.duration * slower), tasks.duration).astype(np.int64)
    start = reference.run(replace(tasks, duration=duration)).start
    return tasks.program, np.stack([start, start + duration])


@pytest.mark.parametrize("name", JOBS)
def test_one_program_a_rank_is_every_rank(name: str) -> None:
    job = JOBS[name]()
    unfolded = UnfoldRanks()(job)
    assert len(unfolded.programs) == job.world_size == unfolded.world_size
    assert all(len(p.coordinates) == len(job.mesh) for p in unfolded.programs)
    if len(job.mesh) > len(job.programs[0].coordinates):
        assert unfolded.unfolded_ops == job.unfolded_ops * job.world_size // len(job.programs)
    found = Mesh(job).ranks()
    for number, ranks in enumerate(found):
        for rank in ranks.tolist():
            assert np.array_equal(unfolded.programs[rank].calls, job.programs[number].calls)
    assert sorted(found.ravel().tolist()) == list(range(job.world_size))


@pytest.mark.parametrize("name", JOBS)
def test_equal_ranks_take_the_time_of_their_role_to_the_picosecond(name: str) -> None:
    job, tasks = expanded(JOBS[name]())
    folded = reference.run(tasks)
    its, times = run_every_rank(job, tasks, EveryRank())
    assert np.array_equal(its.duration, tasks.duration)
    assert np.array_equal(its.start, folded.start)
    assert np.array_equal(its.cause, folded.cause)
    assert not times.waited_ps.any()
    programs, (start, end) = written_out(job, EveryRank())
    assert end.max() == times.end_ps.max() == (folded.start + tasks.duration).max()
    ranks = Mesh(job).ranks()
    for number in range(len(job.programs)):
        for rank in ranks[number].tolist():
            assert np.array_equal(start[programs == rank], folded.start[tasks.program == number])


@pytest.mark.parametrize("slow", [{0: 1.5}, {3: 1.1}, {1: 2.0, 3: 1.3}])
@pytest.mark.parametrize("name", JOBS)
def test_slow_ranks_are_those_of_the_written_out_job(name: str, slow: dict[int, float]) -> None:
    job, tasks = expanded(JOBS[name]())
    every = EveryRank(slow={rank: factor for rank, factor in slow.items() if rank < job.world_size})
    its, times = run_every_rank(job, tasks, every)
    programs, (start, end) = written_out(job, every)
    ends = np.array([end[programs == rank].max() for rank in range(job.world_size)])
    assert np.array_equal(times.end_ps, ends)
    column = int(np.flatnonzero((ends[Mesh(job).ranks()] == ends.max()).any(axis=0))[0])
    for number, rank in enumerate(Mesh(job).ranks()[:, column].tolist()):
        mine = its.program == number
        assert np.array_equal(its.start[mine], start[programs == rank])
        assert np.array_equal(its.end[mine], end[programs == rank])
    known = its.cause >= 0
    assert np.array_equal(its.start[known], its.end[its.cause[known]])


def slower_each(job: JobGraph) -> EveryRank:
    """Ranks of which no two are alike, so that the critical path is one."""
    return EveryRank(slow={rank: 1 + 0.0137 * ((5 * rank) % 11) + 0.0001 * rank for rank in range(job.world_size)})


@pytest.mark.parametrize("name", JOBS)
def test_the_critical_path_goes_on_in_the_rank_that_was_waited_for(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the job that is written out, which has one program a rank, by the reference engine."""
    monkeypatch.setattr("echograph.simulator.ranks.MOST_COLUMNS", 1000)
    job, tasks = expanded(JOBS[name]())
    every = slower_each(job)
    its, times = run_every_rank(job, tasks, every)
    path = rank_path(job, every, times, its, lambda c: run_every_rank(job, tasks, every, column=c)[0])
    assert sum(path.limits.values()) == times.end_ps.max()
    assert "other ranks" not in path.limits
    alone, unfolded = expanded(UnfoldRanks()(job))
    slower = np.array([every.slow[rank] for rank in range(job.world_size)])[unfolded.program]
    kernel = (unfolded.lane == 1) & (alone.ops.kind[unfolded.op] == OpKind.COMPUTE)
    duration = np.where(kernel, np.rint(unfolded.duration * slower), unfolded.duration).astype(np.int64)
    found = reference.run(replace(unfolded, duration=duration))
    spent, task = np.zeros(job.world_size, np.int64), int(np.argmax(found.start + duration))
    while task >= 0:
        spent[unfolded.program[task]] += duration[task]
        task = int(found.cause[task])
    told = {one.rank: one.total_ps for one in path.ranks}
    assert told == {rank: value for rank, value in enumerate(spent.tolist()) if rank in told}
    assert max(spent.tolist()) in told.values()
    if np.count_nonzero(spent) <= MOST_TOLD:
        assert sum(told.values()) == times.end_ps.max()


@pytest.mark.parametrize(("name", "rank"), [("data-parallel", 5), ("pipelines", 3), ("hybrid sharded", 2)])
def test_a_straggler_is_named_and_its_share_is_the_derivative(name: str, rank: int) -> None:
    job, tasks = expanded(JOBS[name]())

    def run(factor: float) -> tuple[RankPath, int]:
        every = EveryRank(slow={rank: factor})
        its, times = run_every_rank(job, tasks, every)
        found = rank_path(job, every, times, its, lambda c: run_every_rank(job, tasks, every, column=c)[0])
        return found, int(times.end_ps.max())

    (path, step), (_, later) = run(3.0), run(3.001)
    first = path.ranks[0]
    assert (first.rank, first.slower) == (rank, 3.0)
    kernels = sum(value for work, value in first.limits.items() if work in KERNELS)
    assert later - step == pytest.approx(kernels * 0.001 / 3, rel=1e-3)


def test_where_no_rank_may_be_looked_at_again_the_rest_is_left_to_others() -> None:
    job, tasks = expanded(JOBS["pipelines"]())
    every = slower_each(job)
    its, times = run_every_rank(job, tasks, every)
    path = rank_path(job, every, times, its, lambda _: pytest.fail("looks again"), 0)
    assert sum(path.limits.values()) == times.end_ps.max()


def test_the_one_that_all_wait_for_waits_least() -> None:
    job, tasks = expanded(data_parallel(replicas=8))
    _, times = run_every_rank(job, tasks, EveryRank(slow={5: 1.2}))
    assert np.argmin(times.waited_ps) == 5
    assert times.waited_ps[5] == 0
    assert (np.delete(times.waited_ps, 5) > 0).all()


def test_jitter_is_drawn_from_the_seed_and_slows_the_slowest() -> None:
    job, tasks = expanded(data_parallel(replicas=32))
    step = run_every_rank(job, tasks, EveryRank())[1].end_ps.max()
    ends = [run_every_rank(job, tasks, EveryRank(jitter=0.05, seed=seed))[1].end_ps.tolist() for seed in (1, 1, 2)]
    assert ends[0] == ends[1] != ends[2]
    assert min(max(e) for e in ends) > step


def test_the_noise_is_normal_enough() -> None:
    noise = compiled(static.noise)
    drawn = np.array([noise(np.uint64(7), task, column) for task in range(400) for column in range(100)])
    assert abs(drawn.mean()) < 0.02
    assert abs(drawn.std() - 1) < 0.02
    assert abs((np.abs(drawn) < 1.645).mean() - 0.9) < 0.01
    grid = drawn.reshape(400, 100)
    assert abs(np.corrcoef(grid[:, 0], grid[:, 1])[0, 1]) < 0.2
    assert abs(np.corrcoef(grid[0], grid[1])[0, 1]) < 0.4


def test_simulate_answers_with_every_rank() -> None:
    job = timed(pipelined(2, 8, 4), CLUSTER.device, 30 * US)
    roles = simulate(job, CLUSTER, HOST)
    equal = simulate(job, CLUSTER, HOST, ranks=EveryRank())
    slower = simulate(job, CLUSTER, HOST, ranks=EveryRank(slow={3: 1.5}))
    assert (roles.ranks, equal.step_ps, equal.breakdown) == (None, roles.step_ps, roles.breakdown)
    assert equal.interval_ps == roles.interval_ps
    assert (equal.simulated_ranks, equal.tasks) == (16, roles.tasks * 8)
    assert slower.step_ps > roles.step_ps
    assert slower.breakdown.total == slower.step_ps
    assert slower.interval_ps[0] <= slower.step_ps <= slower.interval_ps[1]
    record = slower.to_json()
    assert record["ranks"]["end_s"]["max"] == slower.step_ps / 1e12
    assert record["simulation"]["ranks"] == prod((2, 8))
    assert "ranks" not in roles.to_json()


def test_ranks_that_are_not_there_are_refused() -> None:
    job, tasks = expanded(data_parallel(replicas=8))
    for rank in (8, -1):
        with pytest.raises(SimulationError, match=f"no rank {rank} .* from 0 to 7"):
            run_every_rank(job, tasks, EveryRank(slow={rank: 1.1}))


@pytest.mark.parametrize(
    "wrong",
    [
        {"slow": {0: 0.0}},
        {"slow": {0: 1e9}},
        {"jitter": -0.1},
        {"jitter": float("nan")},
        {"seed": -1},
        {"slow": {0: 1000.1}},
        {"jitter": 0.51},
        {"seed": 2**63},
    ],
)
def test_numbers_out_of_range_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=": give a"):
        EveryRank(**wrong)


def test_the_last_numbers_in_range_are_not() -> None:
    assert EveryRank(slow={0: 1000.0}, jitter=0.5, seed=2**63 - 1).seed == 2**63 - 1
    assert EveryRank(slow={0: 1e-9}, jitter=0.0, seed=0).seed == 0


def test_a_step_beyond_the_clock_is_refused() -> None:
    job, tasks = expanded(data_parallel(replicas=2))
    days = replace(tasks, duration=tasks.duration + 2**63 // (500 * len(tasks)))
    with pytest.raises(SimulationError, match="more than 107 days"):
        run_every_rank(job, days, EveryRank(slow={0: 600.0}))


def test_segments_are_of_roles_only() -> None:
    job = timed(data_parallel(replicas=8), CLUSTER.device, 30 * US)
    with pytest.raises(UsageError, match="engine 'segments' simulates roles"):
        simulate(job, CLUSTER, HOST, engine="segments", ranks=EveryRank())


def test_what_is_too_large_is_not_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh, "MAX_CALLS", 50)
    with pytest.raises(PlanError, match=r"8 ranks with .* at most 50"):
        UnfoldRanks()(data_parallel(replicas=8, micro_batches=5))


def test_a_job_that_lists_its_ranks_is_refused() -> None:
    b = GraphBuilder(streams=("compute",))
    took = (Duration(device="trace", picoseconds=5, source=Source.IMPORTED),)
    b.compute("work", durations=took)
    b.program([(0, 0, 1, 0, 0)], ranks=[0, 1])
    job = b.build(JobGraph)
    with pytest.raises(PlanError, match="lists its ranks"):
        UnfoldRanks()(job)
    with pytest.raises(SimulationError, match="simulate roles"):
        Mesh(job)


def test_the_event_engine_takes_as_many_tasks_as_its_limit_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all ranks, as often as they run; what is left over is for looking at other ranks."""
    job, tasks = expanded(data_parallel(replicas=6))
    every = 6 * len(tasks)
    for limit, runs, left in ((every, 1, 0), (3 * every, 2, 1), (3 * every + 1, 3, 0), (8 * every - 1, 2, 5)):
        monkeypatch.setattr("echograph.simulator.simulate.MAX_EVENTS", limit)
        check_effort(job, tasks, runs)
        assert left_over(job, tasks, runs) == left
    monkeypatch.setattr("echograph.simulator.simulate.MAX_EVENTS", 3 * every - 1)
    with pytest.raises(
        SimulationError, match=rf"^{every:,} tasks of all ranks, 3 times, are over .* {3 * every - 1:,}:"
    ):
        check_effort(job, tasks, 3)
    assert left_over(job, tasks, 3) == 0
    monkeypatch.setattr("echograph.simulator.simulate.MAX_EVENTS", every - 1)
    with pytest.raises(SimulationError, match=rf"^{every:,} tasks of all ranks are over"):
        check_effort(job, tasks, 1)

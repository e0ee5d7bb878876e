"""The static pass in segments against the engines that run tasks one by one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import reference_engine as reference
from layered import layered_step, timed
from random_jobs import random_job

from echograph.errors import DeadlockError
from echograph.ir import serde
from echograph.ir.graph import JobGraph, StepGraph
from echograph.ir.passes.data_parallel import DataParallel
from echograph.ir.passes.fold import Fold
from echograph.ir.passes.fully_shard import FullyShard
from echograph.ir.passes.pipeline import Pipeline
from echograph.ir.types import OpKind
from echograph.simulator.breakdown import breakdown
from echograph.simulator.clusters import load_cluster
from echograph.simulator.durations import Durations
from echograph.simulator.engine import Roles, static, write_timeline
from echograph.simulator.engine.segments import (
    SegmentedJob,
    SegmentRun,
    critical_path,
    cut,
    program_timeline,
    run,
    work_of,
)
from echograph.simulator.engine.segments import simulate as segments
from echograph.simulator.engine.spent import breakdowns_of
from echograph.simulator.host import IssueTimes
from echograph.simulator.limits import families, largest_first, limits
from echograph.simulator.simulate import simulate
from echograph.simulator.tasks import expand
from echograph.workflow.plan import Plan
from echograph.workflow.predict import lower

US = 1_000_000
CLUSTER = load_cluster("dgx-h100")
HOST = IssueTimes(op_ps=4 * US, launch_ps=3 * US, spread=0.5)
SCENARIOS = 3


def durations(job: JobGraph, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Device and host picoseconds in several scenarios; every third seed draws so few values that many tie."""
    random = np.random.default_rng(seed)
    most = (3, 50, 10**9)[seed % 3]
    size = (len(job.ops), SCENARIOS)
    return random.integers(0, most + 1, size), random.integers(0, 1 + most // 3, size)


def in_segments(job: JobGraph, device: np.ndarray, host: np.ndarray) -> tuple[SegmentedJob, SegmentRun | None]:
    segments = cut(job)
    assert segments is not None
    return segments, run(segments, work_of(job, device, host))


def check(job: JobGraph, device: np.ndarray, host: np.ndarray, found: SegmentRun) -> None:
    """Every start, the end of every scenario, and the critical path are those of the readable engine."""
    for scenario in range(SCENARIOS):
        tasks = expand(job, device[:, scenario], host[:, scenario])
        starts = reference.run(tasks)
        assert found.ends[scenario] == (starts.start + tasks.duration).max(initial=0)
        if scenario:
            continue
        timeline = write_timeline(job, tasks, starts.start)
        last, total = critical_path(found, families(job))
        assert last == timeline.program[np.argmax(timeline.end)]
        assert largest_first(job, total, timeline.makespan) == limits(job, timeline)
        spent = breakdowns_of(found, compile_it=False)
        for program in range(len(job.programs)):
            assert spent(program) == breakdown(job, timeline, program)
            mine, own = timeline.program == program, program_timeline(found, program)
            for column in ("lane", "stream", "op", "instance", "micro_batch", "start", "duration"):
                assert np.array_equal(getattr(own, column), getattr(timeline, column)[mine]), column


def compare(seeds: range) -> tuple[int, int, int]:
    """How many random jobs ran in segments, had to run task by task, and wait for ever."""
    ran = circles = deadlocks = 0
    for seed in seeds:
        job = random_job(seed, crossed=seed % 3 == 0)
        device, host = durations(job, seed)
        _, found = in_segments(job, device, host)
        if found is not None:
            check(job, device, host, found)
            ran += 1
            continue
        tasks = expand(job, device[:, 0], host[:, 0])
        try:
            static.run(tasks)
            circles += 1
        except DeadlockError:
            deadlocks += 1
    return ran, circles, deadlocks


def test_random_jobs_run_to_the_picosecond_as_their_tasks_do() -> None:
    ran, circles, deadlocks = compare(range(100))
    assert ran > 60
    # Segments may wait in a circle where tasks do not, but that is rare.
    assert circles < 5
    assert deadlocks > 15


@pytest.mark.slow
def test_thousands_of_random_jobs_run_as_their_tasks_do() -> None:
    ran, circles, _ = compare(range(100, 2500))
    assert ran > 1500
    assert circles < 0.05 * ran


RINGS = Path(__file__).parents[2] / "golden" / "predictions" / "graphs" / "llama.pb"


@pytest.mark.parametrize(
    "words", [{"cp": 2, "gpus": 2}, {"cp": 4, "pp": 2, "gpus": 16, "global_batch": 6}], ids=str
)
def test_messages_around_a_ring_are_part_of_what_repeats(words: dict[str, int]) -> None:
    """A send and the receive behind it start together: no rendezvous is left within a role."""
    step = serde.load(RINGS)
    assert isinstance(step, StepGraph)
    job = lower(step, Plan(**words))
    sends = job.ops.kind == OpKind.SEND
    around = [row for row in np.flatnonzero(sends).tolist() if job.strings[job.ops.name[row]] == "cp.send"]
    assert around
    for seed in range(3):
        device, host = durations(job, seed)
        segments, found = in_segments(job, device, host)
        meets = [kind.rows.start for kind in segments.kinds if kind.rendezvous]
        assert not {*meets} & {*around}
        assert found is not None
        check(job, device, host, found)


def staged(step: StepGraph, schedule: str = "1f1b", stages: int = 4, chunks: int = 1) -> JobGraph:
    return Pipeline(stages=stages, micro_batches=12, schedule=schedule, chunks=chunks)(step)


JOBS: dict[str, Callable[[StepGraph], JobGraph]] = {
    "micro-batches": lambda step: DataParallel(replicas=16, micro_batches=6)(step),
    "1f1b": lambda step: DataParallel(replicas=8)(staged(step)),
    "gpipe": lambda step: DataParallel(replicas=8)(staged(step, "gpipe")),
    "interleaved": lambda step: DataParallel(replicas=8)(staged(step, "interleaved", 2, 2)),
    "zero-bubble": lambda step: DataParallel(replicas=8)(staged(step, "zb-h1")),
    "zero-1": lambda step: DataParallel(replicas=8, zero=1)(staged(step)),
    "zero-2": lambda step: DataParallel(replicas=8, zero=2)(staged(step)),
    "fsdp": lambda step: FullyShard(replicas=8, shard=8, micro_batches=4)(step),
}


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("waits", [False, True])
def test_a_prediction_over_segments_is_the_same_bytes(name: str, waits: bool) -> None:
    job = timed(JOBS[name](Fold()(layered_step(8))), CLUSTER.device, 30 * US)
    host = replace(HOST, waits=waits)
    records = {}
    for asked in ("auto", "static"):
        record = simulate(job, CLUSTER, host, engine=asked).to_json()
        record["simulation"].pop("wall_s")
        ran = record["simulation"].pop("engine")
        records[ran] = json.dumps(record)
    assert list(records) == ["segments", "static"]
    assert records["segments"] == records["static"]


def test_equal_calls_are_worked_out_once() -> None:
    few, many = (
        cut(job)
        for job in (Pipeline(stages=4, micro_batches=count)(Fold()(layered_step(8))) for count in (16, 64))
    )
    assert few is not None
    assert many is not None
    assert len(few.kinds) == len(many.kinds)
    assert sum(len(its.kind) for its in many.sequences) > 3 * sum(len(its.kind) for its in few.sequences)


def test_a_graph_that_repeats_nothing_runs_task_by_task() -> None:
    job = timed(DataParallel(replicas=8)(layered_step(3)), CLUSTER.device, 30 * US)
    assert simulate(job, CLUSTER, HOST).engine == "static"


def test_times_whose_sum_64_bits_do_not_hold_run_task_by_task() -> None:
    job = JOBS["fsdp"](Fold()(layered_step(8)))
    count = len(job.ops)
    long = Durations(
        picoseconds=np.full(count, 2**62),
        source=np.zeros(count, np.uint8),
        spread=np.zeros(count, np.float32),
        algorithm={},
    )
    assert segments(Roles(job=job, times=long, issue=long.picoseconds, host=HOST)) is None


@pytest.mark.parametrize("name", JOBS)
def test_compiled_loops_say_what_they_say_interpreted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times, critical path and breakdowns of all roles, of steps with much to do as of those with little."""
    job = timed(JOBS[name](Fold()(layered_step(8))), CLUSTER.device, 30 * US)
    records = []
    for compile_from in (10**12, 0):
        monkeypatch.setattr("echograph.simulator.engine.segments.COMPILE_FROM", compile_from)
        record = simulate(job, CLUSTER, HOST, engine="segments").to_json()
        record["simulation"].pop("wall_s")
        records.append(record)
    assert records[0] == records[1]

"""Simulated timelines, written as Chrome traces and read back: analyses find what the simulator says."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layered import layered_step, timed
from random_jobs import RandomJob

from echograph.errors import DataError, EchoError, UsageError
from echograph.ir.builder import GraphBuilder
from echograph.ir.exporters.chrome import chrome_trace, process_groups
from echograph.ir.graph import JobGraph
from echograph.ir.passes.data_parallel import DataParallel
from echograph.ir.passes.fold import Fold
from echograph.ir.passes.fully_shard import FullyShard
from echograph.ir.passes.pipeline import Pipeline
from echograph.ir.timeline import Lane, Timeline
from echograph.ir.types import COMMUNICATIONS, CopyDirection, Duration, Source
from echograph.profiler.analyses import ANALYSES
from echograph.profiler.analyses.table import AnswerTable
from echograph.profiler.analyses.work import KernelKind, kernel_kinds
from echograph.profiler.traces import TraceSet, read_traces
from echograph.profiler.traces.events import TEXTS
from echograph.profiler.traces.simulated import simulated_traces
from echograph.profiler.traces.trace import COPIES, Trace
from echograph.simulator.breakdown import Breakdown, breakdown
from echograph.simulator.clusters import load_cluster
from echograph.simulator.host import IssueTimes
from echograph.simulator.simulate import simulate
from echograph.workflow.analyze import analyze

CLUSTER = load_cluster("dgx-h100")
HOST = IssueTimes(op_ps=4_000_000, launch_ps=3_000_000)
US, NS = 1_000_000, 1_000
STEP = Fold()(layered_step(4))


def pipelined(stages: int, **options: object) -> JobGraph:
    return DataParallel(replicas=4)(Pipeline(stages=stages, micro_batches=6, **options)(STEP))


JOBS = {
    "buckets beside the backward pass": (lambda: DataParallel(replicas=16, bucket_bytes=2**21)(STEP), 200 * US),
    "parameters gathered ahead": (lambda: FullyShard(replicas=64)(STEP), 37 * US + 1),
    "bound by the host": (lambda: DataParallel(replicas=8)(STEP), US // 3),
    "pipeline": (lambda: pipelined(4), 200 * US),
    "interleaved pipeline": (lambda: pipelined(2, chunks=2, schedule="interleaved"), 90 * US + 7),
}


def run(make: Callable[[], JobGraph], work_ps: int) -> tuple[JobGraph, Timeline]:
    job = timed(make(), CLUSTER.device, work_ps)
    return job, simulate(job, CLUSTER, HOST).timeline


def read_back(job: JobGraph, timeline: Timeline, path: Path) -> TraceSet:
    path.write_text("".join(chrome_trace(job, timeline)))
    return read_traces(path)


def moments(timeline: Timeline, rows: np.ndarray) -> int:
    """Picoseconds during which any of the rows runs, moment by moment."""
    points = [(t, d) for r in rows for t, d in ((int(timeline.start[r]), 1), (int(timeline.end[r]), -1))]
    total = running = last = 0
    for time, change in sorted(points):
        total += (time - last) * (running > 0)
        running, last = running + change, time
    return total


def check(traces: TraceSet, job: JobGraph, timeline: Timeline) -> None:
    said = {name: ANALYSES[name](traces).records() for name in ("temporal-breakdown", "overlap", "steps")}
    assert len(traces) == len(job.programs)
    for program in range(len(job.programs)):
        parts = breakdown(job, timeline, program)
        temporal, overlap, step = (table[program] for table in said.values())
        exposed = sum(parts.exposed_communication.values())
        assert temporal["compute_time(us)"] * US == pytest.approx(parts.compute, rel=0, abs=NS)
        assert temporal["non_compute_time(us)"] * US == pytest.approx(exposed, rel=0, abs=NS)
        # The simulator's step begins before the first work and ends with that of the last program.
        around = step["dur"] - temporal["kernel_time(us)"]
        idle = parts.host + parts.bubble + parts.wait
        assert (temporal["idle_time(us)"] + around) * US == pytest.approx(idle, rel=0, abs=NS)
        assert step["dur"] * US == pytest.approx(parts.total, rel=0, abs=NS)
        mine = (timeline.program == program) & (timeline.lane == Lane.DEVICE) & (timeline.duration > 0)
        talks = moments(timeline, np.flatnonzero(mine & np.isin(job.ops.kind[timeline.op], COMMUNICATIONS)))
        assert overlap["communication_time(us)"] * US == pytest.approx(talks, rel=0, abs=NS)
        assert overlap["overlapped_time(us)"] * US == pytest.approx(talks - exposed, rel=0, abs=NS)


@pytest.mark.parametrize("name", JOBS)
def test_the_breakdown_is_the_simulators(name: str, tmp_path: Path) -> None:
    job, timeline = run(*JOBS[name])
    check(read_back(job, timeline, tmp_path / "trace.json"), job, timeline)


@pytest.mark.parametrize("seed", (0, 1, 3, 4, 5, 8, 9, 12))  # some others wait for ever
def test_the_breakdown_of_random_jobs_is_the_simulators(seed: int, tmp_path: Path) -> None:
    job, timeline = run(RandomJob(seed, stages=1 + seed % 4).build, 11 * US + seed)
    check(read_back(job, timeline, tmp_path / "trace.json"), job, timeline)


OF_OTHER_FILES = {"memory-categories", "execution-trace", "hardware-counters", "trace-diff"}
PLACES = {"index": 0, "event_idx": 0}


def answer(name: str, traces: TraceSet) -> AnswerTable | str:
    """A table, or why there is none."""
    try:
        return ANALYSES[name](traces)  # type: ignore[no-any-return]
    except EchoError as error:
        return str(error).partition(": ")[2]


def said_by(trace: Trace) -> dict[str, dict[int, object]]:
    """The arguments of a trace's rows; texts as they are."""
    return {
        name: {
            row: trace.strings[value] if name in TEXTS else value
            for row, value in zip(rows.tolist(), values.tolist(), strict=True)
        }
        for name, (rows, values) in trace.arguments.items()
    }


def check_columns(job: JobGraph, timeline: Timeline, path: Path) -> None:
    """A timeline as traces is what its file holds, and analyses answer alike."""
    read, made = read_back(job, timeline, path), simulated_traces(job, timeline)
    assert list(made) == list(read)
    for ours, theirs in zip(made.values(), read.values(), strict=True):
        for column in ("start", "duration", "pid", "tid", "stream", "correlation", "external_id"):
            assert getattr(ours, column).tolist() == getattr(theirs, column).tolist(), column
        for column in ("name", "category"):
            texts = [[t.strings[code] for code in getattr(t, column).tolist()] for t in (ours, theirs)]
            assert texts[0] == texts[1], column
        assert ours.world_size == theirs.world_size and ours.notes == theirs.notes
        assert said_by(ours) == said_by(theirs)
    for name in ANALYSES.keys() - OF_OTHER_FILES:
        first, second = answer(name, made), answer(name, read)
        if isinstance(first, str) or isinstance(second, str):
            assert first == second, name
            continue
        assert first.columns.keys() == second.columns.keys()
        # What a profile lacks it can be asked for; a simulated step has none of it.
        lacks = [note.removesuffix(" in a simulated step") for note in first.notes]
        assert lacks == [note.partition(": profile with")[0] for note in second.notes]
        # Rows that are equal but for their texts stand in the order in which the texts were met, and positions are
        # those of events in a file.
        said = [sorted(str(row | PLACES) for row in table.records()) for table in (first, second)]
        assert said[0] == said[1], name


@pytest.mark.parametrize("name", JOBS)
def test_a_timeline_needs_no_file_to_be_analysed(name: str, tmp_path: Path) -> None:
    job, timeline = run(*JOBS[name])
    check_columns(job, timeline, tmp_path / "trace.json")


@pytest.mark.parametrize("seed", (0, 3, 8))
def test_timelines_of_random_jobs_need_no_file(seed: int, tmp_path: Path) -> None:
    job, timeline = run(RandomJob(seed, stages=1 + seed % 4).build, 11 * US + seed)
    check_columns(job, timeline, tmp_path / "trace.json")


def test_jobs_that_are_checked_overlap_and_stand_still() -> None:
    """Else equality says little."""

    def parts(name: str) -> Breakdown:
        job, timeline = run(*JOBS[name])
        return breakdown(job, timeline, 0)

    buckets, host = (parts(name) for name in ("buckets beside the backward pass", "bound by the host"))
    assert sum(buckets.exposed_communication.values()) > 0
    assert host.host > host.compute
    assert parts("pipeline").bubble > 0


def test_picoseconds_are_kept_in_a_step_of_minutes(tmp_path: Path) -> None:
    job, timeline = run(JOBS["pipeline"][0], 6 * 10**12 + 7)
    assert 10**14 < timeline.makespan < 10**15
    traces = read_back(job, timeline, tmp_path / "trace.json")
    for program, trace in enumerate(traces.values()):
        rows = (timeline.program == program) & (timeline.lane == Lane.DEVICE) & (timeline.duration > 0)
        assert trace.start[trace.on_device].tolist() == timeline.start[rows].tolist()
        assert trace.duration[trace.on_device].tolist() == timeline.duration[rows].tolist()


def of_job(path: Path, groups: set[tuple[str, tuple[int, ...]]]) -> dict[str, object]:
    """What a file says of its job, beside its process groups, which are these."""
    said: dict[str, Any] = json.loads(path.read_text())["distributedInfo"]
    assert {(group["pg_name"], tuple(group["ranks"])) for group in said.pop("pg_config")} == groups
    return said


def test_processes_are_ranks(tmp_path: Path) -> None:
    job, timeline = run(*JOBS["pipeline"])
    path = tmp_path / "trace.json"
    traces = read_back(job, timeline, path)
    assert list(traces) == [0, 4, 8, 12], "pipeline stages of four replicas: the first rank of each"
    assert {trace.world_size for trace in traces.values()} == {16}
    for _ in range(2):
        assert list(read_traces(path, [8], cache_folder=tmp_path / "cache")) == [8]
    with pytest.raises(UsageError, match="no trace of rank 1; there is 0, 4, 8, 12"):
        read_traces(path, [1])
    path.write_text("".join(chrome_trace(job, timeline, ranks=(3, 7, 11, 15))))
    assert list(read_traces(path)) == [3, 7, 11, 15]
    groups = {(f"dp {first}", tuple(range(first, first + 4))) for first in (0, 4, 8, 12)}
    assert of_job(path, {("pp 3", (3, 7, 11, 15)), *groups}) == {"world_size": 16}
    read_back(*run(*JOBS["bound by the host"]), path)
    assert of_job(path, {("dp 0", tuple(range(8)))}) == {"world_size": 8, "rank": 0}


@pytest.mark.parametrize("ranks", ["[0]", '{"0": "1"}', '{"0": true}', '{"0": -1}'])
def test_a_file_that_says_ranks_in_other_ways_is_refused(ranks: str, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(f'{{"processRanks": {ranks}, "traceEvents": []}}')
    with pytest.raises(DataError, match="processRanks: give the rank of each process, as"):
        read_traces(tmp_path / "t.json")


@pytest.mark.parametrize("name", JOBS)
def test_process_groups_are_the_ranks_that_differ_along_their_axes_alone(name: str) -> None:
    job = JOBS[name][0]()
    places = [dict(zip(job.strides, np.unravel_index(rank, [a.size for a in job.mesh]), strict=True))
              for rank in range(job.world_size)]  # fmt: skip
    for rank in range(0, job.world_size, 5):
        found = process_groups(job, rank)
        for number, group in enumerate(job.groups):
            others = job.strides.keys() - set(group.axes)
            same = [r for r, place in enumerate(places) if all(place[a] == places[rank][a] for a in others)]
            assert found[number].ranks == tuple(same)
        assert len({one.name for one in found.values()}) == len(found) == len(job.groups)


def test_work_belongs_to_the_step_and_to_what_issued_it(tmp_path: Path) -> None:
    job, timeline = run(*JOBS["pipeline"])
    traces = read_back(job, timeline, tmp_path / "trace.json")
    launches = ANALYSES["launches"](traces).records()
    works = (timeline.lane == Lane.DEVICE) & (timeline.duration > 0)
    # Of the operations of this job the host issues each by itself, and none but a view takes the device no time.
    assert len(launches) == int(works.sum())
    assert sum(row["launched"] for row in ANALYSES["steps"](traces).records()) == int(works.sum())
    for trace in traces.values():
        rows = {int(n): int(s) for n, s in zip(trace.correlation, trace.end, strict=True) if n > 0}
        host = ~trace.on_device & (trace.correlation > 0)
        begins = dict(zip(trace.correlation[trace.on_device], trace.start[trace.on_device], strict=True))
        for number, end in zip(trace.correlation[host], trace.end[host], strict=True):
            assert int(number) in rows
            assert begins[number] >= end, "nothing runs before it is issued"


def test_copies_are_copies(tmp_path: Path) -> None:
    builder = GraphBuilder(streams=("compute", "copy"))
    took = (Duration(device="trace", picoseconds=4 * US, source=Source.IMPORTED),)
    for direction in CopyDirection:
        builder.copy("offload", direction, nbytes=10**6, stream=1, durations=took)
    builder.compute("mm", flops=1, durations=took)
    builder.program([(0, 0, builder.op_count(), 0, 0)], role="all")
    job = builder.build(JobGraph)
    result = simulate(job, replace(CLUSTER, device="trace"), IssueTimes(op_ps=0, launch_ps=0))
    traces = read_back(job, result.timeline, tmp_path / "trace.json")
    check_columns(job, result.timeline, tmp_path / "trace.json")
    device = traces[0].rows(traces[0].on_device)
    assert sorted(device.text(row) for row in np.flatnonzero(kernel_kinds(device) == KernelKind.MEMORY)) == [
        "Memcpy DtoD (offload)",
        "Memcpy DtoH (offload)",
        "Memcpy HtoD (offload)",
    ]
    assert int((kernel_kinds(device) == KernelKind.COMPUTATION).sum()) == 1
    assert int(device.of_category(COPIES).sum()) == 3
    rates = ANALYSES["memory-bandwidth"](traces).records()
    assert {row["memory_bw_gbps"] for row in rates} == {0.0, 250.0}, "a megabyte in four microseconds"


NEEDS = {
    "kernel-sequences": {"operator": "mm", "min_length": 1},
    "trace-diff": {"test_rank": 4},
    "queue-full": {"max_queue_length": 2},
}
LACKS = {
    "annotated-kernels": "no annotation on the device in a simulated step",
    "annotations": "no annotation on the device in a simulated step",
    "collectives": "no collective was traced on several ranks",
    "execution-trace": "name the file",
    "hardware-counters": "no hardware counters in a simulated step",
    "slow-kernels": "no shapes in a simulated step",
    "stragglers": "no collective of at least 1 % of a step runs on two ranks",
    "memory-bandwidth": "no copy or set whose bandwidth is known",
    "memory-bandwidth-summary": "no copy or set whose bandwidth is known",
    "memory-categories": "name the file",
    "memory-holders": "no memory snapshot",
    "memory-peaks": "no memory in its profile in a simulated step",
    "memory-timeline": "no memory in its profile in a simulated step",
}


@pytest.fixture(scope="module")
def step() -> Timeline:
    job, timeline = run(*JOBS["pipeline"])
    return replace(timeline, graph=job)


@pytest.mark.parametrize("name", ANALYSES)
def test_every_analysis_answers_of_a_simulated_step_or_says_what_it_lacks(name: str, step: Timeline) -> None:
    try:
        found = analyze(step, name, **NEEDS.get(name, {}))
    except EchoError as error:
        assert LACKS[name] in str(error) and "\n" not in str(error)
        return
    assert bool(len(found)) == (name not in LACKS)
    assert len(found) or any(LACKS[name] in note for note in found.notes)


def test_a_timeline_whose_job_nobody_kept_is_refused(step: Timeline) -> None:
    with pytest.raises(UsageError, match="does not know its job"):
        analyze(replace(step, graph=None), "overlap")
    with pytest.raises(UsageError, match="no rank 3 in the prediction"):
        analyze(step, "overlap", ranks=[3])

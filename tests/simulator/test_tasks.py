"""Expansion: tasks and their dependencies are those of the program written out by the rules of the format."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from layered import layered_step

from echograph.errors import SimulationError
from echograph.ir.builder import GraphBuilder
from echograph.ir.graph import JobGraph
from echograph.ir.passes.data_parallel import DataParallel
from echograph.ir.passes.fold import Fold
from echograph.ir.passes.fully_shard import FullyShard
from echograph.ir.passes.pipeline import Pipeline
from echograph.ir.types import OpKind
from echograph.simulator import tasks as expansion
from echograph.simulator.groups import rendezvous_key
from echograph.simulator.tasks import DEVICE, HOST, TaskGraph, expand

Run = tuple[int, int, int]
"""(instance, operation, micro-batch)."""


def with_host_work() -> JobGraph:
    """A stream, host work that waits for it, and a kernel that waits for that; twice, in two micro-batches."""
    b = GraphBuilder(streams=("compute", "copy"))
    kernel = b.compute("kernel", flops=1)
    copied = b.compute("copy", flops=1, stream=1, deps=[kernel])
    waits = b.host("wait", deps=[copied])
    b.compute("after", flops=1, stream=1, deps=[waits, kernel])
    b.program([(0, 0, 4, 0, 0), (0, 0, 4, 0, 1)])
    return b.build(JobGraph)


JOBS = {
    "data-parallel": lambda: DataParallel(replicas=8, micro_batches=3)(Fold()(layered_step(3))),
    "unfolded": lambda: DataParallel(replicas=8)(layered_step(3)),
    "fully sharded": lambda: FullyShard(replicas=8, micro_batches=3)(Fold()(layered_step(4))),
    "pipelines": lambda: DataParallel(replicas=2)(Pipeline(stages=2, micro_batches=4)(Fold()(layered_step(4)))),
    "host": with_host_work,
}


def expanded(job: JobGraph) -> TaskGraph:
    rows = np.arange(len(job.ops))
    return expand(job, 1000 + rows, 10 + rows)


def written_out(job: JobGraph, number: int) -> list[tuple[Run, set[int]]]:
    """Every run of a program with the positions that it depends on, one by one."""
    position: dict[Run, int] = {}
    latest: dict[tuple[int, int], int] = {}
    found = []
    for block, begin, end, instance, micro_batch in job.programs[number].calls.tolist():
        for row in range(begin, end):
            op = job.ops[row]
            sources = [job.source(block, instance, tensor) for tensor in op.inputs]
            makers = [(s[1], s[2]) for s in sources if s and job.ops.stream[s[2]] != op.stream]
            makers += [(instance, dep) for dep in op.deps]
            places = [position.get((i, m, micro_batch), latest.get((i, m))) for i, m in makers]
            run = (instance, row, micro_batch)
            found.append((run, {p for p in places if p is not None}))
            position[run] = latest[instance, row] = len(found) - 1
    return found


@pytest.mark.parametrize("name", JOBS)
def test_tasks_are_those_of_the_programs_written_out(name: str) -> None:
    job = JOBS[name]()
    tasks, first = expanded(job), 0
    lanes = 1 + len(job.streams)
    assert tasks.resources == lanes * len(job.programs)
    for number in range(len(job.programs)):
        begin = first
        for (instance, row, micro_batch), before in written_out(job, number):
            hosts = job.ops.kind[row] == OpKind.HOST
            for lane, task in ((HOST, first), (DEVICE, first + 1)):
                assert (tasks.lane[task], tasks.op[task], tasks.instance[task]) == (lane, row, instance)
                assert (tasks.micro_batch[task], tasks.program[task]) == (micro_batch, number)
                waits = {begin + 2 * p + DEVICE for p in before} if (lane == HOST) == hosts else set()
                assert set(tasks.deps[task].tolist()) == waits | ({first} if lane == DEVICE else set())
            stream = int(job.ops.stream[row])
            assert tasks.resource[first : first + 2].tolist() == [number * lanes, number * lanes + 1 + stream]
            assert tasks.duration[first : first + 2].tolist() == [10 + row, 0 if hosts else 1000 + row]
            first += 2
    assert first == len(tasks)


def test_the_nth_meeting_of_a_key_is_one_meeting() -> None:
    job = JOBS["pipelines"]()
    tasks = expanded(job)
    met = np.flatnonzero(tasks.rendezvous >= 0)
    seen: dict[tuple[int, object, int], int] = {}
    numbers: dict[tuple[object, int], int] = {}
    for task in met.tolist():
        program, row = int(tasks.program[task]), int(tasks.op[task])
        key = rendezvous_key(job, program, row)
        nth = seen[program, key, job.ops.kind[row]] = seen.get((program, key, job.ops.kind[row]), -1) + 1
        assert numbers.setdefault((key, nth), int(tasks.rendezvous[task])) == tasks.rendezvous[task]
    assert len(set(numbers.values())) == len(numbers) == 2 * 4
    assert np.all(np.bincount(tasks.rendezvous[met]) == 2)
    communicates = np.isin(job.ops.kind[tasks.op], (OpKind.SEND, OpKind.RECV)) & (tasks.lane == DEVICE)
    assert np.array_equal(np.flatnonzero(communicates), met)


def test_a_job_of_too_many_tasks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expansion, "MAX_TASKS", 100)
    with pytest.raises(SimulationError, match="over the limit of 100"):
        expanded(JOBS["data-parallel"]())


def test_a_program_that_runs_nothing_has_no_tasks() -> None:
    job = with_host_work()
    idle = replace(job, programs=(replace(job.programs[0], calls=np.zeros((0, 5), np.int64)),))
    assert len(expanded(idle)) == 0

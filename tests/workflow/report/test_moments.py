"""What a role does at every moment: the breakdown of the simulator, laid out in time."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from echograph.ir.graph import JobGraph
from echograph.ir.intervals import Pieces
from echograph.ir.timeline import Lane, Timeline
from echograph.simulator.breakdown import BreakdownLayers, breakdown, layers_of, moments
from echograph.simulator.result import Result
from echograph.workflow.report.lanes import runs

Staged = tuple[Result, JobGraph]
work = st.tuples(
    st.integers(0, 10**6), st.sampled_from(Lane), st.integers(0, 1), st.integers(0, 40), st.integers(0, 9)
)


def timeline_of(job: JobGraph, tasks: list[tuple[int, Lane, int, int, int]]) -> Timeline:
    op, lane, program, start, duration = (np.array(column, np.int64) for column in zip(*tasks, strict=True))
    op %= len(job.ops)
    zero = np.zeros(len(op), np.int32)
    return Timeline(
        program=program.astype(np.int32),
        lane=lane.astype(np.uint8),
        stream=job.ops.stream[op],
        op=op,
        instance=zero,
        micro_batch=zero,
        start=start,
        duration=duration,
        cause=np.full(len(op), -1),
        programs=("first", "second"),
        streams=job.streams,
    )


def spent_of(found: Pieces, layers: BreakdownLayers) -> list[int]:
    """Picoseconds of each layer, and of none."""
    return [int((found.end - found.start)[found.layer == layer].sum()) for layer in range(layers.idle + 1)]


def layer_at(timeline: Timeline, layers: BreakdownLayers, program: int, moment: int) -> int:
    """The layer of one unit of time, by looking at all that runs then."""
    runs_then = (timeline.program == program) & (timeline.start <= moment) & (moment < timeline.end)
    device = timeline.lane[runs_then] == Lane.DEVICE
    of = np.where(device, layers.of_op[timeline.op[runs_then]], layers.host)
    return int(of.min(initial=layers.idle))


@given(tasks=st.lists(work, min_size=1, max_size=60))
def test_moments_are_the_breakdown_in_time(staged: Staged, tasks: list[tuple[int, Lane, int, int, int]]) -> None:
    job = staged[1]
    timeline, layers = timeline_of(job, tasks), layers_of(job)
    for program in range(2):
        rows = np.flatnonzero(timeline.program == program)
        found, parts = moments(layers, timeline, rows), breakdown(job, timeline, program)
        communication = list(parts.exposed_communication.values())
        expected = [parts.compute, *communication, parts.host, parts.bubble]
        assert spent_of(found, layers) == expected
        spent = {(int(program), layer): 0 for layer in range(len(expected))}
        for moment in range(timeline.makespan):
            spent[program, layer_at(timeline, layers, program, moment)] += 1
        assert list(spent.values()) == expected
        if timeline.makespan:
            assert (found.start[0], found.end[-1]) == (0, timeline.makespan)
        assert (found.start[1:] == found.end[:-1]).all()
        runs_then = found.row >= 0
        assert (runs_then == (found.layer != layers.idle)).all()
        row = found.row[runs_then]
        assert (timeline.program[row] == program).all()
        assert (timeline.start[row] <= found.start[runs_then]).all()


def test_roles_of_a_pipeline_add_up_to_the_step(staged: Staged) -> None:
    result, job = staged
    layers, parts = layers_of(job), []
    for program in range(3):
        rows = np.flatnonzero(result.timeline.program == program)
        spent = spent_of(moments(layers, result.timeline, rows), layers)
        assert sum(spent) == result.step_ps
        parts.append(spent)
    said = result.breakdown
    assert [said.compute, *said.exposed_communication.values(), said.host, said.bubble] in parts


pieces = st.lists(st.tuples(st.integers(1, 20), st.integers(-3, 2)), min_size=1, max_size=60)


@given(pieces, st.integers(1, 40))
def test_runs_hold_every_piece_once_and_nothing_long_between(drawn: list[tuple[int, int]], gap: int) -> None:
    """Keys of 0 and more are compute; below, other kinds."""
    length, key = (np.array(column, np.int64) for column in zip(*drawn, strict=True))
    end = np.cumsum(length)
    kind = np.where(key >= 0, 0, -key)
    found = runs(Pieces(end - length, end, kind, np.arange(len(key))), np.maximum(key, -1), gap)
    last = np.append(found.first[1:], len(key))
    for first, stop, longest, own, other in zip(
        found.first, last, found.longest, found.own, found.other, strict=True
    ):
        inner = range(first, stop)
        mine = [at for at in inner if kind[at] == kind[longest] and (kind[at] or key[at] == key[longest])]
        assert own == sum(length[at] for at in mine)
        assert length[longest] == max(length[at] for at in mine)
        rest = [at for at in inner if at not in mine]
        assert (other >= 0) == bool(rest)
        # Only between work of one key is anything taken in, each stretch of it shorter than the gap.
        stretch = 0
        for at in inner:
            stretch = 0 if at in mine else stretch + length[at]
            assert stretch < gap
        assert not rest or (kind[first] == 0 and kind[stop - 1] == 0)
        assert not rest or length[rest].sum() >= max(length[at] for at in rest if kind[at] == other)

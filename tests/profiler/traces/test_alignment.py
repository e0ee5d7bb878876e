"""Clocks that are wrong by a known offset and drift are set right; those that agree stay as they are."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from small_traces import Event, job, operator, work

from echograph.profiler.analyses import ANALYSES
from echograph.profiler.traces import TraceSet, read_traces
from echograph.profiler.traces.alignment import RankClock, align, clocks, on_clock
from echograph.profiler.traces.collectives import collectives_of_job
from echograph.profiler.traces.trace import Trace

REAL = "traces/dlrm-v100-8-ranks"
KERNEL = "ncclKernel_AllReduce_RING_LL_Sum_float"
US = 1_000_000


def reductions(ranks: int, count: int, spacing_us: float, seed: int, noise_us: float = 1.0) -> list[list[Event]]:
    """Kernels of all-reduces that ranks begin at times of their own and end together, stamped with some noise."""
    chance = random.Random(seed)
    events: list[list[Event]] = [[] for _ in range(ranks)]
    for number in range(count):
        begins = [1_000 + spacing_us * number + chance.uniform(0, 300) for _ in range(ranks)]
        end = max(begins) + chance.uniform(20, 200)
        for rank, begin in enumerate(begins):
            stamped = end + chance.uniform(-noise_us, noise_us)
            events[rank].append(work(KERNEL, round(begin, 3), round(stamped - begin, 3), number + 1, stream=20))
    return events


def wrong(traces: TraceSet, seed: int, offset_us: float, drift: float) -> TraceSet:
    """The traces on clocks that are off."""
    chance, moved = random.Random(seed), {}
    for rank, trace in traces.items():
        off, pace = chance.uniform(-offset_us, offset_us) * US, chance.uniform(-drift, drift)
        moved[rank] = on_clock(trace, RankClock(offset_ps=off, drift=pace) if rank else RankClock())
    return TraceSet(moved)


def furthest_us(found: TraceSet, true: TraceSet) -> float:
    """How far any stamp is from where it should be, by the first rank's clock."""
    shift = int(found[0].start[0] - true[0].start[0])
    return max(float(np.abs(found[r].start - true[r].start - shift).max()) for r in true) / US


@pytest.mark.parametrize(("seed", "spacing_us"), [(1, 5_000.0), (2, 50_000.0), (3, 400.0)])
def test_offsets_and_drifts_are_recovered(tmp_path: Path, seed: int, spacing_us: float) -> None:
    true = job(tmp_path, *reductions(4, 60, spacing_us, seed))
    off = wrong(true, seed, offset_us=2e6, drift=5e-5)
    assert furthest_us(off, true) > 1_000
    found, fit = align(off)
    assert furthest_us(found, true) < 5
    assert (fit.collectives, fit.apart) == (60, 0)
    assert fit.residual_ps < 2 * US < fit.before_ps
    assert "aligned by 60 collectives" in found.notes[0]


def test_a_rank_held_up_at_the_end_of_a_collective_does_not_move_its_clock(tmp_path: Path) -> None:
    events = reductions(2, 40, 2_000, 4)
    for event in events[1][::8]:
        event["dur"] += 900.0
    true = job(tmp_path, *events)
    found, _ = align(wrong(true, 4, offset_us=1e5, drift=0.0))
    assert furthest_us(found, true) < 5


def test_a_collective_does_not_end_before_its_last_rank_has_begun_it(tmp_path: Path) -> None:
    """Though the ends would agree best that way: one rank sees most of them late."""
    first = [work(KERNEL, 1_000.0 * n, 100.0, n + 1, stream=20) for n in range(6)]
    second = [work(KERNEL, 1_000.0 * n + 95, 5.0 if n else 105.0, n + 1, stream=20) for n in range(6)]
    for event in second[1:]:
        event["dur"] += 200.0
    traces = job(tmp_path, first, second)
    found, fit = align(traces)
    assert fit.apart == 0
    for one in collectives_of_job(found)[0]:
        begun = max(int(found[rank].start[call.row]) for rank, call in one.calls.items())
        assert all(found[rank].end[call.row] >= begun - 1 for rank, call in one.calls.items())


def test_ranks_that_share_no_collective_keep_their_clocks_and_it_is_said(tmp_path: Path) -> None:
    first, second = reductions(2, 5, 1_000, 5)
    traces = job(tmp_path, first, second, [operator("aten::mm", 5, 10)])
    found, fit = align(traces)
    assert sorted(fit.clocks) == [0]
    assert np.array_equal(found[2].start, traces[2].start)
    assert any("not matched" in note for note in fit.notes)
    assert any("ranks 1, 2 are as they were" in note for note in fit.notes)


def test_one_rank_is_its_own_reference(tmp_path: Path) -> None:
    traces = job(tmp_path, [operator("aten::mm", 5, 10)])
    found, fit = align(traces)
    assert (fit.collectives, fit.notes, len(found)) == (0, (), 1)


def test_a_real_job_of_eight_ranks(measured_data: Path) -> None:
    traces = read_traces(measured_data / REAL, last_step=True, align=True)
    met, notes = collectives_of_job(traces)
    assert (len(met), notes) == (8, [])
    assert all(set(one.calls) == set(range(8)) for one in met)
    for one in met:
        begun = max(int(traces[rank].start[call.row]) for rank, call in one.calls.items())
        assert begun < min(int(traces[rank].end[call.row]) for rank, call in one.calls.items())
    again, fit = align(wrong(traces, 6, offset_us=1e6, drift=2e-5))
    assert furthest_us(again, traces) < 5
    assert clocks(again, met).apart == fit.apart == 0


@pytest.mark.parametrize("name", ["collectives", "communication", "cross-rank-critical-path-summary"])
def test_no_column_is_made_for_each_collective(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many whole columns are computed for sixty collectives as for ten: what they cost is linear."""
    made: list[int] = []
    monkeypatch.setattr(Trace, "end", property(lambda trace: made.append(1) or trace.start + trace.duration))
    often = []
    for count in (10, 60):
        folder = tmp_path / str(count)
        folder.mkdir()
        off = wrong(job(folder, *reductions(3, count, 5_000.0, 4)), 4, offset_us=2e6, drift=0.0)
        made.clear()
        ANALYSES[name](off)
        often.append(len(made))
    assert often[0] == often[1]

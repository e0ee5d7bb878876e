"""Traces that say little: every analysis answers exactly, or refuses in one line."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_traces import Event, call, job, launched, operator, step, work

from echograph.errors import EchoError, UsageError
from echograph.profiler.analyses import ANALYSES
from echograph.profiler.traces import TraceSet

# "What is not a number is empty": these columns may have no value, as their analyses say.
EMPTY = {"count", "mean", "std", "min", "25%", "50%", "75%", "max"}
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ANALYSES),
    ("kernel-sequences", {"operator": "a", "min_length": 1}),
    ("annotations", {"side": "host"}),
    ("cross-rank-critical-path", {"step": 0}),
    ("critical-path", {"annotation": "ProfilerStep"}),
    ("critical-path", {"launch_edges": True}),
    ("queue-full", {"max_queue_length": 1}),
    ("kernels", {"top": 1}),
    ("trace-diff", {"test_step": 1}),
    ("hardware-counters", {"peak_gflops": 1.0, "peak_gbps": 1.0}),
]
REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
USUAL = [
    operator("aten::mm", 5, 50),
    *launched("gemm", 10, 20, 30, 1),
    *launched(REDUCE, 40, 45, 100, 2, stream=20),
]


def annotated(name: str, ts: float, dur: float, **place: Any) -> Event:
    return operator(name, ts, dur) | {"cat": "user_annotation"} | place


LITTLE: dict[str, list[list[Event]]] = {
    "no event": [[]],
    "no event on two ranks": [[], []],
    "one operator": [[operator("aten::a", 1, 1)]],
    "one operator of no time": [[operator("aten::a", 1, 0)]],
    "one kernel": [[work("k", 1, 1)]],
    "one kernel of no time": [[work("k", 1, 0)]],
    "one call of no time": [[call(1, 0, 3)]],
    "a launch of no time": [[call(1, 0, 3), work("k", 1, 0, 3)]],
    "one annotation": [[annotated("x", 1, 5)]],
    "one step": [[step(0, 1, 5)]],
    "one step of no time": [[step(0, 1, 0)]],
    "two steps of no time": [[step(0, 1, 0), step(1, 1, 0)]],
    "steps that overlap": [[step(0, 0, 100), step(1, 50, 100), step(2, 60, 5), *USUAL]],
    "one step twice": [[step(0, 0, 100), step(0, 0, 100), *USUAL]],
    "a step without kernels": [[step(0, -100, 90), operator("a", -50, 5), step(1, 0, 100), *USUAL]],
    "a rank without events": [USUAL, []],
    "a first rank without events": [[], USUAL],
    "a rank without kernels": [USUAL, [operator("aten::a", 1, 5)]],
    "a rank with one event of no time": [USUAL, [operator("aten::a", 1, 0)]],
    "no rank with kernels": [[operator("aten::a", 1, 5)], [operator("aten::b", 2, 5)]],
    "negative times": [[e | {"ts": e["ts"] - 1000} for e in USUAL]],
    "collectives": [USUAL, USUAL],
    "one rank with a collective more": [USUAL, [*USUAL, *launched(REDUCE, 300, 305, 5, 9, stream=20)]],
    "collectives of no time": [launched(REDUCE, 1, 6, 0, 1, stream=20)] * 2,
    "a thread of no time": [[operator("aten::a", 1, 5), operator("aten::b", 2, 0, tid=2)]],
    "a main thread of no time": [[step(0, 0, 9), operator("aten::a", 1, 0), operator("aten::b", 2, 3, tid=2)]],
    "a device alone": [[work("k", 1, 5), work(REDUCE, 3, 5, stream=8)]] * 2,
    "a copy of no bandwidth": [
        launched("Memcpy HtoD", 1, 2, 0, 1, cat="gpu_memcpy", bytes=0, **{"memory bandwidth (GB/s)": "N/A"})
    ],
    "a copy of endless bandwidth": [
        launched("Memcpy HtoD", 1, 2, 0, 1, cat="gpu_memcpy", **{"memory bandwidth (GB/s)": math.inf})
    ],
    "gloo": [[operator("c10d::allreduce_", 1, 1), annotated("gloo:all_reduce", 3, 10, tid=2)]] * 2,
    "gloo before the optimizer": [
        [annotated("gloo:all_reduce", 3, 10, tid=2), annotated("Optimizer.step#S", 20, 1)]
    ],
    "Python alone": [[operator("f", 1, 5, **{"Python id": 1}) | {"cat": "python_function"}]],
    "an annotation on the device alone": [
        [operator("x", 1, 0) | {"cat": "gpu_user_annotation", "pid": 0, "tid": 7}]
    ],
    "a child that is longer": [[operator("aten::a", 1, 5), operator("aten::b", 2, 50)]],
    "one number twice": [[*launched("g", 1, 5, 5, 7), *launched("g", 20, 25, 5, 7)]],
    "a kernel before its launch": [[call(100, 5, 3), work("k", 1, 5, 3)]],
    "no processes": [[{k: v for k, v in e.items() if k not in ("pid", "tid")} for e in USUAL]],
    "no arguments": [[e | {"args": None} for e in USUAL]],
}


def answers(traces: TraceSet) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """What each analysis answers that answers."""
    for name, options in OPTIONS:
        try:
            table = ANALYSES[name](traces, **options)
        except EchoError as error:
            assert str(error) and "\n" not in str(error), name
            continue
        for title, column in table.columns.items():
            for value in column if title not in EMPTY else ():
                assert not isinstance(value, float | np.floating) or math.isfinite(value), (name, title)
        yield name, table.records()


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("case", LITTLE)
def test_every_analysis_of_a_little_trace(tmp_path: Path, case: str) -> None:
    found = dict(answers(job(tmp_path, *LITTLE[case])))
    assert {"temporal-breakdown", "kernels", "idle", "launches", "steps", "collectives"} <= found.keys()


def any_rank(chance: random.Random) -> list[Event]:
    """A few events of any sort, at any time, on few threads and streams."""
    found: list[Event] = []
    for number in range(chance.randint(0, 6)):
        ts, dur, tid = chance.randint(-5, 40), chance.choice([0, 0, 1, 5, 30]), chance.randint(1, 3)
        stream, kernel = chance.choice([7, 20]), chance.choice(["k", REDUCE])
        match chance.randint(0, 7):
            case 0:
                names = ["aten::a", "c10d::allreduce_", "autograd::engine::evaluate_function: X"]
                found.append(operator(chance.choice(names), ts, dur, tid=tid))
            case 1:
                found += [call(ts, dur, number + 1, tid=tid), work(kernel, ts + 3, dur, number + 1, stream=stream)]
            case 2:
                found.append(step(chance.randint(0, 2), ts, dur))
            case 3:
                calls = [
                    "cudaDeviceSynchronize",
                    "cudaStreamSynchronize",
                    "cudaStreamWaitEvent",
                    "cudaEventRecord",
                ]
                found.append(call(ts, dur, number + 1, chance.choice(calls)))
            case 4:
                found.append(annotated("gloo:all_reduce", ts, dur, tid=tid))
            case 5:
                found.append(work(kernel, ts, dur, stream=stream))
            case 6:
                waits = ["Context Sync", "Stream Sync", "Event Sync", "Stream Wait Event"]
                found.append(work(chance.choice(waits), ts, dur, chance.randint(1, 5), cat="cuda_sync"))
            case _:
                found.append(annotated("Optimizer.step#S", ts, dur))
    return found


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_every_analysis_of_any_little_trace(tmp_path: Path) -> None:
    chance = random.Random(7)
    for number in range(20):
        ranks = [any_rank(chance) for _ in range(chance.randint(1, 3))]
        assert dict(answers(job(tmp_path / str(number), *ranks)))


def rows_of(name: str, traces: TraceSet, **options: Any) -> list[dict[str, Any]]:
    return list(ANALYSES[name](traces, **options).records())


def test_work_is_of_the_step_that_began_last(tmp_path: Path) -> None:
    traces = job(tmp_path, *LITTLE["steps that overlap"])
    # The kernel is launched at 10, the collective at 40; the operator around both begins at 5.
    assert [(r["step"], r["launched"]) for r in rows_of("steps", traces)] == [(0, 2), (1, 0), (2, 0)]
    inside = job(tmp_path / "inside", [step(0, 0, 100), step(1, 50, 5), *launched("k", 70, 75, 1, 1)])
    assert [(r["step"], r["launched"]) for r in rows_of("steps", inside)] == [(0, 1), (1, 0)]


def test_a_thread_of_no_time_is_on_no_path(tmp_path: Path) -> None:
    rows = rows_of("cross-rank-critical-path", job(tmp_path, *LITTLE["a thread of no time"]))
    assert {(row["name"], row["line"], row["bound_by"]) for row in rows} == {("aten.a", "main", "compute")}
    assert sum(row["duration(us)"] for row in rows) == 5
    assert rows_of("cross-rank-critical-path", job(tmp_path / "alone", *LITTLE["one operator of no time"])) == []


def test_ranks_without_a_critical_path_are_notes(tmp_path: Path) -> None:
    table = ANALYSES["critical-path-summary"](job(tmp_path, *LITTLE["a rank without events"]))
    assert {row["rank"] for row in table.records()} == {0}
    assert any(note.startswith("rank 1: ") and "no operator or call began" in note for note in table.notes)
    with pytest.raises(UsageError, match="no operator or call began in it"):
        ANALYSES["critical-path"](job(tmp_path / "none", [], []))


def test_shares_of_nothing_are_none_and_sums_are_exact(tmp_path: Path) -> None:
    traces = job(tmp_path, *LITTLE["a rank without kernels"])
    (row,) = rows_of("temporal-breakdown", traces)
    assert (row["rank"], row["idle_time(us)"], row["compute_time(us)"], row["non_compute_time(us)"]) == (
        0,
        0,
        30,
        95,
    )
    assert any("rank 1: nothing ran on a device" in note for note in ANALYSES["temporal-breakdown"](traces).notes)
    zero = job(tmp_path / "zero", *LITTLE["one kernel of no time"])
    (row,) = rows_of("temporal-breakdown", zero)
    assert (row["kernel_time(us)"], row["idle_time_pctg"]) == (0, 0)
    (row,) = rows_of("overlap", job(tmp_path / "reduce", *LITTLE["collectives of no time"][:1]))
    assert row["comp_comm_overlap_pctg"] is None

"""Every count of the analyses equals that of a counter that shares no code with them, on all traces there are."""

from __future__ import annotations

import random
from collections import Counter as Multiset
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hta_reference import PUBLISHED
from raw_events import Counter
from small_traces import Event, call, operator, work, write

from echograph.profiler.analyses import ANALYSES
from echograph.profiler.traces import TraceSet, read_traces

US = 1_000_000
GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevComm*, unsigned long)"
NAMES = (
    "gemm<float>",
    "void at::native::reduce_kernel<512, 1>(T)",
    GATHER,
    "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWork)",
)


def made(seed: int) -> list[Event]:
    """Work at random, on streams that overlap, with launches, without, too early, or of two kernels."""
    chance = random.Random(seed)
    events: list[Event] = [operator("aten::mm", 0, 500)]
    for number in range(1, chance.randrange(2, 40)):
        at, stream = chance.randrange(0, 400) / 4, chance.choice((7, 7, 20, 30))
        name, cat = chance.choice(NAMES), "kernel"
        if chance.random() < 0.2:
            name, cat = "Memcpy DtoD (Device -> Device)", "gpu_memcpy"
        if chance.random() < 0.8:
            events.append(call(at, chance.randrange(8) / 4, number, tid=chance.choice((1, 2))))
        begin = at + chance.randrange(-4, 200) / 4
        events.append(work(name, begin, chance.randrange(0, 60) / 4, number, stream=stream, cat=cat))
        if chance.random() < 0.1:
            events.append(work("gemm<float>", begin + 20, 3, number, stream=stream))
        if chance.random() < 0.1:
            events.append(work("Event Sync", begin, 30, number, stream=stream, cat="cuda_sync"))
    chance.shuffle(events)
    return events


@cache
def files(data: Path, name: str) -> tuple[Path, ...]:
    return tuple(sorted((data / "traces" / name).glob("*.gz")))


@cache
def read(path: Path) -> tuple[TraceSet, dict[int, Counter]]:
    traces = read_traces(path, last_step=True)
    return traces, {rank: Counter(Path(trace.path)) for rank, trace in traces.items()}


def check_all(path: Path) -> None:
    traces, counters = read(path)
    for check in (busy, kernels, launches, idle, communication):
        check(traces, counters)


def busy(traces: TraceSet, counters: dict[int, Counter]) -> None:
    parts = {row["rank"]: row for row in ANALYSES["temporal-breakdown"](traces).records()}
    overlaps = {row["rank"]: row for row in ANALYSES["overlap"](traces).records()}
    for rank, counter in counters.items():
        spent = counter.busy()
        if not counter.works:
            assert rank not in parts and rank not in overlaps
            continue
        of = {"idle_time(us)": "idle", "compute_time(us)": "computation", "non_compute_time(us)": "other"}
        for column, what in (of | {"kernel_time(us)": "all"}).items():
            assert parts[rank][column] == pytest.approx(spent[what] / US), column
        assert overlaps[rank]["communication_time(us)"] == pytest.approx(spent["communication"] / US)
        assert overlaps[rank]["overlapped_time(us)"] == pytest.approx(spent["both"] / US)


def kernels(traces: TraceSet, counters: dict[int, Counter]) -> None:
    rows = ANALYSES["kernels"](traces).records()
    found = {(row["rank"], f"{row['name']}|{row['kernel_type'].lower()}"): row for row in rows}
    expected = {(rank, name): took for rank, c in counters.items() for name, took in c.kernels().items()}
    assert found.keys() == expected.keys()
    for key, took in expected.items():
        row = found[key]
        assert row["count"] == len(took)
        for column, value in (("sum (us)", sum(took)), ("max (us)", max(took)), ("min (us)", min(took))):
            assert row[column] == pytest.approx(value / US), (key, column)


def launches(traces: TraceSet, counters: dict[int, Counter]) -> None:
    for rank, counter in counters.items():
        found = Multiset[Any]()
        columns = ("correlation", "cpu_duration", "gpu_duration", "launch_delay")
        for row in ANALYSES["launches"](traces).records():
            if row["rank"] == rank:
                number, *times = (row[column] for column in columns)
                found[number, *(round(time * US) for time in times)] += 1
        assert found == Multiset(counter.launches())


def idle(traces: TraceSet, counters: dict[int, Counter]) -> None:
    for rank, counter in counters.items():
        found = {
            (row["device"], row["stream"], row["idle_category"]): row["idle_time"]
            for row in ANALYSES["idle"](traces).records()
            if row["rank"] == rank
        }
        assert found == pytest.approx({key: gap / US for key, gap in counter.idle().items()})


def communication(traces: TraceSet, counters: dict[int, Counter]) -> None:
    """Of one rank alone a collective is its kernel; what several ranks share is checked below."""
    if len(traces) > 1:
        return
    rows = ANALYSES["communication"](traces).records()
    (works,) = ([work for work in c.works if work.kind == "communication"] for c in counters.values())
    assert sum(row["count"] for row in rows) == len(works)
    took = sum(work.end - work.start for work in works) / US
    assert sum(row["sum(us)"] for row in rows) == pytest.approx(took)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_traces(measured_data: Path, name: str) -> None:
    for path in files(measured_data, name):
        check_all(path)


@pytest.mark.parametrize("seed", range(40))
def test_made_traces(tmp_path: Path, seed: int) -> None:
    check_all(write(tmp_path / "rank0.json", made(seed)))


def met(counters: dict[int, Counter]) -> list[float]:
    """Microseconds from the last begin to the last end, of the n-th collectives of each kind."""
    of_rank = {rank: counter.collectives() for rank, counter in counters.items()}
    found = []
    for kind in set().union(*of_rank.values()):
        for spans in zip(*(of[kind] for of in of_rank.values()), strict=True):
            took = max(end for _, end in spans) - max(start for start, _ in spans)
            found.append(max(0, took) / US)
    return sorted(found)


@pytest.mark.parametrize("seed", range(10))
def test_collectives_of_made_jobs(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    waits = [(chance.choice(NAMES[2:]), chance.randrange(1, 50)) for _ in range(6)]
    for rank in range(3):
        events = []
        for number, (name, took) in enumerate(waits, start=1):
            begin = 1000 * number - chance.randrange(0, 100)
            events += [
                call(begin - 5, 1, number),
                work(name, begin, 1000 * number + took - begin, number, stream=20),
            ]
        write(tmp_path / f"rank{rank}.json", events, rank=rank)
    traces = read_traces(tmp_path, last_step=True)
    counters = {rank: Counter(Path(trace.path)) for rank, trace in traces.items()}
    rows = ANALYSES["collectives"](traces).records()
    assert {row["ranks"] for row in rows} == {"0,1,2"}
    assert sorted(row["duration(us)"] for row in rows) == pytest.approx(met(counters))


def test_collectives_of_a_published_job_are_as_many(measured_data: Path) -> None:
    traces, rows = read_traces(measured_data / "traces" / "dlrm-v100-8-ranks", last_step=True), Multiset[str]()
    for row in ANALYSES["collectives"](traces).records():
        rows[row["name"]] += 1
        assert row["ranks"] == "0,1,2,3,4,5,6,7"
    counted = [Counter(Path(trace.path)).collectives() for trace in traces.values()]
    assert {kind: len(of) for kind, of in counted[0].items()} == {
        kind: len(of) for kind, of in counted[-1].items()
    }
    assert rows.total() == sum(map(len, counted[0].values()))

"""Columns hold what the file says, to the last digit."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_traces import Event, call, operator, step, trace, work, write

from echograph.profiler.traces import read_trace
from echograph.profiler.traces.trace import NONE

US = 1_000_000


def test_a_row_for_every_complete_event_in_the_order_of_the_file(tmp_path: Path) -> None:
    events: list[Event] = [
        {"ph": "M", "name": "process_name", "pid": 10, "args": {"name": "python"}},
        operator("aten::mm", 5, 10, **{"External id": 3, "Sequence number": 8, "Fwd thread id": 0}),
        {"ph": "s", "id": 1, "pid": 10, "tid": 1, "ts": 6, "cat": "ac2g", "name": "ac2g"},
        call(6, 2, 77),
        {
            "ph": "X",
            "cat": "Trace",
            "name": "PyTorch Profiler (0)",
            "pid": "Spans",
            "tid": "x",
            "ts": 0,
            "dur": 99,
        },
        work("gemm", 9, 4, 77, bytes=5, **{"memory bandwidth (GB/s)": 2.5}),
        {"ph": "X", "name": "no category", "pid": 1, "tid": 1, "ts": 3, "dur": 1},
    ]
    found = trace(tmp_path, events)
    assert [found.text(row) for row in range(len(found))] == ["aten::mm", "cudaLaunchKernel", "gemm"]
    assert [found.strings[code] for code in found.category] == ["cpu_op", "cuda_runtime", "kernel"]
    assert found.index.tolist() == [1, 3, 5]
    assert (found.start + found.origin).tolist() == [5 * US, 6 * US, 9 * US]
    assert found.duration.tolist() == [10 * US, 2 * US, 4 * US]
    assert found.stream.tolist() == [NONE, NONE, 7]
    assert found.correlation.tolist() == [NONE, 77, 77]
    assert found.external_id.tolist() == [3, NONE, NONE]
    assert found.on_device.tolist() == [False, False, True]
    assert found.argument("Sequence number").tolist() == [8, NONE, NONE]
    assert found.argument("bytes").tolist() == [NONE, NONE, 5]
    assert found.argument("memory bandwidth (GB/s)", np.nan)[2] == 2.5
    assert found.argument("never said").tolist() == [NONE] * 3
    assert (found.rank, found.world_size, found.tick, found.notes) == (0, 2, US, ())


@given(
    origin=st.sampled_from([0, 86_902, 4_458_676_522_690, 1_712_195_495_519_689]),
    nanoseconds=st.lists(st.tuples(st.integers(0, 10**12), st.integers(0, 10**10)), min_size=1, max_size=8),
)
def test_nanoseconds_are_exact_whatever_the_epoch(
    tmp_path_factory: pytest.TempPathFactory, origin: int, nanoseconds: list[tuple[int, int]]
) -> None:
    lines = [
        f'{{"ph":"X","cat":"kernel","name":"k","pid":0,"tid":7,"ts":{origin + ns // 1000}.{ns % 1000:03},'
        f'"dur":{duration // 1000}.{duration % 1000:03},"args":{{"stream":7}}}}'
        for ns, duration in nanoseconds
    ]
    path = tmp_path_factory.mktemp("ns") / "rank0.json"
    path.write_text('{"traceEvents":[' + ",".join(lines) + "]}")
    found = read_trace(path)
    assert [found.origin + ps for ps in found.start.tolist()] == [origin * US + ns * 1000 for ns, _ in nanoseconds]
    assert found.duration.tolist() == [duration * 1000 for _, duration in nanoseconds]


def test_picoseconds_of_short_traces_are_exact(tmp_path: Path) -> None:
    found = trace(tmp_path, [work("k", 1.000001, 0.000003), work("k", 12345.678901, 2.5)])
    assert found.start.tolist() == [0, int((Decimal("12345.678901") - Decimal("1.000001")) * US)]
    assert found.duration.tolist() == [3, 2_500_000]
    assert found.tick == 1


def test_work_that_names_no_stream_is_on_that_of_its_thread(tmp_path: Path) -> None:
    event = work("k", 1, 1, stream=13)
    del event["args"]["stream"]
    assert trace(tmp_path, [event]).stream.tolist() == [13]


def test_old_names_of_categories(tmp_path: Path) -> None:
    found = trace(tmp_path, [work("k", 1, 1, cat="Kernel"), work("Memcpy HtoD", 2, 1, cat="Memcpy")])
    assert found.on_device.tolist() == [True, True]


def test_collectives_keep_their_arguments(tmp_path: Path) -> None:
    said = {"Collective name": "allreduce", "dtype": "Float", "In msg nelems": 64, "Group size": 8}
    found = trace(tmp_path, [work("k", 0, 1), work("ncclDevKernel_AllReduce", 1, 1, **said)])
    text = found.argument("Collective name")
    assert [found.strings[code] if code != NONE else None for code in text] == [None, "allreduce"]
    assert found.argument("In msg nelems").tolist() == [NONE, 64]
    assert found.argument("Group size").tolist() == [NONE, 8]


def test_processes_and_threads_that_are_text_are_told_apart(tmp_path: Path) -> None:
    events = [operator("a", 1, 1) | {"tid": tid} for tid in ("main", "other", "main", 7, 2**63)]
    tid = trace(tmp_path, events).tid.tolist()
    assert tid[0] == tid[2] < NONE
    assert tid[1] < NONE
    assert tid[1] != tid[0]
    assert tid[3] == 7
    assert tid[4] < NONE


def half(phase: str, ts: float, *, tid: int = 1, **said: Any) -> dict[str, Any]:
    return {"ph": phase, "cat": "cpu_op", "pid": 1, "tid": tid, "ts": ts} | said


def test_begins_are_paired_with_ends(tmp_path: Path) -> None:
    events = [
        half("B", 10, name="outer", args={"External id": 3}),
        half("B", 11, name="other", tid=2),
        half("B", 12.5, name="inner"),
        work("k", 13, 1, bytes=5, stream=7),
        half("E", 14, args={"External id": 4}),
        half("E", 20.25),
        half("E", 30, tid=2, name="not looked at"),
    ]
    found = trace(tmp_path, events)
    assert [found.text(row) for row in range(4)] == ["outer", "other", "inner", "k"]
    assert found.start.tolist() == [0, US, 2_500_000, 3 * US]
    assert found.duration.tolist() == [10_250_000, 19 * US, 1_500_000, US]
    assert found.external_id.tolist() == [3, NONE, 4, NONE]
    assert found.index.tolist() == [0, 1, 2, 3]
    assert found.argument("bytes").tolist() == [NONE, NONE, NONE, 5]
    assert found.notes == ()


def test_pairs_keep_nanoseconds_of_the_epoch(tmp_path: Path) -> None:
    text = '[{"ph":"B","cat":"c","name":"a","ts":1700000000000000.123},{"ph":"E","ts":1700000000000001.125}]'
    (tmp_path / "t.json").write_text(text)
    found = read_trace(tmp_path / "t.json")
    assert (found.origin, found.duration.tolist()) == (1_700_000_000_000_000_123_000, [1_002_000])


def test_pairs_come_together_across_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echograph.profiler.traces.events.CHUNK_BYTES", 256)
    events = [half("B", 0, name="long"), *(operator(f"op {i}", i, 1) for i in range(50)), half("E", 60)]
    found = trace(tmp_path, events)
    assert found.text(0) == "long"
    assert found.duration.tolist() == [60 * US] + [US] * 50
    assert np.array_equal(found.index, np.arange(51))


def test_halves_are_not_lost_without_a_word(tmp_path: Path) -> None:
    found = trace(tmp_path, [operator("a", 1, 1), half("E", 0), half("B", 2, name="b"), half("B", 3, name="c")])
    assert [note.partition(": ")[2] for note in found.notes] == [
        "2 events begin and do not end: they are left out",
        "1 events end and did not begin: they are left out",
    ]
    assert len(found) == 1


def test_rank_from_the_file_then_from_its_name(tmp_path: Path) -> None:
    assert read_trace(write(tmp_path / "rank9.json", [step(1, 0, 1)], rank=3)).rank == 3
    assert read_trace(write(tmp_path / "rank-9.json", [step(1, 0, 1)], rank=None)).rank == 9
    assert read_trace(write(tmp_path / "worker12_step_3.json", [step(1, 0, 1)], rank=None)).rank == 12
    assert read_trace(write(tmp_path / "trace.json", [step(1, 0, 1)], rank=None)).rank == 0


def test_half_a_character_does_not_reach_the_answer(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", [operator("caf_", 1, 1)])
    path.write_text(path.read_text().replace("caf_", "caf\\ud83d"))
    assert read_trace(path).text(0) == "caf?"


def test_an_empty_trace(tmp_path: Path) -> None:
    found = trace(tmp_path, [])
    assert len(found) == 0
    assert not found.on_device.any()
    assert len(found.rows(np.zeros(0, np.bool_))) == 0


def test_chosen_rows_keep_their_arguments(tmp_path: Path) -> None:
    found = trace(tmp_path, [work(f"k{i}", i, 1, bytes=i) for i in range(6)])
    odd = found.rows(np.arange(6) % 2 == 1)
    assert odd.argument("bytes").tolist() == [1, 3, 5]
    again = odd.rows(np.array([0, 2]))
    assert again.argument("bytes").tolist() == [1, 5]
    assert again.index.tolist() == [1, 5]

"""What is wrong in a trace is refused in one line, or left out and counted; the rest is read as it stands."""

from __future__ import annotations

import codecs
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_traces import Event, call, job, launched, operator, step, trace, work, write

from echograph.errors import DataError, EchoError, InputError
from echograph.profiler.analyses import ANALYSES
from echograph.profiler.traces import TraceSet, cache_folder, read_trace, read_traces
from echograph.profiler.traces.alignment import align

US = 1_000_000
GOOD = [operator("aten::mm", 5, 10), *launched("gemm", 6, 9, 4, 77)]


def raw(path: Path, events: list[str], head: str = "") -> Path:
    """A trace file of events as text, for what `json` does not write."""
    path.write_text(f'{{{head}"traceEvents": [\n' + ",\n".join(events) + "\n]}")
    return path


def text_of(event: Event, **values: str) -> str:
    """An event as JSON with some of its values as they are given."""
    fields = {name: json.dumps(value) for name, value in event.items()} | values
    return "{" + ", ".join(f'"{name}": {value}' for name, value in fields.items() if value) + "}"


@pytest.mark.parametrize("dur", ["-1", "-0.001", "NaN", "Infinity", "-Infinity", "1e400", "1" + "0" * 400, "1e19"])
@pytest.mark.parametrize("nanoseconds", [False, True])
def test_a_duration_that_is_none_leaves_its_event_out(tmp_path: Path, dur: str, nanoseconds: bool) -> None:
    at = 1_712_195_495_519_689.25 if nanoseconds else 5
    events = [text_of(operator("aten::bad", at, 0), dur=dur), text_of(operator("aten::mm", at, 10))]
    found = read_trace(raw(tmp_path / "t.json", events))
    assert [found.text(row) for row in range(len(found))] == ["aten::mm"]
    assert found.duration.tolist() == [10 * US]
    (note,) = found.notes
    assert "1 events left out: their duration is negative or no time (event 0 first)" in note


@pytest.mark.parametrize("ts", ["", "null", "NaN", "-Infinity", "1e400", "1e19", "1" + "0" * 400])
def test_an_event_without_a_time_is_left_out_and_not_the_origin(tmp_path: Path, ts: str) -> None:
    events = [text_of(e) for e in GOOD]
    events.insert(1, text_of(operator("aten::bad", 0, 3), ts=ts))
    found = read_trace(raw(tmp_path / "t.json", events))
    assert found.origin == 5 * US and len(found) == 3
    (note,) = found.notes
    assert "1 events left out: when they began is missing or no time (event 1 first)" in note


def test_times_far_from_the_others_are_left_out(tmp_path: Path) -> None:
    # What CUPTI's stamp of 0 becomes, and a counter that ran below zero.
    now = 1_700_000_000_000_000
    events = [e | {"ts": now + e["ts"]} for e in GOOD] + [
        work("gemm", 0, 1, 78),
        work("gemm", 2**64 // 1000, 1, 79),
    ]
    found = trace(tmp_path, events)
    assert found.origin == (now + 5) * US and len(found) == 3
    assert int(found.end.max()) == 10 * US
    (note,) = found.notes
    assert "2 events left out: they began more than 25 days before or after most others (event 3 first)" in note


def test_begins_and_ends_without_a_time_or_the_wrong_way_round(tmp_path: Path) -> None:
    def mark(phase: str, ts: float | None) -> Event:
        found = {"ph": phase, "cat": "cpu_op", "name": "a", "pid": 1, "tid": 1, "ts": ts}
        return {name: value for name, value in found.items() if value is not None}

    good = [mark("B", 5), mark("E", 8)]
    found = trace(
        tmp_path,
        [*good, mark("B", 20), mark("E", 10), mark("B", None), mark("E", 30), mark("B", 40), mark("E", None)],
    )
    assert (found.origin, found.duration.tolist()) == (5 * US, [3 * US])
    assert sum("left out" in note for note in found.notes) == 2


def test_negative_times_are_times(tmp_path: Path) -> None:
    found = trace(tmp_path, [e | {"ts": e["ts"] - 1000.5} for e in GOOD])
    assert found.origin == -995_500_000 and found.start.tolist() == [0, US, 4 * US] and not found.notes


def test_what_is_left_out_is_said_from_the_cache_too(tmp_path: Path) -> None:
    write(tmp_path / "job" / "rank0.json", [*GOOD, operator("bad", 5, -5)])
    said = [read_traces(tmp_path / "job", cache_folder=tmp_path / "cache").notes for _ in range(2)]
    assert said[0] == said[1] and len(said[0]) == 1
    assert cache_folder() != tmp_path


def test_ranks_whose_clocks_are_years_apart_count_from_their_own_first_event(tmp_path: Path) -> None:
    traces = job(tmp_path, GOOD, [e | {"ts": 1_700_000_000_000_000 + e["ts"]} for e in GOOD])
    assert [one.start.tolist() for one in traces.values()] == [[0, US, 4 * US]] * 2
    (note,) = traces.notes
    assert note.startswith("rank 1: its clock is more than 25 days from that of rank 0")
    assert note in align(traces)[0].notes


def test_halves_of_characters_reach_no_table(tmp_path: Path) -> None:
    half = '"\\ud800x"'
    events = [
        text_of(operator("", 5, 10), name=half),
        text_of(work("", 6, 3), name=half, args='{"stream": 7, "q": "\\udfff"}'),
    ]
    head = f'"deviceProperties": [{{"id": 0, "name": {half}}}], '
    found = read_trace(raw(tmp_path / "t.json", events, head))
    assert [found.text(row) for row in range(2)] == ["?x", "?x"]
    assert found.header["deviceProperties"] == [{"id": 0, "name": "?x"}]
    ANALYSES["kernels"](TraceSet({0: found})).csv().encode()


@pytest.mark.parametrize(
    "broken",
    ["null", "5", '"text"', "[]", "[[]]", "true", '{"ph": "X", "name": 5}', '{"ph": "X", "dur": "long"}',
     '{"ph": "X", "cat": []}', '{"ph": "X", "pid": {}}', "[" * 100_000 + "]" * 100_000,
     '{"ph": "X", "name": "a" "b"}', '{"ph": "X", "args": ' + '{"a":' * 5000 + "1" + "}" * 5000 + "}",
     "{" + '"ph": "X", "ts": ' + "1" * 5000 + "}"],
)  # fmt: skip
def test_what_is_no_event_is_refused_with_its_number(tmp_path: Path, broken: str) -> None:
    path = raw(tmp_path / "t.json", [text_of(GOOD[0]), broken, text_of(GOOD[1])])
    try:
        found = read_trace(path)
    except DataError as error:
        assert "event 1 is broken" in str(error) and "\n" not in str(error) and len(str(error)) < 300
    else:
        assert len(found) >= 2


@pytest.mark.parametrize(
    "args",
    [[], "text", 5, {"stream": [7], "correlation": "first"}, {"Process Group Ranks": {"a": 1}, "dtype": 5},
     {"External id": 1.5, "Collective name": ["x"]}],
)  # fmt: skip
def test_arguments_of_wrong_types_are_left_out_and_counted(tmp_path: Path, args: Any) -> None:
    found = trace(tmp_path, [*GOOD, operator("aten::odd", 20, 5) | {"args": args}])
    assert len(found) == 4
    (note,) = found.notes
    assert "1 events have arguments that are not of their type, which are left out (event 3" in note
    traces = TraceSet({0: found})
    for name in ("collectives", "operators", "memory-timeline", "cross-rank-critical-path", "hardware-counters"):
        assert isinstance(ANALYSES[name](traces).records(), list)


def test_events_that_say_almost_nothing(tmp_path: Path) -> None:
    rows: list[Event] = [
        {},
        {"ph": "X"},
        {"ph": "Z"},
        {"ph": None},
        {"ph": "X", "cat": "cpu_op", "ts": 1, "dur": 2},
    ]
    found = trace(tmp_path, rows)
    assert len(found) == 1 and found.text(0) == ""
    assert ANALYSES["call-stacks"](TraceSet({0: found})).records()[0]["host_time(us)"] == 2


def test_of_calls_with_one_number_the_last_launched_it(tmp_path: Path) -> None:
    traces = job(tmp_path, [call(0, 1, 5), call(10, 2, 5), work("gemm", 20, 5, 5), work("gemm", 30, 5, 5)])
    rows = ANALYSES["launches"](traces).records()
    assert [(r["cpu_duration"], r["launch_delay"]) for r in rows] == [(2, 8), (2, 18)]


@pytest.mark.parametrize("rank", [-1, True, "0", 1.5, 10**30, [0]])
def test_a_rank_that_is_none_is_refused(tmp_path: Path, rank: Any) -> None:
    path = write(tmp_path / "t.json", GOOD, distributedInfo={"rank": rank})
    with pytest.raises(DataError, match=r"t\.json: distributedInfo: rank .* is no number of a rank"):
        read_trace(path)


def test_a_name_with_an_endless_number_is_of_no_rank(tmp_path: Path) -> None:
    assert read_trace(write(tmp_path / f"rank{'9' * 30}.json", GOOD, rank=None)).rank == 0


def encoded(text: str, how: str) -> bytes:
    match how:
        case "bom":
            return codecs.BOM_UTF8 + text.encode()
        case "gzipped bom":
            return gzip.compress(codecs.BOM_UTF8 + text.encode())
        case "latin-1":
            return text.replace("mm", "m\xe9").encode("latin-1")
        case _:
            return text.encode(how)


@pytest.mark.parametrize("how", ["bom", "gzipped bom", "latin-1"])
def test_a_mark_of_the_encoding_and_bytes_that_are_no_characters(tmp_path: Path, how: str) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(encoded(json.dumps({"traceEvents": GOOD}), how))
    assert len(read_trace(path)) == 3


@pytest.mark.parametrize("how", ["utf-16", "utf-32"])
def test_other_encodings_are_no_trace(tmp_path: Path, how: str) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(encoded(json.dumps({"traceEvents": GOOD}), how))
    with pytest.raises(InputError, match="not a trace: it has no traceEvents"):
        read_trace(path)


@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.9, 0.999])
def test_a_gzip_that_was_cut_off_is_read_as_far_as_it_goes(tmp_path: Path, share: float) -> None:
    whole = gzip.compress(json.dumps({"traceEvents": [operator(f"n{i}", i, 1) for i in range(2000)]}).encode(), 1)
    path = tmp_path / "t.json.gz"
    path.write_bytes(whole[: int(share * len(whole))])
    found = read_trace(path)
    assert found.index.tolist() == list(range(len(found))) and len(found) <= 2000
    assert any("cut off" in note for note in found.notes)


@pytest.mark.parametrize(
    "head",
    ['"a": [, ', '"a": {"traceEvents": [1]}, ', '"a": ' + "[" * 100_000 + ", ", '"a": ' + "1" * 5000 + ", "],
)  # fmt: skip
def test_a_header_that_is_no_json_is_refused(tmp_path: Path, head: str) -> None:
    with pytest.raises(DataError, match=r"is not valid JSON|not a trace|event 0 is broken"):
        read_trace(raw(tmp_path / "t.json", [text_of(GOOD[0])], head))


def test_two_arrays_of_events_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": GOOD})[:-1] + ', "traceEvents": [{"ph": "X"}]}')
    with pytest.raises(DataError, match="has traceEvents twice"):
        read_trace(path)


def test_records_of_memory_that_are_none_are_counted(tmp_path: Path) -> None:
    def memory(ts: Any, **args: Any) -> Event:
        return {"ph": "i", "name": "[memory]", "pid": 1, "tid": 1, "ts": ts, "args": args}

    good = memory(6, **{"Bytes": 5, "Device Type": 1, "Device Id": 0, "Total Allocated": 5})
    odd = [memory("soon"), memory(7, Bytes="many"), memory(8) | {"args": []}, {"ph": "i", "name": "[memory]"}]
    table = ANALYSES["memory-timeline"](job(tmp_path, [*GOOD, good, *odd]))
    assert [r["change_bytes"] for r in table.records()] == [5]
    assert any("4 records of memory have no time or are no numbers: they are left out" in n for n in table.notes)


def test_counters_that_are_no_numbers_count_nothing(tmp_path: Path) -> None:
    said = {
        "gpu__time_duration.sum": "long",
        "dram__bytes.sum": [1],
        "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum": None,
    }
    traces = job(tmp_path, [operator("gemm", 1, 5, **said) | {"cat": "cuda_profiler_range"}])
    (row,) = ANALYSES["hardware-counters"](traces).records()
    assert (row["time(us)"], row["flops"], row["bytes"]) == (None, None, None)


def test_a_lone_step_of_no_time(tmp_path: Path) -> None:
    traces = job(tmp_path, [step(0, 5, 0)])
    assert ANALYSES["steps"](traces).records()[0]["dur"] == 0
    with pytest.raises(EchoError):
        ANALYSES["critical-path"](traces)
    assert np.array_equal(traces[0].start, [0])

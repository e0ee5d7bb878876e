"""Counters, and a copy of a trace that shows them."""

from __future__ import annotations

import gzip
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hta_reference import answer, close, exact, traces
from small_traces import Event, job, launched, operator, work, write

from echograph.errors import InputError, UsageError
from echograph.profiler.analyses import ANALYSES, COPIES
from echograph.profiler.traces import TraceSet, read_trace

US = 1_000_000


def copy(ts: float, dur: float, gbps: float) -> Event:
    said = {"memory bandwidth (GB/s)": gbps}
    return work("Memcpy HtoD (Pinned -> Device)", ts, dur, 9, stream=8, cat="gpu_memcpy", **said)


EVENTS = [*launched("a", 0, 10, 5, 1), *launched("b", 2, 15, 5, 2), operator("aten::mm", 0, 30), copy(4, 3, 2.5)]


def shown(traces: TraceSet, **options: Any) -> str:
    return b"".join(COPIES["counters"](traces, **options)).decode()


def test_counters(tmp_path: Path) -> None:
    found = ANALYSES["counters"](job(tmp_path, EVENTS)).rows()
    assert list(found) == [
        (0, 0, 0, "queue length, stream 7", 1),
        (0, 2, 0, "queue length, stream 7", 2),
        (0, 10, 0, "queue length, stream 7", 1),
        (0, 15, 0, "queue length, stream 7", 0),
        (0, 4, 0, "Memcpy HtoD (GB/s)", 2.5),
        (0, 7, 0, "Memcpy HtoD (GB/s)", 0),
    ]
    only = ANALYSES["counters"](job(tmp_path, EVENTS), which="memory-bandwidth")
    assert set(only.columns["counter"]) == {"Memcpy HtoD (GB/s)"}


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("ending", ["json", "json.gz"])
def test_a_copy_has_the_counters_and_all_else_as_it_was(tmp_path: Path, ending: str, indent: int | None) -> None:
    path = write(tmp_path / f"t.{ending}", EVENTS, indent=indent, schemaVersion=1)
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    marked = shown(TraceSet({0: read_trace(path)}))
    kept = text[text.index("[") + 1 :]
    assert marked.startswith(text.removesuffix(kept))
    assert marked.endswith(f",{kept}")
    document, original = json.loads(marked), json.loads(text)
    added = document["traceEvents"][: -len(EVENTS)]
    assert document["traceEvents"][-len(EVENTS) :] == original["traceEvents"]
    assert {**document, "traceEvents": None} == {**original, "traceEvents": None}
    assert [e["ph"] for e in added] == ["C"] * 6
    assert [(e["name"], e["pid"], e["ts"], e["args"]) for e in added[:2]] == [
        ("queue length, stream 7", 0, 0, {"value": 1}),
        ("queue length, stream 7", 0, 2, {"value": 2}),
    ]


def test_a_copy_of_an_array_alone_and_of_an_empty_one(tmp_path: Path) -> None:
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps(EVENTS))
    assert len(json.loads(shown(TraceSet({0: read_trace(path)})))) == len(EVENTS) + 6
    path.write_text('{"traceEvents": [ \n ], "schemaVersion": 1}')
    assert shown(TraceSet({0: read_trace(path)})).split() == path.read_text().split()


def test_times_of_the_copy_have_every_digit(tmp_path: Path) -> None:
    begin = Decimal("1738622478211953.123")
    text = json.dumps({"traceEvents": launched("a", 0, 0, 0, 1)})
    for old, new in (('"ts": 0', f'"ts": {begin}'), ('"dur": 0', '"dur": 0.001')):
        text = text.replace(old, new)
    path = tmp_path / "rank0.json"
    path.write_text(text)
    events = json.loads(shown(TraceSet({0: read_trace(path)})), parse_float=Decimal)["traceEvents"]
    assert [event["ts"] for event in events[:2]] == [begin, begin]


def test_a_process_that_is_text_stays_so(tmp_path: Path) -> None:
    events = [
        event | ({"pid": "GPU 0"} if event["cat"] == "kernel" else {}) for event in launched("a", 0, 5, 1, 1)
    ]
    assert json.loads(shown(job(tmp_path, events)))["traceEvents"][0]["pid"] == "GPU 0"


def test_a_wrong_question_gets_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="one rank's trace, and there are 2: add --ranks 0"):
        COPIES["counters"](job(tmp_path, EVENTS, EVENTS))
    with pytest.raises(UsageError, match="which: 'flops' is none of all, queue-length, memory-bandwidth"):
        ANALYSES["counters"](job(tmp_path, EVENTS), which="flops")
    gone = job(tmp_path, EVENTS)
    Path(gone[0].path).unlink()
    with pytest.raises(InputError, match="No such file"):
        shown(gone)


@pytest.mark.parametrize("name", ["a100-nccl-args", "dlrm-v100-8-ranks", "critical-path-alexnet"])
def test_the_copy_shows_what_hta_answers(measured_data: Path, name: str) -> None:
    # HTA has no counters of its own here: its series are what it writes into a copy.
    job_traces = traces(measured_data, name)
    first = TraceSet({0: job_traces[0]})
    origin = first[0].origin // US - min(t.origin // US for t in job_traces.values())
    found: dict[str, list[tuple[float, float]]] = {}
    for event in json.loads(shown(first))["traceEvents"]:
        if event["ph"] == "C" and "args" in event and "value" in event["args"]:
            ts = event["ts"] - first[0].origin / US + origin
            found.setdefault(event["name"], []).append((ts, event["args"]["value"]))
    lengths: dict[str, list[tuple[float, float]]] = {}
    for row in answer(measured_data, name, "queue_length_time_series.rank0.csv") or []:
        key = f"queue length, stream {int(row['stream'])}"
        lengths.setdefault(key, []).append((row["ts"], row["queue_length"]))
    assert lengths
    for key, points in lengths.items():
        # In one moment HTA has them in no order.
        assert sorted(ts for ts, _ in found[key]) == sorted(ts for ts, _ in points)
        assert dict(found[key])[points[-1][0]] == points[-1][1] == 0
    rates: dict[str, list[tuple[float, float]]] = {}
    for row in answer(measured_data, name, "memory_bw_time_series.rank0.csv") or []:
        rates.setdefault(f"{row['name']} (GB/s)", []).append((row["ts"], row["memory_bw_gbps"]))
    assert rates
    for key, points in rates.items():
        assert len(found[key]) == len(points)
        assert close(max(v for _, v in found[key]), max(v for _, v in points))


def test_a_copy_is_a_trace_with_the_same_answers(measured_data: Path, tmp_path: Path) -> None:
    original = exact(measured_data, "v100-float-timestamps")
    path = tmp_path / "rank0.json"
    path.write_text(shown(original))
    again = TraceSet({0: read_trace(path)})
    for name in ("temporal-breakdown", "kernels", "call-stacks"):
        ranks = TraceSet({0: read_trace(Path(original[min(original)].path))})
        assert ANALYSES[name](again).csv() == ANALYSES[name](ranks).csv()

"""The events of a file are those that it holds, however it is written, cut off or broken."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_traces import operator, write

from echograph.errors import DataError, InputError
from echograph.profiler.traces import events as module
from echograph.profiler.traces.events import EventStream

AWKWARD = ["}, {", '"}],"', "]", "\\", "\\\\", '{"traceEvents": [', "é ✓", "tab\there", "", "},\n  {", "1\u2028"]


def names(path: Path) -> list[str]:
    return [event.name for batch in EventStream(path) for event in batch]


@settings(max_examples=80, deadline=None)
@given(
    texts=st.lists(st.one_of(st.sampled_from(AWKWARD), st.text(max_size=8)), max_size=12),
    indent=st.sampled_from([None, 0, 2]),
    compact=st.booleans(),
    ascii_only=st.booleans(),
    chunk=st.sampled_from([32, 200, 1 << 20]),
    after=st.booleans(),
)
def test_batches_hold_what_json_holds(
    tmp_path_factory: pytest.TempPathFactory,
    texts: list[str],
    indent: int | None,
    compact: bool,
    ascii_only: bool,
    chunk: int,
    after: bool,
) -> None:
    found: list[dict[str, Any]] = [operator(text, 1, 2, nested=[{"a": text}, {"b": [{}]}]) for text in texts]
    document: dict[str, Any] = {"deviceProperties": [{"id": 0}, {"id": 1}], "traceEvents": found}
    if after:
        document |= {"more": [{"x": 1}, {"y": "},{"}], "traceName": "t"}
    separators = (",", ":") if compact else None
    text = json.dumps(document, indent=indent, separators=separators, ensure_ascii=ascii_only)
    path = tmp_path_factory.mktemp("events") / "t.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK_BYTES", chunk)
        stream = EventStream(path)
        read = [event.name for batch in stream for event in batch]
    assert read == texts
    assert stream.notes == []
    del document["traceEvents"]
    assert stream.header == document


def test_a_gzip_file_may_have_several_members(tmp_path: Path) -> None:
    text = json.dumps({"traceEvents": [operator(str(i), i, 1) for i in range(50)]}).encode()
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(text[:900]) + gzip.compress(text[900:]) + b"\0" * 512)
    assert names(path) == [str(i) for i in range(50)]


def test_an_array_of_events_is_a_trace_too(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text("\n [" + json.dumps(operator("a", 1, 1)) + " ,\n" + json.dumps(operator("b", 1, 1)) + "\n]")
    assert names(path) == ["a", "b"]


@pytest.mark.parametrize("size", [40, 99, 100, 1000])
@pytest.mark.parametrize("ending", [".json", ".json.gz"])
def test_what_is_cut_off_is_read_as_far_as_it_goes_and_said(tmp_path: Path, size: int, ending: str) -> None:
    whole = write(tmp_path / f"w{ending}", [operator(f"n{i}", i, 1) for i in range(size)])
    path = tmp_path / f"t{ending}"
    path.write_bytes(whole.read_bytes()[: whole.stat().st_size * 2 // 3])
    stream = EventStream(path)
    read = [event.name for batch in stream for event in batch]
    assert 0 < len(read) < size
    assert read == [f"n{i}" for i in range(len(read))]
    assert stream.notes == [f"{path}: cut off after {len(read)} events; what follows is missing"]


def test_broken_text_is_refused_with_its_event(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", [operator(f"n{i}", i, 1) for i in range(100)])
    path.write_text(path.read_text().replace('"name": "n41"', '"name" "n41"'))
    with pytest.raises(DataError, match="event 41 is broken: Expecting ':' delimiter"):
        names(path)


def test_an_event_of_the_wrong_type_is_refused_with_its_event(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", [operator("a", 1, 1), operator("b", 1, 1) | {"ts": "soon"}])
    with pytest.raises(DataError, match=r"event 1 is broken: .*ts"):
        names(path)


def test_a_damaged_gzip_stream_is_refused(tmp_path: Path) -> None:
    whole = bytearray(write(tmp_path / "w.json.gz", [operator(f"n{i}", i, 1) for i in range(99)]).read_bytes())
    whole[len(whole) // 2] ^= 0xFF
    (tmp_path / "t.json.gz").write_bytes(bytes(whole))
    with pytest.raises(DataError, match=r"t\.json\.gz: .*(damaged|broken)"):
        names(tmp_path / "t.json.gz")


@pytest.mark.parametrize("text", ["", "{}", '{"rows": [1, 2]}', "plain text"])
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(DataError, match="not a trace: it has no traceEvents"):
        names(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        names(tmp_path / "none.json")


def test_bytes_that_are_no_text_cost_a_character_and_not_the_trace(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", [operator("abc", 1, 1), operator("line\nbreak", 1, 1), operator("z", 1, 1)])
    path.write_bytes(path.read_bytes().replace(b"abc", b"a\xffc").replace(b"line\\nbreak", b"line\nbreak"))
    assert names(path) == ["a?c", "line\nbreak", "z"]


def test_phases_that_no_format_knows_are_passed_over(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.json", [operator("a", 1, 1), {"ph": "?", "name": []}, {"name": "x"}, operator("b", 1, 1)]
    )
    read = [getattr(event, "name", None) for batch in EventStream(path) for event in batch]
    assert read == ["a", None, None, "b"]


def test_numbers_as_text_and_null_arguments(tmp_path: Path) -> None:
    rows = [
        operator("a", 1, 1, correlation="3", stream="3", bytes="64"),
        operator("b", 1, 1, stream=None),
        operator("c", 1, 1) | {"args": None},
    ]
    (batch,) = (list(batch) for batch in EventStream(write(tmp_path / "t.json", rows)))
    assert [event.args and event.args.correlation for event in batch] == [3, -1, None]
    assert batch[0].args.bytes == 64


def test_memory_is_bounded_by_the_batch_and_not_by_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json.gz", [operator(f"n{i}", i, 1, padding="x" * 500) for i in range(20_000)])
    sizes = [len(batch) for batch in EventStream(path)]
    assert sum(sizes) == 20_000
    assert max(sizes) < 8_000

"""What the columns do not keep can be read anew."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from small_traces import operator, trace, work, write

from echograph.errors import DataError, InputError
from echograph.profiler.traces import read_traces
from echograph.profiler.traces.events import details, whole_events

EVENTS = [
    operator("a", 1, 1, **{"Input Dims": [[2, 3], []]}),
    {"ph": "i", "name": "[memory]", "ts": 2, "s": "t", "pid": 1, "tid": 1, "args": {"Bytes": 512}},
    work("k", 3, 1, 9, grid=[4, 1, 1]),
    operator("b", 5, 1),
]


def test_details_of_rows_in_their_order(tmp_path: Path) -> None:
    found = trace(tmp_path, EVENTS)
    assert [event["args"] for event in details(found, np.array([1, 0]))] == [EVENTS[2]["args"], EVENTS[0]["args"]]
    assert details(found, found.on_device) == [EVENTS[2]]
    assert details(found, np.zeros(3, np.bool_)) == []


def test_events_of_any_phase(tmp_path: Path) -> None:
    assert list(whole_events(write(tmp_path / "t.json.gz", EVENTS))) == list(enumerate(EVENTS))


def test_another_file_in_its_place_is_noticed(tmp_path: Path) -> None:
    found = trace(tmp_path, EVENTS)
    write(Path(found.path), EVENTS[1:])
    with pytest.raises(DataError, match="changed since it was read"):
        details(found, np.array([0]))
    Path(found.path).unlink()
    with pytest.raises(InputError, match="No such file"):
        details(found, np.array([0]))


def test_details_of_texts_that_are_no_unicode(tmp_path: Path) -> None:
    """An event is decoded alone: bytes that are no UTF-8 are one character each, as when the file is read."""
    path = tmp_path / "rank0.json"
    events = [EVENTS[0], EVENTS[2] | {"args": {"grid": ["?"], "stream": 7, "correlation": 1}}, EVENTS[0]]
    write(path, events)
    path.write_bytes(path.read_bytes().replace(b"?", b"\xff"))
    found = read_traces(path, last_step=True)[0]
    assert details(found, found.on_device)[0]["args"]["grid"] == ["\ufffd"]

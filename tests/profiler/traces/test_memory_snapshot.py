"""PyTorch's memory snapshots: what tensors held when, what was alive at the peak, and nothing that is executed."""

from __future__ import annotations

import gzip
import os
import pickle  # noqa: TID251 - the format is a pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echograph.errors import DataError, InputError
from echograph.profiler.analyses import ANALYSES
from echograph.profiler.analyses.memory import PredictedMemory
from echograph.profiler.page.report import report
from echograph.profiler.traces import read_traces

MB = 2**20


def frame(line: int, name: str = "f", filename: str = "/job/train.py") -> dict[str, Any]:
    return {"filename": filename, "line": line, "name": name}


def entry(action: str, size: int, addr: int = 0, at: int = 0, *frames: dict[str, Any]) -> dict[str, Any]:
    return {
        "action": action,
        "size": size,
        "addr": addr,
        "stream": 0,
        "time_us": 5000 + at,
        "frames": list(frames),
    }


def snapshot(**changed: Any) -> dict[str, Any]:
    """A history that begins with 3,000 bytes held: two blocks come, one of them and the older one go."""
    inner = frame(7, "linear", "/site-packages/torch/nn/functional.py")
    trace = [
        entry("segment_alloc", 2 * MB, 0, 0),
        entry("alloc", 1000, 10, 1, inner, frame(31, "forward")),
        entry("alloc", 600, 20, 2, inner, frame(40, "loss")),
        entry("free_requested", 3000, 5, 3),
        entry("free_completed", 3000, 5, 3),
        entry("free_requested", 1000, 10, 4, frame(99)),
        entry("free_completed", 1000, 10, 5, frame(99)),
        entry("segment_free", 4 * MB, 0, 6),
        entry("snapshot", 0, 0, 7),
    ]
    blocks = [
        {"size": 1024, "requested_size": 600, "address": 20, "state": "active_allocated", "frames": []},
        {"size": 2 * MB - 1024, "address": 1044, "state": "inactive", "frames": []},
    ]
    segments = [{"device": 1, "address": 20, "total_size": 2 * MB, "blocks": blocks, "segment_type": "small"}]
    return {"segments": segments, "device_traces": [[], trace], "allocator_settings": {}} | changed


def written(path: Path, content: Any, protocol: int = 4) -> Path:
    data = pickle.dumps(content, protocol)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", ["rank3.pickle", "snapshot_rank3.pickle.gz"])
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_what_was_held_when(name: str, protocol: int, tmp_path: Path) -> None:
    traces = read_traces(written(tmp_path / name, snapshot(), protocol))
    assert list(traces) == [3]
    rows = [tuple(row.values()) for row in ANALYSES["memory-timeline"](traces).records()]
    # Blocks of 512: 3,000 are 3,072, 1,000 are 1,024, 600 are 1,024.
    assert rows == [
        (3, 0.0, "cuda:1", 0, 3072, 6 * MB),
        (3, 1.0, "cuda:1", 1024, 4096, 6 * MB),
        (3, 2.0, "cuda:1", 1024, 5120, 6 * MB),
        (3, 3.0, "cuda:1", -3072, 2048, 6 * MB),
        (3, 4.0, "cuda:1", -1024, 1024, 6 * MB),
        (3, 6.0, "cuda:1", 0, 1024, 2 * MB),
    ]


def test_the_peak_beside_the_prediction(tmp_path: Path) -> None:
    traces = read_traces(written(tmp_path / "a.pickle", snapshot()))
    measured = ANALYSES["memory-peaks"](traces)
    assert [tuple(row.values())[2:5] for row in measured.records()] == [
        ("allocated", 5120, 2.0),
        ("reserved", 6 * MB, 0.0),
    ]
    assert "name our prediction" in measured.notes[-1]
    beside = ANALYSES["memory-peaks"](traces, predicted=PredictedMemory(4096, 3 * MB)).records()
    assert [(row["predicted_bytes"], row["ratio"]) for row in beside] == [(4096, 1.25), (3 * MB, 2.0)]
    unknown = ANALYSES["memory-peaks"](traces, predicted=PredictedMemory(4096, None)).records()
    assert unknown[1]["predicted_bytes"] is None


def test_what_was_alive_at_the_peak(tmp_path: Path) -> None:
    traces = read_traces(written(tmp_path / "a.pickle", snapshot()))
    rows = ANALYSES["memory-holders"](traces).records()
    assert [(row["place"], row["bytes"], row["percent"]) for row in rows] == [
        ("", 3072, 60.0),
        ("/job/train.py:31 forward", 1024, 20.0),
        ("/job/train.py:40 loss", 1024, 20.0),
    ]
    (one,) = ANALYSES["memory-holders"](traces, stack=True, top=1).records()
    assert one["bytes"] == 3072
    stacks = [row["place"] for row in ANALYSES["memory-holders"](traces, stack=True).records()]
    assert stacks[1].endswith("functional.py:7 linear < /job/train.py:31 forward")


def test_what_a_snapshot_does_not_say_is_a_note(tmp_path: Path) -> None:
    old = [{"action": "alloc", "size": 512, "addr": 1}, {"action": "oom", "size": 9, "device_free": 3}]
    traces = read_traces(written(tmp_path / "a.pickle", snapshot(device_traces=[old])))
    assert [note.partition(": ")[2] for note in traces.notes] == [
        "device 0 ran out of memory 1 times",
        "device 0: its entries have no times: ts counts them",
    ]
    held = read_traces(written(tmp_path / "b.pickle", snapshot(device_traces=[])))
    assert "no history, only what is held" in held.notes[0]
    assert [row["bytes"] for row in ANALYSES["memory-holders"](held).records()] == [1024]
    assert not len(ANALYSES["kernels"](held))


class Harm:
    """Makes a folder when it is unpickled by a reader that lets it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("protocol", [2, 4])
def test_nothing_is_executed(protocol: int, tmp_path: Path) -> None:
    path = written(tmp_path / "a.pickle", snapshot(segments=[Harm(tmp_path / "harm")]), protocol)
    with pytest.raises(DataError, match=r"a pickle with (GLOBAL|STACK_GLOBAL), which plain values do not have"):
        read_traces(path)
    assert not (tmp_path / "harm").exists()


def test_what_is_no_snapshot_is_one_line(tmp_path: Path) -> None:
    data = pickle.dumps(snapshot())
    for number, (content, why) in enumerate(
        [
            (data[:-30], "no memory snapshot of PyTorch, or cut off"),
            (pickle.dumps([1, 2]), "Expected `object`"),
            (pickle.dumps({"segments": 3}), "Expected `array`"),
            (b"\x80\x04.", "or cut off"),
        ]
    ):
        path = tmp_path / f"{number}.pickle"
        path.write_bytes(content)
        with pytest.raises(DataError, match=why) as error:
            read_traces(path)
        assert "\n" not in str(error.value)


def test_beside_profiles_a_snapshot_is_left_out(tmp_path: Path) -> None:
    written(tmp_path / "memory.pickle", snapshot())
    (tmp_path / "rank0.json").write_text('{"traceEvents": []}')
    traces = read_traces(tmp_path)
    assert traces[0].path.endswith("rank0.json")
    assert any("memory.pickle: a memory snapshot of PyTorch, no profile: name it alone" in n for n in traces.notes)


def test_its_page_has_what_a_snapshot_answers(tmp_path: Path) -> None:
    text = report(read_traces(written(tmp_path / "a.pickle", snapshot())), "memory")
    assert "<h3>memory-timeline</h3>" in text and "<h3>memory-holders</h3>" in text
    # Nothing ran, and nothing is missing for that.
    assert "nothing ran on a device" not in text and "Timeline" not in text and "events" not in text


DATA = pickle.dumps(snapshot())


@settings(max_examples=200, deadline=None)
@given(cut=st.integers(2, len(DATA)), at=st.integers(2, len(DATA) - 1), byte=st.integers(0, 255))
def test_damage_is_one_line(cut: int, at: int, byte: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("damage") / "a.pickle"
    data = bytearray(DATA)
    data[at] = byte
    path.write_bytes(data[:cut])
    try:
        traces = read_traces(path)
        ANALYSES["memory-timeline"](traces)
        ANALYSES["memory-holders"](traces)
    except InputError as error:
        assert "\n" not in str(error)

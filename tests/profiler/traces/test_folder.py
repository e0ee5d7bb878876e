"""A folder is a job: one trace a rank, one origin, and what was read is not read again."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest
from small_traces import launched, operator, step, work, write

from echograph.errors import DataError, InputError, UsageError
from echograph.profiler.traces import Trace, cache, folder, read_traces

US = 1_000_000
COLUMNS = ("start", "duration", "name", "category", "pid", "tid", "stream", "correlation", "external_id", "index")


def equal(one: Trace, other: Trace) -> bool:
    """Whether two traces hold the same."""
    facts = ("rank", "world_size", "path", "origin", "strings", "notes")
    return (
        all(np.array_equal(getattr(one, c), getattr(other, c)) for c in COLUMNS)
        and all(getattr(one, f) == getattr(other, f) for f in facts)
        and dict(one.header) == dict(other.header)
        and one.arguments.keys() == other.arguments.keys()
        and all(
            np.array_equal(one.argument(a, np.nan), other.argument(a, np.nan), equal_nan=True)
            for a in one.arguments
        )
    )


def test_ranks_share_the_origin_of_the_first_event(tmp_path: Path) -> None:
    for rank, at in enumerate((1_000_500, 1_000_000)):
        write(tmp_path / f"{rank}.json.gz", [work("k", at, 5), work("k", at + 10, 5)], rank=rank)
    found = read_traces(tmp_path)
    assert list(found) == [0, 1]
    assert found[0].start.tolist() == [500 * US, 510 * US]
    assert found[1].start.tolist() == [0, 10 * US]
    assert found[0].origin == found[1].origin == 1_000_000 * US


def test_two_files_of_one_rank_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.json", [work("k", 1, 1)], rank=4)
    write(tmp_path / "b.json", [work("k", 1, 1)], rank=4)
    with pytest.raises(DataError, match=r"a\.json and .*b\.json are both of rank 4: leave one of them out"):
        read_traces(tmp_path)


def test_only_the_ranks_asked_for_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in range(4):
        write(tmp_path / f"{rank}.json", [work("k", 1, 1)], rank=rank)
    read: list[str] = []
    whole = folder.read_any
    monkeypatch.setattr(
        folder, "read_any", lambda file, progress: (read.append(file.name), whole(file, progress))[1]
    )
    assert list(read_traces(tmp_path, [1, 3])) == [1, 3]
    assert read == ["1.json", "3.json"]
    with pytest.raises(UsageError, match="no trace of rank 7; there are 0, 1, 2, 3"):
        read_traces(tmp_path, [1, 7])


def test_a_rank_that_only_the_name_tells(tmp_path: Path) -> None:
    for rank in range(3):
        write(tmp_path / f"rank{rank}.json", [work("k", 1, 1)], rank=None)
    assert list(read_traces(tmp_path, [2])) == [2]
    with pytest.raises(UsageError, match="no trace of rank 5"):
        read_traces(tmp_path, [5])


def test_folders_without_traces_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no trace in it: expected \*\.json or \*\.json\.gz"):
        read_traces(tmp_path)
    with pytest.raises(InputError, match="no such file or folder"):
        read_traces(tmp_path / "none")


def test_the_last_step_is_left_out_with_the_work_that_it_launched(tmp_path: Path) -> None:
    events = [
        step(4, 0, 100),
        step(5, 100, 100),
        *launched("early", 10, 150, 20, 1),
        *launched("late", 110, 180, 20, 2),
    ]
    path = write(
        tmp_path / "t.json", [*events, operator("a", 99, 1), operator("b", 100, 1), work("stray", 20, 1, 99)]
    )
    kept = read_traces(path)[0]
    names = {kept.text(row) for row in range(len(kept))}
    assert names == {"ProfilerStep#4", "cudaLaunchKernel", "early", "a"}
    assert len(read_traces(path, last_step=True)[0]) == len(events) + 3


def test_a_single_step_stays_whole(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", [step(4, 0, 100), operator("after", 200, 1)])
    assert len(read_traces(path)[0]) == 2


def test_processes_read_what_one_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in range(3):
        events = [work(f"k{i % 5}", i, 1, i, bytes=i) for i in range(rank * 100 + 50)]
        write(tmp_path / f"{rank}.json.gz", events, rank=rank)
    monkeypatch.setattr(folder, "_PARALLEL_BYTES", 0)
    told: list[tuple[str, int, int]] = []
    alone, together = (
        read_traces(tmp_path),
        read_traces(tmp_path, workers=2, progress=lambda *told_of: told.append(told_of)),
    )
    assert all(equal(alone[rank], together[rank]) for rank in range(3))
    assert told == [("reading traces", n, 3) for n in (1, 2, 3)]


def test_a_second_look_reads_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"Collective name": "allreduce", "memory bandwidth (GB/s)": 1.5, "bytes": 7}
    file = write(tmp_path / "in" / "t.json.gz", [work("ké", 1.5, 2, **said), operator("a", 3, 4)], note="x")
    kept = tmp_path / "cache"
    first = read_traces(file, cache_folder=kept)[0]
    assert len(list(kept.iterdir())) == 1
    monkeypatch.setattr(folder, "read_any", None)
    assert equal(first, read_traces(file, cache_folder=kept)[0])
    moved = file.rename(file.with_name("renamed.json.gz"))
    assert read_traces(moved, cache_folder=kept)[0].path == str(moved)


def test_another_content_is_read_anew(tmp_path: Path) -> None:
    kept = tmp_path / "cache"
    file = write(tmp_path / "t.json", [work("a", 1, 1)])
    read_traces(file, cache_folder=kept)
    write(file, [work("b", 1, 1)])
    assert read_traces(file, cache_folder=kept)[0].text(0) == "b"


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04 no", "half"])
def test_a_damaged_cache_costs_time_only(tmp_path: Path, damage: bytes | str) -> None:
    kept = tmp_path / "cache"
    file = write(tmp_path / "t.json", [work("a", 1, 1)])
    first = read_traces(file, cache_folder=kept)[0]
    (stored,) = kept.iterdir()
    stored.write_bytes(stored.read_bytes()[: stored.stat().st_size // 2] if isinstance(damage, str) else damage)
    assert equal(first, read_traces(file, cache_folder=kept)[0])


def test_a_cache_that_cannot_be_written_is_left_alone(tmp_path: Path) -> None:
    file = write(tmp_path / "t.json", [work("a", 1, 1)])
    (tmp_path / "file").write_text("")
    assert len(read_traces(file, cache_folder=tmp_path / "file" / "cache")) == 1


def test_the_cache_forgets_the_oldest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "cache"
    sizes = []
    for number in range(3):
        read_traces(write(tmp_path / "t.json", [work(f"k{number}", 1, 1)]), cache_folder=kept)
        newest = max(kept.iterdir(), key=lambda p: p.stat().st_mtime_ns)
        os.utime(newest, (1000 + number, 1000 + number))
        sizes.append(newest.stat().st_size)
    monkeypatch.setattr(cache, "MAX_CACHE_BYTES", 2 * max(sizes) + 1)
    read_traces(write(tmp_path / "t.json", [work("k9", 1, 1)]), cache_folder=kept)
    assert len(list(kept.iterdir())) == 2


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOGRAPH_CACHE", "somewhere")
    assert cache.cache_folder() == Path("somewhere")
    monkeypatch.delenv("ECHOGRAPH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "caches")
    assert cache.cache_folder() == Path("caches") / "echograph" / "traces"


EXECUTION = {
    "schema": "1.1.1-chakra.0.0.4",
    "pid": 5,
    "time": "now",
    "nodes": [{"id": 1, "name": "[pytorch|profiler]"}],
}
TIMELINE = [[-1, 0, 512, 0], [5, 1, 64, 3]]


@pytest.mark.parametrize("ending", [".json", ".json.gz"])
@pytest.mark.parametrize(
    ("content", "what"),
    [(EXECUTION, "an execution trace, no profile: the analysis execution-trace"),
     (TIMELINE, "a memory timeline, no profile: the analysis memory-categories")],
)  # fmt: skip
def test_what_lies_beside_profiles_is_left_out_and_named(
    tmp_path: Path, content: object, what: str, ending: str
) -> None:
    write(tmp_path / "rank0.json", [operator("aten::mm", 0, 5)])
    text = json.dumps(content, indent=1).encode()
    (tmp_path / f"beside{ending}").write_bytes(gzip.compress(text) if ending.endswith("gz") else text)
    traces = read_traces(tmp_path, ranks=[0], align=True)
    assert list(traces) == [0]
    (note,) = traces.notes
    assert note.startswith(f"{tmp_path / f'beside{ending}'}: {what} reads it")


def test_a_folder_of_execution_traces_alone_has_no_trace(tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(json.dumps(EXECUTION))
    with pytest.raises(InputError, match="no trace in it, but an execution trace"):
        read_traces(tmp_path)


def test_a_file_that_nothing_here_reads_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "rank0.json", [operator("aten::mm", 0, 5)])
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 5}))
    with pytest.raises(InputError, match=r"config\.json: not a trace"):
        read_traces(tmp_path)


def test_work_that_stands_twice_is_said(tmp_path: Path) -> None:
    events = [*launched("gemm", 0, 5, 10, 1), work("gemm", 5, 10, 2), *launched("gemm", 20, 30, 10, 3)]
    assert not read_traces(write(tmp_path / "once.json", events)).notes
    (note,) = read_traces(write(tmp_path / "twice.json", events * 2)).notes
    assert "3 kernels, copies or sets stand twice" in note


def test_jobs_of_different_sizes_are_said(tmp_path: Path) -> None:
    for rank, size in enumerate((2, 2, 8)):
        said = {"distributedInfo": {"rank": rank, "world_size": size}}
        write(tmp_path / "job" / f"{rank}.json", launched("gemm", 0, 5, 10, 1), rank=None, **said)
    (note,) = read_traces(tmp_path / "job").notes
    assert "different sizes (2 on rank 0, 1; 8 on rank 2)" in note
    assert not read_traces(tmp_path / "job", ranks=[0, 1]).notes

"""Traces of three tools, whole and broken; what cannot be read is counted and named."""

from __future__ import annotations

import json
import pickletools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echograph.errors import FormatError, InputError
from echograph.ir.comms.record import FORMAT, CallSignature, EndLine, GroupLine, HeaderLine, Heartbeat, encode
from echograph.ir.plain_pickle import plain_pickle
from echograph.profiler.comms.readers.flight_recorder import read_dump
from echograph.profiler.comms.report import Report, report_on

HEADER = HeaderLine(format=FORMAT, version=(1, 0), rank=0, world=1)
WHAT = CallSignature(
    id=0, op="all_reduce", group="0", channel="0", bytes=8, input_bytes=8, output_bytes=8, shapes=((2,),)
)


def write(folder: Path, *parts: Any, rank: int = 0, name: str = "trace") -> Path:
    path = folder / f"{name}.{rank}.jsonl"
    path.write_bytes(b"".join(part if isinstance(part, bytes) else encode(part) for part in parts))
    return path


def row(*numbers: int) -> bytes:
    return json.dumps(list(numbers)).encode() + b"\n"


def test_broken_lines_are_counted_and_the_rest_is_read(tmp_path: Path) -> None:
    write(
        tmp_path, HEADER, GroupLine(name="0", ranks=(0,)), WHAT,
        row(0, 0, 100, 0, 10, 0), b"[0,1,2\n", b"garbage\n", b'{"line":"nonsense"}\n', row(0, 1, 200, 0, 30, 0),
        row(7, 0, 300, 0, 10, 0), row(0, 2, 10**30, 0, 1, 0), b'\xff\xfe\n', row(0, 3, 400, 0, 20, 0), b"[0,4,50",
    )  # fmt: skip
    report = report_on(tmp_path)
    (operation,) = report.operations
    assert (operation["calls"], operation["total_s"]) == (3, pytest.approx(60e-9))
    assert report.problems == {
        "unreadable lines": 5,
        "rows without a description": 1,
        "half-written last lines": 1,
        "files without an end: the run was killed, or goes on": 1,
    }


@given(data=st.data())
def test_no_damage_to_a_file_is_more_than_the_loss_of_lines(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    path = write(
        folder, HEADER, GroupLine(name="0", ranks=(0,)), WHAT, *[row(0, n, n, 0, 5, 0) for n in range(20)]
    )
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 5))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        report = report_on(folder)
    except InputError as error:
        assert "\n" not in str(error)
        return
    assert report.calls <= 20


def test_files_of_other_versions_and_kinds_are_passed_over_and_named(tmp_path: Path) -> None:
    write(tmp_path, HEADER, GroupLine(name="0", ranks=(0,)), WHAT, row(0, 0, 0, 0, 1, 0), EndLine(calls=1))
    newer = HeaderLine(format=FORMAT, version=(2, 3), rank=1, world=2)
    write(tmp_path, newer, rank=1)
    (tmp_path / "notes.txt").write_text("nothing\n")
    report = report_on(tmp_path)
    assert report.calls == 1
    assert [line.rpartition("/")[2] for line in report.skipped] == [
        "notes.txt: no trace of collectives",
        "trace.1.jsonl: version 2.3, newer than 1: read it with a newer echograph",
    ]
    assert report.problems == {"files passed over": 2}


def test_a_newer_minor_version_is_read(tmp_path: Path) -> None:
    header = encode(HeaderLine(format=FORMAT, version=(1, 9), rank=0, world=1)).replace(
        b'"rank"', b'"new":[1],"rank"'
    )
    write(tmp_path, header, WHAT, row(0, 0, 0, 0, 1, 0), EndLine(calls=1))
    assert report_on(tmp_path).calls == 1


def test_nothing_to_read_is_said_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no trace of collectives"):
        report_on(tmp_path)
    with pytest.raises(InputError, match="no such file"):
        report_on(tmp_path / "none")


def test_a_row_without_an_end_is_unfinished_until_a_later_one_has_it(tmp_path: Path) -> None:
    write(
        tmp_path, HEADER, GroupLine(name="0", ranks=(0,)), WHAT,
        row(0, 0, 0, 0, -1, -1), row(0, 1, 1, 0, -1, -1),
        Heartbeat(at_ns=5, issued={"0": 2}), row(0, 0, 0, 0, 9, 0),
    )  # fmt: skip
    report = report_on(tmp_path)
    assert [(call["operation"], call["sequence"]) for call in report.unfinished] == [("all_reduce", 1)]
    assert (report.calls, report.operations[0]["unfinished"]) == (2, 1)


LOG = """\
something else on the way
[TRACE] global rank {rank} in GROUP_{rank} - all_reduce - async:0, Size: 4.00 MB, Shape: (1024, 1024), Dtype: \
torch.float32, Duration: 10.5 ms, GROUP size 2  = [0, 1], call count: 1
[TRACE] global rank {rank} in GROUP_{rank} - all_reduce - async:1, Size: 4.00 MB, Shape: (1024, 1024), Dtype: \
torch.float32, Duration: 9.5 ms, GROUP size 2  = [0, 1], call count: 2
[BATCH] global rank {rank} - send: 16 bytes (0.00 MB), shape: [(4,)], ops count: 2
[BARRIER] global rank {rank} -barrier - async:0, Duration: 5.839 ms
[COALESCE] global rank {rank} in GROUP_{rank} - coalesced_ops - async:1, conuters: 2, name: all_reduce, \
sizes: 192, Duration: 0.224 ms, GROUP size 2  = [0, 1],
[TRACE] global rank {rank} in GROUP_{rank} - all_red
"""


@pytest.mark.parametrize("folder", [True, False])
def test_logs_of_collective_trace(tmp_path: Path, folder: bool) -> None:
    for rank in range(2):
        (tmp_path / f"trace-{rank}").write_text(LOG.format(rank=rank))
    report = report_on(tmp_path if folder else tmp_path / "trace-1")
    ranks = 2 if folder else 1
    told = {
        (row["operation"], row["shape"], row["bytes"]): (row["calls"], pytest.approx(row["total_s"] * 1e3))
        for row in report.operations
    }
    assert told == {
        ("all_reduce", "1024x1024", 4 << 20): (2 * ranks, 20.0 * ranks),
        ("send", "4", 16): (ranks, 0.0),
        ("barrier", "", 0): (ranks, 5.839 * ranks),
        ("all_reduce_coalesced", "", 192): (ranks, 0.224 * ranks),
    }
    assert report.problems == {"unreadable lines": ranks}
    assert [rank["rank"] for rank in report.ranks] == list(range(2))[-ranks:]


ENTRY = {
    "profiling_name": "nccl:_all_gather_base",
    "process_group": ["0", "default_pg"],
    "collective_seq_id": 4,
    "is_p2p": False,
    "input_sizes": [[256]],
    "output_sizes": [[1024]],
    "input_dtypes": ["BFloat16"],
    "output_dtypes": ["BFloat16"],
    "time_created_ns": 1000,
    "time_discovered_started_ns": 2000,
    "time_discovered_completed_ns": 9000,
    "duration_ms": 0.005,
    "state": "completed",
    "retired": True,
}


def dumps(tmp_path: Path) -> None:
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}}
    running = ENTRY | {
        "collective_seq_id": 5,
        "time_discovered_completed_ns": None,
        "state": "started",
        "retired": False,
    }
    for rank in range(4):
        created = {"time_created_ns": 1000 + 500 * rank}
        entries = [ENTRY | created, running | created, {"profiling_name": "nccl:broken"}]
        dump = {"version": "2.10", "pg_config": config, "entries": entries}
        (tmp_path / f"nccl_trace_rank_{rank}").write_text(json.dumps(dump))


def test_dumps_of_the_flight_recorder(tmp_path: Path) -> None:
    dumps(tmp_path)
    report = report_on(tmp_path)
    (operation,) = report.operations
    assert (operation["operation"], operation["bytes"], operation["calls"]) == ("all_gather_into_tensor", 2048, 8)
    assert (operation["merged"], operation["unfinished"]) == (4, 4)
    assert operation["total_s"] == pytest.approx(4 * 5e-6)
    assert operation["busbw_GBps"] == pytest.approx(2048 / 5e-6 * 3 / 4 * 1e-9)
    assert report.problems == {"unreadable entries": 4}
    assert [call["sequence"] for call in report.unfinished] == [5] * 4


def test_what_a_dump_does_not_say_is_counted(tmp_path: Path) -> None:
    """A type of unknown size, the rank in the file's name, and the ranks of the group."""
    unknown = ENTRY | {"collective_seq_id": 5, "output_dtypes": ["Bits16"]}
    (tmp_path / "dump").write_text(json.dumps({"version": "2.10", "entries": [ENTRY, unknown]}))
    report = report_on(tmp_path)
    assert {operation["bytes"] for operation in report.operations} == {2048, 0}
    assert report.problems == {
        "dumps whose names have no rank, taken for those of rank 0": 1,
        "tensors of unknown type Bits16, whose bytes are not counted": 1,
        "calls of groups whose ranks are not said: bus bandwidth as of all files": 2,
    }


def test_calls_that_the_tracer_could_not_describe_are_told(tmp_path: Path) -> None:
    group = GroupLine(name="0", ranks=(0,))
    write(tmp_path, HEADER, group, WHAT, row(0, 0, 100, 0, 10, 0), EndLine(calls=1, errors=3))
    report = report_on(tmp_path)
    assert report.problems == {"calls that the tracer could not describe, left out": 3}


def test_a_log_with_a_type_of_unknown_size(tmp_path: Path) -> None:
    (tmp_path / "trace-0").write_text(
        "[TRACE] global rank 0 in GROUP_0 - all_reduce - async:0, Size: 0.00 MB, Shape: (4, 4), "
        "Dtype: torch.bits16, Duration: 1.0 ms, GROUP size 2  = [0, 1], call count: 1\n"
    )
    report = report_on(tmp_path)
    assert report.operations[0]["bytes"] == 0
    assert report.problems["calls of unknown type bits16, whose bytes are not counted"] == 1


def test_pytorchs_own_dump_is_read_without_unpickling() -> None:
    dist = pytest.importorskip("torch.distributed", reason="needs the [torch] extra")
    data = dist.distributed_c10d.torch._C._distributed_c10d._dump_fr_trace()
    dump = plain_pickle(data)
    assert {"version", "pg_config"} <= dump.keys()
    assert (
        json.loads(dist.distributed_c10d.torch._C._distributed_c10d._dump_fr_trace_json())["version"]
        == dump["version"]
    )


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=300),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.text(max_size=5), inner, max_size=5)
        | st.tuples(inner)
        | st.tuples(inner, inner, inner, inner)
    ),
    max_leaves=30,
)


@given(PLAIN, st.integers(2, 5))
def test_plain_values_are_read_as_python_reads_them(value: Any, protocol: int) -> None:
    pickled = pickletools.optimize(_pickled(value, protocol))
    assert plain_pickle(pickled) == value


def _pickled(value: Any, protocol: int) -> bytes:
    import importlib

    # The standard library's own, as the independent word; the project itself never loads one.
    return bytes(importlib.import_module("pickle").dumps(value, protocol))


@pytest.mark.parametrize("value", [print, Path("/"), 1j, {1, 2}, Report])
def test_a_pickle_of_anything_else_is_refused(value: Any) -> None:
    with pytest.raises(FormatError, match="no dump of the flight recorder"):
        read_dump(_pickled({"entries": [value]}, 2), "dump")


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_in_a_line(data: bytes) -> None:
    with pytest.raises(FormatError, match="no dump"):
        read_dump(b"\x80\x02" + data, "dump")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"bytes": -8}, "$.bytes"), ({"input_bytes": -1}, "$.input_bytes"), ({"bytes": 1.5}, "$.bytes"),
        ({"bytes": True}, "$.bytes"), ({"bytes": 2**63}, "$.bytes"), ({"shapes": [[-2]]}, "$.shapes[0][0]"),
        ({"tensors": -1}, "$.tensors"), ({"id": -1}, "$.id"), ({"peer": -2}, "$.peer"),
        ({"stream": -1}, "$.stream"),
    ],
)  # fmt: skip
def test_what_no_call_has_is_refused_by_line_and_field(tmp_path: Path, change: dict[str, Any], field: str) -> None:
    wrong = json.dumps(json.loads(encode(WHAT)) | change).encode() + b"\n"
    path = write(tmp_path, HEADER, GroupLine(name="0", ranks=(0,)), wrong, row(0, 0, 100, 0, 10, 0))
    with pytest.raises(FormatError) as refused:
        report_on(tmp_path)
    assert str(refused.value).startswith(f"{path}: line 3: ")
    assert field in str(refused.value)


@pytest.mark.parametrize(
    ("numbers", "name"),
    [
        ((-1, 0, 100, 0, 10, 0), "what"), ((0, -1, 100, 0, 10, 0), "sequence"), ((0, 0, -100, 0, 10, 0), "queued"),
        ((0, 0, 100, 0, 2**62, 0), "end"), ((0, 0, 100, -(2**63), 1, 0), "start"),
        ((0, 2**41, 1, 0, 1, 0), "sequence"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("garbage", [False, True])
def test_a_row_that_no_call_has_is_refused_by_line_and_column(
    tmp_path: Path, numbers: tuple[int, ...], name: str, garbage: bool
) -> None:
    before = (b"no row\n",) if garbage else (row(0, 0, 1, 0, 5, 0),)
    path = write(tmp_path, HEADER, GroupLine(name="0", ranks=(0,)), WHAT, *before, row(*numbers))
    with pytest.raises(FormatError) as refused:
        report_on(tmp_path)
    assert str(refused.value).startswith(f"{path}: line 5: {name} is ")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"input_sizes": [[-256]]}, "$.input_sizes[0][0]"), ({"output_sizes": [[1.5]]}, "$.output_sizes[0][0]"),
        ({"time_created_ns": -1}, "$.time_created_ns"), ({"duration_ms": -1}, "$.duration_ms"),
        ({"time_created_ns": True}, "$.time_created_ns"), ({"collective_seq_id": 2**50}, "$.collective_seq_id"),
        ({"process_group": [[]]}, "$.process_group[0]"), ({"profiling_name": ["x"]}, "$.profiling_name"),
        ({"input_sizes": [[2**40, 2**40]]}, "sizes"),
    ],
)  # fmt: skip
def test_an_entry_that_no_call_has_is_refused_by_field(tmp_path: Path, change: dict[str, Any], field: str) -> None:
    path = tmp_path / "nccl_trace_rank_0"
    path.write_text(json.dumps({"version": "2.10", "pg_config": {}, "entries": [ENTRY, ENTRY | change]}))
    with pytest.raises(FormatError) as refused:
        report_on(tmp_path)
    assert str(refused.value).startswith(f"{path}: entry 1: ")
    assert field in str(refused.value)


@pytest.mark.parametrize("config", [3, {"0": 3}, {"0": {"ranks": [0, 1]}}, {"0": {"ranks": "9" * 30}}])
def test_groups_that_are_none_are_refused(tmp_path: Path, config: Any) -> None:
    path = tmp_path / "nccl_trace_rank_0"
    path.write_text(json.dumps({"version": "2.10", "pg_config": config, "entries": [ENTRY]}))
    with pytest.raises(InputError, match="pg_config"):
        report_on(tmp_path)


DEPTH = 80
DOUBLED = b"](" * DEPTH + b"]q\x00" + b"".join(b"h%ceq%c" % (n, n + 1) for n in range(DEPTH))
TUPLES = b")q\x00" + b"".join(b"h%c\x86q%c" % (n, n + 1) for n in range(DEPTH))


@pytest.mark.parametrize(
    "place", ["process_group", "profiling_name", "input_sizes", "pg_config", "entries", "state"]
)
def test_lists_that_are_shared_are_not_written_out(tmp_path: Path, place: str) -> None:
    """Eighty lists, each of twice the one before: a kilobyte, whose text would have 2^80 brackets."""

    def pickled(value: Any) -> bytes:
        match value:
            case {"shared": _}:
                return DOUBLED
            case dict():
                return b"}(" + b"".join(map(pickled, (x for pair in value.items() for x in pair))) + b"u"
            case list():
                return b"](" + b"".join(map(pickled, value)) + b"e"
            case bool() | None:
                return {True: b"\x88", False: b"\x89", None: b"N"}[value]
            case int():
                return b"\x8a\x08" + value.to_bytes(8, "little", signed=True)
            case float():
                return b"N"
            case text:
                return b"X" + len(text).to_bytes(4, "little") + text.encode()

    bomb = {"shared": True}
    entry: Any = ENTRY | ({place: [bomb] if place == "process_group" else bomb} if place in ENTRY else {})
    dump = {
        "entries": [bomb] if place == "entries" else [entry],
        "pg_config": {"0": {"ranks": bomb}} if place == "pg_config" else {},
    }
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(b"\x80\x02" + pickled(dump) + b".")
    assert path.stat().st_size < 2000
    if place == "entries":
        assert report_on(tmp_path).problems == {"unreadable entries": 1}
    else:
        with pytest.raises(InputError, match=place):
            report_on(tmp_path)


@pytest.mark.parametrize("key", [b"]", b"}", TUPLES, b"G" + bytes(8)])
def test_keys_are_texts_and_numbers(key: bytes) -> None:
    for how in (b"}(%bNu.", b"}%bNs."):
        with pytest.raises(FormatError, match="key"):
            read_dump(b"\x80\x02" + how % key, "dump")


@pytest.mark.parametrize(
    "data", [b"\x80\x02Na.", b"\x80\x02N(e.", b"\x80\x02N(Nu.", b"\x80\x02.", b"\x80\x02(.", b'{"entries": [NaN]}']
)
def test_opcodes_on_what_they_do_not_fit(data: bytes) -> None:
    with pytest.raises(FormatError):
        read_dump(data, "dump")


@pytest.mark.parametrize(
    ("before", "after", "name"),
    [
        ("10.5 ms", "1.0.5 ms", "duration"), ("global rank 0", "global rank " + "9" * 30, "global rank"),
        ("(1024, 1024)", "(1024, " + "9" * 5000 + ")", "shape"), ("(1024, 1024)", f"({2**40}, {2**40})", "shape"),
        ("[0, 1]", "[0, 99999999999]", "rank"), ("16 bytes", "9" * 40 + " bytes", "size"),
    ],
)  # fmt: skip
def test_a_log_that_says_what_no_call_has(tmp_path: Path, before: str, after: str, name: str) -> None:
    (tmp_path / "trace-0").write_text(LOG.format(rank=0).replace(before, after))
    with pytest.raises(InputError, match=rf"trace-0: line \d: its {name} is"):
        report_on(tmp_path)

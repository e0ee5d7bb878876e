"""Graphs survive a file whole; what is not a whole file of a known format is refused in one line."""

from __future__ import annotations

import random
import zlib
from pathlib import Path

import pytest
from conformance_graphs import GRAPHS, two_layers

from echograph.errors import FormatError, GraphError, InputError, OutputError
from echograph.ir import serde
from echograph.ir.builder import GraphBuilder
from echograph.ir.files import fields, with_checksum
from echograph.ir.graph import StepGraph
from echograph.ir.serde import decode, encode, load, save
from echograph.ir.text import to_text
from echograph.proto import workload_pb2 as pb

WHOLE = b"".join(encode(two_layers()))
KNOWN = b"".join(WHOLE[f.start : f.end] for f in fields(WHOLE))


def sealed(*messages: bytes) -> bytes:
    return b"".join(with_checksum(messages))


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_comes_back_from_its_file(name: str, tmp_path: Path) -> None:
    graph = GRAPHS[name]()
    written = save(graph, tmp_path / "g.pb")
    again = load(tmp_path / "g.pb")
    assert written == (tmp_path / "g.pb").stat().st_size
    assert type(again) is type(graph)
    assert list(to_text(again)) == list(to_text(graph))
    assert list(again.ops) == list(graph.ops)
    assert list(again.tensors) == list(graph.tensors)
    assert (again.blocks, again.mesh, again.groups) == (graph.blocks, graph.mesh, graph.groups)
    assert (again.workload, again.streams, again.strings) == (graph.workload, graph.streams, graph.strings)
    for mine, theirs in zip(again.programs, graph.programs, strict=True):
        assert mine.calls.tolist() == theirs.calls.tolist()
        assert (mine.role, mine.coordinates, mine.ranks) == (theirs.role, theirs.coordinates, theirs.ranks)
    assert list(encode(again)) == list(encode(graph))


@pytest.mark.parametrize("name", GRAPHS)
def test_chunks_are_one_message(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file parses as one protobuf message, however the tables are cut, and the cut does not matter."""
    graph = GRAPHS[name]()
    monkeypatch.setattr(serde, "CHUNK", 3)
    data = b"".join(encode(graph))
    message = pb.Graph.FromString(data)
    assert sum(len(chunk.ops) for chunk in message.op_chunks) == message.op_count == len(graph.ops)
    assert all(len(chunk.ops) <= 3 for chunk in message.op_chunks)
    assert list(to_text(decode(data))) == list(to_text(graph))


@pytest.mark.parametrize("name", GRAPHS)
def test_operations_are_written_as_protobuf_writes_them(name: str) -> None:
    """Fields by number, shortest numbers, defaults left out: read and written again the bytes are the same."""
    chunks = b"".join(serde.op_chunks(GRAPHS[name]().ops, pb.Graph.OP_CHUNKS_FIELD_NUMBER))
    assert pb.Graph.FromString(chunks).SerializeToString(deterministic=True) == chunks


def test_tables_that_hold_unused_entries_come_back() -> None:
    b = GraphBuilder()
    b.string("unused")
    for attributes in reversed(GRAPHS["kinds"]().ops.attribute_values):
        b.attribute(attributes)
    graph = b.build(StepGraph)
    again = decode(b"".join(encode(graph)))
    assert again.strings == graph.strings
    assert again.ops.attribute_values == graph.ops.attribute_values


def test_a_newer_major_format_is_refused() -> None:
    data = sealed(KNOWN, pb.Graph(format_major=3, format_minor=3).SerializeToString())
    with pytest.raises(FormatError, match=r"format 3\.3 is newer than this echograph reads \(2\.x\): upgrade"):
        decode(data)


def test_unknown_fields_of_a_newer_minor_format_are_kept() -> None:
    future = [b"\xa2\x06\x03new", b"\xa8\x06\x2a", b"\xad\x06abcd", b"\xb1\x06abcdefgh"]
    data = sealed(future[0], KNOWN, pb.Graph(format_minor=9).SerializeToString(), *future[1:])
    graph = decode(data)
    assert graph.unknown == b"".join(future)
    again = decode(b"".join(encode(graph)))
    assert again.unknown == graph.unknown
    assert list(to_text(again)) == list(to_text(graph))


def test_cut_anywhere_it_is_refused() -> None:
    for end in range(len(WHOLE)):
        with pytest.raises(FormatError):
            decode(WHOLE[:end])


def test_cut_between_fields_it_is_refused_even_with_a_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serde, "CHUNK", 2)
    data = b"".join(encode(two_layers()))
    tables = [f for f in fields(data) if f.number in (15, 16, 17)]
    assert len(tables) > 8
    for field in tables:
        with pytest.raises(FormatError, match=r"truncated: it holds|corrupted"):
            decode(sealed(data[: field.start]))
        with pytest.raises(FormatError, match=r"truncated: it holds|corrupted"):
            decode(sealed(data[: field.start] + b"".join(data[f.start : f.end] for f in tables if f > field)))


def test_without_a_program_it_is_refused() -> None:
    message = pb.Graph.FromString(KNOWN)
    del message.programs[:]
    with pytest.raises(FormatError, match="no program"):
        decode(sealed(message.SerializeToString()))


@pytest.mark.parametrize("table", ["strings", "groups"])
def test_a_table_that_repeats_an_entry_is_refused(table: str) -> None:
    message = pb.Graph.FromString(b"".join(encode(GRAPHS["job"]())))
    message.ClearField("crc32")
    entries = getattr(message, table)
    entries.extend([entries[-1]])
    with pytest.raises(FormatError, match="repeats"):
        decode(sealed(message.SerializeToString()))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "empty"),
        (b"\x00", "not an echograph"),
        (b"{}\n", "not an echograph"),
        (sealed(b""), "not an echograph file"),
        (sealed(pb.Graph(magic="echograph").SerializeToString()), "no format version"),
        (sealed(pb.Graph(magic="echograph", format_major=1).SerializeToString()), "no level"),
        (sealed(KNOWN) + b"\x00", "checksum"),
        (KNOWN + b"\xfd\x7f" + (zlib.crc32(KNOWN) ^ 1).to_bytes(4, "little"), "checksum does not match"),
    ],
)
def test_what_is_no_graph_is_refused_in_one_line(data: bytes, says: str) -> None:
    with pytest.raises(FormatError, match=says) as caught:
        decode(data)
    assert "\n" not in str(caught.value)


def test_random_bytes_are_refused() -> None:
    chance = random.Random(0)
    for size in range(1, 400):
        with pytest.raises(FormatError):
            decode(chance.randbytes(size))
        with pytest.raises(FormatError):
            decode(sealed(chance.randbytes(size)))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="echoc compile"):
        load(tmp_path / "none.pb")
    with pytest.raises(InputError):
        load(tmp_path)


def test_the_error_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "bad.pb"
    path.write_bytes(b"junk")
    with pytest.raises(FormatError, match=r"bad\.pb: not an echograph"):
        load(path)


def test_saving_where_nothing_can_be_written(tmp_path: Path) -> None:
    for path in (tmp_path / "no" / "such" / "folder.pb", tmp_path, tmp_path / ("x" * 300)):
        with pytest.raises(OutputError, match="cannot write"):
            save(two_layers(), path)
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_no_file_can_hold_is_refused(tmp_path: Path) -> None:
    builder = GraphBuilder(name="half \ud800")
    with pytest.raises(GraphError, match="holds half a character"):
        save(builder.build(StepGraph), tmp_path / "graph.pb")
    assert list(tmp_path.iterdir()) == []

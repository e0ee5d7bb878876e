"""Chakra traces to and from bytes."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from echograph.errors import EchoError, FormatError, InputError, OutputError
from echograph.ir.chakra.messages import (
    AttributeValue,
    ChakraNode,
    NodeType,
    read_metadata,
    read_nodes,
    varint,
    write_nodes,
)

SOME_INT = st.integers(-(2**31), 2**31 - 1)
ONE = st.one_of(st.booleans(), SOME_INT, st.floats(allow_nan=False), st.text(max_size=8), st.binary(max_size=8))
LISTS = st.one_of(
    *(st.lists(of, min_size=1, max_size=4).map(tuple) for of in (st.booleans(), SOME_INT, st.text(max_size=4)))
)
NAMES = st.sampled_from(["num_ops", "comm_size", "comm_tag", "pg_name", "involved_dim", "other", ""])
IDS = st.integers(0, 2**64 - 1)


@st.composite
def nodes(draw: st.DrawFn) -> ChakraNode:
    attributes: dict[str, AttributeValue] = draw(st.dictionaries(NAMES, ONE | LISTS, max_size=4))
    return ChakraNode(
        id=draw(IDS), name=draw(st.text(min_size=1, max_size=10)), type=draw(st.sampled_from(NodeType)),
        ctrl_deps=tuple(draw(st.lists(IDS, max_size=3))), data_deps=tuple(draw(st.lists(IDS, max_size=3))),
        start_us=draw(st.integers(0, 2**40)), duration_us=draw(st.integers(0, 2**40)), attributes=attributes,
    )  # fmt: skip


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trace=st.lists(nodes(), max_size=5))
def test_what_is_written_is_read(trace: list[ChakraNode], tmp_path: Path) -> None:
    file = tmp_path / "a.0.et"
    size = write_nodes(file, trace, {"schema": "x", "count": 3})
    assert size == file.stat().st_size
    assert list(read_nodes(file)) == trace
    assert read_metadata(file) == ("0.0.4", {"schema": "x", "count": 3})


@given(value=st.integers(0, 2**64 - 1))
def test_a_varint_is_sevens_of_bits(value: int) -> None:
    data = varint(value)
    assert sum((byte & 127) << (7 * i) for i, byte in enumerate(data)) == value
    assert [byte < 128 for byte in data] == [False] * (len(data) - 1) + [True]


def test_numbers_have_the_types_that_readers_expect(tmp_path: Path) -> None:
    from echograph.proto import chakra_pb2 as pb

    types = {
        "num_ops": "int64_val", "tensor_size": "uint64_val", "comm_type": "int64_val", "comm_size": "int64_val",
        "comm_priority": "int32_val", "comm_src": "int32_val", "comm_dst": "int32_val", "comm_tag": "int32_val",
        "anything": "int64_val",
    }  # fmt: skip
    node = ChakraNode(id=1, name="n", type=NodeType.COMP, attributes={**dict.fromkeys(types, 1), "large": 2**63})
    write_nodes(tmp_path / "a.et", [node])
    data = (tmp_path / "a.et").read_bytes()
    message = pb.Node.FromString(data[data[0] + 2 + (data[data[0] + 1] > 127) :])
    found = {attribute.name: attribute.WhichOneof("value") for attribute in message.attr}
    assert found == {**types, "large": "uint64_val"}


SAMPLE = [
    ChakraNode(id=1, name="a", type=NodeType.COMP, attributes={"num_ops": 3}),
    ChakraNode(id=2, name="b", type=NodeType.COLLECTIVE, ctrl_deps=(1,), attributes={"pg_name": "1"}),
]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_end_in_one_line(data: st.DataObject, tmp_path: Path) -> None:
    file = tmp_path / "a.et"
    write_nodes(file, SAMPLE)
    content = bytearray(file.read_bytes())
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content)))]
    for _ in range(data.draw(st.integers(0, 3))):
        if content:
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(content)
    try:
        list(read_nodes(file))
    except EchoError as error:
        assert len(str(error).splitlines()) == 1
        assert str(file) in str(error)


@given(content=st.binary(min_size=1, max_size=200))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_bytes_end_in_one_line(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.et").write_bytes(content)
    try:
        list(read_nodes(tmp_path / "a.et"))
    except EchoError as error:
        assert len(str(error).splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "the file is empty"),
        (b"\x80", "truncated before message 0"),
        (b"\x05\x0a", "truncated in message 0"),
        (b"\xff" * 12, "message 0 has no length"),
        (varint(2**40) + b"x", "message 0 is 1,099,511,627,776 bytes long"),
        (b"\x02\x08\x01", "begins with no GlobalMetadata: not a Chakra trace"),
        (b"\x03\x0a\x01\xff", "begins with no GlobalMetadata"),
        (b"\x00\x00", "message 1 is empty"),
        (b"\x00\x01\xff", "message 1 is no node"),
        (b"\x00\x02\x18\x63", "unknown type 99"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "a.et").write_bytes(content)
    with pytest.raises(FormatError, match=says):
        list(read_nodes(tmp_path / "a.et"))


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        list(read_nodes(tmp_path / "none.et"))
    with pytest.raises(OutputError):
        write_nodes(tmp_path / "no" / "a.et", SAMPLE)


def test_a_false_length_reserves_no_memory_and_reading_keeps_none(tmp_path: Path) -> None:
    file = tmp_path / "a.et"
    file.write_bytes(b"\x00" + varint(60 * 2**20) + b"short")
    tracemalloc.start()
    with pytest.raises(FormatError, match="truncated"):
        list(read_nodes(file))
    assert tracemalloc.get_traced_memory()[1] < 2**22
    tracemalloc.clear_traces()
    write_nodes(file, (ChakraNode(id=i, name="n" * 100, type=NodeType.COMP) for i in range(1, 20_000)))
    assert sum(1 for _ in read_nodes(file)) == 19_999
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()

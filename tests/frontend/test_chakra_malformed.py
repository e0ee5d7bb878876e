"""Chakra traces that are malformed: one line, nothing written, and no more memory than a small set takes."""

from __future__ import annotations

import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "ir" / "exporters"))

from chakra_sets import NAME, changed, good_set, node, write_set

from echograph.errors import EchoError, FormatError, InputError
from echograph.ir.chakra import importer as chakra
from echograph.ir.chakra import reader as chakra_traces
from echograph.ir.chakra.check import check
from echograph.ir.chakra.importer import load
from echograph.ir.chakra.messages import ChakraNode, NodeType, delimited, varint
from echograph.ir.chakra.reader import ATTRIBUTES, read_traces
from echograph.proto import chakra_pb2 as pb


def imported(folder: Path, ranks: Any, groups: Any) -> None:
    load(write_set(folder / "set", ranks, groups))


# -- what nodes do not say ----------------------------------------------------------------------------------------


def broken(**changes: Any) -> dict[int, list[Any]]:
    """The good set with attributes of the gather of rank 2 changed; None takes one away."""
    ranks, _ = good_set()
    without = [name for name, value in changes.items() if value is None]
    values = {name: value for name, value in changes.items() if value is not None}
    ranks[2][4] = changed(ranks[2][4], without=without, **values)
    return ranks


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "no kind": ({"comm_type": None}, "comm_type"),
    "unknown kind": ({"comm_type": 10}, "comm_type 10"),
    "no size": ({"comm_size": None}, "no comm_size"),
    "negative size": ({"comm_size": -1}, "comm_size -1"),
    "vast size": ({"comm_size": 2**62}, "beyond 63 bits"),
    "group of others": ({"pg_name": "1"}, "no member"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_collective_that_says_too_little(case: str, tmp_path: Path) -> None:
    changes, words = BROKEN[case]
    with pytest.raises(FormatError, match=rf"{NAME}\.2\.et: node 5 \(gather\).*{words}"):
        imported(tmp_path, broken(**changes), good_set()[1])


def test_ranks_that_are_missing(tmp_path: Path) -> None:
    ranks, groups = good_set()
    del ranks[1]
    with pytest.raises(InputError, match="none of rank 1"):
        imported(tmp_path, ranks, groups)


def test_dependencies_that_lead_nowhere(tmp_path: Path) -> None:
    for name, deps, words in (("cycle", (4,), "cycle"), ("missing", (99,), "does not have")):
        ranks, groups = good_set()
        ranks[0][0] = replace(ranks[0][0], data_deps=deps)
        with pytest.raises(FormatError, match=words):
            imported(tmp_path / name, ranks, groups)


def test_a_message_to_nobody(tmp_path: Path) -> None:
    ranks, groups = good_set()
    ranks[0][2] = changed(ranks[0][2], comm_dst=4)
    with pytest.raises(FormatError, match=r"node 3 \(message\).*rank 4 of 0 to 3"):
        imported(tmp_path, ranks, groups)


# -- bytes ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    folder = write_set(tmp_path_factory.mktemp("fuzz") / "set", *good_set())
    return folder, (folder / f"{NAME}.1.et").read_bytes()


Change = tuple[str, int, bytes]
changes = st.lists(
    st.tuples(st.sampled_from(["put", "cut", "insert", "repeat"]), st.integers(0, 4000), st.binary(max_size=12)),
    min_size=1, max_size=4,
)  # fmt: skip


def apply(data: bytes, change: Change) -> bytes:
    what, place, piece = change
    at = place % (len(data) + 1)
    match what:
        case "put":
            return data[:at] + piece + data[at + len(piece) :]
        case "cut":
            return data[:at]
        case "insert":
            return data[:at] + piece + data[at:]
        case _:
            return data + data[at : at + 40 * len(piece)]


def check_bytes(fuzzed: tuple[Path, bytes], data: bytes) -> None:
    """The traces are read, or refused in one line; either way the checker has an answer."""
    folder, _ = fuzzed
    (folder / f"{NAME}.1.et").write_bytes(data)
    for use in (load, lambda source: check(read_traces(source))):
        try:
            use(folder)
        except EchoError as error:
            assert "\n" not in str(error)
            assert len(str(error)) < 1000


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(edits=changes)
@example(edits=[("cut", 0, b"")])
def test_changed_bytes(fuzzed: tuple[Path, bytes], edits: list[Change]) -> None:
    data = fuzzed[1]
    for edit in edits:
        data = apply(data, edit)
    check_bytes(fuzzed, data)


@given(data=st.binary(max_size=400))
def test_random_bytes(fuzzed: tuple[Path, bytes], data: bytes) -> None:
    check_bytes(fuzzed, data)


numbers = st.sampled_from([-(2**63), -1, 0, 1, 2, 3, 9, 64, 2**31, 2**62, 2**63 - 1, 2**64 - 1])
values = st.one_of(numbers, st.sampled_from(["", "0", "1", "2", "x", True, 1.5, b"1", (True,), ("1", "2"), ()]))
names = st.sampled_from([*ATTRIBUTES, "other"])
some_ids = st.lists(st.integers(0, 6), max_size=3).map(tuple)
any_node = st.builds(
    ChakraNode,
    id=st.integers(0, 6),
    name=st.text(max_size=3),
    type=st.sampled_from(NodeType),
    ctrl_deps=some_ids,
    data_deps=some_ids,
    duration_us=st.sampled_from([0, 1, 2**40, 2**64 - 1]),
    attributes=st.dictionaries(names, values, max_size=6),
)
any_groups = st.dictionaries(
    st.sampled_from(["0", "1", "2", "x", ""]), st.lists(st.integers(-1, 3), max_size=3), max_size=3
)


def encoded(one: ChakraNode) -> pb.Node:
    """The message of a node whose attributes are of any type."""
    message = pb.Node(
        id=one.id, name=one.name, type=int(one.type), ctrl_deps=one.ctrl_deps, data_deps=one.data_deps,
        duration_micros=one.duration_us,
    )  # fmt: skip
    for name, value in one.attributes.items():
        attribute = message.attr.add(name=name)
        match value:
            case bool():
                attribute.bool_val = value
            case int() if value >= 2**63:
                attribute.uint64_val = value
            case int():
                attribute.int64_val = value
            case float():
                attribute.double_val = value
            case str():
                attribute.string_val = value
            case bytes():
                attribute.bytes_val = value
            case _:
                attribute.string_list.values.extend(map(str, value))
    return message


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(ranks=st.lists(st.lists(any_node, max_size=5), min_size=1, max_size=3), groups=any_groups)
def test_nodes_that_mean_nothing(tmp_path_factory: pytest.TempPathFactory, ranks: Any, groups: Any) -> None:
    """Whatever well-formed nodes say, they are read and checked, or refused in one line."""
    folder = write_set(tmp_path_factory.mktemp("any"), {}, groups)
    for rank, nodes in enumerate(ranks):
        messages = [pb.GlobalMetadata(version="x"), *map(encoded, nodes)]
        pieces = (delimited(message.SerializeToString()) for message in messages)
        (folder / f"{NAME}.{rank}.et").write_bytes(b"".join(pieces))
    for use in (load, lambda source: check(read_traces(source))):
        try:
            use(folder)
        except EchoError as error:
            assert "\n" not in str(error)


def test_every_length_of_a_truncated_file(fuzzed: tuple[Path, bytes]) -> None:
    for length in range(0, len(fuzzed[1]), 7):
        check_bytes(fuzzed, fuzzed[1][:length])


@pytest.mark.parametrize("length", [2**26 + 1, 2**31, 2**60, 2**64 - 1])
def test_an_absurd_length_reserves_nothing(fuzzed: tuple[Path, bytes], length: int) -> None:
    folder, data = fuzzed
    (folder / f"{NAME}.1.et").write_bytes(data + varint(length) + b"\x08\x01")
    tracemalloc.start()
    with pytest.raises(FormatError, match=r"bytes long|truncated"):
        load(folder)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * 2**20


def test_a_name_without_end(tmp_path: Path) -> None:
    ranks, groups = good_set()
    ranks[0][0] = replace(ranks[0][0], name="m" * 2**20)
    with pytest.raises(FormatError, match="of 1,048,576 letters"):
        imported(tmp_path, ranks, groups)


@pytest.mark.parametrize(
    ("limit", "most"),
    [("MAX_NODES", 20), ("MAX_DEPENDENCIES", 10), ("MAX_TEXT_LETTERS", 20), ("MAX_GROUPS_BYTES", 5)],
)
def test_a_set_that_is_too_large(limit: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chakra_traces, limit, most)
    with pytest.raises(FormatError, match=r"over 20|over 10|letters|larger than"):
        imported(tmp_path, *good_set())


def test_nodes_left_out_do_not_multiply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What many nodes wait for through one that is left out is as much for each of them."""
    monkeypatch.setattr(chakra, "MAX_DEPENDENCIES", 500)
    works = [node(1 + i, "mm", duration_us=1) for i in range(40)]
    through = node(41, "m", NodeType.METADATA, data_deps=tuple(range(1, 41)))
    ranks = {0: [*works, through, *(node(42 + i, "mm", data_deps=(41,)) for i in range(20))]}
    with pytest.raises(FormatError, match="500 dependencies where nodes are left out"):
        imported(tmp_path, ranks, None)

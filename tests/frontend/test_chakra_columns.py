"""Chakra traces decoded in bulk are what they are a node at a time, and what surely ends does."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "ir" / "exporters"))

from chakra_jobs import DEVICE, job
from chakra_sets import NAME, changed, collective, good_set, node, write_set

from echograph.errors import EchoError
from echograph.ir.chakra import dry_run as chakra_dry_run
from echograph.ir.chakra import reader as chakra_traces
from echograph.ir.chakra.dry_run import dry_run, free_run, surely_end
from echograph.ir.chakra.importer import _Shape, load
from echograph.ir.chakra.messages import (
    ChakraNode,
    CommType,
    NodeType,
    delimited,
    encode_metadata,
    encode_node,
    split,
)
from echograph.ir.chakra.reader import ATTRIBUTES, RankTrace, Traces, read_traces
from echograph.ir.chakra.writer import write_chakra
from echograph.ir.columns import Ragged
from echograph.proto import chakra_pb2 as pb


def one_by_one(source: Path, monkeypatch: pytest.MonkeyPatch) -> Traces:
    """The traces, read a node at a time."""

    def read(files: Sequence[tuple[int, Path]], shared: Any) -> Iterator[RankTrace]:
        return (chakra_traces._read_rank(rank, path, shared) for rank, path in files)

    with monkeypatch.context() as patch:
        patch.setattr(chakra_traces, "_read_ranks", read)
        return read_traces(source)


def said(traces: Traces) -> list[dict[str, Any]]:
    """All that traces say, without where it stands in tables."""
    found: list[dict[str, Any]] = [{"others": traces.others, "groups": traces.groups}]
    for trace in traces.ranks:
        row: dict[str, Any] = {}
        for field in fields(trace):
            value = getattr(trace, field.name)
            if field.name == "name":
                value = [traces.names[index] for index in value]
            elif field.name == "group":
                value = [(type(named), named) for named in (traces.groups_named[index] for index in value)]
            elif isinstance(value, Ragged):
                value = value.offsets.tolist(), value.values.tolist()
            elif isinstance(value, np.ndarray):
                value = str(value.dtype), value.tolist()
            row[field.name] = value
        found.append(row)
    return found


@pytest.mark.parametrize("window", [1 << 12, 8 << 20])
def test_our_traces_are_read_in_bulk_and_the_same(
    window: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_chakra(job("llama", gpus=8, tp=2, pp=2, global_batch=16), tmp_path / "traces", device=DEVICE)
    slow = said(one_by_one(tmp_path / "traces", monkeypatch))

    def refuse(*_: object) -> RankTrace:
        raise AssertionError("read a node at a time")

    monkeypatch.setattr(chakra_traces, "WINDOW_BYTES", window)
    monkeypatch.setattr(chakra_traces, "_read_rank", refuse)
    assert said(read_traces(tmp_path / "traces")) == slow


values = st.one_of(
    st.integers(-(2**63), 2**64 - 1),
    st.integers(0, 300),
    st.sampled_from(["", "0", "1", "12", "é", "x" * 200, True, False, 1.5, b"1", (True,), ("1", "2"), ()]),
)
some_ids = st.lists(st.one_of(st.integers(0, 6), st.integers(0, 2**64 - 1)), max_size=4).map(tuple)
any_node = st.builds(
    ChakraNode,
    id=st.one_of(st.integers(0, 9), st.integers(0, 2**64 - 1)),
    name=st.sampled_from(["", "mm", "é", "n" * 150]),
    type=st.sampled_from(NodeType),
    ctrl_deps=some_ids,
    data_deps=some_ids,
    duration_us=st.sampled_from([0, 1, 127, 128, 2**40, 2**64 - 1]),
    attributes=st.dictionaries(st.sampled_from([*ATTRIBUTES, "other", "x"]), values, max_size=7),
)


def write_any(path: Path, nodes: Sequence[ChakraNode], twist: int) -> None:
    """Writes nodes whose attributes are of any type; some with a field twice, or one that nobody knows."""
    pieces = [encode_metadata({"a": 1})]
    for number, one in enumerate(nodes):
        message = pb.Node.FromString(encode_node(replace(one, attributes={})))
        for name, value in one.attributes.items():
            attribute = message.attr.add(name=name)
            match value:
                case bool():
                    attribute.bool_val = value
                case int() if value < 0 or number % 2:
                    attribute.int64_val = min(value, 2**63 - 1)
                case int():
                    attribute.uint64_val = value
                case float():
                    attribute.double_val = value
                case str():
                    attribute.string_val = value
                case bytes():
                    attribute.bytes_val = value
                case _:
                    attribute.string_list.values.extend(map(str, value))
        data = message.SerializeToString(deterministic=True)
        extra = [b"", b"\x08\x05", b"\x62\x01x", b"\x4a\x02\x0a\x00", b"\x20\x03"][twist % 5]
        pieces.append(delimited(data + (extra if number == twist % 7 else b"")))
    path.write_bytes(b"".join(pieces))


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(ranks=st.lists(st.lists(any_node, max_size=5), min_size=1, max_size=3), twist=st.integers(0, 34))
def test_any_nodes_are_read_as_one_by_one(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, ranks: Any, twist: int
) -> None:
    folder = tmp_path_factory.mktemp("any")
    for rank, nodes in enumerate(ranks):
        write_any(folder / f"{NAME}.{rank}.et", nodes, twist)
    try:
        slow: Any = said(one_by_one(folder, monkeypatch))
    except EchoError as error:
        slow = str(error)
    try:
        fast: Any = said(read_traces(folder))
    except EchoError as error:
        fast = str(error)
    assert fast == slow


def test_ranks_of_one_size_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of the same length that differ in ranks and groups, in a name, or in a size."""
    ranks, groups = good_set()
    ranks[1] = [replace(one, name=one.name.replace("mm", "nn")) for one in ranks[1]]
    ranks[3][5] = changed(ranks[3][5], comm_size=(1 << 16) + 1)
    ranks[2][4] = changed(ranks[2][4], pg_name="2")
    folder = write_set(tmp_path / "set", ranks, groups)
    assert len({path.stat().st_size for path in folder.glob("*.et")}) < 4
    assert said(read_traces(folder)) == said(one_by_one(folder, monkeypatch))


def test_messages_are_split_at_their_lengths() -> None:
    data = delimited(b"a" * 5) + delimited(b"") + delimited(b"b" * 300)
    found = split(data + b"\x85")
    assert [(end - begin) for begin, end in zip(found.begins, found.ends, strict=True)] == [5, 0, 300]
    assert (found.rest, found.odd) == (len(data), False)
    assert split(b"\xff" * 11).odd
    assert split(delimited(b"x") + b"\xff\xff\xff\xff\x7f").odd


def test_equal_ranks_run_one_program(tmp_path: Path) -> None:
    nodes = [
        node(1, "mm", duration_us=5),
        collective(2, "sum", CommType.ALL_REDUCE, 1 << 20, "1", data_deps=(1,)),
    ]
    found = load(write_set(tmp_path / "set", dict.fromkeys(range(16), nodes), {"1": list(range(16))}))
    (program,) = found.graph.programs
    assert program.ranks == tuple(range(16))
    assert (len(found.graph.ops), found.graph.world_size) == (2, 16)


# -- whether ranks come to an end ----------------------------------------------------------------------------

talk = st.tuples(st.sampled_from("CSRW"), st.integers(0, 2), st.integers(0, 1), st.booleans(), st.booleans())


def talking(rank: int, number: int, what: Any) -> ChakraNode:
    """A node that computes, sums, or sends to or receives from a rank; after its last one or not."""
    kind, peer, tag, ctrl, data = what
    fields: dict[str, Any] = {
        "ctrl_deps": (number - 1,) if ctrl and number > 1 else (),
        "data_deps": (number - 2,) if data and number > 2 else (),
    }
    if kind == "W":
        return node(number, "mm", duration_us=1 + (rank * 7 + number * 3) % 5, **fields)
    if kind == "C":
        return collective(number, "sum", CommType.ALL_REDUCE, 64, str(1 + tag), **fields)
    ends = {"comm_src": rank, "comm_dst": peer} if kind == "S" else {"comm_src": peer, "comm_dst": rank}
    return node(
        number, "m", NodeType.SEND if kind == "S" else NodeType.RECV, comm_tag=tag, comm_size=8, **ends, **fields
    )


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(ranks=st.lists(st.lists(talk, max_size=7), min_size=2, max_size=3))
def test_what_surely_ends_does(tmp_path_factory: pytest.TempPathFactory, ranks: Any) -> None:
    nodes = {
        rank: [talking(rank, 1 + at, what) for at, what in enumerate(mine)] for rank, mine in enumerate(ranks)
    }
    folder = write_set(tmp_path_factory.mktemp("ends"), nodes, {"1": list(range(len(ranks))), "2": [0, 1]})
    traces = read_traces(folder)
    shapes = {trace.rank: _Shape(trace, trace.order(), control=True) for trace in traces.ranks}
    edges, chains = (
        {rank: getattr(shape, name) for rank, shape in shapes.items()} for name in ("edges", "chains")
    )
    if surely_end(traces, edges, chains):
        assert free_run(traces, buffered=False) == []


busy = st.tuples(st.sampled_from("CSRWWWW"), st.integers(0, 2), st.integers(0, 1), st.booleans(), st.booleans())


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(ranks=st.lists(st.lists(busy, max_size=9), min_size=2, max_size=3), alike=st.booleans())
def test_computations_in_a_row_are_run_as_one(
    tmp_path_factory: pytest.TempPathFactory, ranks: Any, alike: bool
) -> None:
    """Whoever waits, waits for the same ranks as where each computation starts and ends by itself."""
    nodes = {
        rank: [talking(rank, 1 + at, what) for at, what in enumerate(ranks[0] if alike else mine)]
        for rank, mine in enumerate(ranks)
    }
    folder = write_set(tmp_path_factory.mktemp("rows"), nodes, {"1": list(range(len(ranks))), "2": [0, 1]})
    traces = read_traces(folder)

    def waits() -> list[list[tuple[int, int, tuple[int, ...]]]]:
        runs = dry_run(traces), free_run(traces, buffered=True), free_run(traces, buffered=False)
        return [[(wait.rank, wait.row, wait.of) for wait in run] for run in runs]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chakra_dry_run, "_joined", lambda lanes, *_, **__: np.zeros(len(lanes), np.bool_))
        apart = waits()
    assert waits() == apart


def test_our_jobs_surely_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pipelines whose stages send and receive at a time, without a run."""
    write_chakra(job("gpt2", gpus=8, tp=2, pp=2, global_batch=16), tmp_path / "traces", device=DEVICE)
    monkeypatch.setattr("echograph.ir.chakra.importer.free_run", None)
    assert load(tmp_path / "traces").notes == ()

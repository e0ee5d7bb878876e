"""What single operations become in a Chakra trace, and what waits for what where some have no node."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay import COLLECTIVE, COMP, RECV, SEND, Node, read_folder

from echograph.errors import EchoError, OutputError, PlanError, SimulationError, UsageError
from echograph.ir import types as t
from echograph.ir.builder import GraphBuilder
from echograph.ir.chakra import writer as chakra
from echograph.ir.chakra.messages import read_metadata, read_nodes, write_nodes
from echograph.ir.chakra.writer import LEAST_GATHER_BYTES, write_chakra
from echograph.ir.graph import Axis, JobGraph

ALL_REDUCE, ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER = 0, 2, 6, 7
US = 1_000_000


def builder(*axes: tuple[str, int], streams: tuple[str, ...] = ("compute", "comm")) -> GraphBuilder:
    made = GraphBuilder(name="small", streams=streams)
    made.mesh = tuple(Axis(name=name, size=size) for name, size in axes)
    return made


def kernel(made: GraphBuilder, picoseconds: int = US, **common: Any) -> int:
    duration = t.Duration(device="trace", picoseconds=picoseconds, source=t.Source.IMPORTED)
    work = {"flops": 10, "bytes_read": 4, "bytes_written": 2} if picoseconds else {}
    return made.compute("aten.mm", phase=t.Phase.FORWARD, durations=(duration,), **(work | common))


def collective(made: GraphBuilder, kind: t.CollectiveKind, size: int, group: int, **common: Any) -> int:
    return made.collective(
        "c", kind, group=group, bytes_per_rank=size, dtype=t.DType.INT8, payload=t.Payload.OTHER, **common
    )


def exported(
    made: GraphBuilder, folder: Path, **options: Any
) -> tuple[dict[int, list[Node]], dict[str, list[int]]]:
    write_chakra(made.build(JobGraph), folder, **options)
    traces, groups = read_folder(folder)
    return {rank: list(nodes.values()) for rank, nodes in traces.items()}, groups


@pytest.mark.parametrize(
    ("kind", "becomes", "size"),
    [
        (t.CollectiveKind.ALL_REDUCE, ALL_REDUCE, 4096),
        (t.CollectiveKind.ALL_GATHER, ALL_GATHER, 1024),
        (t.CollectiveKind.REDUCE_SCATTER, REDUCE_SCATTER, 4096),
        (t.CollectiveKind.ALL_TO_ALL, ALL_TO_ALL, 4096),
        (t.CollectiveKind.BROADCAST, ALL_GATHER, 1024),
        (t.CollectiveKind.GATHER, ALL_GATHER, 1024),
        (t.CollectiveKind.REDUCE, REDUCE_SCATTER, 4096),
        (t.CollectiveKind.SCATTER, REDUCE_SCATTER, 4096),
    ],
)
def test_a_collective_is_one_that_readers_simulate(
    tmp_path: Path, kind: t.CollectiveKind, becomes: int, size: int
) -> None:
    made = builder(("dp", 4))
    collective(made, kind, 4096, made.group("dp", axes=("dp",)))
    traces, groups = exported(made, tmp_path / "out")
    assert groups == {"1": [0, 1, 2, 3]}
    for (node,) in traces.values():
        assert (node.type, node.comm_type, node.size, node.pg) == (COLLECTIVE, becomes, size, "1")
    notes = json.loads((tmp_path / "out" / "chakra.json").read_text())["notes"]
    simulated = kind.name in ("ALL_REDUCE", "ALL_GATHER", "REDUCE_SCATTER", "ALL_TO_ALL")
    assert any(f"{kind.name.lower()} as" in note for note in notes) != simulated


def test_a_barrier_still_makes_ranks_wait_for_each_other(tmp_path: Path) -> None:
    made = builder(("dp", 4))
    collective(made, t.CollectiveKind.BARRIER, 0, made.group("dp", axes=("dp",)))
    traces, _ = exported(made, tmp_path / "out")
    assert [(n.comm_type, n.size) for n in traces[3]] == [(ALL_REDUCE, 4)]


def test_shards_too_small_for_astra_sim_are_rounded_up(tmp_path: Path) -> None:
    made = builder(("dp", 4))
    group = made.group("dp", axes=("dp",))
    for size in (1, 4, 4 * LEAST_GATHER_BYTES, 4 * LEAST_GATHER_BYTES + 1):
        collective(made, t.CollectiveKind.ALL_GATHER, size, group)
    traces, _ = exported(made, tmp_path / "out")
    least = LEAST_GATHER_BYTES
    assert [n.size for n in traces[0]] == [least, least, least, least + 1]


def test_what_moves_nothing_is_left_out(tmp_path: Path) -> None:
    made = builder(("dp", 4), ("tp", 1))
    dp, tp = made.group("dp", axes=("dp",)), made.group("tp", axes=("tp",))
    collective(made, t.CollectiveKind.ALL_REDUCE, 64, tp)
    collective(made, t.CollectiveKind.ALL_REDUCE, 0, dp)
    for peer, nbytes in ((0, 8), (1, 0)):
        made.send("s", group=dp, peer=peer, tag=1, nbytes=nbytes, payload=t.Payload.ACTIVATION)
        made.recv("r", group=dp, peer=-peer, tag=1, nbytes=nbytes, payload=t.Payload.ACTIVATION)
    made.host("load")
    kernel(made, 0)
    traces, groups = exported(made, tmp_path / "out")
    assert groups == {}
    for (node,) in traces.values():
        assert (node.type, node.micros, node.deps) == (COMP, 0, [])


def test_messages_name_both_ends_and_groups_keep_their_tags_apart(tmp_path: Path) -> None:
    made = builder(("pp", 3), ("tp", 2))
    ring, pair = made.group("pp", axes=("pp",)), made.group("all", axes=("pp", "tp"))
    made.send("s", group=ring, peer=1, tag=5, nbytes=8, payload=t.Payload.ACTIVATION, stream=1)
    made.recv("r", group=ring, peer=-1, tag=5, nbytes=8, payload=t.Payload.ACTIVATION, stream=1)
    made.send("s", group=pair, peer=2, tag=5, nbytes=9, payload=t.Payload.ACTIVATION, stream=1)
    made.recv("r", group=pair, peer=-2, tag=5, nbytes=9, payload=t.Payload.ACTIVATION, stream=1)
    traces, groups = exported(made, tmp_path / "out")
    assert groups == {}
    for rank, nodes in traces.items():
        ahead, behind = (rank + 2) % 6, (rank - 2) % 6
        assert [(n.type, n.message[:2], n.size) for n in nodes] == [
            (SEND, (rank, ahead), 8), (RECV, (behind, rank), 8),
            (SEND, (rank, ahead), 9), (RECV, (behind, rank), 9),
        ]  # fmt: skip
        tags = [n.message[2] for n in nodes]
        assert tags[0] == tags[1] != tags[2] == tags[3]


def test_a_group_of_some_positions_has_a_number_at_each_place_on_the_other_axes(tmp_path: Path) -> None:
    made = builder(("pp", 3), ("dp", 2))
    ends = made.group("embedding", axes=("pp",), positions=(0, 2))
    shared = collective(made, t.CollectiveKind.ALL_REDUCE, 64, ends)
    alone = kernel(made)
    for stage in range(3):
        calls = [(0, shared, shared + 1, 0, 0)] if stage != 1 else [(0, alone, alone + 1, 0, 0)]
        made.program(calls, role=f"stage {stage}", coordinates={"pp": stage})
    traces, groups = exported(made, tmp_path / "out")
    assert groups == {"1": [0, 4], "2": [1, 5]}
    assert {rank: [n.pg for n in nodes] for rank, nodes in traces.items()} == {
        0: ["1"], 4: ["1"], 1: ["2"], 5: ["2"], 2: [""], 3: [""],
    }  # fmt: skip


def test_jobs_that_list_their_ranks(tmp_path: Path) -> None:
    made = builder()
    group = made.group("pair", ranks=(3, 7))
    collective(made, t.CollectiveKind.ALL_REDUCE, 64, group)
    made.program([(0, 0, 1, 0, 0)], role="b", ranks=(7,))
    made.program([(0, 0, 1, 0, 0)], role="a", ranks=(3,))
    traces, groups = exported(made, tmp_path / "out")
    assert sorted(traces) == [3, 7]
    assert groups == {"1": [3, 7]}


@dataclass(frozen=True)
class Op:
    stream: int
    kind: str
    deps: tuple[int, ...]


@st.composite
def programs(draw: st.DrawFn) -> list[Op]:
    """Operations on three streams, with and without a node, that wait for earlier ones."""
    kinds = st.sampled_from(["kernel", "view", "host", "collective", "nothing"])
    count = draw(st.integers(1, 14))
    return [
        Op(
            draw(st.integers(0, 2)),
            draw(kinds),
            tuple(draw(st.lists(st.integers(0, i - 1), max_size=3, unique=True))) if i else (),
        )
        for i in range(count)
    ]


def reached(before: list[set[int]]) -> list[set[int]]:
    """For each of a list in order, all that it comes after."""
    found: list[set[int]] = []
    for direct in before:
        found.append(direct.union(*(found[i] for i in direct)))
    return found


@given(program=programs())
def test_nodes_come_after_just_what_their_operations_come_after(
    program: list[Op], tmp_path_factory: pytest.TempPathFactory
) -> None:
    made = builder(("dp", 2), streams=("a", "b", "c"))
    group = made.group("dp", axes=("dp",))
    for op in program:
        common = {"stream": op.stream, "deps": op.deps}
        match op.kind:
            case "kernel":
                kernel(made, **common)
            case "view":
                kernel(made, 0, **common)
            case "host":
                made.host("wait", **common)
            case "collective" | "nothing":
                collective(made, t.CollectiveKind.ALL_REDUCE, 64 * (op.kind == "collective"), group, **common)
    folder = tmp_path_factory.mktemp("program") / "out"
    traces, _ = exported(made, folder)
    last: dict[int, int] = {}
    before = []
    for i, op in enumerate(program):
        before.append({*op.deps, *([last[op.stream]] if op.stream in last else [])})
        last[op.stream] = i
    kept = [i for i, op in enumerate(program) if op.kind in ("kernel", "collective")]
    place = {i: number for number, i in enumerate(kept, start=1)}
    expected = [{place[j] for j in reached(before)[i] if j in place} for i in kept]
    nodes = traces[0] if kept else []
    found = reached([set(), *({*node.deps} for node in nodes)])[1:]
    assert found == expected
    for number, node in zip(kept, nodes, strict=True):
        assert (node.type == COMP) == (program[number].kind == "kernel")


@settings(max_examples=60, deadline=None)
@given(durations=st.lists(st.integers(1, 5 * US), min_size=1, max_size=40))
def test_rounding_is_carried_on(durations: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    made = builder(("dp", 1))
    for picoseconds in durations:
        kernel(made, picoseconds)
    folder = tmp_path_factory.mktemp("rounding") / "out"
    done = write_chakra(made.build(JobGraph), folder)
    micros = [node.duration_us for node in read_nodes(folder / "small.0.et")]
    run = [US * micro or 1000 for micro in micros]
    for end in range(1, len(durations) + 1):
        assert abs(sum(run[:end]) - sum(durations[:end])) <= US // 2 + 1000 * end
    assert done.drift_ps == sum(run) - sum(durations)


def test_a_kernel_without_a_duration_is_refused(tmp_path: Path) -> None:
    made = builder(("dp", 1))
    made.compute("aten.mm", phase=t.Phase.FORWARD, flops=1, bytes_read=1, bytes_written=1)
    with pytest.raises(SimulationError, match=r"operation 0 \(aten.mm\) has no duration"):
        write_chakra(made.build(JobGraph), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_copies_run_as_compute(tmp_path: Path) -> None:
    made = builder(("dp", 1))
    duration = t.Duration(device="gpu", picoseconds=3 * US, source=t.Source.MEASURED)
    made.copy("offload", t.CopyDirection.DEVICE_TO_HOST, nbytes=100, durations=(duration,), stream=1)
    traces, _ = exported(made, tmp_path / "out", device="gpu")
    assert [(n.type, n.micros) for n in traces[0]] == [(COMP, 3)]


def small_job() -> JobGraph:
    made = builder(("dp", 2))
    kernel(made)
    return made.build(JobGraph)


def test_an_earlier_export_is_replaced_and_nothing_else_is(tmp_path: Path) -> None:
    write_chakra(small_job(), tmp_path / "out", name="old")
    write_chakra(small_job(), tmp_path / "out", name="new")
    assert sorted(p.name for p in (tmp_path / "out").glob("*.et")) == ["new.0.et", "new.1.et"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("words")
    for place in (tmp_path / "mine", tmp_path / "mine" / "thesis.tex", tmp_path / "none" / "out"):
        with pytest.raises(OutputError):
            write_chakra(small_job(), place)
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "words"
    (tmp_path / "bare").mkdir()
    write_chakra(small_job(), tmp_path / "bare")
    assert (tmp_path / "bare" / "small.0.et").is_file()


def test_an_export_that_fails_leaves_the_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_chakra(small_job(), tmp_path / "out")
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(chakra._Writer, "_groups", full)
    with pytest.raises(OutputError, match="No space left"):
        write_chakra(small_job(), tmp_path / "out", name="other")
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("name", ["../up", "a/b", "", " ", ".hidden", "x" * 200, "a\nb"])
def test_names_of_files_are_plain(tmp_path: Path, name: str) -> None:
    if not name:
        write_chakra(small_job(), tmp_path / "out", name=name)
        assert (tmp_path / "out" / "small.0.et").is_file()
        return
    with pytest.raises(UsageError, match="give letters"):
        write_chakra(small_job(), tmp_path / "out", name=name)


def test_jobs_too_large_to_be_written_out_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = builder(("dp", 2**21))
    kernel(made)
    with pytest.raises(PlanError, match="at most 1,048,576"):
        write_chakra(made.build(JobGraph), tmp_path / "out")
    monkeypatch.setattr(chakra, "MAX_NODES", 1)
    with pytest.raises(PlanError, match="--per-role"):
        write_chakra(small_job(), tmp_path / "out")
    write_chakra(small_job(), tmp_path / "out", per_role=True)
    monkeypatch.setattr(chakra, "MAX_ROLE_NODES", 0)
    with pytest.raises(PlanError, match="a rank runs 1 operations"):
        write_chakra(small_job(), tmp_path / "out", per_role=True)


def test_files_are_those_that_the_message_classes_write(tmp_path: Path) -> None:
    """The pieces of bytes that ranks share make the same file as protobuf's own encoder."""
    made = builder(("pp", 2), ("dp", 200))
    dp, pp = made.group("dp", axes=("dp",)), made.group("pp", axes=("pp",))
    for size in (1, 200, 2**40):
        kernel(made, size)
        collective(made, t.CollectiveKind.ALL_REDUCE, size, dp, stream=1, deps=(made.op_count() - 1,))
        made.send("s", group=pp, peer=1, tag=size % 300, nbytes=size, payload=t.Payload.ACTIVATION)
        made.recv("r", group=pp, peer=-1, tag=size % 300, nbytes=size, payload=t.Payload.ACTIVATION)
    exported(made, tmp_path / "out")
    for rank in (0, 127, 128, 399):
        file = tmp_path / "out" / f"small.{rank}.et"
        write_nodes(tmp_path / "again.et", read_nodes(file), read_metadata(file)[1])
        assert (tmp_path / "again.et").read_bytes() == file.read_bytes()


def test_errors_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(EchoError) as caught:
        write_chakra(small_job(), tmp_path / "no" / "folder")
    assert "\n" not in str(caught.value)

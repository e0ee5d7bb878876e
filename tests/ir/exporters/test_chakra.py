"""Whole jobs as Chakra traces, read back by a replay that knows nothing of what they were made from."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _pytest.mark import ParameterSet
from chakra_jobs import DEVICE, job
from even_cluster import GBPS, even_cluster
from replay import COLLECTIVE, COMP, RECV, SEND, Node, Replay, read_folder, read_messages

from echograph.ir.chakra.check import check
from echograph.ir.chakra.reader import read_traces
from echograph.ir.chakra.writer import ChakraExport, write_chakra
from echograph.ir.graph import JobGraph
from echograph.ir.passes.mesh import UnfoldRanks
from echograph.ir.types import OpKind
from echograph.simulator.durations import durations
from echograph.simulator.host import HostTimes
from echograph.simulator.simulate import simulate

pytestmark = pytest.mark.torch

Case = tuple[str, dict[str, Any]]
SMALL: list[Case] = [
    ("gpt2", {"gpus": 8}),
    ("gpt2", {"gpus": 8, "tp": 2, "pp": 2, "global_batch": 16}),
    ("llama", {"gpus": 8, "tp": 4, "sequence_parallel": True}),
    ("llama", {"gpus": 8, "pp": 4, "vpp": 2, "global_batch": 32}),
    ("llama", {"gpus": 8, "tp": 2, "cp": 2}),
    ("mixtral", {"gpus": 8, "ep": 4}),
    ("tied gpt2", {"gpus": 8, "tp": 2, "pp": 2, "global_batch": 16}),
    ("gpt2", {"gpus": 64, "tp": 4, "pp": 4, "global_batch": 64}),
]
LARGE: list[Case] = [
    ("llama", {"gpus": 64, "tp": 2, "pp": 2, "cp": 2, "global_batch": 64}),
    ("mixtral", {"gpus": 64, "ep": 8, "pp": 2, "tp": 2, "global_batch": 64}),
    ("llama", {"gpus": 1024, "tp": 8, "pp": 8, "global_batch": 128}),
    ("gpt2", {"gpus": 1024, "tp": 8, "pp": 4, "global_batch": 256}),
]
SHARDED: list[Case] = [
    ("llama", {"gpus": 8, "zero": 3}),
    ("gpt2", {"gpus": 16, "zero": 3, "hsdp_replicas": 2}),
]
Exported = tuple[JobGraph, ChakraExport, Path]
CASES = [*SMALL, *(pytest.param(*case, marks=pytest.mark.slow) for case in LARGE)]

Traces = dict[int, dict[int, Node]]


def export(folder: Path, model: str, plan: dict[str, Any], **options: Any) -> tuple[JobGraph, ChakraExport]:
    made = job(model, **plan)
    return made, write_chakra(made, folder, device=DEVICE, **options)


def step_s(made: JobGraph, folder: Path) -> float:
    """Seconds by the simulator, on the cluster that the replay assumes and with a host that takes no time."""
    found = simulate(made, even_cluster(folder), HostTimes(op_ps=0, launch_ps=0), memory=False)
    return found.step_ps / 1e12


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, dict[str, Any]], Exported]:
    """`exported(model, plan)`: a job, what its export said, and where it is; the last one is kept."""
    last: list[tuple[tuple[str, dict[str, Any]], Exported]] = []

    def make(model: str, plan: dict[str, Any]) -> Exported:
        if not last or last[0][0] != (model, plan):
            folder, made = tmp_path_factory.mktemp("exported"), job(model, **plan)
            times = durations(made, even_cluster(folder)).picoseconds
            done = write_chakra(made, folder / "out", device=DEVICE, communication_ps=times)
            last[:] = [((model, plan), (made, done, folder / "out"))]
        return last[0][1]

    return make


def of_each(cases: Sequence[Case | ParameterSet]) -> pytest.MarkDecorator:
    """A parametrization that has all tests of a case run one after another."""
    return pytest.mark.parametrize(("model", "plan"), cases, scope="module")


@of_each(CASES)
def test_a_replay_of_the_files_takes_as_long_as_the_simulator_says(
    exported, tmp_path: Path, model: str, plan: dict[str, Any]
) -> None:
    made, _, folder = exported(model, plan)
    replayed = Replay(folder, GBPS * 1e9).run()
    assert replayed == pytest.approx(step_s(made, tmp_path), rel=0.02)


@of_each([*SMALL[:-1], *SHARDED])
def test_a_reader_that_communicates_once_at_a_time_comes_to_the_end(
    exported, model: str, plan: dict[str, Any]
) -> None:
    """What ASTRA-sim does: what overlapped follows each other, and no rank waits for ever."""
    _, _, folder = exported(model, plan)
    side_by_side = Replay(folder, GBPS * 1e9).run()
    assert Replay(folder, GBPS * 1e9, one_at_a_time=True).run() > side_by_side * (1 - 1e-9)


@of_each([*CASES, *SHARDED])
def test_what_is_expected_of_a_reader_is_what_one_takes(exported, model: str, plan: dict[str, Any]) -> None:
    """From the job alone, with a rank of each program; the replay reads the files of all ranks."""
    _, done, folder = exported(model, plan)
    replayed = Replay(folder, GBPS * 1e9, one_at_a_time=True).run()
    assert done.one_at_a_time_ps is not None
    assert done.one_at_a_time_ps / 1e12 == pytest.approx(replayed, rel=1e-3)


@pytest.mark.parametrize(("model", "plan"), SHARDED)
def test_kernels_of_communication_streams_are_what_one_compute_unit_cannot_overlap(
    tmp_path: Path, model: str, plan: dict[str, Any]
) -> None:
    """FSDP copies on its communication stream: the chains of the files say so; one unit runs all in turn."""
    made, done = export(tmp_path / "out", model, plan)
    expected = step_s(made, tmp_path)
    assert Replay(tmp_path / "out", GBPS * 1e9, streams=True).run() == pytest.approx(expected, rel=0.02)
    assert Replay(tmp_path / "out", GBPS * 1e9).run() > 1.02 * expected
    assert any("one kernel of a rank at a time" in note for note in done.notes)


@of_each(CASES)
def test_the_files_agree_with_each_other(exported, model: str, plan: dict[str, Any]) -> None:
    made, done, folder = exported(model, plan)
    traces, groups = read_folder(folder)
    assert sorted(traces) == list(range(made.world_size))
    assert done.ranks == made.world_size
    assert done.nodes == sum(map(len, traces.values()))
    assert not check(read_traces(folder)).findings
    check_order(traces)
    check_groups(traces, groups)
    check_messages(traces)


def check_order(traces: Traces) -> None:
    """Ids count the nodes of the file, and nodes wait for earlier ones alone."""
    for nodes in traces.values():
        assert list(nodes) == list(range(1, len(nodes) + 1))
        assert all(before < node.id for node in nodes.values() for before in node.deps)


def check_groups(traces: Traces, groups: dict[str, list[int]]) -> None:
    """All members of a group, and no other rank, run its collectives, in one order and with one size."""
    orders: dict[str, dict[int, list[tuple[int, int]]]] = defaultdict(dict)
    for rank, nodes in traces.items():
        for node in nodes.values():
            if node.type == COLLECTIVE:
                assert int(node.pg) > 0
                assert node.size > 0
                orders[node.pg].setdefault(rank, []).append((node.comm_type, node.size))
    assert orders.keys() == groups.keys()
    for name, members in groups.items():
        assert len(set(members)) == len(members) > 1
        assert set(orders[name]) == set(members)
        assert len({tuple(order) for order in orders[name].values()}) == 1


def check_messages(traces: Traces) -> None:
    """Between two ranks the sends of a tag are its receives, in order."""
    sent: dict[object, list[int]] = defaultdict(list)
    received: dict[object, list[int]] = defaultdict(list)
    for rank, nodes in traces.items():
        for node in nodes.values():
            if node.type in (SEND, RECV):
                (sent if node.type == SEND else received)[node.message].append(node.size)
                assert node.message[0 if node.type == SEND else 1] == rank
                assert node.message[0] != node.message[1]
    assert sent == received


@pytest.mark.parametrize(("model", "plan"), [SMALL[1], SMALL[5], SHARDED[0]])
def test_every_kernel_is_there_and_whole_microseconds_lose_nothing(
    tmp_path: Path, model: str, plan: dict[str, Any]
) -> None:
    made, done = export(tmp_path / "out", model, plan)
    traces, _ = read_folder(tmp_path / "out")
    exact = made.ops.duration_on(DEVICE)[0]
    works = np.isin(made.ops.kind, (OpKind.COMPUTE, OpKind.COPY)) & ~made.ops.is_view
    for program in made.programs:
        rows = np.concatenate([np.arange(begin, end) for _, begin, end, _, _ in program.calls.tolist()])
        rows = rows[works[rows]]
        rank = sum(v * {"pp": 4, "dp": 2}[a] for a, v in program.coordinates.items())
        kernels = [node for node in traces[rank].values() if node.type == COMP]
        assert len(kernels) == len(rows)
        nanoseconds = sum(1000 * node.micros or 1 for node in kernels)
        drift = 1000 * nanoseconds - int(exact[rows].sum())
        assert abs(drift) <= len(made.streams) * 500_000 + 1000 * sum(not node.micros for node in kernels)
        if len(np.unique(made.ops.stream[rows])) == 1 == len(made.programs):
            assert drift == done.drift_ps


def test_kernels_carry_what_a_roofline_needs(tmp_path: Path) -> None:
    made, _ = export(tmp_path / "out", *SMALL[0])
    found = read_messages(tmp_path / "out" / "gpt2.0.et")
    assert next(found).version == "0.0.4"
    work: Counter[tuple[int, int]] = Counter()
    for node in found:
        attributes = {a.name: (a.WhichOneof("value"), getattr(a, a.WhichOneof("value"))) for a in node.attr}
        assert attributes["is_cpu_op"] == ("bool_val", False)
        if node.type == COMP:
            (one, flops), (other, moved) = attributes["num_ops"], attributes["tensor_size"]
            assert (one, other) == ("int64_val", "uint64_val")
            work[flops, moved] += 1
    ops, calls = made.ops, made.programs[0].calls.tolist()
    rows = [row for _, begin, end, _, _ in calls for row in range(begin, end) if ops.kind[row] == OpKind.COMPUTE]
    expected = Counter(
        (max(1, int(ops.flops[row])), int(ops.bytes_read[row] + ops.bytes_written[row]))
        for row in rows
        if not ops.is_view[row]
    )
    assert work == expected


@pytest.mark.parametrize(("model", "plan"), [SMALL[1], SMALL[5]])
def test_one_program_a_rank_gives_the_same_files(tmp_path: Path, model: str, plan: dict[str, Any]) -> None:
    made, _ = export(tmp_path / "roles", model, plan)
    write_chakra(UnfoldRanks()(made), tmp_path / "ranks", device=DEVICE)
    for file in sorted((tmp_path / "roles").iterdir()):
        assert (tmp_path / "ranks" / file.name).read_bytes() == file.read_bytes()


def test_one_file_a_role_says_whose_it_is(tmp_path: Path) -> None:
    made, done = export(tmp_path / "roles", *SMALL[1], per_role=True)
    export(tmp_path / "ranks", *SMALL[1])
    roles = json.loads((tmp_path / "roles" / "roles.json").read_text())
    assert sorted(rank for role in roles for rank in role["ranks"]) == list(range(8))
    assert [role["role"] for role in roles] == [program.role for program in made.programs]
    for role in roles:
        first = (tmp_path / "ranks" / f"gpt2.{role['ranks'][0]}.et").read_bytes()
        assert (tmp_path / "roles" / role["file"]).read_bytes() == first
    groups = [(tmp_path / kind / "comm_groups.json").read_text() for kind in ("roles", "ranks")]
    assert groups[0] == groups[1]
    assert done.nodes == sum(len(list(read_messages(p))) - 1 for p in (tmp_path / "roles").glob("*.et"))


def test_the_same_job_gives_the_same_bytes(tmp_path: Path) -> None:
    export(tmp_path / "one", *SMALL[5])
    export(tmp_path / "two", *SMALL[5])
    for file in (tmp_path / "one").iterdir():
        assert (tmp_path / "two" / file.name).read_bytes() == file.read_bytes()

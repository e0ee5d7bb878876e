"""Chakra traces become jobs: ours come out as they went in, those of others as far as a graph holds them."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "ir" / "exporters"))
sys.path.insert(0, str(Path(__file__).parents[1] / "properties"))

from chakra_jobs import DEVICE, job
from chakra_sets import NAME, changed, collective, good_set, node, write_set
from small_models import small_step

from echograph.cli.app import run
from echograph.ir import serde
from echograph.ir.chakra.check import CHECKS, check
from echograph.ir.chakra.importer import load
from echograph.ir.chakra.messages import CommType, NodeType
from echograph.ir.chakra.reader import read_traces
from echograph.ir.chakra.writer import write_chakra
from echograph.ir.graph import JobGraph
from echograph.ir.types import Collective, Compute, Copy, Host, Recv, Send, Source
from echograph.profiler.costs import load_device
from echograph.profiler.costs.estimate import estimate
from echograph.simulator.clusters import load_cluster
from echograph.simulator.host import IssueTimes as Issue
from echograph.simulator.simulate import simulate
from echograph.workflow.plan import Plan
from echograph.workflow.predict import lower

PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2 dp8": ("gpt2", {"gpus": 8}),
    "gpt2 tp2 pp2 dp2": ("gpt2", {"gpus": 8, "tp": 2, "pp": 2, "global_batch": 16}),
    "llama tp2 pp2 zero1": ("llama", {"gpus": 8, "tp": 2, "pp": 2, "global_batch": 16, "zero": 1}),
    "llama fsdp": ("llama", {"gpus": 8, "zero": 3}),
    "llama interleaved": ("llama", {"gpus": 8, "pp": 2, "vpp": 2, "tp": 2, "global_batch": 16}),
    "mixtral ep4 tp2": ("mixtral", {"gpus": 8, "ep": 4, "tp": 2}),
}
FREE = Issue(op_ps=0, launch_ps=0)


@pytest.fixture(scope="module", params=PLANS)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[JobGraph, Path]:
    """A job, and its traces."""
    model, plan = PLANS[request.param]
    lowered = lower(small_step(model), Plan(**plan), load_cluster())
    made = estimate(lowered, load_device(DEVICE))(lowered)
    folder = tmp_path_factory.mktemp("traces") / "traces"
    write_chakra(made, folder, device=DEVICE)
    return made, folder


def test_traces_come_out_as_they_went_in(exported: tuple[JobGraph, Path], tmp_path: Path) -> None:
    """Node for node, to the byte, and so are the groups; the file of the graph in between changes nothing."""
    made, folder = exported
    assert_round_trip(made, folder, tmp_path)


def assert_round_trip(made: JobGraph, folder: Path, scratch: Path) -> None:
    found = load(folder)
    assert found.notes == ()
    serde.save(found.graph, scratch / "job.pb")
    write_chakra(serde.load(scratch / "job.pb"), scratch / "again")
    files = sorted(folder.glob("*.et"))
    assert len(files) == made.world_size
    for file in (*files, folder / "comm_groups.json"):
        assert (scratch / "again" / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.slow
def test_many_ranks_come_out_as_they_went_in(tmp_path: Path) -> None:
    made = job("llama", gpus=64, tp=4, pp=2, global_batch=64)
    write_chakra(made, tmp_path / "traces", device=DEVICE)
    assert check(read_traces(tmp_path / "traces")).findings == ()
    assert_round_trip(made, tmp_path / "traces", tmp_path)


def test_our_traces_have_no_flaw(exported: tuple[JobGraph, Path]) -> None:
    assert check(read_traces(exported[1])).findings == ()


def test_an_imported_job_takes_as_long(exported: tuple[JobGraph, Path]) -> None:
    """Without the time of the host, which traces leave out: only whole microseconds differ.

    Where the host waits for the device (a mixture's counts of tokens), kernels start later than in the trace.
    """
    made, folder = exported
    cluster = replace(load_cluster("dgx-h100"), device=DEVICE)
    before = simulate(made, cluster, FREE, memory=False).step_ps
    after = simulate(load(folder).graph, cluster, FREE, memory=False).step_ps
    waits = any(isinstance(op, Host) for op in made.ops)
    assert after == pytest.approx(before, rel=1e-2 if waits else 1e-3)


# -- traces of others ----------------------------------------------------------------------------------------


def imported(folder: Path, ranks: Any, groups: Any) -> tuple[Any, str]:
    found = load(write_set(folder / "set", ranks, groups))
    return found.graph, "\n".join(found.notes)


def test_what_nodes_become(tmp_path: Path) -> None:
    graph, notes = imported(tmp_path, *good_set())
    assert notes == ""
    assert [program.ranks for program in graph.programs] == [(0, 1), (2, 3)], "those that are equal run one"
    first = list(graph.ops)[:6]
    kinds = (Compute, Collective, Send, Compute, Collective, Collective)
    assert [type(op) for op in first] == list(kinds)
    assert [op.name for op in first] == ["mm", "sum", "message", "mm", "gather", "scatter"]
    mm, total, message, after, gather, scatter = first
    assert (mm.flops, mm.bytes_read, mm.durations[0].picoseconds) == (1 << 20, 4096, 20_000_000)
    assert mm.durations[0].source == Source.IMPORTED
    assert (total.collective, total.bytes_per_rank, graph.groups[total.group].ranks) == (1, 1 << 20, (0, 1))
    assert total.durations == ()
    assert (message.peer, message.tag, message.nbytes, message.deps) == (2, 3, 4096, (total.id,))
    assert (after.stream, after.deps) == (mm.stream, (message.id,)), "a chain is a stream"
    assert (gather.bytes_per_rank, scatter.bytes_per_rank) == (4 * 4096, 1 << 16), "a gather counts its result"
    assert isinstance(graph.ops[8], Recv)
    assert graph.ops[8].peer == -2


def test_traces_of_pytorch(tmp_path: Path) -> None:
    """No version, no groups file, nodes of the host, attributes that mean nothing here, dependencies on calls."""
    ranks = {
        rank: [
            node(10, "[metadata]", NodeType.METADATA, is_cpu_op=True, rf_id=1),
            node(11, "aten::mm", duration_us=5, is_cpu_op=True, ctrl_deps=(3,), data_deps=(10,), tid=1),
            node(12, "gemm", duration_us=50, ctrl_deps=(11,), data_deps=(11,), stream=7, op_schema="x"),
            collective(
                13,
                "nccl",
                CommType.ALL_REDUCE,
                4096,
                "5",
                duration_us=9,
                ctrl_deps=(11,),
                data_deps=(12,),
                stream=20,
            ),
            node(14, "offload", NodeType.MEM_STORE, tensor_size=64, data_deps=(12,)),
        ]
        for rank in range(2)
    }
    graph, notes = imported(tmp_path, ranks, None)
    host, gemm, nccl, offload = list(graph.ops)[:4]
    assert isinstance(host, Host)
    assert isinstance(nccl, Collective)
    assert isinstance(offload, Copy)
    assert [graph.streams[op.stream] for op in (host, gemm, nccl, offload)] == [
        "host",
        "stream 7",
        "stream 20",
        "copy",
    ]
    assert (host.deps, gemm.deps, nccl.deps) == ((), (host.id,), (host.id, gemm.id))
    assert graph.groups[nccl.group].ranks == (0, 1)
    assert nccl.durations[0].picoseconds == 9_000_000
    for words in ("group 5 has no list", "2 METADATA nodes", "2 control dependencies on nodes", "op_schema (2)"):
        assert words in notes, notes


def test_groups_that_mean_everyone(tmp_path: Path) -> None:
    ranks, groups = good_set()
    for rank, group in enumerate((None, "", "0", None)):
        for place in (4, 5):
            one = ranks[rank][place]
            ranks[rank][place] = (
                changed(one, pg_name=group) if group is not None else changed(one, without=["pg_name"])
            )
    graph, _ = imported(tmp_path, ranks, groups)
    assert {graph.groups[op.group].ranks for op in graph.ops if op.name == "gather"} == {(0, 1, 2, 3)}


def test_calls_that_contradict_the_data(tmp_path: Path) -> None:
    ranks, groups = good_set()
    ranks[0][0] = replace(ranks[0][0], ctrl_deps=(2,))
    graph, notes = imported(tmp_path, ranks, groups)
    assert "3 control dependencies that contradict" in notes
    assert len(graph.ops) == 18, "ranks 2 and 3 are equal"


def test_sends_that_go_first(tmp_path: Path) -> None:
    """Each rank sends before it receives, and yet the job runs: what follows a send does not wait for its end."""
    ranks = {
        rank: [
            node(1, "s", NodeType.SEND, comm_src=rank, comm_dst=1 - rank, comm_tag=1, comm_size=64),
            node(
                2, "r", NodeType.RECV, comm_src=1 - rank, comm_dst=rank, comm_tag=1, comm_size=64, data_deps=(1,)
            ),
            node(3, "mm", duration_us=5, data_deps=(2,)),
        ]
        for rank in range(2)
    }
    graph, notes = imported(tmp_path, ranks, None)
    assert "2 sends whose receives begin later" in notes
    assert simulate(graph, load_cluster("dgx-h100"), FREE, memory=False).step_ps > 5_000_000


def test_durations_of_zero(tmp_path: Path) -> None:
    """0 among others is a nanosecond, as readers of the format take it; 0 everywhere says nothing."""
    ranks, groups = good_set()
    ranks[1][0] = replace(ranks[1][0], duration_us=0)
    graph, notes = imported(tmp_path / "one", ranks, groups)
    assert [op.durations[0].picoseconds for op in graph.ops if op.name == "mm"][2] == 1000
    for nodes in ranks.values():
        nodes[:] = [replace(one, duration_us=0) for one in nodes]
    graph, notes = imported(tmp_path / "all", ranks, groups)
    assert not len(graph.ops.duration.values)
    assert "no computation has a duration" in notes


def test_an_idle_rank(tmp_path: Path) -> None:
    ranks = {0: [node(1, "mm", duration_us=3)], 1: []}
    graph, _ = imported(tmp_path, ranks, None)
    assert [int((p.calls[:, 2] - p.calls[:, 1]).sum()) for p in graph.programs] == [1, 0]
    assert simulate(graph, load_cluster("dgx-h100"), FREE, memory=False).step_ps == 3_000_000


# -- the command ---------------------------------------------------------------------------------------------


@pytest.fixture
def echo(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """`echo("echosim", "run", path)`: status, stdout and stderr of a command."""

    def command(name: str, *arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            run(import_module(f"echograph.cli.{name}").app, name)
        return int(stop.value.code or 0), *capsys.readouterr()

    return command


def test_import_then_simulate(echo: Any, tmp_path: Path) -> None:
    folder, out = write_set(tmp_path / "set", *good_set()), tmp_path / "job.pb"
    status, said, _ = echo("echoc", "import", "chakra", folder, "-o", out, "--json")
    assert status == 0
    assert {"ranks": 4, "operations": 24, "notes": []}.items() <= json.loads(said).items()
    status, said, _ = echo("echosim", "run", out, "--json", "--without", "host")
    assert status == 0
    assert json.loads(said)["step_time_s"] > 27e-6, "what a rank computes, one after the other"


def test_the_answer_of_a_check(echo: Any, tmp_path: Path) -> None:
    folder = write_set(tmp_path / "set", *good_set())
    assert echo("echoc", "check", folder, "--as", "chakra")[:2] == (
        0, f"{folder}: valid (4 ranks, 24 nodes, {len(CHECKS)} checks)\n",
    )  # fmt: skip
    ranks, _ = good_set()
    ranks[2][4] = changed(ranks[2][4], comm_size=-1)
    write_set(folder, ranks, None)
    status, said, _ = echo("echoc", "check", folder, "--as", "chakra", "--json")
    answer = json.loads(said)
    assert (status, answer["valid"], answer["counts"]["sizes_positive"]) == (1, False, 1)
    (finding,) = [found for found in answer["findings"] if found["check"] == "sizes_positive"]
    assert (finding["file"], finding["node"], finding["severity"]) == (f"{NAME}.2.et", 5, "error")
    assert echo("echoc", "check", folder, "--as", "chakras")[0] == 2


def test_a_job_that_hangs_says_who_waits(echo: Any, tmp_path: Path) -> None:
    ranks, groups = good_set()
    groups["4"] = [0, 1]
    for rank, order in ((0, "14"), (1, "41")):
        late = [collective(7 + at, f"late {order[at]}", CommType.ALL_REDUCE, 64, order[at]) for at in range(2)]
        ranks[rank] += [late[0], replace(late[1], data_deps=(7,))]
    folder, out = write_set(tmp_path / "set", ranks, groups), tmp_path / "job.pb"
    status, _, said = echo("echoc", "import", "chakra", folder, "-o", out)
    assert status == 0
    assert "note: the ranks wait for each other" in said
    assert "rank 0 at node 7 (late 1) waits for rank 1, rank 1 at node 7 (late 4) waits for rank 0" in said
    status, _, said = echo("echosim", "run", out)
    assert status == 1
    assert said.startswith("echosim: deadlock: rank 0 at operation 6 (late 1), ")
    assert "rank 1 at operation 14 (late 4)" in said
    status, said, _ = echo("echoc", "check", folder, "--as", "chakra")
    assert status == 1
    assert "rank 0 at node 7 (late 1) waits for rank 1, rank 1 at node 7 (late 4) waits for rank 0" in said


def test_nothing_is_written_of_what_cannot_be_read(echo: Any, tmp_path: Path) -> None:
    ranks, groups = good_set()
    folder, out = write_set(tmp_path / "set", ranks, groups), tmp_path / "job.pb"
    (folder / f"{NAME}.3.et").write_bytes(b"\xff" * 11)
    status, said, errors = echo("echoc", "import", "chakra", folder, "-o", out)
    assert (status, said) == (1, "")
    assert errors.startswith("echoc: ")
    assert errors.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["set"]

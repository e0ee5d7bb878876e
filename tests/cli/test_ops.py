"""`echoprof ops`, `step` and `graph`, `echoc annotate --profile`, and a simulation on the measured machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from echograph.ir import serde
from echograph.ir.profile import load_profile, save_profile
from echograph.ir.types import Source

pytestmark = pytest.mark.torch
pytest.importorskip("torch", reason="needs the [torch] extra")

MODEL = """
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(20, 8)
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8)) for _ in range(3)
        )

    def forward(self, tokens):
        x = self.words(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def build():
    return Net(), (torch.arange(12).reshape(2, 6),)
"""
QUICK = ("--device", "cpu", "--repeats", 5, "--budget", 60)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "net.py"
    path.write_text(MODEL)
    return f"{path}:build"


@pytest.fixture(scope="module")
def measured(session_cli, model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("measured")
    paths = {"profile": folder / "profile.pb", "graph": folder / "graph.pb", "echo": folder / "echo"}
    outcome = session_cli(
        "echoprof", "ops", "-m", model, *QUICK, "-o", paths["profile"], "--graph", paths["graph"],
        "--echo-json", paths["echo"], "--json",
    )  # fmt: skip
    return {**paths, "record": outcome.json()}


def test_every_operation_has_a_duration_or_is_free(measured: dict[str, Any]) -> None:
    record = measured["record"]
    assert record["operations"]["missing"] == record["unmatched"] == record["left"] == 0
    assert record["not_measured"] == []
    assert record["operations"]["measured"] > 0 and record["operations"]["free"] > 0
    assert record["sum_s"] > 0 and record["host_op_s"] > 0
    profile = load_profile(measured["profile"])
    assert len(profile.measurements) == record["measurements"]
    assert profile.environment.threads > 0 and profile.environment.torch
    assert all(m.samples == 5 and m.runs > 0 and m.arguments for m in profile.measurements)


def test_equal_layers_are_measured_once(measured: dict[str, Any]) -> None:
    products = [m for m in load_profile(measured["profile"]).measurements if m.operator == "aten.addmm"]
    assert sorted(m.runs for m in products) == [3, 3]


def test_it_goes_on_where_it_stopped(cli, model: str, measured: dict[str, Any], tmp_path: Path) -> None:
    whole, path = load_profile(measured["profile"]), tmp_path / "part.pb"
    save_profile(type(whole)(environment=whole.environment, measurements=whole.measurements[:-4]), path)
    assert cli("echoprof", "ops", "-m", model, *QUICK, "-o", path, "--resume").status == 0
    done = load_profile(path)
    kept = len(whole.measurements) - 4
    assert done.measurements[:kept] == whole.measurements[:kept]
    names = [[(m.arguments, m.signature) for m in found.measurements] for found in (done, whole)]
    assert names[0] == names[1]


def test_what_there_was_no_time_for_is_left_and_said(cli, model: str, tmp_path: Path) -> None:
    outcome = cli("echoprof", "ops", "-m", model, "--device", "cpu", "--budget", 0, "-o", tmp_path / "p.pb")
    assert outcome.status == 0 and "--resume goes on" in outcome.err
    assert load_profile(tmp_path / "p.pb").measurements == ()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--device", "tpu"), "--device tpu: give one of cuda, cpu"),
        (("--device", "cpu", "--clock", "sun"), "--clock sun: give one of wall, cpu"),
        (("--device", "cpu", "--resume"), "--resume: there is no"),
        (("--device", "cpu", "--dtype", "int4"), "dtype 'int4': choose one of"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(cli, model: str, tmp_path: Path, options: Any, words: str) -> None:
    outcome = cli("echoprof", "ops", "-m", model, "-o", tmp_path / "p.pb", *options)
    assert outcome.status == 2 and words in outcome.err and outcome.err.count("\n") == 1


def test_a_profile_annotates_the_folded_graph(cli, measured: dict[str, Any], tmp_path: Path) -> None:
    output = tmp_path / "annotated.pb"
    record = cli(
        "echoc", "annotate", measured["graph"], "--profile", measured["profile"], "-o", output, "--json"
    ).json()["profile"]
    assert record["operations"]["missing"] == 0 and record["unmatched"] == []
    assert record["measured_share"] == 1.0
    graph = serde.load(output)
    sources = {d.source for op in graph.ops for d in op.durations}
    assert sources == {Source.MEASURED}
    outcome = cli("echoc", "annotate", measured["graph"], "--profile", measured["profile"], "-o", output)
    assert "100.0% of the device operations that run are measured" in outcome.out


def test_another_graph_says_what_is_missing_and_what_fits_nothing(
    cli, measured: dict[str, Any], graph: Path, tmp_path: Path
) -> None:
    outcome = cli("echoc", "annotate", graph, "--profile", measured["profile"], "-o", tmp_path / "a.pb")
    assert outcome.status == 0
    assert "missing: " in outcome.err and "measurements fit no operation: " in outcome.err


def test_measured_durations_come_before_those_of_a_cluster(cli, measured: dict[str, Any], tmp_path: Path) -> None:
    output = tmp_path / "both.pb"
    outcome = cli(
        "echoc", "annotate", measured["graph"], "--profile", measured["profile"], "--cluster", "dgx-h100",
        "-o", output,
    )  # fmt: skip
    assert outcome.status == 0
    graph = serde.load(output)
    works = [op for op in graph.ops if not getattr(op, "is_view", True)]
    of_device = [[d for d in op.durations if d.device == "h100-sxm"] for op in works]
    assert all([d.source for d in found] == [Source.MEASURED] for found in of_device)


def test_an_annotated_graph_runs_without_its_profile(cli, measured: dict[str, Any], tmp_path: Path) -> None:
    output, where = tmp_path / "alone.pb", ("--cluster", "dgx-h100")
    profile = ("--profile", measured["profile"])
    record = cli("echoc", "annotate", measured["graph"], *profile, *where, "-o", output, "--json").json()
    assert record["profile"]["host"] == "h100-sxm/host"
    assert record["durations"]["host"]["measured"] == record["operations"]
    # A processor computes itself, so that nothing is issued meanwhile.
    alone = cli("echosim", "run", output, *where, "--gpus", 1, "--launch-blocking", "--json").json()
    beside = cli("echosim", "run", measured["graph"], "--cluster", measured["profile"], "--json").json()
    assert alone["step_time_s"] == beside["step_time_s"]
    modelled = cli("echosim", "run", measured["graph"], *where, "--gpus", 1, "--launch-blocking", "--json").json()
    assert modelled["step_time_s"] != alone["step_time_s"]


def test_a_profile_is_a_cluster_of_one_device_everywhere(cli, measured: dict[str, Any], tmp_path: Path) -> None:
    job = tmp_path / "job.pb"
    assert cli("echoc", "lower", measured["graph"], "--cluster", measured["profile"], "-o", job).status == 0
    assert serde.load(job).world_size == 1
    run = ("echosim", "run", measured["graph"], "--cluster", measured["profile"])
    assert cli(*run, "--strict-memory").status == 0
    # With less memory than the step needs, plans that might fit are looked for, and there are none.
    small = tmp_path / "small.pb"
    profile = load_profile(measured["profile"])
    save_profile(replace(profile, environment=replace(profile.environment, memory_bytes=1000)), small)
    outcome = cli("echosim", "run", measured["graph"], "--cluster", small, "--strict-memory")
    assert outcome.status == 1 and "the plan needs" in outcome.err


def test_the_machine_that_was_measured_runs_the_step(cli, measured: dict[str, Any]) -> None:
    record = cli("echosim", "run", measured["graph"], "--cluster", measured["profile"], "--json").json()
    profile = load_profile(measured["profile"])
    shares = record["durations"]
    assert record["gpus"] == 1 and shares["measured"] > 0.3
    assert shares["fitted"] == shares["analytical"] == shares["imported"] == 0
    # On a processor the host does all work: what it issues and what it computes add up.
    issue, view = profile.environment.host_op_picoseconds, profile.environment.host_view_picoseconds
    total, launches = 0, set()
    graph = serde.load(measured["graph"])
    for block, begin, end, _, _ in graph.programs[0].calls.tolist():
        for row in range(begin, end):
            op = graph.ops[row]
            if op.is_view:
                total += view
                continue
            (found,) = [m for m in profile.measurements if _fits(graph, op, m)][:1]
            total += found.median_picoseconds
            follows = getattr(op.attributes, "leads", True) is False
            total += 0 if follows else issue
            launches.add((block, row))
    assert record["step_time_s"] * 1e12 == pytest.approx(total, rel=0.02)


def _fits(graph: Any, op: Any, measurement: Any) -> bool:
    types = [[(graph.tensors[i].dtype, graph.tensors[i].shape) for i in side] for side in (op.inputs, op.outputs)]
    sides = (measurement.inputs, measurement.outputs)
    return measurement.operator == op.name and [[(t.dtype, t.shape) for t in s] for s in sides] == types


def test_one_measured_machine_is_one_device(cli, measured: dict[str, Any]) -> None:
    where = ("echosim", "run", measured["graph"], "--cluster", measured["profile"])
    assert cli(*where, "--gpus", 8).status != 0
    outcome = cli(*where, "--straggler", "0=1.5")
    assert outcome.status == 2 and "is one measured device" in outcome.err


def test_a_graph_with_other_operations_is_refused(cli, measured: dict[str, Any], graph: Path) -> None:
    outcome = cli("echosim", "run", graph, "--cluster", measured["profile"])
    assert outcome.status == 1 and "have no duration on device" in outcome.err


def test_steps_are_timed_beside_the_sum_and_the_simulation(cli, model: str, measured: dict[str, Any]) -> None:
    steps = ("echoprof", "step", "-m", model, "--device", "cpu", "--steps", 3, "--warm-up", 1)
    record = cli(*steps, "--profile", measured["profile"], "--json").json()
    assert len(record["seconds"]) == record["steps"] == 3 and min(record["seconds"]) > 0
    assert record["missing"] == 0 and record["sum_s"] < record["simulated_s"]
    assert record["sum_error"] == pytest.approx(record["sum_s"] / record["step_s"] - 1)
    assert cli(*steps).out.startswith("measured ")
    assert "--allocator mine: give keep or system" in cli(*steps, "--allocator", "mine").err


def test_echos_files_name_times_and_nodes_alike(measured: dict[str, Any]) -> None:
    folder = measured["echo"]
    for phase in ("forward", "backward", "global"):
        (runtime,) = folder.glob(f"PyTorch/pytorch_ops_profiling/*/{phase}_ops_profiling_bs2_seq6.json")
        (nodes,) = folder.glob(f"PyTorch/pytorch_graph_profiling/*/{phase}_graph_profiling_bs2_seq6.json")
        times, listed = json.loads(runtime.read_text()), json.loads(nodes.read_text())
        assert set(times) == {node["name"] for node in listed}, "no phantom, and none without a time"
        assert all(times[n["name"]] == 0 for n in listed if n["op"] in ("aten.view", "aten.t"))
        assert all(n["output_shapes"] for n in listed)
    whole = {n["name"]: n for n in listed}
    assert all(name in whole for n in listed for name in (*n["input_nodes"], *n["output_nodes"]))
    optimizer = [n for n in listed if n["op"] == "aten._fused_adamw_"]
    assert listed[0]["output_types"] == ["torch.float32"]
    assert optimizer and all(times[n["name"]] > 0 for n in optimizer)
    total = sum(m.median_picoseconds * m.runs for m in load_profile(measured["profile"]).measurements)
    assert sum(times.values()) * 1e9 == pytest.approx(total, rel=1e-3)


@pytest.mark.parametrize("ending", ["svg", "json"])
def test_a_graph_is_drawn_as_its_ending_says(cli, measured: dict[str, Any], tmp_path: Path, ending: str) -> None:
    output = tmp_path / f"graph.{ending}"
    record = cli("echoprof", "graph", measured["graph"], "-o", output, "--json").json()
    assert record["format"] == ending and output.stat().st_size == record["bytes"] > 0


def test_an_ending_that_is_no_format_names_those_that_are(cli, measured: dict[str, Any], tmp_path: Path) -> None:
    outcome = cli("echoprof", "graph", measured["graph"], "-o", tmp_path / "graph.png")
    assert outcome.status == 2 and ".svg" in outcome.err and outcome.err.count("\n") == 1

"""The commands that look at graphs, models, clusters and devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from echograph.ir import serde
from echograph.ir.builder import GraphBuilder
from echograph.ir.graph import StepGraph
from echograph.ir.types import DType, Phase, TensorRole
from echograph.ir.unfold import unfold
from echograph.models import model_names
from echograph.workflow.summary import summarize


def test_models_lists_the_zoo(cli) -> None:
    rows = cli("echoc", "models", "--json").json()
    assert [row["name"] for row in rows] == list(model_names())
    assert all(row["parameters"] > 0 for row in rows)
    table = cli("echoc", "models")
    assert table.status == 0
    assert len(table.out.splitlines()) == len(rows) + 1


def test_models_describes_one_by_any_of_its_names(cli) -> None:
    (row,) = cli("echoc", "models", "openai-community/gpt2", "--json").json()
    assert row["name"] == "gpt2"
    assert row["parameters"] == 124_439_808
    assert set(row["flops_per_sample"]) == {"forward", "backward"}


def test_show_counts_what_the_unfolded_graph_holds(cli, graph: Path) -> None:
    shown = cli("echoc", "show", graph, "--json").json()
    whole = unfold(serde.load(graph))
    assert shown["level"] == "step"
    assert shown["ops"] < shown["unfolded_ops"] == len(whole.ops)
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        assert shown["flops"][phase.name.lower()] == int(whole.ops.flops[whole.ops.phase == phase].sum())
    flat = summarize(whole)
    for key in ("flops", "device_bytes", "tensor_bytes", "views", "operators"):
        assert shown[key] == flat[key], key
    assert shown["durations"] == {}, "a graph just compiled has none"


def test_show_for_people_names_blocks_and_operators(cli, graph: Path) -> None:
    text = cli("echoc", "show", graph).out
    for expected in ("tiny (step graph)", "3 x model.layers", "aten.mm", "optimizer_state"):
        assert expected in text


def test_show_says_how_much_of_a_job_has_durations(cli, job_graph: Path) -> None:
    shown = cli("echoc", "show", job_graph, "--json").json()
    assert shown["level"] == "job"
    assert shown["ranks"] == 16
    (count,) = shown["durations"].values()
    assert sum(v for k, v in count.items() if k != "of") == count["of"] > 0


def test_check_accepts_what_compile_writes(cli, graph: Path) -> None:
    assert "valid" in cli("echoc", "check", graph).out
    assert cli("echoc", "check", graph, "--json").json()["valid"] is True


def test_text_prints_the_graph_folded_and_whole(cli, graph: Path) -> None:
    folded, whole = cli("echoc", "text", graph), cli("echoc", "text", graph, "--unfold")
    assert folded.status == whole.status == 0
    assert "model.layers.{}" in folded.out
    assert "model.layers.2.mlp" in whole.out
    assert "{}" not in whole.out
    assert len(whole.out) > len(folded.out)


@pytest.mark.parametrize(("command", "name"), [("clusters", "dgx-h100"), ("devices", "h100-sxm")])
def test_clusters_and_devices_are_listed_and_described(cli, command: str, name: str) -> None:
    rows = cli("echosim", command, "--json").json()
    assert name in [row["name"] for row in rows]
    assert len(cli("echosim", command).out.splitlines()) == len(rows) + 1
    (row,) = cli("echosim", command, name, "--json").json()
    assert row == next(r for r in rows if r["name"] == name)
    assert name in cli("echosim", command, name).out


@pytest.mark.parametrize("name", ["echoc", "echosim", "echoprof"])
def test_every_command_has_help_and_a_version(cli, name: str) -> None:
    from importlib.metadata import version

    assert cli(name, "--version").out.strip() == version("echograph")
    overview = cli(name, "--help")
    assert overview.status == 0
    bare = cli(name)
    assert bare.status == 2
    assert "Commands:" in bare.err
    commands = overview.out.partition("Commands:")[2].split("\n")
    names = [line.split()[0] for line in commands if line.startswith("  ") and line[2] != " "]
    assert names
    for command in names:
        assert cli(name, command, "--help").status == 0


def test_what_is_read_and_written_is_added_up_beyond_64_bits() -> None:
    builder = GraphBuilder()
    tensors = [builder.tensor(f"w{n}", (2**57,), DType.FP32, TensorRole.PARAMETER) for n in range(20)]
    builder.compute("aten.add", inputs=tensors, bytes_read=2**62, bytes_written=2**62)
    shown = summarize(builder.build(StepGraph))
    assert shown["device_bytes"] == {"other": 2**63}
    assert [row["bytes"] for row in shown["operators"]] == [2**63]
    assert shown["tensor_bytes"]["parameter"] == 20 * 2**59

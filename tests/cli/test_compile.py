"""`echoc compile`, from each kind of model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echograph.ir import serde
from echograph.ir.types import DType

pytestmark = pytest.mark.torch
pytest.importorskip("transformers", reason="needs the [torch] extra")

USER_MODEL = """
import torch


def build():
    module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    return module, (torch.zeros(32, 8),), lambda output: output.square().mean()
"""


def test_a_configuration_file_and_its_folder_make_the_same_graph(cli, graph, tiny_config, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(tiny_config.read_text())
    outcome = cli("echoc", "compile", "-m", folder, "--batch-size", 2, "-o", tmp_path / "graph.pb")
    assert outcome.status == 0
    assert "3 x model.layers" in outcome.out
    assert outcome.err.startswith("wrote ")
    assert (tmp_path / "graph.pb").read_bytes() == graph.read_bytes()


def test_a_zoo_model_by_any_of_its_names(cli, tmp_path: Path) -> None:
    name, alias = "distilbert-base-uncased", "DistilBERT/distilbert-base-uncased"
    record = cli(
        "echoc", "compile", "-m", alias, "--batch-size", 1, "--seq-len", 32, "--json", "-o", tmp_path / "g"
    )
    summary = record.json()
    assert summary["model"] == name
    assert summary["parameters"] == 66_985_530
    assert summary["bytes"] == (tmp_path / "g").stat().st_size
    assert [b["instances"] for b in summary["blocks"]] == [1, 6]


def test_a_function_of_a_file(cli, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(USER_MODEL)
    outcome = cli("echoc", "compile", "-m", f"{tmp_path / 'mine.py'}:build", "--json", "-o", tmp_path / "graph.pb")
    summary = outcome.json()
    assert summary["parameters"] == 8 * 16 + 16 + 16 * 4 + 4
    assert summary["flops"]["forward"] == 2 * 32 * (8 * 16 + 16 * 4)
    assert summary["flops"]["backward"] == 2 * 32 * (8 * 16 + 2 * 16 * 4), "the input needs no gradient"


def test_the_options_reach_the_step(cli, tiny_config: Path, tmp_path: Path) -> None:
    graphs = {}
    for name, *options in (
        ("plain", "--no-master-weights", "--optimizer", "sgd", "--dtype", "fp32"),
        ("clipped", "--clip-grad-norm", "1.0", "--recompute", "--attention", "eager", "--seq-len", "16"),
    ):
        path = tmp_path / f"{name}.pb"
        assert cli("echoc", "compile", "-m", tiny_config, "-o", path, *options).status == 0
        graphs[name] = serde.load(path)
    plain, clipped = graphs["plain"].workload, graphs["clipped"].workload
    assert (plain.dtype, plain.optimizer, plain.master_weights) == (DType.FP32, "sgd", False)
    assert (clipped.dtype, clipped.optimizer, clipped.master_weights) == (DType.BF16, "adamw", True)
    assert (plain.sequence_length, clipped.sequence_length) == (64, 16)
    names = {name: set(graph.strings) for name, graph in graphs.items()}
    assert not any("attention" in n and n.startswith("aten.") for n in names["clipped"]), (
        "eager attention is products"
    )
    assert any("norm" in n for n in names["clipped"] - names["plain"])


@pytest.mark.slow
def test_both_captures_count_the_same_work(cli, tiny_config: Path, tmp_path: Path) -> None:
    records = [
        cli("echoc", "compile", "-m", tiny_config, "--capture", way, "--json", "-o", tmp_path / way).json()
        for way in ("recorder", "aot")
    ]
    assert records[0]["flops"] == records[1]["flops"]
    assert records[0]["parameters"] == records[1]["parameters"]


def test_it_writes_to_a_device_that_is_no_file(cli, tiny_config: Path) -> None:
    assert cli("echoc", "compile", "-m", tiny_config, "-o", "/dev/null").status == 0


def test_compiling_again_gives_the_same_bytes(cli, graph: Path, tiny_config: Path, tmp_path: Path) -> None:
    assert cli("echoc", "compile", "-m", tiny_config, "--batch-size", 2, "-o", tmp_path / "again.pb").status == 0
    assert (tmp_path / "again.pb").read_bytes() == graph.read_bytes()


def test_a_file_that_stands_there_is_replaced_only_by_a_whole_one(cli, tiny_config: Path, tmp_path: Path) -> None:
    path = tmp_path / "graph.pb"
    path.write_text("precious")
    (tmp_path / "bad.json").write_text(json.dumps({"model_type": "llama", "hidden_size": "wide"}))
    assert cli("echoc", "compile", "-m", tmp_path / "bad.json", "-o", path).status == 1
    assert path.read_text() == "precious"
    assert cli("echoc", "compile", "-m", tiny_config, "-o", path).status == 0
    assert path.read_bytes() != b"precious"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.json", "graph.pb"]

"""`echoc compile --onnx` and `echoc import onnx`: a graph that runs, or one line and no file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnx")
pytest.importorskip("torch")
sys.path.append(str(Path(__file__).parents[1] / "frontend" / "onnx"))

import onnx_models as m

DIMS = ("--dim", "batch=2", "--dim", "sequence=4")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return m.save(m.layers(3), tmp_path)


@pytest.mark.parametrize("train", [False, True])
def test_compile_then_run(train: bool, model: Path, tmp_path: Path, cli: Any) -> None:
    graph = tmp_path / "graph.pb"
    options = ("--train", "--dtype", "bf16") if train else ()
    made = cli("echoc", "compile", "--onnx", model, *DIMS, *options, "-o", graph, "--json")
    assert made.status == 0, made.err
    summary = made.json()
    assert (summary["model"], summary["batch_size"], summary["sequence_length"]) == ("model", 2, 4)
    assert (summary["dtype"], summary["optimizer"]) == (("bf16", "adamw") if train else ("fp32", ""))
    assert summary.get("loss") == ("cross-entropy of 'logits'" if train else None)
    assert set(summary["flops"]) == ({"forward", "backward", "optimizer"} if train else {"forward"})
    for plan in (("--gpus", 1), ("--gpus", 8)):
        run = cli("echosim", "run", graph, *plan, "--json")
        assert run.status == 0, run.err
        assert run.json()["step_time_s"] > 0


def test_the_loss_is_said(model: Path, tmp_path: Path, cli: Any) -> None:
    made = cli("echoc", "compile", "--onnx", model, *DIMS, "--train", "-o", tmp_path / "g.pb")
    assert "note: trained on the cross-entropy of 'logits'" in made.err


def test_import(tmp_path: Path, cli: Any) -> None:
    made = cli("echoc", "import", "onnx", m.save(m.picture(), tmp_path), "-o", tmp_path / "g.pb")
    assert made.status == 2
    assert "symbolic dimensions without a size: n" in made.err
    proto = m.picture()
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2
    made = cli("echoc", "import", "onnx", m.save(proto, tmp_path), "-o", tmp_path / "g.pb", "--json")
    assert made.status == 0, made.err
    assert made.json()["level"] == "step"
    assert "the forward pass alone" in made.err


def test_export_and_back(model: Path, tmp_path: Path, cli: Any) -> None:
    graph, out = tmp_path / "graph.pb", tmp_path / "out.onnx"
    assert cli("echoc", "compile", "--onnx", model, *DIMS, "-o", graph).status == 0
    made = cli("echoc", "export", graph, "--to", "onnx", "-o", out)
    assert made.status == 0, made.err
    assert cli("echoc", "import", "onnx", out, "-o", tmp_path / "again.pb").status == 0
    flops = [cli("echoc", "show", p, "--json").json()["flops"] for p in (graph, tmp_path / "again.pb")]
    assert flops[0] == flops[1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "symbolic dimensions without a size: batch, sequence: give each, as echoc compile"),
        ((*DIMS, "--dim", "depth=3"), "no such dimension: batch, sequence"),
        (("--dim", "batch"), "give a name and a size, as --dim batch=8"),
        (("--dim", "batch=-1"), "give a name and a size"),
        ((*DIMS, "--batch-size", "2"), "not for an ONNX file"),
        ((*DIMS, "--model", "gpt2"), "one of them"),
        ((*DIMS, "--loss", "sum"), "add --train"),
        ((*DIMS, "--train", "--loss", "sam"), "did you mean 'sum'"),
        ((*DIMS, "--dtype", "fp64"), "dtype 'fp64'"),
    ],
)
def test_wrong_options(arguments: tuple[str, ...], says: str, model: Path, tmp_path: Path, cli: Any) -> None:
    made = cli("echoc", "compile", "--onnx", model, *arguments, "-o", tmp_path / "g.pb")
    assert made.status == 2
    assert says in made.err
    assert made.err.count("\n") == 1
    assert not (tmp_path / "g.pb").exists()


@pytest.mark.parametrize("data", [b"", b"not onnx", bytes(range(256)) * 10])
def test_no_model(data: bytes, tmp_path: Path, cli: Any) -> None:
    (tmp_path / "x.onnx").write_bytes(data)
    made = cli("echoc", "compile", "--onnx", tmp_path / "x.onnx", "-o", tmp_path / "g.pb")
    assert made.status == 1
    assert "x.onnx" in made.err and made.err.count("\n") == 1
    assert not (tmp_path / "g.pb").exists()


def test_options_of_onnx_need_a_file(tmp_path: Path, cli: Any) -> None:
    made = cli("echoc", "compile", "--model", "gpt2", "--train", "-o", tmp_path / "g.pb")
    assert made.status == 2 and "give it by --onnx" in made.err
    made = cli("echoc", "compile", "-o", tmp_path / "g.pb")
    assert made.status == 2 and "--model NAME or --onnx FILE" in made.err

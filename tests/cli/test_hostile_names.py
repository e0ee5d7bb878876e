"""Names that come from input: none controls the terminal, breaks a line, or becomes a formula."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from echograph.cli.output import MOST_OF_ERROR, shortened
from echograph.ir.builder import GraphBuilder
from echograph.ir.graph import StepGraph, Workload
from echograph.ir.serde import save
from echograph.ir.tables import csv_text, printable
from echograph.ir.types import DType, Phase, TensorRole

RAW = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
HOSTILE = "evil\x1b[2J\x1b]0;owned\x07\x9b31m\u202egnp\r\n\x7f\u2066."
FORMULA = "=HYPERLINK(0)"


def clean(outcome: Any) -> Any:
    """An outcome that shows no character as it came which controls a terminal."""
    for text in (outcome.out, outcome.err):
        assert not RAW.search(text), ascii(RAW.findall(text))
        assert "internal error" not in text
    return outcome


@pytest.fixture
def traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A trace of one rank, with a kernel for each of two names."""
    monkeypatch.setenv("ECHOGRAPH_CACHE", str(tmp_path / "cache"))
    events: list[dict[str, Any]] = []
    for number, name in enumerate((HOSTILE, FORMULA)):
        args, at = {"correlation": number + 1}, 10 * number
        launch = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 9, "tid": 9, "ts": at, "dur": 4}
        kernel = {"cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": 20 + 2 * at, "dur": 10}
        events += [{"ph": "X", **launch, "args": args}, {"ph": "X", **kernel, "args": {**args, "stream": 7}}]
    folder = tmp_path / "traces"
    folder.mkdir()
    (folder / "0.json").write_text(json.dumps({"distributedInfo": {"rank": 0}, "traceEvents": events}))
    return folder


def test_kernels_of_a_trace(cli, traces: Path, tmp_path: Path) -> None:
    shown = clean(cli("echoprof", "analyze", traces, "kernels"))
    assert shown.status == 0
    assert "evil\\u001b[2J" in shown.out
    assert len(shown.out.splitlines()) == 3
    names = {row["name"] for row in clean(cli("echoprof", "analyze", traces, "kernels", "--json")).json()["rows"]}
    assert {HOSTILE, FORMULA} <= names
    table = tmp_path / "kernels.csv"
    assert clean(cli("echoprof", "analyze", traces, "kernels", "--csv", "-o", table)).status == 0
    written = {row["name"] for row in csv.DictReader(io.StringIO(table.read_text(), newline=""))}
    assert f"'{FORMULA}" in written
    clean(cli("echoprof", "analyze", traces, "kernels", "--csv"))


@pytest.fixture
def graph_of_names(tmp_path: Path) -> Path:
    """A step whose model, module and operator have such a name."""
    builder = GraphBuilder(name=HOSTILE, workload=Workload(model=HOSTILE, batch_size=1))
    read = builder.tensor("x", (8, 8), DType.BF16, TensorRole.INPUT)
    made = builder.tensor("y", (8, 8), DType.BF16, TensorRole.ACTIVATION)
    builder.compute(HOSTILE, inputs=(read,), outputs=(made,), phase=Phase.FORWARD, module=HOSTILE, bytes_read=9)
    path = tmp_path / "graph.pb"
    save(builder.build(StepGraph), path)
    return path


def test_modules_of_a_graph(cli, graph_of_names: Path) -> None:
    assert clean(cli("echoc", "show", graph_of_names)).status == 0
    run = clean(cli("echosim", "run", graph_of_names, "--gpus", 8))
    assert run.status == 0
    assert "evil" in run.out
    assert clean(cli("echosim", "run", graph_of_names, "--gpus", 8, "--json")).json()["model"] == HOSTILE
    clean(cli("echoc", "text", graph_of_names))
    clean(cli("echoc", "lower", graph_of_names, "--tp", 3))


def test_keys_of_a_cluster(cli, graph_of_names: Path, tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.toml"
    key = json.dumps(HOSTILE)
    cluster.write_text(f"{key} = 3\n")
    outcome = clean(cli("echosim", "run", graph_of_names, "--cluster", cluster))
    assert outcome.status == 1
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize("command", [("echosim", "run"), ("echoc", "show"), ("echoprof", "analyze")])
@pytest.mark.parametrize("name", ["a\x1b[31mb", "line\nbreak", "\u202ebackwards", "\udcff", "x" * 5000])
def test_files_that_are_not_there(cli, tmp_path: Path, command: tuple[str, str], name: str) -> None:
    outcome = clean(cli(*command, f"{tmp_path}/{name}"))
    assert outcome.status in (1, 2)
    assert outcome.err.count("\n") == 1
    assert len(outcome.err) <= MOST_OF_ERROR + 1


def test_an_option_that_nobody_knows(cli, graph_of_names: Path) -> None:
    outcome = clean(cli("echosim", "run", graph_of_names, f"--{HOSTILE}{'long' * 500}"))
    assert outcome.status == 2
    assert len(outcome.err) <= MOST_OF_ERROR + 1
    assert outcome.err.endswith("(see echosim --help)\n")


def test_a_traceback_is_as_harmless(cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOGRAPH_DEBUG", "1")
    assert "Traceback" in clean(cli("echosim", "run", tmp_path / HOSTILE.replace("/", ""))).err


def test_what_happened_and_what_to_do_stay_readable() -> None:
    line = f"the file {'x' * 10_000} is broken: write it again"
    cut = shortened(line)
    assert len(cut) == MOST_OF_ERROR
    assert cut.startswith("the file xxx") and cut.endswith("is broken: write it again")
    assert shortened("short") == "short"


def test_letters_of_other_scripts_stay_what_they_are() -> None:
    assert printable("Größe 大 слон é – …") == "Größe 大 слон é – …"


def test_names_are_no_formulas_and_numbers_no_names() -> None:
    names = ["=1+1", "+1", "-1", "@x", "\tx", "\rx", "plain", "a=b"]
    rows = list(csv.reader(io.StringIO(csv_text(["=title", "n"], [[name, -1.5] for name in names]), newline="")))
    assert rows[0] == ["'=title", "n"]
    assert [row[0] for row in rows[1:]] == [f"'{name}" for name in names[:6]] + names[6:]
    assert {row[1] for row in rows[1:]} == {"-1.5"}

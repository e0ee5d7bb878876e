"""`echosim plan` and `echosim sweep`, as they are called."""

from __future__ import annotations

import csv
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

FEW = ("--tp", 1, "--pp", 1, "--cp", 1, "--fix", "recompute=none", "--fix", "micro-batch=2")


def test_the_best_plan_is_written_and_runs(cli: Any, graph: Path, tmp_path: Path) -> None:
    best, script = tmp_path / "plan.toml", tmp_path / "ds.json"
    asked = ("--gpus", 8, "--global-batch", 16, *FEW, "-o", best, "--write", f"deepspeed:{script}", "--json")
    record = cli("echosim", "plan", graph, *asked).json()
    assert record["proven"] and record["considered"] == record["simulated"] == len(record["best"])
    assert record["best"][0]["options"] == tomllib.loads(best.read_text())
    again = cli("echosim", "run", graph, "--plan", best, "--json").json()
    assert again["step_time_s"] == record["best"][0]["step_time_s"]
    assert script.exists()
    assert {"plan", "step_time_interval_s", "tokens_per_s", "mfu", "peak_bytes", "fits"} <= record["best"][
        0
    ].keys()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("--gpus", 8), "--global-batch"),
        (("--gpus", 8, "--global-batch", 8, "--fix", "tp=1,2"), "--fix tp: has 2 values"),
        (("--gpus", 8, "--global-batch", 8, "--fix", "tpp=1"), "unknown word"),
        (("--gpus", 8, "--global-batch", 8, "--tp", 1, "--over", "tp=1,2"), "--tp: is given twice"),
        (("--gpus", 8, "--global-batch", 8, "--max-memory", "72"), "with its unit"),
        (("--gpus", 8, "--global-batch", 8, "--write", "nemo:x"), "unknown format"),
        (("--gpus", 8, "--global-batch", 8, "--objective", "fast"), "unknown objective"),
        (("--gpus", 8, "--global-batch", 8, "--time", -1), "--time -1: give 0 seconds or more"),
        (("--gpus", 8, "--global-batch", 8, "--train-tokens", "1B", "--days", 0), "--days 0: give more than 0"),
    ],
)
def test_what_is_wrong_is_one_line(cli: Any, graph: Path, asked: tuple[Any, ...], said: str) -> None:
    outcome = cli("echosim", "plan", graph, *asked)
    assert outcome.status == 2
    assert said in outcome.err and outcome.err.count("\n") == 1


def test_a_search_writes_a_page(cli: Any, graph: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    asked = ("--gpus", 8, "--global-batch", 64, "--tp", 1, "--fix", "recompute=none", "--html", page)
    told = cli("echosim", "plan", graph, *asked, "--json").json()
    text = page.read_text()
    for title in ("The best", "How sure their order is", "Step, memory and GPUs", "Why the others lose"):
        assert f"<h2>{title}</h2>" in text
    within = json.loads(text.partition('id="plan">')[2].partition("</script>")[0])
    assert within | {"wall_s": 0} == told | {"wall_s": 0}
    for one in told["best"]:
        assert text.count(f"--micro-batch {one['options']['micro-batch']}") >= 2
    assert "http" not in text.replace("http-equiv", "")


def test_a_sweep_writes_a_table_and_a_page(cli: Any, graph: Path, tmp_path: Path) -> None:
    table, page = tmp_path / "rows.csv", tmp_path / "page.html"
    asked = ("--over", "gpus=8,16", "--over", "zero=1,3", "-o", table, "--html", page)
    assert cli("echosim", "sweep", graph, *asked).status == 0
    assert [(row["gpus"], row["zero"]) for row in csv.DictReader(table.open())] == [
        ("8", "1"), ("8", "3"), ("16", "1"), ("16", "3"),
    ]  # fmt: skip
    text = page.read_text()
    for title in ("How it scales", "Where the time goes", "Efficiency", "Two axes at once", "Every point"):
        assert title in text
    assert "http" not in text.replace("http-equiv", "")
    assert cli("echosim", "sweep", graph, *asked, "--json").json()["known"] == 4


def test_a_sweep_without_one_answer_ends_in_its_reason(cli: Any, graph: Path, tmp_path: Path) -> None:
    table = tmp_path / "rows.csv"
    outcome = cli("echosim", "sweep", graph, "--over", "cluster=dgx-h1000", "-o", table)
    assert outcome.status == 1
    assert "none of 1 points can be predicted: unknown cluster 'dgx-h1000': did you mean" in outcome.err
    assert "unknown cluster" in table.read_text()
    assert cli("echosim", "sweep", graph, "--over", "cluster=dgx-h1000,dgx-h100").status == 0


def test_a_training_is_told(cli: Any, graph: Path) -> None:
    record = cli("echosim", "run", graph, "--gpus", 8, "--train-tokens", "1B", "--gpu-hour", 2, "--json").json()
    assert record["training"]["price"] == pytest.approx(2 * record["training"]["gpu_hours"])


def test_the_gpus_for_a_training_and_what_fits_are_told(cli: Any, graph: Path) -> None:
    training = ("--train-tokens", "1B", "--days", 10_000, "--global-batch", 16)
    record = cli("echosim", "run", graph, "--gpus", 8, *training, "--json").json()
    assert record["gpus_needed"]["plan"]["gpus"] == 1
    small = ("--set", "cluster.node.memory_GiB=1.3")
    record = cli("echosim", "run", graph, "--gpus", 8, *small, "--what-fits", "--json").json()
    assert {one["of"] for one in record["largest"]} == {"micro-batch", "layers"}
    text = cli("echosim", "run", graph, "--gpus", 8, *training).out
    assert "1 GPUs at least" in text


@pytest.mark.slow
def test_the_longest_sequence_is_of_the_model_that_the_graph_was_compiled_of(
    cli: Any, graph: Path, tiny_config: Path
) -> None:
    asked = ("echosim", "run", graph, "--gpus", 8, "--set", "cluster.node.memory_GiB=1.3")
    record = cli(*asked, "--what-fits", "-m", tiny_config, "--json").json()
    (sequence,) = (one for one in record["largest"] if one["of"] == "sequence")
    # A whole number of the graph's 64 tokens, and what it holds fits by less than one more of them would take.
    assert sequence["size"] > 64 and sequence["size"] % 64 == 0 and sequence["error"] is None
    assert 0.95 * 1.3 * 2**30 < sequence["device_bytes"] <= 1.3 * 2**30
    other = cli(*asked, "--what-fits", "-m", "gpt2")
    assert other.status == 2 and "--model gpt2: at 64 tokens it is another step than the graph's" in other.err
    alone = cli(*asked, "-m", "gpt2")
    assert alone.status == 2 and "give --what-fits as well" in alone.err


def test_clusters_are_compared(cli: Any, graph: Path) -> None:
    asked = ("--gpus", 8, "--global-batch", 16, *FEW, "--fix", "zero=0", "--train-tokens", "1B")
    rows = cli("echosim", "plan", graph, *asked, "--compare-clusters", "dgx-h100,dgx-a100", "--json").json()
    assert [row["cluster"] for row in rows["clusters"]] == ["dgx-h100", "dgx-a100"]
    assert all(row["training"]["days"] > 0 for row in rows["clusters"])
    wrong = cli(
        "echosim", "plan", graph, *asked, "--compare-clusters", "dgx-h100,dgx-a100", "--cluster", "dgx-b200"
    )
    assert wrong.status == 2 and "--compare-clusters" in wrong.err


@pytest.mark.slow
def test_moves_tell_what_each_gained(cli: Any, graph: Path) -> None:
    asked = ("--gpus", 4, "--global-batch", 16, "--recompute", "full", "--moves", "greedy")
    record = cli("echosim", "plan", graph, *asked, "--json").json()
    assert record["moves"] and record["step_time_s"] < record["first_step_time_s"]
    again = cli("echosim", "run", graph, "--passes", record["passes"], "--json").json()
    assert again["step_time_s"] == record["step_time_s"]
    wrong = cli("echosim", "plan", graph, *asked, "--top", 3)
    assert wrong.status == 2 and "--moves" in wrong.err

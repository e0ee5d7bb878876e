"""`echosim compare`: what two predictions differ in."""

from __future__ import annotations

from pathlib import Path

import pytest


def test_two_predictions_side_by_side(cli, graph: Path, tmp_path: Path) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    results = [
        cli("echosim", "run", graph, "--gpus", 8, *options, "-o", path, "--json").json()
        for options, path in zip(((), ("--tp", 2)), paths, strict=True)
    ]
    record = cli("echosim", "compare", *paths, "--json").json()
    step = record["figures"]["step_time_s"]
    assert (step["before"], step["after"]) == tuple(r["step_time_s"] for r in results)
    assert step["ratio"] == pytest.approx(results[1]["step_time_s"] / results[0]["step_time_s"])
    assert record["plan"]["tp"] == [1, 2]
    assert record["figures"]["exposed tp"]["before"] == 0
    assert "plan: tp 1 -> 2" in cli("echosim", "compare", *paths).out
    same = cli("echosim", "compare", paths[0], paths[0], "--json").json()
    assert not same["plan"]
    assert all(row["difference"] == 0 for row in same["figures"].values())


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"step_time_s": 1}', "[" * 100_000, "\x00"])
def test_what_is_no_result_is_refused_in_one_line(cli, tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    outcome = cli("echosim", "compare", path, path)
    assert outcome.status == 1
    assert "is no result" in outcome.err
    assert outcome.err.count("\n") == 1


def test_a_missing_result_is_named(cli, tmp_path: Path) -> None:
    outcome = cli("echosim", "compare", tmp_path / "a.json", tmp_path / "b.json")
    assert outcome.status == 1
    assert "a.json" in outcome.err

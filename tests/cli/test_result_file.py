"""A result file that is damaged is refused in one line that names the file and the key, never half believed."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

WRONG: list[Any] = [None, "text", [], {}, -1, 1e999, float("nan"), 10**400, [[[[1]]]], True]
READ = (
    "model", "cluster", "device", "gpus", "step_time_s", "step_time_interval_s", "tokens_per_s", "samples_per_s",
    "mfu", "plan", "breakdown_s", "limits_s", "memory", "collectives",
)  # fmt: skip


@pytest.fixture(scope="module")
def result(session_cli, graph: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("results") / "before.json"
    assert session_cli("echosim", "run", graph, "--gpus", 8, "--tp", 2, "-o", path).status == 0
    return path


def places(record: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys that lead to every value."""
    if isinstance(record, dict | list):
        for key, value in record.items() if isinstance(record, dict) else enumerate(record):
            yield (*at, key)
            yield from places(value, (*at, key))


def changed(record: Any, at: tuple[Any, ...], value: Any) -> Any:
    found = copy.deepcopy(record)
    inside = found
    for key in at[:-1]:
        inside = inside[key]
    inside[at[-1]] = value
    return found


def test_whatever_value_is_damaged_no_command_breaks(cli, result: Path, tmp_path: Path) -> None:
    record, other, page = json.loads(result.read_text()), tmp_path / "after.json", tmp_path / "both.html"
    tried = refused = 0
    for number, at in enumerate(places(record)):
        for value in (WRONG[number % len(WRONG)], WRONG[(number + 3) % len(WRONG)]):
            other.write_text(json.dumps(changed(record, at, value)))
            outcome = cli("echosim", "compare", result, other, "--html", page)
            assert "internal error" not in outcome.err, (at, value)
            assert "inf" not in outcome.out and "nan" not in outcome.out, (at, value)
            tried, refused = tried + 1, refused + outcome.status
            if outcome.status:
                assert outcome.err.startswith(f"echosim: {other}: is no result of echosim run --json: "), (
                    at,
                    value,
                )
                assert outcome.err.count("\n") == 1
    assert 0 < refused < tried


@pytest.mark.parametrize("key", READ)
def test_a_missing_key_is_named(cli, result: Path, tmp_path: Path, key: str) -> None:
    record, other = json.loads(result.read_text()), tmp_path / "after.json"
    del record[key]
    other.write_text(json.dumps(record))
    outcome = cli("echosim", "compare", result, other)
    assert outcome.status == 1
    assert f"{other}: " in outcome.err and f"`{key}`" in outcome.err


@pytest.mark.parametrize(
    ("at", "value", "said"),
    [
        (("step_time_s",), float("inf"), "step_time_s is inf"),
        (("memory", "peak_bytes"), float("nan"), "memory.peak_bytes is nan"),
        (("breakdown_s", "bubble"), -1.0, "$.breakdown_s.bubble"),
        (("breakdown_s", "compute"), 12.5, "adds up to"),
        (("memory", "at_peak_bytes"), {"dragons": 1}, "'dragons'"),
        (("plan", "tp"), "two", "$.plan.tp"),
        (("gpus",), 1.5, "$.gpus"),
    ],
)
def test_a_wrong_value_is_named(cli, result: Path, tmp_path: Path, at: Any, value: Any, said: str) -> None:
    other = tmp_path / "after.json"
    other.write_text(json.dumps(changed(json.loads(result.read_text()), at, value)))
    outcome = cli("echosim", "compare", result, other)
    assert outcome.status == 1
    assert said in outcome.err and str(other) in outcome.err


def test_what_one_result_does_not_know_is_not_nought(cli, result: Path, tmp_path: Path) -> None:
    other = tmp_path / "after.json"
    other.write_text(json.dumps(changed(json.loads(result.read_text()), ("mfu",), None)))
    row = cli("echosim", "compare", result, other, "--json").json()["figures"]["mfu"]
    assert row["before"] > 0
    assert row["after"] is row["difference"] is row["ratio"] is None

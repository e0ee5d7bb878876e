"""When tests were measured, with which arguments, and how often, from a repository's history."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("yaml", reason="needs PyYAML, of the [dev] extra")

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import megatron_page
from benchmarks.megatron_history import CASES, Known, Measured, history, of_github


class Clone:
    """A repository with a test or two."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.git("init", "-q", "-b", "main")

    def git(self, *words: str, date: str = "2026-01-01") -> None:
        when = {f"GIT_{who}_DATE": f"{date}T12:00:00+0000" for who in ("AUTHOR", "COMMITTER")}
        name = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        subprocess.run(["git", *words], cwd=self.folder, env={**when, **name, "PATH": "/usr/bin:/bin"}, check=True)

    def commit(self, date: str, name: str, times: Any = None, **arguments: Any) -> None:
        folder = self.folder / CASES / "gpt" / name
        folder.mkdir(parents=True, exist_ok=True)
        if times is not None:
            told = times if isinstance(times, str) else json.dumps({"iteration-time": {"values": times}})
            (folder / "golden_values_dev.json").write_text(told)
        if arguments:
            lines = "".join(f"  --{key.replace('_', '-')}: {value}\n" for key, value in arguments.items())
            (folder / "model_config.yaml").write_text(f"MODEL_ARGS:\n{lines}")
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", "one", date=date)

    def known(self, name: str) -> Known:
        found = history(self.folder, "main", lambda told: told.get("--timing-log-level"))
        return found[f"{CASES}/gpt/{name}/golden_values_dev.json"]


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def test_measurements_of_the_same_arguments_in_order(clone: Clone) -> None:
    clone.commit("2025-01-05", "a", {"1": 9.0, "2": 0.4, "3": 0.6}, timing_log_level=2)
    clone.commit("2025-11-05", "a", timing_log_level=0)
    clone.commit("2026-01-05", "a", {"1": 9.0, "2": 0.2, "3": 0.3, "4": 0.4})
    clone.commit("2026-03-05", "a", {"1": 9.0, "2": 0.5, "3": 0.5})
    assert clone.known("a") == Known(
        {"--timing-log-level": 0}, (Measured("2026-01-05", 0.3, 2.0), Measured("2026-03-05", 0.5))
    )


def test_arguments_are_those_of_the_measurement_and_not_of_today(clone: Clone) -> None:
    clone.commit("2025-01-05", "a", {"1": 9.0, "2": 0.4, "3": 0.6}, timing_log_level=2)
    clone.commit("2025-11-05", "a", timing_log_level=0)
    clone.commit("2026-01-05", "a", {"2": 0.4, "3": 0.6})  # written otherwise, and measured before
    assert clone.known("a") == Known({"--timing-log-level": 2}, (Measured("2025-01-05", 0.5, 0.6 / 0.4),))


def test_a_test_that_is_given_another_name_keeps_what_is_known(clone: Clone) -> None:
    clone.commit("2025-01-05", "old", {"1": 9.0, "2": 0.4, "3": 0.6}, timing_log_level=2)
    clone.git("mv", f"{CASES}/gpt/old", f"{CASES}/gpt/new")
    clone.commit("2026-01-05", "other", timing_log_level=0)
    assert clone.known("new").runs == (Measured("2025-01-05", 0.5, 0.6 / 0.4),)


@pytest.mark.parametrize("times", [{"1": 9.0, "2": 0.4}, {"1": "nan"}, "no json", '{"loss": 1}', "[1]"])
def test_what_has_no_times_is_no_measurement(clone: Clone, times: Any) -> None:
    clone.commit("2025-01-05", "a", times, timing_log_level=2)
    assert clone.known("a") == Known(None, ())


def test_lists_of_times_are_read(clone: Clone) -> None:
    clone.commit("2025-01-05", "a", [9.0, 0.4, 0.6], timing_log_level=2)
    assert clone.known("a").runs == (Measured("2025-01-05", 0.5, 0.6 / 0.4),)


def test_times_of_another_machine_are_told_by_whose_tests_they_are_and_by_how_long_they_take() -> None:
    runs = {"there": True, "here": False, "both": True}  # GitHub's CI runs it; NVIDIA's own runs all
    times = {
        "gpt/there/h100.json": [("own", Measured("2026-01-05", 1.0)), ("github", Measured("2026-05-05", 1.5))],
        "gpt/both/h100.json": [
            ("own", Measured("2026-01-05", 2.0)), ("alone", Measured("2026-02-05", 2.1)),
            ("github", Measured("2026-05-05", 2.9)), ("year", Measured("2027-05-05", 9.0)),
        ],
        "gpt/here/h100.json": [("own", Measured("2026-01-05", 1.0)), ("slow", Measured("2026-06-05", 3.0))],
        "gpt/unknown/h100.json": [("github", Measured("2026-05-05", 0.1))],
    }  # fmt: skip
    assert of_github(times, lambda _: runs) == {"github"}
    assert of_github(times, lambda _: {}) == set()


def test_times_that_files_of_two_gpus_share_are_of_neither(clone: Clone) -> None:
    folder = clone.folder / CASES / "gpt" / "a"
    folder.mkdir(parents=True)

    def write(gpu: str, seconds: float) -> None:
        told = {"iteration-time": {"values": {"2": 9.0, "3": seconds, "4": seconds}}}
        (folder / f"golden_values_{gpu}.json").write_text(json.dumps(told))

    for gpu in ("dev_dgx_a100", "dev_dgx_h100"):
        write(gpu, 1.0)
    clone.commit("2026-02-05", "a", timing_log_level=0)
    for gpu in ("dev_dgx_h100", "dev_dgx_gb200", "lts_dgx_gb200"):
        write(gpu, {"dev_dgx_h100": 0.5}.get(gpu, 0.25))
    clone.commit("2026-04-05", "a")
    found = history(clone.folder, "main", lambda told: told.get("--timing-log-level"))
    known = {path.partition("golden_values_")[2]: (k.runs, k.copied) for path, k in found.items()}
    assert known == {
        "dev_dgx_a100.json": ((), True),
        "dev_dgx_h100.json": ((Measured("2026-04-05", 0.5),), False),
        "dev_dgx_gb200.json": ((Measured("2026-04-05", 0.25),), False),
        "lts_dgx_gb200.json": ((Measured("2026-04-05", 0.25),), False),
    }


RECIPE = """
products:
  - test_case: [a]
    products: [{environment: [dev], scope: [SCOPE], platforms: [dgx_h100]}]
"""


def test_recipes_say_which_ci_runs_a_test(clone: Clone) -> None:
    recipes = clone.folder / "tests/test_utils/recipes/h100/gpt.yaml"
    recipes.parent.mkdir(parents=True)
    file = clone.folder / CASES / "gpt" / "a" / "golden_values_dev_dgx_h100.json"
    file.parent.mkdir(parents=True)
    for date, scope, seconds in (("2026-01-05", "nightly", 1.0), ("2026-05-05", "mr-github", 1.4)):
        recipes.write_text(RECIPE.replace("SCOPE", scope))
        file.write_text(json.dumps({"iteration-time": {"values": {"1": 9.0, "2": seconds, "3": seconds}}}))
        clone.commit(date, "a", timing_log_level=0)
    found = history(clone.folder, "main", lambda told: told.get("--timing-log-level"))
    (known,) = (known for path, known in found.items() if path.endswith("h100.json"))
    assert known.runs == (Measured("2026-01-05", 1.0), Measured("2026-05-05", 1.4, on_github=True))


def test_the_page_tells_years_apart() -> None:
    def row(measured: float, *runs: tuple[str, float]) -> dict[str, Any]:
        return {"gpu": "A100", "measured_s": measured, "predicted_s": 0.9, "spread": 1.0, "runs": [*runs]}

    rows = [row(2.0, ("2025-10-01", 2.0)), row(1.5, ("2025-12-01", 1.0), ("2026-01-02", 0.6), ("2026-04-02", 1.5))]
    text = "".join(megatron_page.of_years([*rows, {"spread": 1.0, "runs": []}]))
    assert "| A100 | 2025 | 1 | 55.0 % | -55.0 % |" in text
    assert "| A100 | 2026 | 1 | 40.0 % | -40.0 % |" in text
    assert "| A100 | 2026, median of several | 1 | 14.3 % | -14.3 % |" in text
    assert "Of the 1 that were measured more than once in 2026" in text and "2.50 times the fastest" in text
    assert megatron_page.of_years([{"spread": 1.0}]) == []

"""What `echosim run` prints: whose step it is, who is waited for, and whether it fits at all."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from echograph.workflow import feasible
from echograph.workflow.feasible import FEW

ALARM = "\x1b[1;31m"


def lines(cli: Any, *arguments: object) -> list[str]:
    outcome = cli("echosim", "run", *arguments)
    assert outcome.status == 0, outcome.err
    return str(outcome.out).splitlines()


def test_whose_step_is_split_is_said(cli, graph: Path) -> None:
    staged = (graph, "--gpus", 8, "--pp", 2, "--tp", 2)
    record = cli("echosim", "run", *staged, "--json").json()
    last, step = record["breakdown_of"], record["step_time_s"]
    shown = lines(cli, *staged)
    where = next(n for n, line in enumerate(shown) if "where the step goes" in line)
    assert f"{last['name']} (rank {last['rank']}), which ends last; mean of 8 ranks" in shown[where]
    computes = [record[f"breakdown_{of}s"]["compute"] / step for of in ("", "mean_", "least_", "most_")]
    assert shown[where + 1].split()[3:8] == [
        *(f"{share:.1%}" for share in computes[:2]), f"({computes[2]:.1%}", "to", f"{computes[3]:.1%})",
    ]  # fmt: skip


def test_one_role_is_all_ranks(cli, graph: Path) -> None:
    assert "  where the step goes" in lines(cli, graph, "--gpus", 8)


def test_a_straggler_is_named(cli, graph: Path) -> None:
    shown = lines(cli, graph, "--gpus", 16, "--tp", 2, "--straggler", "5=100")
    through = next(line for line in shown if line.startswith("  on the path"))
    assert re.search(r"rank 5, 100 times as slow, for (9\d|100)%: ", through)
    assert "kernels" in through
    assert not any("other ranks" in line for line in shown)


def test_utilisation_says_what_it_counts(cli, graph: Path) -> None:
    line = next(line for line in lines(cli, graph, "--gpus", 8) if line.startswith("  utilisation"))
    record = cli("echosim", "run", graph, "--gpus", 8, "--json").json()
    assert 0 < record["mfu_causal"] < record["mfu"]
    assert "model FLOPs, none recomputed or padded" in line
    assert f"{record['mfu_causal']:.1%} with causal attention by half" in line


@pytest.fixture(scope="module")
def many(session_cli: Any, tiny_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step whose activations are most of its memory."""
    path: Path = tmp_path_factory.mktemp("many") / "many.pb"
    assert session_cli("echoc", "compile", "-m", tiny_config, "--batch-size", 1024, "-o", path).status == 0
    return path


@pytest.fixture
def little(many: Path, cli: Any) -> tuple[object, ...]:
    """A run that needs more than the device has, but not if everything is recomputed."""

    def needed(*options: object) -> int:
        record = cli("echosim", "run", many, "--gpus", 8, *options, "--json").json()
        return int(record["memory"]["device_bytes"])

    between = (needed() + needed("--recompute", "full")) / 2 / 2**30
    return (many, "--gpus", 8, "--set", f"cluster.node.memory_GiB={between}")


def test_what_does_not_fit_is_said_first(cli, little: tuple[object, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    first, *others = lines(cli, *little)
    assert first.startswith("DOES NOT FIT: needs ")
    assert "it fits with --recompute full (" in first
    assert any("step time" in line for line in others)
    assert ALARM not in first
    strict = cli("echosim", "run", *little, "--strict-memory")
    assert (strict.status, strict.out) == (1, "")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert lines(cli, *little)[0].startswith(f"{ALARM}DOES NOT FIT")
    monkeypatch.setenv("NO_COLOR", "1")
    assert lines(cli, *little)[0].startswith("DOES NOT FIT")


def test_the_page_of_what_does_not_fit_has_a_banner(cli, little: tuple[object, ...], tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    assert cli("echosim", "run", *little, "--html", path).status == 0
    text = path.read_text()
    banner = text.index('<p class="banner" role="alert"><b>DOES NOT FIT</b> needs ')
    assert banner < text.index('<div class="tiles">')
    assert "it fits with --" in text[banner : text.index("</p>", banner)]


def test_few_plans_are_tried_where_nobody_asked(
    cli, little: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:

    tried: list[Any] = []

    def none_fits(job: Any, *_: Any) -> None:
        tried.append(job)

    monkeypatch.setattr(feasible, "largest_memory", none_fits)
    first = lines(cli, *little)[0]
    assert first.endswith("share it over more --tp, --pp or --zero 3 ranks")
    assert 0 < len(tried) <= FEW
    tried.clear()
    assert cli("echosim", "run", *little, "--json").status == 0
    assert not tried


def test_what_cannot_be_enough_is_not_tried() -> None:
    from echograph.simulator.memory import Memory
    from echograph.workflow.feasible import _may_be_enough

    memory = Memory(
        peak_bytes=150,
        reserved_bytes=None,
        overhead_bytes={},
        capacity_bytes=100,
        fits=False,
        by_role={"parameter": 20, "gradient": 20, "optimizer_state": 80, "activation": 30},
        contributors=(),
    )
    assert not _may_be_enough({"recompute": "full"}, memory)
    assert _may_be_enough({"zero": 1}, memory)
    assert _may_be_enough({"recompute": "full", "zero": 3}, memory)
    assert _may_be_enough({"tp": 2}, memory)

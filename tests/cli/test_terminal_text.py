"""What files hold never moves a terminal's cursor, and an error is one line that can be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echograph.cli.app import MAX_LINE, shown
from echograph.ir import serde
from echograph.ir.builder import GraphBuilder
from echograph.ir.graph import StepGraph


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("plain é\ttab\nline", "plain é\ttab\nline"), ("\x1b[31mred", "\\x1b[31mred"), ("\x9b2J", "\\x9b2J"),
        ("a\rb", "a\\x0db"), ("\0\x7f", "\\x00\\x7f"), ("\u202etxt", "\\x202etxt"), ("\ud800", "\\xd800"),
    ],
)  # fmt: skip
def test_control_characters_stand_as_their_numbers(text: str, seen: str) -> None:
    assert shown(text) == seen


def test_a_name_in_a_graph_obeys_nothing(cli, tmp_path: Path) -> None:
    path = tmp_path / "graph.pb"
    serde.save(GraphBuilder(name="\x1b[2J\x1b]0;title\x07").build(StepGraph), path)
    for words in (("echoc", "show", path), ("echoc", "text", path), ("echoc", "check", path)):
        outcome = cli(*words)
        assert "\x1b" not in outcome.out + outcome.err
        assert outcome.status == 0


def test_a_long_error_keeps_what_and_where_and_what_to_do(cli, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"model_type": "x" * 5000, "architectures": ["LlamaForCausalLM"]}))
    outcome = cli("echoc", "compile", "-m", path, "-o", tmp_path / "out.pb")
    assert outcome.status == 1
    assert outcome.err.count("\n") == 1
    assert len(outcome.err) <= MAX_LINE + 1
    assert "mine.json" in outcome.err


@pytest.mark.parametrize("text", ["tp = " + "9" * 5000, "tp = " + "[" * 5000, "tp = \x00", "\ufefftp = 1"])
def test_a_plan_that_is_no_toml_is_one_line(cli, tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    graph = tmp_path / "graph.pb"
    serde.save(GraphBuilder(name="empty").build(StepGraph), graph)
    outcome = cli("echosim", "run", graph, "--plan", path)
    assert (outcome.status, outcome.err.count("\n")) == (1, 1)
    assert "plan.toml: is no TOML" in outcome.err

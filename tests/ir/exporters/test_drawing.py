"""A picture shows every block once, every operation but views, and every communication with axis and bytes."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest
from conformance_graphs import GRAPHS
from graphs import Model, build, models
from hypothesis import given, settings

from echograph.ir import types as t
from echograph.ir.builder import GraphBuilder
from echograph.ir.exporters.drawing import MAX_STEPS, Picture, picture, to_svg
from echograph.ir.graph import Graph, StepGraph
from echograph.ir.passes.data_parallel import DataParallel
from echograph.ir.passes.fold import Fold
from echograph.workflow.formats import EXPORTS

SVG = "{http://www.w3.org/2000/svg}"


def steps_of(drawn: Picture) -> list[tuple[int, ...]]:
    return [step.ops for box in drawn.boxes for step in box.steps]


def rectangles(graph: Graph) -> list[tuple[float, float, float, float]]:
    """Left, top, right, bottom of the steps of an SVG; steps alone have the corners of 4."""
    root = ElementTree.fromstring("".join(to_svg(picture(graph), graph.programs)))
    found = [
        [float(rect.get(key, "")) for key in ("x", "y", "width", "height")]
        for rect in root.iter(f"{SVG}rect")
        if rect.get("rx") == "4" and float(rect.get("width", "")) > 20
    ]
    return [(x, y, x + width, y + height) for x, y, width, height in found]


@settings(max_examples=30, deadline=None)
@given(models())
def test_every_operation_but_views_is_in_one_step_of_its_block(model: Model) -> None:
    for graph in (Fold()(build(model)), DataParallel(replicas=4)(Fold()(build(model)))):
        drawn = picture(graph)
        rows = sorted(row for ops in steps_of(drawn) for row in ops)
        assert rows == [row for row, view in enumerate(graph.ops.is_view) if not view]
        assert [box.instances for box in drawn.boxes] == [len(block.instances) for block in graph.blocks]
        for number, box in enumerate(drawn.boxes):
            assert all(graph.block_of_op[row] == number for step in box.steps for row in step.ops)


@settings(max_examples=30, deadline=None)
@given(models())
def test_steps_do_not_lie_on_each_other(model: Model) -> None:
    graph = DataParallel(replicas=4)(Fold()(build(model)))
    found = rectangles(graph)
    assert len(found) == len(steps_of(picture(graph)))
    for i, (left, top, right, bottom) in enumerate(found):
        for x0, y0, x1, y1 in found[i + 1 :]:
            assert right <= x0 or x1 <= left or bottom <= y0 or y1 <= top


def test_edges_are_what_steps_read_of_each_other() -> None:
    drawn = picture(GRAPHS["two_layers"]())
    names = [[step.lines[0] for step in box.steps] for box in drawn.boxes]
    assert names == [["loss", "d_loss"], ["mm", "mm x2", "sgd_"]]
    pairs = {(names[a][i], names[b][j]) for (a, i), (b, j) in drawn.edges}
    assert pairs == {
        ("loss", "d_loss"), ("mm", "loss"), ("d_loss", "mm x2"), ("mm", "mm x2"), ("mm x2", "sgd_"),
    }  # fmt: skip


def test_communications_are_marked_with_their_axis_and_bytes(tmp_path: Path) -> None:
    graph = GRAPHS["job"]()
    said = [step.title for box in picture(graph).boxes for step in box.steps if step.communication]
    assert len(said) == int((graph.ops.kind == t.OpKind.COLLECTIVE).sum() + (graph.ops.kind == t.OpKind.SEND).sum()
                            + (graph.ops.kind == t.OpKind.RECV).sum())  # fmt: skip
    assert all(re.fullmatch(r"[a-z-]+ (pp|dp|tp|dp[+]tp|first and last) [0-9.]+ B", title) for title in said)
    for form in ("svg", "dot"):
        done = EXPORTS[form](graph, tmp_path / form)
        assert "blocks stand once" in done.notes[0]
        assert all(title in (tmp_path / form).read_text(encoding="utf-8") for title in said)


def test_of_too_many_steps_the_first_and_last_are_drawn() -> None:
    builder = GraphBuilder()
    for number in range(3 * MAX_STEPS):
        builder.compute("op", module=f"m.{number}", flops=1 + number, phase=t.Phase.FORWARD)
    drawn = picture(builder.build(StepGraph))
    titles = [step.title for step in drawn.boxes[0].steps]
    assert titles[0] == "m.0"
    assert titles[-1] == f"m.{3 * MAX_STEPS - 1}"
    assert titles[MAX_STEPS // 2] == "..."
    assert len(titles) == MAX_STEPS + 1
    assert drawn.left_out == (f"{2 * MAX_STEPS} operations of block main are left out of the drawing",)


def test_what_repeats_stands_once_with_how_often(tmp_path: Path) -> None:
    """Layers written out, and blocks of equal steps: counts are in the text, and a screen holds the drawing."""
    builder = GraphBuilder()
    for layer in range(96):
        builder.compute("norm", module=f"h.{layer}.ln", flops=3, phase=t.Phase.FORWARD)
        builder.compute("mm", module=f"h.{layer}.mlp", flops=5, phase=t.Phase.FORWARD)
    for number in range(1, 7):
        builder.begin_block(f"part.{number}")
        builder.compute("add", module="tail", flops=number // 6, bytes_read=1, phase=t.Phase.FORWARD)
    for block in range(1, 7):
        builder.instance(block)
    graph = builder.build(StepGraph)
    drawn = picture(graph)
    assert [(step.heading, step.times, len(step.ops)) for step in drawn.boxes[0].steps] == [
        ("96 x h.*.ln", 96, 96), ("96 x h.*.mlp", 96, 96),
    ]  # fmt: skip
    assert [(box.name, box.instances) for box in drawn.boxes[1:]] == [("part.1 to part.5", 5), ("part.6", 1)]
    assert drawn.left_out == ()
    assert sorted(row for ops in steps_of(drawn) for row in ops) == list(range(len(graph.ops)))
    EXPORTS["svg"](graph, tmp_path / "svg")
    text = (tmp_path / "svg").read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    assert float(root.get("width", "")) <= 1800
    assert float(root.get("height", "")) <= 960
    assert "96 x h.*.mlp" in text
    assert "5 x part.1 to part.5" in text


@pytest.mark.parametrize("name", ["<a> & b", 'quo"te', "back\\slash", "Größe …", "bell \x07"])
def test_any_name_can_be_drawn(name: str, tmp_path: Path) -> None:
    builder = GraphBuilder(name=name)
    builder.compute(name, module=name, flops=1, phase=t.Phase.FORWARD)
    for form in ("svg", "dot"):
        EXPORTS[form](builder.build(StepGraph), tmp_path / form)
    ElementTree.parse(tmp_path / "svg")


@pytest.mark.skipif(shutil.which("dot") is None, reason="needs Graphviz")
def test_graphviz_draws_it(tmp_path: Path) -> None:
    graph = GRAPHS["job"]()
    EXPORTS["dot"](graph, tmp_path / "graph.dot")
    done = subprocess.run(["dot", "-Tsvg", tmp_path / "graph.dot"], capture_output=True, text=True, check=True)
    with_steps = [box for box in picture(graph).boxes if box.steps]
    assert done.stdout.count('class="cluster"') == len(with_steps) == len(graph.blocks) - 1, "main is empty"


def test_what_a_step_moves_is_added_up_beyond_64_bits() -> None:
    builder = GraphBuilder()
    builder.compute("op", bytes_read=2**62, bytes_written=2**62)
    (step,) = picture(builder.build(StepGraph)).boxes[0].steps
    assert step.lines[-1] == "8.389e+06 TiB"

"""Pictures of a graph: `dot`, for Graphviz to lay out, and `svg`, laid out here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from echograph.ir.exporters.picture import Picture, Step, picture
from echograph.ir.exporters.svg import COLOURS, to_svg
from echograph.ir.files import write_whole
from echograph.ir.formats import Exported
from echograph.ir.graph import Graph
from echograph.ir.types import Phase

LEFT_OUT = "it is a picture: views, parameters and inputs are not drawn, and blocks stand once"


def export_dot(graph: Graph, output: Path) -> Exported:
    """Writes a drawing for Graphviz (`dot -Tsvg`).

    Raises:
        OutputError: the path cannot be written.
    """
    drawn = picture(graph)
    return Exported(files=1, bytes=write_whole(output, _dot(drawn)), notes=(LEFT_OUT, *drawn.left_out))


def export_svg(graph: Graph, output: Path) -> Exported:
    """Writes a drawing as SVG.

    Raises:
        OutputError: the path cannot be written.
    """
    drawn = picture(graph)
    pieces = to_svg(drawn, graph.programs)
    return Exported(files=1, bytes=write_whole(output, pieces), notes=(LEFT_OUT, *drawn.left_out))


def _dot(drawn: Picture) -> Iterator[str]:
    yield "digraph graph_ {\n"
    yield f"  label={_quoted(drawn.title)}; labelloc=t; fontname=Helvetica; compound=true; ranksep=0.3;\n"
    yield '  node [shape=box, style="filled,rounded", fontname=Helvetica, fontsize=10, margin="0.1,0.04"];\n'
    yield '  edge [color="#555555", arrowsize=0.6];\n'
    for number, box in enumerate(drawn.boxes):
        repeats = f"{box.instances} x {box.name}" if box.instances != 1 else box.name
        yield f"  subgraph cluster_{number} {{\n"
        yield f'    label={_quoted(repeats)}; style=rounded; color="#999999"; fontsize=12;\n'
        yield from (f"    s{number}_{i} [{_node(step)}];\n" for i, step in enumerate(box.steps))
        yield "  }\n"
    for (box_a, a), (box_b, b) in drawn.edges:
        phases = drawn.boxes[box_a].steps[a].phase, drawn.boxes[box_b].steps[b].phase
        # What the backward pass reads of the forward pass would pull the two together.
        kept = phases[0] == Phase.FORWARD != phases[1]
        back = (box_a, a) >= (box_b, b) and box_a == box_b
        style = (
            ' [color="#c8c8c8", constraint=false]' if kept else " [style=dashed, constraint=false]" if back else ""
        )
        yield f"  s{box_a}_{a} -> s{box_b}_{b}{style};\n"
    yield "}\n"


def _node(step: Step) -> str:
    border = ', penwidth=2, color="#6a3d9a"' if step.communication else ', color="#888888"'
    label = _quoted("\n".join((step.heading, *step.lines)))
    return f'label={label}, fillcolor="{COLOURS[step.phase]}"{border}'


def _quoted(text: str) -> str:
    """A text as DOT writes it, which is as JSON does but for letters beyond ASCII."""
    return json.dumps(text, ensure_ascii=False)

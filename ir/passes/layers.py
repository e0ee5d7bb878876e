"""The layers of a model, as a step graph shows them: repeated blocks, and numbered modules beside them."""

from __future__ import annotations

from dataclasses import dataclass

from echograph.ir import types as t
from echograph.ir.graph import StepGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A layer of the model.

    Attributes:
        block: number of the block that it is in.
        instance: which instance of the block it is.
        rows: its forward operations, in order.
    """

    block: int
    instance: int
    rows: tuple[int, ...]


def find_layers(graph: StepGraph) -> list[Layer]:
    """The layers in the order of their first forward operation.

    Every instance of a repeated block is one, and so is what stands in the main block under a numbered module
    beside the repeated ones; where nothing repeats, what stands under any numbered module, of nested ones the
    outermost.
    """
    stems = {
        graph.strings[graph.ops.module[block.ops.start]].partition(".{}")[0]
        for block in graph.blocks[1:]
        if block.ops
    }
    found: dict[tuple[int, int, str], list[int]] = {}
    for block, begin, end, instance, _ in graph.programs[0].calls.tolist():
        for row in range(begin, end):
            if graph.ops.phase[row] != t.Phase.FORWARD:
                continue
            name = "" if block else _layer_name(graph.strings[graph.ops.module[row]], stems)
            if block or name:
                found.setdefault((block, instance, name), []).append(row)
    return [Layer(block=b, instance=i, rows=tuple(rows)) for (b, i, _), rows in found.items()]


def _layer_name(module: str, stems: set[str]) -> str:
    """The path of a module down to its layer's number; "" where it is in none."""
    parts = module.split(".")
    numbered = [(".".join(parts[:i]), part) for i, part in enumerate(parts) if part.isdigit()]
    stem, number = next((n for n in numbered if n[0] in stems or not stems), ("", ""))
    return f"{stem}.{number}".lstrip(".")

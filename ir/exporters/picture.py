"""What a drawing of a graph shows: blocks once, with how often they repeat, and in them the steps of the work.

A step is operations that follow each other in one phase and module (in the optimizer: of one name), without views;
a communication is a step of its own. Parameters and inputs are left out. `drawing` makes files of this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from echograph.ir.columns import NONE
from echograph.ir.graph import Block, Graph
from echograph.ir.types import COMMUNICATIONS, OpKind, Phase
from echograph.units import format_bytes, format_count

MAX_STEPS = 60
"""Steps of one phase of a block that are drawn; of more, the first and the last."""
MAX_BLOCKS = 40
MAX_WIDTH = 38
"""Characters of a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A node of the drawing.

    Attributes:
        phase: part of the training step.
        title: its module, or what is communicated.
        lines: its operators, and their FLOPs or bytes.
        communication: whether other ranks take part.
        ops: rows of the operation table; none in a step that stands for others that are left out.
    """

    phase: Phase
    title: str
    lines: tuple[str, ...]
    communication: bool
    ops: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A block: its name, its instances, and its steps in the order of the table."""

    name: str
    instances: int
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A drawing of a graph.

    Attributes:
        title: the graph's name and size.
        boxes: of the blocks; the first is the main one.
        edges: pairs of steps, each (box, place in the box), of which the second reads what the first makes.
        left_out: what is not drawn, a line each.
    """

    title: str
    boxes: tuple[Box, ...]
    edges: tuple[tuple[tuple[int, int], tuple[int, int]], ...]
    left_out: tuple[str, ...]


def picture(graph: Graph) -> Picture:
    """What to draw of a graph."""
    boxes, left_out = [], []
    for block in graph.blocks[:MAX_BLOCKS]:
        steps = list(_steps(graph, block))
        kept = [step for phase in Phase for step in _trimmed([s for s in steps if s.phase == phase])]
        kept.sort(key=lambda step: step.ops[0] if step.ops else int(step.title))
        hidden = sum(len(s.ops) for s in steps) - sum(len(s.ops) for s in kept)
        if hidden:
            left_out.append(f"{hidden:,} operations of block {block.name} are left out of the drawing")
        kept = [step if step.ops else _gap(step) for step in kept]
        boxes.append(Box(name=block.name, instances=len(block.instances), steps=tuple(kept)))
    if len(graph.blocks) > MAX_BLOCKS:
        left_out.append(f"{len(graph.blocks) - MAX_BLOCKS:,} blocks are left out of the drawing")
    ranks = f", {graph.world_size:,} ranks" if graph.world_size > 1 else ""
    title = f"{graph.workload.model or graph.name}: {graph.unfolded_ops:,} operations{ranks}"
    return Picture(title=title, boxes=tuple(boxes), edges=_edges(graph, boxes), left_out=tuple(left_out))


def _steps(graph: Graph, block: Block) -> Iterator[Step]:
    ops = graph.ops
    views = ops.is_view
    rows = [row for row in block.ops if not views[row]]

    def key(row: int) -> tuple[int, int, int]:
        own = row if ops.kind[row] in COMMUNICATIONS else NONE
        alike = ops.name if ops.phase[row] in (Phase.OPTIMIZER, Phase.OTHER) else ops.module
        return int(ops.phase[row]), int(alike[row]), own

    for (phase, _, own), group in groupby(rows, key):
        run = tuple(group)
        modules = {graph.strings[ops.module[row]] for row in run}
        module = modules.pop() if len(modules) == 1 else ""
        title = module.removeprefix(f"{block.name}.{{}}").lstrip(".") or block.name
        if own != NONE:
            yield Step(phase=Phase(phase), title=_communication(graph, own), lines=(_end(title),),
                       communication=True, ops=run)  # fmt: skip
            continue
        flops = int(ops.flops[list(run)].sum())
        moved = int((ops.bytes_read + ops.bytes_written)[list(run)].sum())
        size = format_count(flops, "FLOP") if flops else format_bytes(moved)
        names = _cut(_names(graph, run))
        yield Step(phase=Phase(phase), title=_end(title), lines=(names, size), communication=False, ops=run)


def _communication(graph: Graph, row: int) -> str:
    op = graph.ops[row]
    group = graph.groups[int(graph.ops.group[row])]
    kind = getattr(op, "collective", None)
    what = (
        kind.name.lower().replace("_", "-") if kind is not None else OpKind(int(graph.ops.kind[row])).name.lower()
    )
    return _cut(f"{what} {group.label} {format_bytes(int(graph.ops.nbytes[row]))}")


def _names(graph: Graph, rows: Sequence[int]) -> str:
    uses = Counter(graph.strings[graph.ops.name[row]].removeprefix("aten.") for row in rows)
    return ", ".join(name if count == 1 else f"{name} x{count}" for name, count in uses.items())


def _cut(text: str) -> str:
    return text if len(text) <= MAX_WIDTH else text[: MAX_WIDTH - 1] + "…"


def _end(text: str) -> str:
    """A path's end, which tells more of it than its beginning."""
    return text if len(text) <= MAX_WIDTH else "…" + text[1 - MAX_WIDTH :]


def _trimmed(steps: list[Step]) -> list[Step]:
    """The steps, or the first and last of too many with one between them that says after which row they are."""
    if len(steps) <= MAX_STEPS:
        return steps
    half = MAX_STEPS // 2
    count = len(steps) - 2 * half
    last = steps[half - 1]
    gap = Step(phase=last.phase, title=str(last.ops[-1]), lines=(f"{count:,}",), communication=False, ops=())
    return [*steps[:half], gap, *steps[-half:]]


def _gap(step: Step) -> Step:
    return Step(phase=step.phase, title="...", lines=(f"{step.lines[0]} steps", ""), communication=False, ops=())


def _edges(graph: Graph, boxes: Sequence[Box]) -> tuple[tuple[tuple[int, int], tuple[int, int]], ...]:
    """Between steps, through views; of a block's instances the first, the second and the last are asked."""
    place = {op: (n, i) for n, box in enumerate(boxes) for i, step in enumerate(box.steps) for op in step.ops}
    found: dict[tuple[tuple[int, int], tuple[int, int]], None] = {}
    for number, box in enumerate(boxes):
        for instance in sorted({0, min(1, box.instances - 1), box.instances - 1} - {-1}):
            for at, step in enumerate(box.steps):
                for op in step.ops:
                    for maker in _makers(graph, number, instance, op):
                        if maker in place and place[maker] != (number, at):
                            found[place[maker], (number, at)] = None
    return tuple(found)


def _makers(graph: Graph, block: int, instance: int, op: int) -> Iterator[int]:
    """Operations that make what an operation reads; those behind a view stand for it."""
    todo = [(block, instance, op)]
    seen = set(todo)
    while todo:
        block, instance, op = todo.pop()
        sources = [graph.source(block, instance, tensor) for tensor in graph.ops.inputs.row(op)]
        sources += [(block, instance, dep) for dep in graph.ops.deps.row(op)]
        for source in sources:
            if source is None or source in seen:
                continue
            seen.add(source)
            if graph.ops.is_view[source[2]]:
                todo.append(source)
            else:
                yield source[2]

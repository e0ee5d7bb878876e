"""What a drawing of a graph shows: blocks once, with how often they repeat, and in them the steps of the work.

A step is operations that follow each other in one phase and module (in the optimizer: of one name), without views;
a communication is a step of its own. Steps that repeat stand once, with how often they do, and so do blocks of
equal steps. Parameters and inputs are left out. `drawing` makes files of this.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from echograph.ir.columns import NONE
from echograph.ir.graph import Block, Graph
from echograph.ir.types import COMMUNICATIONS, OpKind, Phase
from echograph.units import format_bytes, format_count

MAX_STEPS = 24
"""Steps of one phase of a block that are drawn; of more, the first and the last."""
MAX_BLOCKS = 40
MAX_PERIOD = 256
"""Steps that repeat together, at most."""
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
        ops: rows of the operation table, those of a repetition after those of the one before; none in a step that
            stands for others that are left out.
        times: how often it repeats.
    """

    phase: Phase
    title: str
    lines: tuple[str, ...]
    communication: bool
    ops: tuple[int, ...]
    times: int = 1

    @property
    def alike(self) -> tuple[object, ...]:
        """What steps that repeat have in common: all but the numbers in names, as of layers and groups."""
        names = self.title if self.communication else "\n".join((self.title, *self.lines[:1]))
        sizes = self.title.split()[-2:] if self.communication else self.lines[1:]
        return self.phase, self.communication, self.times, _numberless(names), *sizes

    @property
    def heading(self) -> str:
        """Its title, after how often it repeats."""
        return f"{self.times:,} x {self.title}" if self.times > 1 else self.title


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """Blocks of equal steps: their names, all instances, the first of them, and its steps in order."""

    name: str
    instances: int
    block: int
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A drawing of a graph.

    Attributes:
        title: the graph's name and size.
        boxes: of the blocks; the first is the main one.
        edges: pairs of steps, each (box, place in the box), of which the second reads what the first makes.
        left_out: what is not drawn, a line each.
        box_of: for every block of the graph its box; those that are left out have a number beyond the boxes.
    """

    title: str
    boxes: tuple[Box, ...]
    edges: tuple[tuple[tuple[int, int], tuple[int, int]], ...]
    left_out: tuple[str, ...]
    box_of: tuple[int, ...]


def picture(graph: Graph) -> Picture:
    """What to draw of a graph."""
    boxes, box_of = _boxes([list(_folded(_steps(graph, block))) for block in graph.blocks], graph)
    left_out = []
    for number, box in enumerate(boxes[:MAX_BLOCKS]):
        kept = [step for phase in Phase for step in _trimmed([s for s in box.steps if s.phase == phase])]
        kept.sort(key=lambda step: step.ops[0] if step.ops else int(step.title))
        hidden = sum(len(s.ops) for s in box.steps) - sum(len(s.ops) for s in kept)
        if hidden:
            left_out.append(f"{hidden:,} operations of block {box.name} are left out of the drawing")
        boxes[number] = replace(box, steps=tuple(step if step.ops else _gap(step) for step in kept))
    if len(boxes) > MAX_BLOCKS:
        left_out.append(f"{len(boxes) - MAX_BLOCKS:,} blocks are left out of the drawing")
    boxes = boxes[:MAX_BLOCKS]
    ranks = f", {graph.world_size:,} ranks" if graph.world_size > 1 else ""
    title = f"{graph.workload.model or graph.name}: {graph.unfolded_ops:,} operations{ranks}"
    edges = _edges(graph, boxes)
    return Picture(title=title, boxes=tuple(boxes), edges=edges, left_out=tuple(left_out), box_of=box_of)


def _boxes(steps_of: Sequence[list[Step]], graph: Graph) -> tuple[list[Box], tuple[int, ...]]:
    """Blocks of equal steps together; the main block stands alone."""
    found: dict[tuple[object, ...], list[int]] = {}
    for number, steps in enumerate(steps_of):
        stem = re.sub(r"\.\d+$", "", graph.blocks[number].name)
        key = (number == 0, stem, *(step.alike for step in steps))
        found.setdefault(key, []).append(number)
    boxes = []
    box_of = [0] * len(steps_of)
    for place, numbers in enumerate(found.values()):
        names = list(dict.fromkeys(graph.blocks[number].name for number in numbers))
        steps = [
            replace(_together(same), times=same[0].times)
            for same in zip(*(steps_of[n] for n in numbers), strict=True)
        ]
        boxes.append(
            Box(
                name=names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}",
                instances=sum(len(graph.blocks[number].instances) for number in numbers),
                block=numbers[0],
                steps=tuple(steps),
            )
        )
        for number in numbers:
            box_of[number] = place
    return boxes, tuple(box_of)


def _folded(steps: Iterator[Step]) -> list[Step]:
    """Steps that repeat, alone or several in turn, once; the shortest repetitions first."""
    kept = list(steps)
    period, codes = 1, _codes(kept)
    while period <= min(MAX_PERIOD, len(kept) // 2):
        same = np.concatenate([[False], codes[:-period] == codes[period:], [False]])
        edges = np.flatnonzero(same[1:] != same[:-1])
        runs = [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True) if b - a >= period]
        for begin, end in reversed(runs):
            times = (end - begin) // period + 1
            rows = [kept[begin + at : begin + times * period : period] for at in range(period)]
            kept[begin : begin + times * period] = [_together(row) for row in rows]
        if runs:
            codes = _codes(kept)
        period += 1
    return kept


def _codes(steps: Sequence[Step]) -> np.ndarray:
    known: dict[tuple[object, ...], int] = {}
    return np.array([known.setdefault(step.alike, len(known)) for step in steps], np.int64)


def _together(steps: Sequence[Step]) -> Step:
    """One step for several that are alike; numbers that they do not share become `*`."""
    first = steps[0]
    same = all(step.title == first.title and step.lines == first.lines for step in steps)
    title = first.title if same or first.communication else _numberless(first.title)
    lines = first.lines if same or first.communication else (_numberless(first.lines[0]), *first.lines[1:])
    ops = tuple(op for step in steps for op in step.ops)
    return replace(first, title=title, lines=lines, ops=ops, times=sum(step.times for step in steps))


def _numberless(text: str) -> str:
    return re.sub(r"\d+", "*", text)


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
        moved = int(ops.bytes_read[list(run)].sum()) + int(ops.bytes_written[list(run)].sum())
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
        last = len(graph.blocks[box.block].instances) - 1
        for instance in sorted({0, min(1, last), last} - {-1}):
            for at, step in enumerate(box.steps):
                for op in step.ops[: -(-len(step.ops) // step.times)]:
                    if op not in graph.blocks[box.block].ops:
                        break
                    for maker in _makers(graph, box.block, instance, op):
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

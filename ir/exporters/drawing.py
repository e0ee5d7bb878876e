"""What a drawing of a graph shows: blocks once, with how often they repeat, and in them the steps of the work.

A step is operations that follow each other in one phase and module (in the optimizer: of one name), without views;
a communication is a step of its own. Steps that repeat stand once, with how often they do, and so do blocks of
equal steps. Parameters and inputs are left out.

`dot` is for Graphviz to lay out; `svg` is laid out here.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np

from echograph.ir.columns import NONE
from echograph.ir.files import write_whole
from echograph.ir.formats import Exported
from echograph.ir.graph import Block, Graph, Program
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
class DrawnStep:
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
    steps: tuple[DrawnStep, ...]


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


def _boxes(steps_of: Sequence[list[DrawnStep]], graph: Graph) -> tuple[list[Box], tuple[int, ...]]:
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


def _folded(steps: Iterator[DrawnStep]) -> list[DrawnStep]:
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


def _codes(steps: Sequence[DrawnStep]) -> np.ndarray:
    known: dict[tuple[object, ...], int] = {}
    return np.array([known.setdefault(step.alike, len(known)) for step in steps], np.int64)


def _together(steps: Sequence[DrawnStep]) -> DrawnStep:
    """One step for several that are alike; numbers that they do not share become `*`."""
    first = steps[0]
    same = all(step.title == first.title and step.lines == first.lines for step in steps)
    title = first.title if same or first.communication else _numberless(first.title)
    lines = first.lines if same or first.communication else (_numberless(first.lines[0]), *first.lines[1:])
    ops = tuple(op for step in steps for op in step.ops)
    return replace(first, title=title, lines=lines, ops=ops, times=sum(step.times for step in steps))


def _numberless(text: str) -> str:
    return re.sub(r"\d+", "*", text)


def _steps(graph: Graph, block: Block) -> Iterator[DrawnStep]:
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
            yield DrawnStep(phase=Phase(phase), title=_communication(graph, own), lines=(_end(title),),
                       communication=True, ops=run)  # fmt: skip
            continue
        flops = int(ops.flops[list(run)].sum())
        moved = int(ops.bytes_read[list(run)].sum()) + int(ops.bytes_written[list(run)].sum())
        size = format_count(flops, "FLOP") if flops else format_bytes(moved)
        names = _cut(_names(graph, run))
        yield DrawnStep(phase=Phase(phase), title=_end(title), lines=(names, size), communication=False, ops=run)


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


def _trimmed(steps: list[DrawnStep]) -> list[DrawnStep]:
    """The steps, or the first and last of too many with one between them that says after which row they are."""
    if len(steps) <= MAX_STEPS:
        return steps
    half = MAX_STEPS // 2
    count = len(steps) - 2 * half
    last = steps[half - 1]
    gap = DrawnStep(phase=last.phase, title=str(last.ops[-1]), lines=(f"{count:,}",), communication=False, ops=())
    return [*steps[:half], gap, *steps[-half:]]


def _gap(step: DrawnStep) -> DrawnStep:
    return DrawnStep(
        phase=step.phase, title="...", lines=(f"{step.lines[0]} steps", ""), communication=False, ops=()
    )


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


# -- SVG ------------------------------------------------------------------------------------------------------
# A picture laid out as SVG: the forward pass runs down on the left, the backward pass up beside it.
#
# The steps of the main block and the boxes of the others follow each other as the programs first come to
# them; boxes that the forward pass never enters (gradient accumulation, buckets, the optimizer) stand on the
# right.


COLOURS = {
    Phase.FORWARD: "#d4e6f7",
    Phase.BACKWARD: "#fbdcc4",
    Phase.RECOMPUTE: "#f6ebb0",
    Phase.OPTIMIZER: "#d7eed2",
    Phase.OTHER: "#e8e8e8",
}
NODE_WIDTH, LINE, GAP, PAD, HEAD = 258, 14, 16, 14, 26
SCREEN = 1800, 960
"""What a drawing is shown in at first, in pixels; a larger one is made smaller, and can be made larger again."""
_FORWARD, _BACKWARD, _REST = range(3)
_LANE = {Phase.FORWARD: _FORWARD, Phase.BACKWARD: _BACKWARD, Phase.RECOMPUTE: _BACKWARD}
_PITCH = NODE_WIDTH + 3 * GAP

_Place = tuple[int, int]
"""(box, place of the step in it)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spot:
    """A rectangle."""

    x: float
    y: float
    width: float
    height: float


class _Layout:
    """Where every step and box stands."""

    def __init__(self, drawn: Picture, programs: Sequence[Program]) -> None:
        self.drawn = drawn
        self.steps: dict[_Place, _Spot] = {}
        self.boxes: dict[int, _Spot] = {}
        self.follows: set[tuple[_Place, _Place]] = set()
        bands, aside = _bands(drawn, programs)
        y: float = 70
        for band, number in bands:
            y = self._lanes(0, band, PAD, y) if band else y
            if number is not None:
                y = self._box(number, PAD / 2, y) + GAP
        right: float = 70
        flow = (*self.boxes.values(), *self.steps.values())
        x = max((spot.x + spot.width for spot in flow), default=0) + 2 * GAP
        rest = [i for i, step in enumerate(drawn.boxes[0].steps) if _lane(step) == _REST]
        right = self._stack(0, rest, x + PAD, right)
        for number in aside:
            right = self._box(number, x, right) + GAP
        spots = [*self.steps.values(), *self.boxes.values()]
        self.width = max((spot.x + spot.width for spot in spots), default=300) + PAD
        self.height = max(y, right) + PAD

    def _box(self, number: int, x: float, y: float) -> float:
        """Lays a block out; returns where it ends."""
        box = self.drawn.boxes[number]
        every = range(len(box.steps))
        used = {_lane(step) for step in box.steps}
        # A box of one lane has no empty columns before it.
        left = x + PAD - (min(used) * _PITCH if len(used) == 1 else 0)
        bottom = self._lanes(number, list(every), left, y + HEAD)
        rest = [i for i in every if _lane(box.steps[i]) == _REST]
        bottom = max(bottom, self._stack(number, rest, left + _REST * _PITCH, y + HEAD))
        right = max(
            (s.x + s.width for place, s in self.steps.items() if place[0] == number), default=x + NODE_WIDTH
        )
        self.boxes[number] = _Spot(x=x, y=y, width=right + PAD - x, height=max(bottom - y, HEAD + GAP))
        return y + self.boxes[number].height

    def _lanes(self, number: int, steps: list[int], x: float, y: float) -> float:
        """Forward steps downwards, backward ones upwards beside them, both over the whole height."""
        box = self.drawn.boxes[number]
        lanes = {lane: [i for i in steps if _lane(box.steps[i]) == lane] for lane in (_FORWARD, _BACKWARD)}
        lanes[_BACKWARD].reverse()
        tall = max(sum(_height(box.steps[i]) + GAP for i in lane) for lane in lanes.values())
        for lane, members in lanes.items():
            slack = tall - sum(_height(box.steps[i]) + GAP for i in members)
            top = y
            for i in members:
                top += slack / (len(members) + 1)
                self._put(number, i, x + lane * _PITCH, top)
                top += _height(box.steps[i]) + GAP
            order = reversed(members) if lane == _BACKWARD else members
            self.follows.update(pairwise((number, i) for i in order))
        return y + tall

    def _stack(self, number: int, steps: list[int], x: float, y: float) -> float:
        """Steps below each other, in as many columns as a screen's height asks for; returns where they end."""
        top = lowest = y
        for i in steps:
            height = _height(self.drawn.boxes[number].steps[i]) + GAP
            if y > top and y + height > SCREEN[1]:
                x, y = x + _PITCH, top
            self._put(number, i, x, y)
            y += height
            lowest = max(lowest, y)
        self.follows.update(
            (a, b) for a, b in pairwise((number, i) for i in steps) if self.steps[a].x == self.steps[b].x
        )
        return lowest

    def _put(self, number: int, i: int, x: float, y: float) -> None:
        height = _height(self.drawn.boxes[number].steps[i])
        self.steps[number, i] = _Spot(x=x, y=y, width=NODE_WIDTH, height=height)


def _lane(step: DrawnStep) -> int:
    return _LANE.get(step.phase, _REST)


def _height(step: DrawnStep) -> float:
    return LINE * (1 + sum(map(bool, step.lines))) + 8


def _bands(drawn: Picture, programs: Sequence[Program]) -> tuple[list[tuple[list[int], int | None]], list[int]]:
    """The main block's steps before each box that the forward pass enters, and that box; then the other boxes."""
    order: list[int] = []
    seen: set[int] = set()
    band: dict[int, int] = {}
    back: int | None = None
    main = drawn.boxes[0].steps
    step_of = {op: i for i, step in enumerate(main) for op in step.ops}
    enters = {n for n, box in enumerate(drawn.boxes) if n and any(_lane(s) == _FORWARD for s in box.steps)}
    for program in programs:
        for block, begin, end in dict.fromkeys(map(tuple, program.calls[:, :3].tolist())):
            number = drawn.box_of[block]
            if number in enters:
                if number not in seen:
                    seen.add(number)
                    order.append(number)
                rows = {op for s in drawn.boxes[number].steps if _lane(s) == _BACKWARD for op in s.ops}
                if rows & set(range(begin, end)):
                    back = min(order.index(number), len(order) if back is None else back)
            for op in range(begin, end) if number == 0 else ():
                if op in step_of and step_of[op] not in band:
                    backward = _lane(main[step_of[op]]) == _BACKWARD
                    band[step_of[op]] = back if backward and back is not None else len(order)
    shown: list[list[int]] = [[] for _ in range(len(order) + 1)]
    for i, step in enumerate(main):
        if _lane(step) != _REST:
            shown[band.get(i, band.get(i - 1, 0))].append(i)
    rest = [n for n in range(1, len(drawn.boxes)) if n not in seen]
    return list(zip(shown, [*order, None], strict=True)), rest


def to_svg(drawn: Picture, programs: Sequence[Program]) -> Iterator[str]:
    """The picture as pieces of SVG.

    Args:
        drawn: what to draw.
        programs: of the graph; their order is that of the drawing.
    """
    layout = _Layout(drawn, programs)
    width, height = layout.width, layout.height
    scale = min(1.0, SCREEN[0] / width, SCREEN[1] / height)
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width * scale:.0f}" height="{height * scale:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="Helvetica, Arial, sans-serif">\n'
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" '
        'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="#555"/></marker></defs>\n'
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="white"/>\n'
    )
    yield _text(PAD, 24, drawn.title, size=15, bold=True)
    yield from _legend()
    for number, spot in layout.boxes.items():
        yield _rect(spot, fill="#fafafa", stroke="#999", radius=10)
        yield _text(spot.x + PAD, spot.y + 18, _heading(drawn.boxes[number]), size=13, bold=True)
    yield from _arrows(layout)
    for (number, i), spot in layout.steps.items():
        yield from _step(drawn.boxes[number].steps[i], spot)
    yield "</svg>\n"


def _heading(box: Box) -> str:
    return f"{box.instances} x {box.name}" if box.instances != 1 else box.name


def _legend() -> Iterator[str]:
    x: float = PAD
    for phase, colour in COLOURS.items():
        yield _rect(_Spot(x=x, y=36, width=14, height=14), fill=colour, stroke="#888")
        yield _text(x + 19, 47, phase.name.lower())
        x += 40 + 7 * len(phase.name)
    yield _rect(_Spot(x=x, y=36, width=14, height=14), fill="white", stroke="#6a3d9a", wide=2.5)
    yield _text(x + 19, 47, "communication")


def _step(step: DrawnStep, spot: _Spot) -> Iterator[str]:
    stroke, wide = ("#6a3d9a", 2.5) if step.communication else ("#888", 1)
    yield _rect(spot, fill=COLOURS[step.phase], stroke=stroke, wide=wide)
    for at, line in enumerate((step.heading, *filter(None, step.lines))):
        yield _text(spot.x + 8, spot.y + LINE * (at + 1), line, bold=at == 0)


def _arrows(layout: _Layout) -> Iterator[str]:
    """Data that flows: down and up in a lane, across from forward to backward, and past other steps."""
    steps = layout.drawn.boxes
    for a, b in layout.drawn.edges:
        if a not in layout.steps or b not in layout.steps or (a[0] == b[0] and a[1] > b[1]):
            continue  # of a layer to the next one, which is the same box
        one, other = layout.steps[a], layout.steps[b]
        lanes = _lane(steps[a[0]].steps[a[1]]), _lane(steps[b[0]].steps[b[1]])
        if (a, b) in layout.follows:
            yield _down(one, other, NODE_WIDTH / 2)
        elif lanes in ((_FORWARD, _FORWARD), (_BACKWARD, _BACKWARD)) and a[0] == b[0]:
            yield _past(one, other, lanes[0])
        elif lanes == (_FORWARD, _BACKWARD) and a[0] == b[0]:
            yield _path(f"M{_right(one)} C{_bend(one, other)} {_left(other)}", colour="#c4c4c4", tip=False)
    for spot, after in _flow(layout):
        yield _down(spot, after, NODE_WIDTH / 2)


def _down(one: _Spot, other: _Spot, aside: float) -> str:
    """A straight arrow between neighbours, down or up."""
    start, end = (one.y + one.height, other.y) if other.y > one.y else (one.y, other.y + other.height)
    return _path(f"M{other.x + aside:.1f},{start:.1f} L{other.x + aside:.1f},{end:.1f}")


def _past(one: _Spot, other: _Spot, lane: int) -> str:
    """A curve beside the lane, past what stands between."""
    x = one.x if lane == _FORWARD else one.x + one.width
    out = x - GAP * 0.8 if lane == _FORWARD else x + GAP * 0.8
    a, b = one.y + one.height / 2, other.y + other.height / 2
    return _path(f"M{x:.1f},{a:.1f} C{out:.1f},{a:.1f} {out:.1f},{b:.1f} {x:.1f},{b:.1f}", colour="#aaa")


def _flow(layout: _Layout) -> Iterator[tuple[_Spot, _Spot]]:
    """Neighbours in the two lanes of the page, of which one at least is a box or lies in it."""
    for lane in (_FORWARD, _BACKWARD):
        column = PAD + lane * _PITCH
        inside = [
            spot for (number, i), spot in layout.steps.items()
            if number == 0 and _lane(layout.drawn.boxes[0].steps[i]) == lane
        ]  # fmt: skip
        boxes = [s for s in layout.boxes.values() if s.x < column and s.x + s.width > column + NODE_WIDTH / 2]
        spots = sorted(
            [*inside, *(_Spot(x=column, y=s.y, width=0, height=s.height) for s in boxes)], key=lambda s: s.y
        )
        for one, other in pairwise(spots):
            if one.width == 0 or other.width == 0:
                near = _Spot(x=column, y=one.y, width=0, height=one.height)
                far = _Spot(x=column, y=other.y, width=0, height=other.height)
                yield (near, far) if lane == _FORWARD else (far, near)


def _right(spot: _Spot) -> str:
    return f"{spot.x + spot.width:.1f},{spot.y + spot.height / 2:.1f}"


def _left(spot: _Spot) -> str:
    return f"{spot.x:.1f},{spot.y + spot.height / 2:.1f}"


def _bend(one: _Spot, other: _Spot) -> str:
    middle = (one.x + one.width + other.x) / 2
    return f"{middle:.1f},{one.y + one.height / 2:.1f} {middle:.1f},{other.y + other.height / 2:.1f}"


def _path(points: str, *, colour: str = "#555", tip: bool = True) -> str:
    end = ' marker-end="url(#tip)"' if tip else ""
    return f'<path d="{points}" fill="none" stroke="{colour}" stroke-width="1.1"{end}/>\n'


def _rect(spot: _Spot, *, fill: str, stroke: str, wide: float = 1, radius: float = 4) -> str:
    where = f'x="{spot.x:.1f}" y="{spot.y:.1f}" width="{spot.width:.1f}" height="{spot.height:.1f}"'
    return f'<rect {where} rx="{radius}" fill="{fill}" stroke="{stroke}" stroke-width="{wide}"/>\n'


def _text(x: float, y: float, text: str, *, size: int = 11, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    clean = "".join(c if c >= " " and not "\ud800" <= c <= "\udfff" else "?" for c in text)
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}"{weight}>{escape(clean)}</text>\n'


# -- files ----------------------------------------------------------------------------------------------------
# Pictures of a graph: `dot`, for Graphviz to lay out, and `svg`, laid out here.


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


def _node(step: DrawnStep) -> str:
    border = ', penwidth=2, color="#6a3d9a"' if step.communication else ', color="#888888"'
    label = _quoted("\n".join((step.heading, *step.lines)))
    return f'label={label}, fillcolor="{COLOURS[step.phase]}"{border}'


def _quoted(text: str) -> str:
    """A text as DOT writes it, which is as JSON does but for letters beyond ASCII."""
    return json.dumps(text, ensure_ascii=False)

"""A picture laid out as SVG: the forward pass runs down on the left, the backward pass up beside it.

The steps of the main block and the boxes of the others follow each other as the programs first come to them; boxes
that the forward pass never enters (gradient accumulation, buckets, the optimizer) stand on the right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from echograph.ir.exporters.picture import Box, Picture, Step
from echograph.ir.graph import Program
from echograph.ir.types import Phase

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

Place = tuple[int, int]
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
        self.steps: dict[Place, _Spot] = {}
        self.boxes: dict[int, _Spot] = {}
        self.follows: set[tuple[Place, Place]] = set()
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


def _lane(step: Step) -> int:
    return _LANE.get(step.phase, _REST)


def _height(step: Step) -> float:
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


def _step(step: Step, spot: _Spot) -> Iterator[str]:
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

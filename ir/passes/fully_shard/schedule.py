"""In which order units are gathered, run and reduced, in one program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from echograph.ir import types as t
from echograph.ir.graph import Graph
from echograph.ir.passes.fully_shard.block import GATHERED, REDUCED, REGATHERED, TOKEN_OF, How, Units, phase_of
from echograph.ir.passes.rewrite import Call

UnitInstance = tuple[int, int, int]
"""A unit where it runs: block, instance, and number of the unit in the block."""
Piece = tuple[t.Phase, UnitInstance, Call]
"""A part of a call, of one phase and one unit."""
Done = tuple[UnitInstance, str, int]
"""Something done for a unit in a micro-batch: a name of `block.actions`."""


@dataclass(slots=True, kw_only=True)
class _Part:
    """A model part: a root, and the units that run inside it, in the order in which they do."""

    root: UnitInstance
    forward: list[UnitInstance] = field(default_factory=list)
    backward: list[UnitInstance] = field(default_factory=list)


class UnitSchedule:
    """What one program runs, in order.

    Args:
        graph: the step, or a pipeline's job.
        units: of its blocks.
        names: what is done for each unit of each block.
        how: FSDP's options.
        calls: of the program, in old rows, of all micro-batches.
        staged: whether they are a stage's. Where gradients add up whole, its units are then reduced after the last
            backward pass of their part, as torch's pipelines do (`torch.distributed.pipelining`), not within it.
    """

    def __init__(
        self,
        graph: Graph,
        units: Units,
        names: Sequence[Sequence[Collection[str]]],
        how: How,
        calls: Sequence[Call],
        staged: bool,
    ) -> None:
        self.graph, self.units, self.names, self.how, self.staged = graph, units, names, how, staged
        self._cuts: dict[tuple[int, int, int], list[tuple[t.Phase, int, int, int]]] = {}
        self.pieces = [piece for call in calls for piece in self._cut(call)]
        self.part_of: dict[UnitInstance, _Part] = {}
        self._find_parts()
        self.last = max((call[4] for call in calls), default=0)
        self.first = min((call[4] for call in calls), default=0)
        self.items = list(self._items())

    def _cut(self, call: Call) -> Iterator[Piece]:
        """A call cut where the phase or the unit changes; its operations as rows of the old table."""
        block, begin, end, instance, micro_batch = call
        if (block, begin, end) not in self._cuts:
            runs: list[tuple[t.Phase, int, int, int]] = []
            for op in range(begin, end):
                phase, unit = phase_of(int(self.graph.ops.phase[op])), self.units.of_op(block, op)
                start = runs.pop()[2] if runs and runs[-1][:2] == (phase, unit) else op
                runs.append((phase, unit, start, op + 1))
            self._cuts[block, begin, end] = runs
        for phase, unit, start, stop in self._cuts[block, begin, end]:
            yield phase, (block, instance, unit), (block, start, stop, instance, micro_batch)

    def _find_parts(self) -> None:
        """Units belong to the root that ran last before their first forward pass."""
        of_root: dict[UnitInstance, _Part] = {}
        part: _Part | None = None
        for phase, place, _ in self.pieces:
            if phase == t.Phase.FORWARD:
                if self.units.is_main(place[0]):
                    root = (place[0], place[1], 0)
                    if root not in of_root:
                        of_root[root] = self.part_of[root] = _Part(root=root, forward=[root])
                    part = of_root[root]
                if part is not None and place not in self.part_of:
                    self.part_of[place] = part
                    part.forward.append(place)
            elif phase == t.Phase.BACKWARD and place in self.part_of:
                its = self.part_of[place]
                if place not in its.backward:
                    its.backward.append(place)

    def before(self) -> dict[tuple[int, str, int], int | None]:
        """For what is done for (block, name, unit), the row of its block that runs next; in the order of running.

        Rows of a block run in ascending order, so what is added must stand where it runs.
        """
        following: dict[tuple[int, int, int], int] = {}
        found: dict[tuple[int, str, int], int | None] = {}
        for item in reversed(self.items):
            if len(item) == 5:
                block, begin, _, instance, micro_batch = item
                following[block, instance, micro_batch] = begin
            else:
                (block, instance, unit), name, micro_batch = item
                found.setdefault((block, name, unit), following.get((block, instance, micro_batch)))
        return dict(reversed(found.items()))

    # -- tokens --------------------------------------------------------------------------------------------

    def _does(self, place: UnitInstance, name: str) -> bool:
        return name in self.names[place[0]][place[2]]

    def token(self, place: UnitInstance, what: str) -> tuple[UnitInstance, str] | None:
        """The unit whose token a unit waits for before it does `what`, and which; None: it does not run here."""
        part = self.part_of.get(place)
        if part is None:
            return None
        name = next(name for name, token in TOKEN_OF.items() if token == what)
        order = part.forward if what == GATHERED else part.backward
        before = order[: order.index(place)] if place in order else []
        found = [(p, what) for p in reversed(before) if self._does(p, name)]
        if what == REGATHERED:
            found += [(p, GATHERED) for p in reversed(part.forward) if self._does(p, "gather")]
        if what == REDUCED:
            found = [(p, its) for p, its in found if p != part.root]
            own = (("regather", REGATHERED), ("gather", GATHERED))
            found += [(place, its) for action, its in own if self._does(place, action)]
        return next(iter(found), (part.root, GATHERED))

    # -- calls ---------------------------------------------------------------------------------------------

    def _items(self) -> Iterator[Call | Done]:
        """The step's calls, in old rows, and what is done for its units between them."""
        left = Counter((place, call[4]) for phase, place, call in self.pieces if phase == t.Phase.BACKWARD)
        of_part = Counter(
            (self.part_of[place].root, call[4])
            for phase, place, call in self.pieces
            if phase == t.Phase.BACKWARD and place in self.part_of
        )
        gathered: set[tuple[UnitInstance, int]] = set()
        regathered: set[tuple[UnitInstance, int]] = set()
        for phase, place, call in self.pieces:
            micro_batch, part = call[4], self.part_of.get(place)
            if part is None or phase == t.Phase.OPTIMIZER:
                yield call
                continue
            if phase == t.Phase.FORWARD:
                for unit in dict.fromkeys((part.root, place)):
                    if (key := (unit, 0 if self.how.once else micro_batch)) not in gathered:
                        gathered.add(key)
                        yield from self._added(unit, ("gather", "unshard"), micro_batch)
            elif self._does(place, "regather") and (place, micro_batch) not in regathered:
                regathered.add((place, micro_batch))
                yield from self._prepare_backward(part, place, micro_batch)
            yield call
            if phase == t.Phase.BACKWARD:
                left[place, micro_batch] -= 1
                of_part[part.root, micro_batch] -= 1
                if not left[place, micro_batch] and place != part.root:
                    yield from self._backward_done(place, micro_batch)
                if not of_part[part.root, micro_batch]:
                    yield from self._part_done(part, micro_batch)

    def _prepare_backward(self, part: _Part, place: UnitInstance, micro_batch: int) -> Iterator[Done]:
        """Gathers a unit unless it ran ahead, and then the one whose backward comes next."""
        order = [p for p in part.backward if self._does(p, "regather")]
        at = order.index(place)
        if at == 0:
            yield from self._added(place, ("regather",), micro_batch)
        yield from self._added(place, ("reunshard",), micro_batch)
        if at + 1 < len(order):
            yield from self._added(order[at + 1], ("regather",), micro_batch)

    def _backward_done(self, place: UnitInstance, micro_batch: int) -> Iterator[Done]:
        """Adds up gradients and reduces them, where that is not left to the end of the part."""
        if micro_batch > self.first:
            yield from self._added(place, ("sum",), micro_batch)
        if not self.how.whole or (micro_batch == self.last and not self.staged):
            yield from self._reduced(place, micro_batch)

    def _part_done(self, part: _Part, micro_batch: int) -> Iterator[Done]:
        if self.how.whole and self.staged and micro_batch == self.last:
            for place in part.backward:
                if place != part.root:
                    yield from self._reduced(place, micro_batch)
        yield from self._backward_done(part.root, micro_batch)
        if self.how.whole and self.staged and micro_batch == self.last:
            yield from self._reduced(part.root, micro_batch)

    def _reduced(self, place: UnitInstance, micro_batch: int) -> Iterator[Done]:
        yield from self._added(place, ("reduce", "add") if micro_batch > self.first else ("reduce",), micro_batch)

    def _added(self, place: UnitInstance, names: tuple[str, ...], micro_batch: int) -> Iterator[Done]:
        yield from ((place, name, micro_batch) for name in names if self._does(place, name))

"""Where the rows of a mixture-of-experts layer are: at home on the rank whose tokens they are, or at the experts.

A tensor that is not at home is divided along one dim: one that counts rows (the ranks exchange them), or one that
counts experts (each rank holds its share of them). How an operator carries the dim on, the rules of tensor
parallelism say; here stands what is peculiar to experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from echograph.errors import PlanError
from echograph.ir.passes.tensor_parallel_placement import WHOLE, Ambiguous, Placement, Shard, Site
from echograph.ir.passes.tensor_parallel_rules import decide

GROUPED = ("_grouped_mm",)
"""Operators that multiply the rows of each expert by its weight: (rows, weights, ends of the groups of rows)."""


@dataclass(frozen=True, slots=True)
class Away:
    """Not at home, but with the experts.

    Attributes:
        along: the dim that counts rows or experts.
        experts: experts of the layer, on all ranks together.
        rows: whether the dim counts rows; else it counts experts.
    """

    along: Shard
    experts: int
    rows: bool = True

    def at(self, dim: int) -> Away:
        """The same along another dim."""
        return Away(Shard(dim), self.experts, self.rows)


Place = Away | None
"""Where a tensor is; None: at home, or whole on every rank."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Where an operation wants its inputs, and where it leaves its outputs."""

    inputs: tuple[Place, ...]
    outputs: tuple[Place, ...]

    @property
    def away(self) -> tuple[Away, ...]:
        """The places of what is away, inputs first."""
        return tuple(p for p in (*self.inputs, *self.outputs) if p is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What of the experts' work one rank has.

    Attributes:
        size: ranks that share the experts.
        imbalance: rows of the busiest rank in units of the mean.
        capacity_factor: rows that each expert takes, in units of its even share; None: whatever comes.
    """

    size: int
    imbalance: float = 1.0
    capacity_factor: float | None = None

    def sent(self, rows: int, experts: int) -> int:
        """Rows that a rank sends to all experts, for the rows that its tokens make."""
        if self.capacity_factor is None:
            return rows
        return experts * ceil(round(self.capacity_factor * rows / experts, 6))

    def received(self, rows: int, experts: int) -> int:
        """Rows that the busiest rank's experts work on, for the rows that each rank's tokens make."""
        return ceil(round(self.imbalance * self.sent(rows, experts), 6))

    def local(self, shape: tuple[int, ...], place: Place) -> tuple[int, ...]:
        """Shape of what one rank holds of a tensor with this place."""
        if place is None:
            return shape
        dim, before = place.along.dim, place.along.before
        part = shape[dim] // before
        part = self.received(part, place.experts) if place.rows else part // self.size
        return (*shape[:dim], before * part, *shape[dim + 1 :])


def grouped(site: Site, experts: int) -> Choice:
    """Rows times weights [experts, ...], or rows times rows to gradients of weights.

    Raises:
        PlanError: the operands have other dims.
    """
    ranks = tuple(len(shape) for shape in site.inputs[:2])
    share, rows = Away(Shard(0), experts, rows=False), Away(Shard(0), experts)
    if ranks not in ((2, 3), (2, 2)) or len(site.inputs) != 3:
        shapes = ", ".join(map(str, site.inputs))
        raise PlanError(f"aten.{site.name} of operands {shapes}: expert parallelism knows rows, weights and ends")
    if ranks == (2, 3):
        return Choice((rows, share, share), (rows,))
    return Choice((rows.at(1), rows, share), (share,))


def by_expert(site: Site, places: tuple[Place, ...], experts: int) -> Choice | None:
    """Rows of a table of the experts (biases), picked by the expert of each row, and the gradient of that."""
    table, rows = Away(Shard(0), experts, rows=False), Away(Shard(0), experts)
    if site.name == "index" and places == (table, None):
        return Choice((table, rows), (rows,))
    if site.name == "index_put" and len(places) == 3 and site.outputs[0][:1] == (experts,):
        return Choice((table, rows, rows), (table,))
    return None


def carry(site: Site, places: tuple[Place, ...], in_place: Place, fixed: tuple[bool, ...]) -> Choice | None:
    """What any other operator does with what is away, or None if it needs something of it at home.

    Args:
        site: the operation; its placements are made here.
        places: of its inputs.
        in_place: of the memory that an in-place operator writes.
        fixed: for each input, whether it is where it is; constants that nothing has read yet are not.
    """
    kinds = {(p.experts, p.rows) for p in (*places, in_place) if p is not None}
    if len(kinds) != 1:
        return None
    ((experts, rows),) = kinds

    def placement(place: Place) -> Placement:
        return WHOLE if place is None else place.along

    def place(placement: Placement) -> Place:
        return Away(placement, experts, rows) if isinstance(placement, Shard) else None

    try:
        decision = decide(
            Site(
                name=site.name, inputs=site.inputs, placements=tuple(map(placement, places)), outputs=site.outputs,
                in_place=None if in_place is None else in_place.along,
            )
        )  # fmt: skip
    except Ambiguous:
        return None
    made = Choice(tuple(map(place, decision.inputs)), tuple(map(place, decision.outputs)))
    stays = all(h == w or not f for h, w, f in zip(places, made.inputs, fixed, strict=True))
    complete = all(isinstance(p, Shard) or p == WHOLE for p in decision.outputs)
    return made if stays and complete and made.away else None


def before(name: str, source: tuple[int, ...], view: tuple[int, ...], place: Away) -> Away | None:
    """Where a tensor must be for a view of it to have a place: along a dim of the same extent, or None."""
    site = Site(name=name, inputs=(source,), placements=(), outputs=(view,))
    for dim, extent in enumerate(source):
        if extent == view[place.along.dim] and place.along == Shard(place.along.dim):
            made = carry(site, (place.at(dim),), None, (True,))
            if made is not None and made.outputs == (place,):
                return place.at(dim)
    return None

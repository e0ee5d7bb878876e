"""Where the parts of a tensor are, over one axis of ranks, and what a sharding rule knows and answers.

A tensor is *whole* on every rank, *sharded* along one dim, or *partial*: every rank holds a full-sized summand.
(The algebra is that of Xu et al., "GSPMD", 2021, and of torch.distributed.tensor.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from echograph.ir.types import Phase

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Whole:
    """Every rank holds all of it."""


@dataclass(frozen=True, slots=True)
class Partial:
    """Every rank holds a summand.

    Attributes:
        experts: of the outputs of experts, or of gradients of their inputs: rows in the order of experts, each to
            be weighted, put back and added up by token. Those are sums too, and fewer: they are reduced after.
    """

    experts: bool = False


@dataclass(frozen=True, slots=True)
class Shard:
    """Each rank holds a share of one dim.

    Attributes:
        dim: the dim.
        before: the dim is a merge of (before, shared, after) and the shared part is cut: a merge of batch and
            heads with sharded heads has the batch before it.
        vocab: the dim is the vocabulary, which is padded to divide.
        shares: in how many shares it is cut, if these are fewer than the ranks (key and value heads); as many
            neighbouring ranks as it takes hold the same one, and summands of its gradient. 0: one a rank.
    """

    dim: int
    before: int = 1
    vocab: bool = False
    shares: int = 0

    def at(self, dim: int, before: int | None = None) -> Shard:
        """The same sharding at another dim of another tensor."""
        return replace(self, dim=dim, before=self.before if before is None else before)

    def finest(self, shape: Shape, size: int) -> Shard:
        """One share a rank, if the dim of a tensor has that many."""
        return replace(self, shares=0) if self.shares and self.extent(shape) % size == 0 else self

    def fitting(self, shape: Shape, size: int) -> Shard:
        """As many shares as the dim of a tensor can have, if it is a divisor of the ranks."""
        extent = self.extent(shape)
        return replace(self, shares=extent) if extent % size and size % extent == 0 and not self.shares else self

    def extent(self, shape: Shape) -> int:
        """What is cut of a tensor's dim."""
        return shape[self.dim] // self.before


Placement = Whole | Partial | Shard
WHOLE, PARTIAL, EXPERTS = Whole(), Partial(), Partial(experts=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What a rule knows of an operation.

    Attributes:
        name: operator without namespace and in-place mark.
        inputs: global shapes of the inputs.
        placements: what the inputs have.
        outputs: global shapes of the outputs.
        in_place: placement of the memory that an in-place operator writes; None for any other.
        forward: placements that the forward operation wanted of its inputs; empty where there is none.
        phase: part of the step.
        size: number of ranks.
    """

    name: str
    inputs: tuple[Shape, ...]
    placements: tuple[Placement, ...]
    outputs: tuple[Shape, ...]
    in_place: Placement | None = None
    forward: tuple[Placement, ...] = ()
    phase: Phase = Phase.FORWARD
    size: int = 1

    @property
    def sharded(self) -> list[int]:
        """Inputs that are sharded, the largest first."""
        found = [i for i, p in enumerate(self.placements) if isinstance(p, Shard)]
        return sorted(found, key=lambda i: -prod(self.inputs[i]))


@dataclass(frozen=True, slots=True)
class Decision:
    """Placements that an operation wants of its inputs, and that its outputs then have."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]


class Ambiguous(Exception):
    """Two dims of equal extent, of which one is sharded, cannot be told apart."""


def view_dim(shard: Shard, source: Shape, target: Shape) -> Shard | None:
    """Where a sharding is after a view of row-major memory, or None where the view cuts across it."""
    outer = prod(source[: shard.dim]) * shard.before
    above = 1
    for dim, extent in enumerate(target):
        if above <= outer < above * extent:
            if outer % above or extent % (outer // above):
                return None
            return shard.at(dim, outer // above)
        above *= extent
    return None

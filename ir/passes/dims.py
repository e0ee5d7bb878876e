"""Dims of tensors, as the rules of operators follow them: shapes, what cannot be told apart, and views."""

from __future__ import annotations

from math import prod

Shape = tuple[int, ...]


class Ambiguous(Exception):
    """Two dims of equal extent cannot be told apart, or an operator does what no rule knows."""


def view_dim(dim: int, before: int, source: Shape, target: Shape) -> tuple[int, int] | None:
    """Where a part of a dim is after a view of row-major memory.

    Args:
        dim: the dim of `source` that holds the part.
        before: extent of what the dim merges ahead of the part.
        source: shape before the view.
        target: shape after it, of as many elements.

    Returns:
        The same two numbers in `target`; None where the view cuts across the part.
    """
    outer, above = prod(source[:dim]) * before, 1
    for number, extent in enumerate(target):
        if above <= outer < above * extent:
            inside = outer // above
            return None if outer % above or extent % inside else (number, inside)
        above *= extent
    return None

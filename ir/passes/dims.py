"""Dims of tensors, as the rules of operators follow them: shapes, what cannot be told apart, operators' factors.

A *factor* is an index of an operator's loops, by the dims of its operands that it runs over: the rows of a product
are a dim of its first operand and one of its result. Rules of placements (`tensor_parallel.rules`) and of extents
(`extent`) ask here for what an operator does to dims, and add what each of them makes of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, permutations
from math import prod

Shape = tuple[int, ...]
Factor = list[tuple[int, int]]
"""(operand, dim) of each operand that has it; operands are numbered: inputs, then outputs."""


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


def transposed(name: str, source: Shape, target: Shape) -> list[Shape]:
    """Orders in which `t`, `transpose` or `permute` may have put the dims: `target[i]` is `source[order[i]]`.

    The graph does not say which dims, their extents do. Of equal extents, nobody swaps the batch; heads and
    positions are swapped, not heads and channels.
    """
    rank = len(source)
    orders = [o for o in permutations(range(rank)) if tuple(source[i] for i in o) == target]
    if name != "permute":
        orders = [o for o in orders if sum(i != j for i, j in enumerate(o)) == 2 or rank < 2]
    likely = [o for o in orders if rank < 3 or o[0] == 0] or orders
    return [o for o in likely if rank != 4 or o == (0, 2, 1, 3)] or likely


def kept_dims(larger: Shape, smaller: Shape) -> list[Shape]:
    """Which dims of the larger shape may be those of the smaller one, in order: the others were taken away."""
    chosen = combinations(range(len(larger)), len(smaller))
    return [dims for dims in chosen if tuple(larger[i] for i in dims) == smaller]


def product_factors(shapes: Sequence[Shape], inputs: int) -> list[Factor]:
    """Matrix products: a batch of them, rows, columns, and the contraction; a bias is added by element.

    Args:
        shapes: of (bias,) left operand, right operand and result.
        inputs: how many of them are inputs.
    """
    left, right, out = inputs - 2, inputs - 1, inputs
    rank = len(shapes[left])
    if len(shapes[right]) < 2:
        return [[(left, 0), (out, 0)], [(left, rank - 1), (right, 0)]][2 - rank :]
    factors = [[(left, d), (right, d), (out, d)] for d in range(rank - 2)]
    factors += [[(left, rank - 2), (out, rank - 2)], [(right, rank - 1), (out, rank - 1)]]
    for factor in factors if left else ():
        dim = factor[-1][1] - rank + len(shapes[0])
        if dim >= 0 and shapes[0][dim] == shapes[out][factor[-1][1]]:
            factor.append((0, dim))
    return [*factors, [(left, rank - 1), (right, rank - 2)]]

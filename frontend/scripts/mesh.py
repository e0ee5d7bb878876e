"""The mesh that the groups of a run are formulas of: axes, outermost first.

A rank is the mixed-radix number of its coordinates. A group of ranks that differ along some axes is then a sum of
multiples of those axes' strides; from the strides of all groups together follow the axes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise, product
from math import prod

from echograph.errors import CaptureError


def infer(
    groups: Iterable[Sequence[int]], size: int, messages: Iterable[Sequence[int]] = ()
) -> dict[str, int] | None:
    """The axes that groups of ranks tell of; None where they are no formulas of any mesh.

    Args:
        groups: global ranks of each, as one rank sees them.
        size: of the world.
        messages: those of the groups in which single ranks send to each other.

    Returns:
        A mesh of the fewest axes that every group is some of. An axis of messages is called "pp", the only other
        one "dp"; several others "axis0", "axis1", ...
    """
    bounds = {1, size}
    for ranks in groups:
        steps = _strides(sorted(ranks))
        if steps is None:
            return None
        for stride, count in steps:
            bounds |= {stride, stride * count}
    ordered = sorted(bounds, reverse=True)
    sizes = [high // low for high, low in pairwise(ordered)]
    if prod(sizes) != size or any(high % low for high, low in pairwise(ordered)):
        return None
    numbers = dict(zip(map(str, range(len(sizes))), sizes, strict=True)) or {"0": 1}
    stages = {axis for ranks in messages for axis in axes_of(ranks, numbers) or ()}
    others = len(numbers) - len(stages)
    return {_name(axis, stages, others): extent for axis, extent in numbers.items()}


def _name(axis: str, stages: set[str], others: int) -> str:
    if axis in stages:
        return "pp" if len(stages) == 1 else f"pp{axis}"
    return "dp" if others == 1 else f"axis{axis}"


def _strides(ranks: Sequence[int]) -> list[tuple[int, int]] | None:
    """(stride, count) of each level of a set of ranks, innermost first; None where they are not regular."""
    found: list[tuple[int, int]] = []
    while len(ranks) > 1:
        stride = ranks[1] - ranks[0]
        count = 1
        while count < len(ranks) and ranks[count] - ranks[0] == stride * count:
            count += 1
        if len(ranks) % count or count == 1:
            return None
        rows = [ranks[i : i + count] for i in range(0, len(ranks), count)]
        if any(rank - row[0] != stride * i for row in rows for i, rank in enumerate(row)):
            return None
        found.append((stride, count))
        ranks = [row[0] for row in rows]
    return found


def axes_of(ranks: Sequence[int], mesh: Mapping[str, int]) -> tuple[str, ...] | None:
    """The axes along which the ranks of a group differ; None where it is not all ranks of some axes.

    Args:
        ranks: global.
        mesh: axes and sizes, outermost first.
    """
    return _axes_of(tuple(ranks), tuple(mesh.items()))


@lru_cache(maxsize=256)
def _axes_of(ranks: tuple[int, ...], mesh: tuple[tuple[str, int], ...]) -> tuple[str, ...] | None:
    # A group is asked for at each of its calls, and may have all ranks of a large world.
    sizes = dict(mesh)
    places = [place_of(rank, sizes) for rank in ranks]
    varied = [len({place[name] for place in places}) for name in sizes]
    if prod(varied) != len(ranks) or any(
        n not in (1, size) for n, size in zip(varied, sizes.values(), strict=True)
    ):
        return None
    found = tuple(name for name, count in zip(sizes, varied, strict=True) if count > 1)
    # A group of one rank lies along an axis of one.
    return found or tuple(name for name, size in sizes.items() if size == 1)[-1:]


def place_of(rank: int, mesh: Mapping[str, int]) -> dict[str, int]:
    """Coordinates of a rank."""
    place: dict[str, int] = {}
    for name, size in reversed(list(mesh.items())):
        rank, place[name] = divmod(rank, size)
    return {name: place[name] for name in mesh}


def standing_for(ranks: Sequence[int], mesh: Mapping[str, int]) -> list[dict[str, int]]:
    """The fixed coordinates of each of some ranks, such that together they stand for all ranks once.

    Args:
        ranks: those that were captured.
        mesh: axes and sizes, outermost first.

    Raises:
        CaptureError: there is no choice of axes of which they have each place once.
    """
    places = [place_of(rank, mesh) for rank in ranks]
    names = list(mesh)
    for chosen in sorted(product((False, True), repeat=len(names)), key=sum):
        fixed = [name for name, taken in zip(names, chosen, strict=True) if taken]
        if prod(mesh[name] for name in fixed) == len(ranks):
            found = {tuple(place[name] for name in fixed) for place in places}
            if len(found) == len(ranks):
                return [{name: place[name] for name in fixed} for place in places]
    shown = ", ".join(f"{name}={size}" for name, size in mesh.items())
    raise CaptureError(
        f"--ranks {','.join(map(str, ranks))}: these do not stand for all ranks of the mesh {shown}: give one "
        "rank for each place on some of its axes, or leave --ranks out"
    )


def crossed(rank: int, peer: int, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The axes on which two ranks differ."""
    here, there = place_of(rank, mesh), place_of(peer, mesh)
    return tuple(axis for axis in mesh if here[axis] != there[axis])


def offset(rank: int, peer: int, mesh: Mapping[str, int]) -> int:
    """How far behind a rank another one stands in their group along the axes on which they differ."""
    here, there, behind = place_of(rank, mesh), place_of(peer, mesh), 0
    for axis in crossed(rank, peer, mesh):
        behind = behind * mesh[axis] + there[axis] - here[axis]
    return behind

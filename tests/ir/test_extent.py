"""Following an extent: views against numpy, and the rules that shapes alone decide."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from echograph.ir.passes.extent import RULES, Ambiguous, Place, Shape, Site, elementwise, follow, view_place

EXTENTS = st.lists(st.sampled_from([1, 2, 3, 5, 7]), min_size=1, max_size=4).map(tuple)
SIZE = 4


def members(shape: Shape, place: Place) -> np.ndarray:
    """Of each element, which of the SIZE parts of the extent it is of, by what a place says."""
    after = shape[place.dim] // place.before // SIZE
    index = np.arange(shape[place.dim]) // after % SIZE
    return np.broadcast_to(index.reshape([-1 if i == place.dim else 1 for i in range(len(shape))]), shape)


@st.composite
def views(draw: st.DrawFn) -> tuple[Place, Shape, Shape]:
    """A tensor with the extent in one of its dims, and a row-major view of it."""
    shape = draw(EXTENTS)
    dim = draw(st.integers(0, len(shape) - 1))
    before = draw(st.sampled_from([1, 2, 3]))
    source = (*shape[:dim], before * SIZE * shape[dim], *shape[dim + 1 :])
    factors = [*source[:dim], before, SIZE, shape[dim], *source[dim + 1 :]]
    edges = sorted({0, len(factors), *draw(st.sets(st.integers(1, len(factors) - 1)))})
    target = tuple(prod(factors[a:b]) for a, b in pairwise(edges))
    return Place(dim, before), source, target


@given(views())
def test_a_view_keeps_every_element_in_its_part(case: tuple[Place, Shape, Shape]) -> None:
    place, source, target = case
    moved = view_place(place, source, target)
    assume(moved is not None)
    assert moved is not None
    assert np.array_equal(members(source, place).reshape(target), members(target, moved))


@given(views())
def test_a_view_that_merges_is_followed_back(case: tuple[Place, Shape, Shape]) -> None:
    place, source, target = case
    moved = view_place(place, source, target)
    assume(moved is not None and all(e > 1 for e in source))
    assert moved is not None
    assert view_place(moved, target, source) == place


def found(name: str, shapes: list[Shape], inputs: int, at: int, place: Place, **site: object) -> dict[int, Place]:
    made = Site(name=name, shapes=tuple(shapes), inputs=inputs, least=4, **site)  # type: ignore[arg-type]
    return dict(follow(made, at, place))


def test_a_sum_over_samples_is_of_no_sample() -> None:
    assert found("sum", [(4, 64, 32), (1, 64, 32)], 1, 0, Place(0)) == {}
    assert found("mm", [(32, 4 * 64), (4 * 64, 16), (32, 16)], 2, 0, Place(1)) == {1: Place(0)}


def test_what_is_added_to_samples_is_of_samples_unless_it_broadcasts() -> None:
    shapes = [(4, 8, 16), (8, 16), (4, 8, 16), (4, 8, 16)]
    assert found("add", shapes, 3, 3, Place(0)) == {0: Place(0), 2: Place(0)}


def test_sequences_of_queries_and_of_keys_are_two() -> None:
    q, k = (2, 8, 64, 16), (2, 2, 64, 16)
    shapes = [q, k, k, q, (2, 8, 64)]
    name = "_scaled_dot_product_flash_attention"
    assert found(name, shapes, 3, 0, Place(2), positions=True) == {3: Place(2), 4: Place(2)}
    assert found(name, shapes, 3, 1, Place(2), positions=True) == {2: Place(2)}
    assert found(name, shapes, 3, 1, Place(0)) == {i: Place(0) for i in (0, 2, 3, 4)}


def test_padded_labels_keep_their_padding() -> None:
    assert found("constant_pad_nd", [(2, 64), (2, 65)], 1, 0, Place(1)) == {1: Place(1, extra=1)}
    assert found("slice", [(2, 65), (2, 64)], 1, 0, Place(1, extra=1)) == {1: Place(1)}


def test_a_scatter_over_an_axis_is_not_a_cut() -> None:
    assert found("slice", [(2, 64, 8), (2, 16, 8)], 1, 0, Place(1), parts=(4,)) == {1: Place(1)}
    assert found("collective all_gather", [(2, 16, 8), (2, 64, 8)], 1, 0, Place(1), parts=(4,)) == {1: Place(1)}


@pytest.mark.parametrize(
    ("name", "shapes", "inputs", "place"),
    [
        ("sum", [(4, 4, 8), (4, 8)], 1, Place(0)),
        ("cat", [(4, 8), (4, 8), (8, 8)], 2, Place(0)),
        ("unheard_of", [(4, 8), (2, 8)], 1, Place(0)),
        ("view", [(6, 4), (8, 3)], 1, Place(1)),
        ("view", [(4, 6), (2, 2, 6)], 1, Place(0)),
    ],
)
def test_what_shapes_do_not_say_is_ambiguous(name: str, shapes: list[Shape], inputs: int, place: Place) -> None:
    with pytest.raises(Ambiguous):
        found(name, shapes, inputs, 0, place)


def test_an_operator_without_a_rule_is_taken_element_by_element() -> None:
    assert "unheard_of" not in RULES
    site = Site(name="unheard_of", shapes=((4, 8), (4, 8)), inputs=1)
    assert list(follow(site, 0, Place(0))) == list(elementwise(site, 0, Place(0))) == [(1, Place(0))]

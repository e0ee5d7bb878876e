"""Following an extent: views against numpy, and each operator's rule on every dim of all of its operands."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from echograph.ir.passes.dims import Ambiguous, Shape
from echograph.ir.passes.extent import (
    RULES,
    ExtentDim,
    OpShapes,
    elementwise,
    follow,
    view_place,
)

EXTENTS = st.lists(st.sampled_from([1, 2, 3, 5, 7]), min_size=1, max_size=4).map(tuple)
SIZE = 4


def members(shape: Shape, place: ExtentDim) -> np.ndarray:
    """Of each element, which of the SIZE parts of the extent it is of, by what a place says."""
    after = shape[place.dim] // place.before // SIZE
    index = np.arange(shape[place.dim]) // after % SIZE
    return np.broadcast_to(index.reshape([-1 if i == place.dim else 1 for i in range(len(shape))]), shape)


@st.composite
def views(draw: st.DrawFn) -> tuple[ExtentDim, Shape]:
    """A tensor with the extent in one of its dims, and a row-major view of it."""
    shape = draw(EXTENTS)
    dim = draw(st.integers(0, len(shape) - 1))
    before = draw(st.sampled_from([1, 2, 3]))
    source = (*shape[:dim], before * SIZE * shape[dim], *shape[dim + 1 :])
    factors = [*source[:dim], before, SIZE, shape[dim], *source[dim + 1 :]]
    edges = sorted({0, len(factors), *draw(st.sets(st.integers(1, len(factors) - 1)))})
    target = tuple(prod(factors[a:b]) for a, b in pairwise(edges))
    return ExtentDim(dim, before), source, target


@given(views())
def test_a_view_keeps_every_element_in_its_part(case: tuple[ExtentDim, Shape]) -> None:
    place, source, target = case
    moved = view_place(place, source, target)
    assume(moved is not None)
    assert moved is not None
    assert np.array_equal(members(source, place).reshape(target), members(target, moved))


@given(views())
def test_a_view_that_merges_is_followed_back(case: tuple[ExtentDim, Shape]) -> None:
    place, source, target = case
    moved = view_place(place, source, target)
    assume(moved is not None and all(e > 1 for e in source))
    assert moved is not None
    assert view_place(moved, target, source) == place


def found(
    name: str, shapes: list[Shape], inputs: int, at: int, place: ExtentDim, **site: object
) -> dict[int, ExtentDim]:
    made = OpShapes(name=name, shapes=tuple(shapes), inputs=inputs, least=4, **site)  # type: ignore[arg-type]
    return dict(follow(made, at, place))


def test_a_sum_over_samples_is_of_no_sample() -> None:
    assert found("sum", [(4, 64, 32), (1, 64, 32)], 1, 0, ExtentDim(0)) == {}
    assert found("mm", [(32, 4 * 64), (4 * 64, 16), (32, 16)], 2, 0, ExtentDim(1)) == {1: ExtentDim(0)}


def test_what_is_added_to_samples_is_of_samples_unless_it_broadcasts() -> None:
    shapes = [(4, 8, 16), (8, 16), (4, 8, 16), (4, 8, 16)]
    assert found("add", shapes, 3, 3, ExtentDim(0)) == {0: ExtentDim(0), 2: ExtentDim(0)}


def test_sequences_of_queries_and_of_keys_are_two() -> None:
    q, k = (2, 8, 64, 16), (2, 2, 64, 16)
    shapes = [q, k, k, q, (2, 8, 64)]
    name = "_scaled_dot_product_flash_attention"
    assert found(name, shapes, 3, 0, ExtentDim(2), positions=True) == {3: ExtentDim(2), 4: ExtentDim(2)}
    assert found(name, shapes, 3, 1, ExtentDim(2), positions=True) == {2: ExtentDim(2)}
    assert found(name, shapes, 3, 1, ExtentDim(0)) == {i: ExtentDim(0) for i in (0, 2, 3, 4)}


def test_padded_labels_keep_their_padding() -> None:
    assert found("constant_pad_nd", [(2, 64), (2, 65)], 1, 0, ExtentDim(1)) == {1: ExtentDim(1, extra=1)}
    assert found("slice", [(2, 65), (2, 64)], 1, 0, ExtentDim(1, extra=1)) == {1: ExtentDim(1)}


def test_a_scatter_over_an_axis_is_not_a_cut() -> None:
    assert found("slice", [(2, 64, 8), (2, 16, 8)], 1, 0, ExtentDim(1), parts=(4,)) == {1: ExtentDim(1)}
    assert found("collective all_gather", [(2, 16, 8), (2, 64, 8)], 1, 0, ExtentDim(1), parts=(4,)) == {
        1: ExtentDim(1)
    }


@pytest.mark.parametrize(
    ("name", "shapes", "inputs", "place"),
    [
        ("sum", [(4, 4, 8), (4, 8)], 1, ExtentDim(0)),
        ("cat", [(4, 8), (4, 8), (8, 8)], 2, ExtentDim(0)),
        ("unheard_of", [(4, 8), (2, 8)], 1, ExtentDim(0)),
        ("view", [(6, 4), (8, 3)], 1, ExtentDim(1)),
        ("view", [(4, 6), (2, 2, 6)], 1, ExtentDim(0)),
    ],
)
def test_what_shapes_do_not_say_is_ambiguous(
    name: str, shapes: list[Shape], inputs: int, place: ExtentDim
) -> None:
    with pytest.raises(Ambiguous):
        found(name, shapes, inputs, 0, place)


def test_an_operator_without_a_rule_is_taken_element_by_element() -> None:
    assert "unheard_of" not in RULES
    site = OpShapes(name="unheard_of", shapes=((4, 8), (4, 8)), inputs=1)
    assert list(follow(site, 0, ExtentDim(0))) == list(elementwise(site, 0, ExtentDim(0))) == [(1, ExtentDim(0))]


@pytest.mark.parametrize(
    ("source", "target", "place", "moved"),
    [
        ((4, 8), (32,), ExtentDim(0), ExtentDim(0)),
        ((4, 8), (32,), ExtentDim(1), ExtentDim(0, 4)),
        ((32,), (4, 8), ExtentDim(0, 4), ExtentDim(1)),
        ((2, 3, 8), (6, 8), ExtentDim(1), ExtentDim(0, 2)),
        ((6, 8), (2, 3, 8), ExtentDim(0, 2), ExtentDim(1)),
        ((2, 8, 5), (2, 4, 10), ExtentDim(1), ExtentDim(1)),
        ((2, 3, 4), (4, 6), ExtentDim(2), None),  # begins within a dim's step
        ((3, 8), (4, 6), ExtentDim(1), None),  # does not divide the dim that it begins in
        ((4, 1), (4,), ExtentDim(1), None),  # nothing is left for it
        ((1, 4), (4,), ExtentDim(0), ExtentDim(0)),
        ((5, 4), (5, 1, 4), ExtentDim(1), ExtentDim(2)),
    ],
)
def test_where_a_view_has_an_extent(
    source: Shape, target: Shape, place: ExtentDim, moved: ExtentDim | None
) -> None:
    assert view_place(place, source, target) == moved


Dim = tuple[int, int]
"""An operand, and one of its dims."""
Q, K, LSE = (2, 8, 64, 16), (2, 4, 32, 16), (2, 8, 64)
FLASH = "_scaled_dot_product_flash_attention"

SHARED: list[tuple[str, list[Shape], int, list[set[Dim]]]] = [
    ("add", [(4, 8, 3), (8, 3), (4, 8, 3)], 2,
     [{(0, 0), (2, 0)}, {(0, 1), (1, 0), (2, 1)}, {(0, 2), (1, 1), (2, 2)}]),
    ("expand", [(1, 8), (5, 8)], 1, [{(0, 1), (1, 1)}]),
    ("expand", [(8,), (5, 8)], 1, [{(0, 0), (1, 1)}]),
    ("expand", [(8, 1), (8, 6)], 1, [{(0, 0), (1, 0)}]),
    ("t", [(5, 7), (7, 5)], 1, [{(0, 0), (1, 1)}, {(0, 1), (1, 0)}]),
    ("t", [(6, 6), (6, 6)], 1, [{(0, 0), (1, 1)}, {(0, 1), (1, 0)}]),
    ("t", [(5,), (5,)], 1, [{(0, 0), (1, 0)}]),
    ("transpose", [(3, 6, 6), (3, 6, 6)], 1, [{(0, 0), (1, 0)}, {(0, 1), (1, 2)}, {(0, 2), (1, 1)}]),
    ("transpose", [(6, 6, 3), (6, 6, 3)], 1, [{(0, 0), (1, 1)}, {(0, 1), (1, 0)}, {(0, 2), (1, 2)}]),
    ("transpose", [(6, 6, 6, 6)] * 2, 1, [{(0, 0), (1, 0)}, {(0, 1), (1, 2)}, {(0, 2), (1, 1)}, {(0, 3), (1, 3)}]),
    ("permute", [(2, 3, 5), (5, 2, 3)], 1, [{(0, 0), (1, 1)}, {(0, 1), (1, 2)}, {(0, 2), (1, 0)}]),
    ("permute", [(2, 3, 4, 5), (3, 2, 5, 4)], 1, [{(0, d), (1, (1, 0, 3, 2)[d])} for d in range(4)]),
    ("_softmax", [(4, 8), (4, 8)], 1, [{(0, 0), (1, 0)}, {(0, 1), (1, 1)}]),
    ("topk", [(5, 8), (5, 2), (5, 2)], 1, [{(0, 0), (1, 0), (2, 0)}, {(1, 1), (2, 1)}]),
    ("native_layer_norm", [(5, 7, 8), (8,), (8,), (5, 7, 8), (5, 7, 1), (5, 7, 1)], 3,
     [{(0, 0), (3, 0), (4, 0), (5, 0)}, {(0, 1), (3, 1), (4, 1), (5, 1)}, {(0, 2), (3, 2)}, {(1, 0), (2, 0)},
      {(4, 2), (5, 2)}]),
    ("select", [(4, 9, 16), (4, 16)], 1, [{(0, 0), (1, 0)}, {(0, 2), (1, 1)}]),
    ("select", [(4, 4, 16), (4, 16)], 1, [{(0, 0), (1, 0)}, {(0, 2), (1, 1)}]),
    ("select", [(9, 4, 16), (4, 16)], 1, [{(0, 1), (1, 0)}, {(0, 2), (1, 1)}]),
    ("select_backward", [(4, 16), (4, 9, 16)], 1, [{(1, 0), (0, 0)}, {(1, 2), (0, 1)}]),
    ("unbind", [(2, 5, 7), (5, 7), (5, 7)], 1, [{(0, 1), (1, 0), (2, 0)}, {(0, 2), (1, 1), (2, 1)}]),
    ("stack", [(5, 7), (5, 7), (2, 5, 7)], 2, [{(2, 1), (0, 0), (1, 0)}, {(2, 2), (0, 1), (1, 1)}]),
    ("sum", [(5, 7, 9), (5, 9)], 1, [{(0, 0), (1, 0)}, {(0, 2), (1, 1)}]),
    ("sum", [(5, 7), ()], 1, []),
    ("mean", [(5, 7, 9), (5, 1, 9)], 1, [{(0, 0), (1, 0)}, {(0, 2), (1, 2)}]),
    ("max", [(5, 7), (5,), (5,)], 1, [{(0, 0), (1, 0)}, {(0, 0), (2, 0)}]),
    ("mm", [(5, 7), (7, 9), (5, 9)], 2, [{(0, 0), (2, 0)}, {(0, 1), (1, 0)}, {(1, 1), (2, 1)}]),
    ("addmm", [(9,), (5, 7), (7, 9), (5, 9)], 3, [{(1, 0), (3, 0)}, {(1, 1), (2, 0)}, {(0, 0), (2, 1), (3, 1)}]),
    ("addmm", [(5, 9), (5, 7), (7, 9), (5, 9)], 3,
     [{(0, 0), (1, 0), (3, 0)}, {(1, 1), (2, 0)}, {(0, 1), (2, 1), (3, 1)}]),
    ("bmm", [(3, 5, 7), (3, 7, 9), (3, 5, 9)], 2,
     [{(0, 0), (1, 0), (2, 0)}, {(0, 1), (2, 1)}, {(0, 2), (1, 1)}, {(1, 2), (2, 2)}]),
    ("baddbmm", [(3, 5, 9), (3, 5, 7), (3, 7, 9), (3, 5, 9)], 3,
     [{(0, 0), (1, 0), (2, 0), (3, 0)}, {(0, 1), (1, 1), (3, 1)}, {(1, 2), (2, 1)}, {(0, 2), (2, 2), (3, 2)}]),
    ("mv", [(5, 7), (7,), (5,)], 2, [{(0, 0), (2, 0)}, {(0, 1), (1, 0)}]),
    ("dot", [(5,), (5,), ()], 2, [{(0, 0), (1, 0)}]),
    ("_grouped_mm", [(12, 7), (3, 7, 9), (3,), (12, 9)], 3, [{(0, 0), (3, 0)}]),
    ("_grouped_mm", [(7, 12), (12, 9), (3,), (3, 7, 9)], 3, [{(0, 1), (1, 0)}]),
    ("convolution", [(5, 3, 8, 8), (9, 3, 3, 3), (9,), (5, 9, 6, 6)], 3, [{(0, 0), (3, 0)}]),
    ("convolution_backward", [(5, 9, 6, 6), (5, 3, 8, 8), (9, 3, 3, 3), (5, 3, 8, 8), (9, 3, 3, 3), (9,)], 3,
     [{(0, 0), (1, 0), (3, 0)}]),
    # Weights that look like the images are none.
    ("convolution_backward", [(5, 5, 1, 1), (5, 3, 3, 3), (5, 3, 3, 3), (5, 3, 3, 3), (5, 3, 3, 3)], 3,
     [{(0, 0), (1, 0), (3, 0)}]),
    (FLASH, [Q, K, K, Q, LSE], 3, [{(i, 0) for i in range(5)}, {(0, 1), (3, 1), (4, 1)}, {(1, 1), (2, 1)}]),
    ("nll_loss_forward", [(12, 50), (12,), (), ()], 2, [{(0, 0), (1, 0)}]),
    ("nll_loss_backward", [(), (12, 50), (12,), (), (12, 50)], 4, [{(1, 0), (2, 0), (4, 0)}]),
    ("embedding", [(50, 8), (5, 7), (5, 7, 8)], 2, [{(1, 0), (2, 0)}, {(1, 1), (2, 1)}]),
    ("embedding_dense_backward", [(5, 7, 8), (5, 7), (50, 8)], 2, [{(0, 0), (1, 0)}, {(0, 1), (1, 1)}]),
    ("index", [(50, 8), (5,), (5, 8)], 2, [{(1, 0), (2, 0)}, {(0, 1), (2, 1)}]),
    ("index", [(3, 50, 8), (5,), (3, 5, 8)], 2, [{(0, 0), (2, 0)}, {(1, 0), (2, 1)}, {(0, 2), (2, 2)}]),
    ("index", [(50, 60, 8), (5, 7), (7,), (5, 7, 8)], 3,
     [{(1, 0), (3, 0)}, {(1, 1), (2, 0), (3, 1)}, {(0, 2), (3, 2)}]),
    ("index_put", [(50, 8), (5,), (5, 8), (50, 8)], 3,
     [{(1, 0), (2, 0)}, {(0, 0), (3, 0)}, {(0, 1), (3, 1)}, {(2, 1), (3, 1)}]),
    ("index_put", [(5,), (5, 8), (50, 8)], 2, [{(0, 0), (1, 0)}, {(1, 1), (2, 1)}]),
    ("index_put", [(5,), (5,), (5,)], 2, [{(0, 0), (1, 0)}]),
    ("histc", [(12,), (12,)], 1, []),
    ("collective all_reduce", [(5, 7), (5, 7)], 1, [{(0, 0), (1, 0)}, {(0, 1), (1, 1)}]),
]  # fmt: skip
"""Operator, shapes of its operands, how many are inputs, and which dims are of one extent."""


@pytest.mark.parametrize(("name", "shapes", "inputs", "shared"), SHARED, ids=[case[0] for case in SHARED])
def test_which_dims_are_of_one_extent(name: str, shapes: list[Shape], inputs: int, shared: list[set[Dim]]) -> None:
    for operand, shape in enumerate(shapes):
        for dim in range(len(shape)):
            here = (operand, dim)
            alike = {there for group in shared if here in group for there in group}
            others = {other: ExtentDim(d) for other, d in alike if other != operand}
            site = OpShapes(name=name, shapes=tuple(shapes), inputs=inputs)
            assert dict(follow(site, operand, ExtentDim(dim))) == others, here


def test_which_positions_are_of_queries_and_which_of_keys() -> None:
    """Backward: gradient, query, key, value, output, statistics -> gradients of query, key and value."""
    forward, backward = [Q, K, K, Q, LSE], [Q, Q, K, K, Q, LSE, Q, K, K]
    for name, shapes, inputs, keys in (
        (FLASH, forward, 3, {1, 2}),
        (f"{FLASH}_backward", backward, 6, {2, 3, 7, 8}),
    ):
        for at in range(len(shapes)):
            alike = {i: ExtentDim(2) for i in range(len(shapes)) if (i in keys) == (at in keys) and i != at}
            assert found(name, shapes, inputs, at, ExtentDim(2), positions=True) == alike
            assert found(name, shapes, inputs, at, ExtentDim(1), positions=True) == {}


@pytest.mark.parametrize(
    ("name", "shapes", "place", "parts", "expected"),
    [
        ("slice", [(2, 64), (2, 16)], ExtentDim(1), (2, 4), ExtentDim(1)),
        ("slice", [(2, 64), (2, 16)], ExtentDim(1), (2,), ExtentDim(1, extra=-48)),
        ("slice", [(2, 64), (2, 63)], ExtentDim(1, extra=2), (), ExtentDim(1, extra=1)),
        ("slice", [(2, 64), (2, 0)], ExtentDim(1), (), ExtentDim(1, extra=-64)),
        ("slice", [(2, 64), (2, 16)], ExtentDim(1, before=2), (4,), ExtentDim(1, before=2)),
        ("slice_backward", [(2, 16), (2, 64)], ExtentDim(1), (4,), ExtentDim(1)),
        ("_softmax", [(2, 64), (2, 16)], ExtentDim(1), (4,), None),
        ("collective reduce_scatter", [(64, 2), (16, 2)], ExtentDim(0), (4,), ExtentDim(0)),
    ],
)
def test_what_is_cut_or_padded(
    name: str, shapes: list[Shape], place: ExtentDim, parts: tuple[int, ...], expected: ExtentDim | None
) -> None:
    there = found(name, shapes, 1, 0, place, parts=parts)
    assert there == ({1: expected} if expected else {})
    # Nothing tells how much was cut off, or added, of what a cut or padded tensor is known to hold.
    back = found(name, shapes, 1, 1, place, parts=parts)
    assert back == ({0: place} if expected and expected == place else {})


def test_a_view_of_one_shape_keeps_the_place_as_it_is() -> None:
    place = ExtentDim(0, before=2, extra=1)
    assert found("view", [(17, 4), (17, 4)], 1, 0, place) == {1: place}
    assert found("view", [(17, 4), (17, 4)], 1, 1, place) == {0: place}


def test_a_view_may_not_leave_less_of_the_extent_than_there_is() -> None:
    shapes: list[Shape] = [(8, 6), (2, 4, 6)]
    for least, at, expected in ((2, 0, {1: ExtentDim(0)}), (2, 1, {0: ExtentDim(0)}), (8, 1, {0: ExtentDim(0)})):
        site = OpShapes(name="view", shapes=tuple(shapes), inputs=1, least=least)
        assert dict(follow(site, at, ExtentDim(0))) == expected
    with pytest.raises(Ambiguous):
        list(follow(OpShapes(name="view", shapes=tuple(shapes), inputs=1, least=4), 0, ExtentDim(0)))
    odd = OpShapes(name="view", shapes=((3, 5), (15,)), inputs=1)
    assert dict(follow(odd, 0, ExtentDim(1))) == {1: ExtentDim(0, before=3)}


@pytest.mark.parametrize(
    ("name", "shapes", "inputs", "at", "place"),
    [
        ("permute", [(6, 6), (6, 6)], 1, 0, ExtentDim(0)),
        ("view", [(17, 4), (68,)], 1, 0, ExtentDim(0, extra=1)),
        ("select", [(9, 4, 4), (9, 4)], 1, 0, ExtentDim(1)),
        ("select", [(9, 4, 4), (9, 4)], 1, 1, ExtentDim(1)),
        ("sum", [(4, 4, 9), (4, 9)], 1, 1, ExtentDim(0)),
        ("split", [(8, 5), (4, 5), (4, 5)], 1, 1, ExtentDim(0)),
        ("slice", [(64, 2), (63, 2)], 1, 0, ExtentDim(0, before=2)),
        ("collective all_gather", [(16, 2), (64, 2)], 1, 0, ExtentDim(0)),
        ("add", [(4, 8), (4, 8), (4, 9)], 2, 0, ExtentDim(1)),
    ],
)
def test_extents_that_cannot_be_told_apart(
    name: str, shapes: list[Shape], inputs: int, at: int, place: ExtentDim
) -> None:
    with pytest.raises(Ambiguous):
        found(name, shapes, inputs, at, place)


def test_pieces_of_the_extent_itself_are_not_followed() -> None:
    pieces: list[Shape] = [(0,), (5, 7), (5, 7), (5, 14)]
    assert found("cat", pieces, 3, 1, ExtentDim(0)) == {2: ExtentDim(0), 3: ExtentDim(0)}
    with pytest.raises(Ambiguous):
        found("cat", pieces, 3, 1, ExtentDim(1))

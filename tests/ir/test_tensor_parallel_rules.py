"""How every operator carries a sharding on: what it wants of its inputs, and what its outputs then have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from echograph.ir import types as t
from echograph.ir.passes.dims import Ambiguous, Shape
from echograph.ir.passes.tensor_parallel.rules import (
    EXPERTS,
    PARTIAL,
    WHOLE,
    Decision,
    OpSchema,
    Placement,
    Shard,
    decide,
)


@pytest.mark.parametrize(
    ("source", "target", "before", "after"),
    [
        (Shard(2), Shard(1), (2, 8, 64), (16, 64)),
        (Shard(2), Shard(2), (2, 8, 64), (2, 8, 4, 16)),
        (Shard(2), Shard(2), (2, 8, 4, 16), (2, 8, 64)),
        (Shard(1), Shard(0, before=2), (2, 4, 8, 16), (8, 8, 16)),
        (Shard(0, before=2), Shard(1), (8, 8, 16), (2, 4, 8, 16)),
        (Shard(1), Shard(2), (2, 4, 8), (2, 1, 4, 8)),
        (Shard(1), Shard(0, before=2), (2, 6), (4, 3)),
        (Shard(1), None, (2, 6), (3, 4)),
    ],
)
def test_a_view_keeps_what_is_cut(source: Shard, target: Shard | None, before: Shape, after: Shape) -> None:
    assert source.viewed(before, after) == target


def _product(a: Placement, b: Placement) -> Decision:
    return decide(OpSchema(name="mm", inputs=((8, 4), (4, 6)), placements=(a, b), outputs=((8, 6),)))


@pytest.mark.parametrize(
    ("a", "b", "wanted", "made"),
    [
        (WHOLE, Shard(1), (WHOLE, Shard(1)), Shard(1)),
        (Shard(1), Shard(0), (Shard(1), Shard(0)), PARTIAL),
        (WHOLE, Shard(0), (Shard(1), Shard(0)), PARTIAL),
        (Shard(0), WHOLE, (Shard(0), WHOLE), Shard(0)),
        (Shard(0, 2), Shard(1), (WHOLE, Shard(1)), Shard(1)),
        (Shard(0), Shard(0, 2), (Shard(0), WHOLE), Shard(0)),
        (PARTIAL, WHOLE, (WHOLE, WHOLE), WHOLE),
    ],
)
def test_a_product_is_cut_along_rows_columns_or_the_contraction(
    a: Placement, b: Placement, wanted: tuple[Placement, ...], made: Placement
) -> None:
    assert _product(a, b) == Decision(wanted, (made,))


def test_an_unknown_operator_wants_everything_whole() -> None:
    site = OpSchema(name="cumsum", inputs=((8, 4),), placements=(Shard(1),), outputs=((8, 4),))
    assert decide(site) == Decision((WHOLE,), (WHOLE,))


def test_nonlinear_operators_want_sums_and_gradients_add_up_as_summands() -> None:
    site = OpSchema(name="gelu", inputs=((8, 4),), placements=(PARTIAL,), outputs=((8, 4),))
    assert decide(site) == Decision((WHOLE,), (WHOLE,))
    both = OpSchema(name="add", inputs=((8, 4),) * 2, placements=(PARTIAL, WHOLE), outputs=((8, 4),))
    assert decide(both).outputs == (WHOLE,)
    assert decide(replace(both, phase=t.Phase.BACKWARD)).outputs == (PARTIAL,)


def test_a_swap_of_equal_extents_is_refused_when_it_matters() -> None:
    site = OpSchema(
        name="transpose", inputs=((4, 4, 4, 4, 4),), placements=(Shard(1),), outputs=((4, 4, 4, 4, 4),)
    )
    with pytest.raises(Ambiguous):
        decide(site)


# -- every rule: operator, inputs, what they have, outputs; what is wanted and made ----------------------------

W, P, E = WHOLE, PARTIAL, EXPERTS
S = Shard
BACKWARD = {"phase": t.Phase.BACKWARD}
Q, KV, LSE = (2, 8, 64, 16), (2, 4, 64, 16), (2, 8, 64)
FLASH = "_scaled_dot_product_flash_attention"
NORM = [(2, 5, 8), (8,), (8,)]
Row = tuple[str, list[Shape], list[Placement], list[Shape], list[Placement], list[Placement]]

VIEWED: list[Row] = [
    ("view", [(4, 6)], [S(0)], [(2, 2, 6)], [S(0)], [S(0)]),
    ("view", [(4, 6)], [S(1)], [(24,)], [S(1)], [S(0, 4)]),
    ("view", [(4, 6)], [P], [(24,)], [P], [P]),
    ("view", [(4, 6)], [W], [(24,)], [W], [W]),
    ("view", [(3, 4)], [S(1)], [(2, 6)], [W], [W]),
    ("alias", [(4, 6)], [S(1)], [(4, 6)], [S(1)], [S(1)]),
    ("t", [(5, 7)], [S(0)], [(7, 5)], [S(0)], [S(1)]),
    ("t", [(5, 7)], [P], [(7, 5)], [P], [P]),
    ("t", [(6, 6)], [S(1)], [(6, 6)], [S(1)], [S(0)]),
    ("transpose", [(2, 6, 6)], [S(1)], [(2, 6, 6)], [S(1)], [S(2)]),
    ("transpose", [(6, 6, 2)], [S(1)], [(6, 6, 2)], [S(1)], [S(0)]),
    ("transpose", [(6, 6, 6, 6)], [S(1)], [(6, 6, 6, 6)], [S(1)], [S(2)]),
    ("transpose", [(6, 6, 6, 6)], [S(3)], [(6, 6, 6, 6)], [S(3)], [S(3)]),
    ("permute", [(2, 3, 5)], [S(0)], [(5, 2, 3)], [S(0)], [S(1)]),
    ("permute", [(2, 3, 5)], [S(2)], [(5, 2, 3)], [S(2)], [S(0)]),
    ("select", [(4, 9, 16)], [S(2)], [(4, 16)], [S(2)], [S(1)]),
    ("select", [(4, 9, 16)], [S(0)], [(4, 16)], [S(0)], [S(0)]),
    ("select", [(4, 9, 16)], [S(1)], [(4, 16)], [W], [W]),
    ("select", [(4, 4, 16)], [S(1)], [(4, 16)], [W], [W]),
    ("select", [(4, 9, 16)], [P], [(4, 16)], [P], [P]),
    ("unbind", [(3, 4, 6)], [S(2)], [(4, 6)] * 3, [S(2)], [S(1)] * 3),
    ("select_backward", [(4, 16)], [S(1)], [(4, 9, 16)], [S(1)], [S(2)]),
    ("select_backward", [(4, 16)], [S(0)], [(4, 4, 16)], [W], [W]),
    ("select_backward", [(4, 16)], [P], [(4, 9, 16)], [W], [W]),
    ("split", [(4, 6)], [S(0)], [(4, 3)] * 2, [S(0)], [S(0)] * 2),
    ("split", [(4, 6)], [S(1)], [(4, 3)] * 2, [S(1)], [S(1)] * 2),
    ("split", [(4, 6)], [S(0)], [(2, 6)] * 2, [W], [W] * 2),
    ("split", [(4, 6)], [P], [(4, 3)] * 2, [P], [P] * 2),
    ("slice_backward", [(4, 6)], [P], [(4, 9)], [W], [W]),
    ("slice", [(2, 4, 6)], [S(1)], [(2, 4, 3)], [S(1)], [S(1)]),
    ("slice", [(2, 4, 6)], [S(1)], [(2, 3, 6)], [W], [W]),
    ("cat", [(4, 6), (4, 3)], [S(0), W], [(4, 9)], [S(0), S(0)], [S(0)]),
    ("cat", [(4, 6), (4, 3)], [S(1), S(1)], [(4, 9)], [S(1), S(1)], [S(1)]),
    ("cat", [(4, 6), (4, 3)], [S(1), W], [(4, 9)], [W, W], [W]),
    ("cat", [(4, 6), (0,)], [S(0), W], [(4, 6)], [W, W], [W]),
    ("cat", [(4, 6), (4, 3)], [P, P], [(4, 9)], [W, W], [W]),
]  # fmt: skip
BY_ELEMENT: list[Row] = [
    ("add", [(4, 6), (4, 6)], [S(0), W], [(4, 6)], [S(0), S(0)], [S(0)]),
    ("add", [(4, 6), (4, 6)], [P, P], [(4, 6)], [P, P], [P]),
    ("add", [(4, 6), (4, 6)], [P, W], [(4, 6)], [W, W], [W]),
    ("add", [(4, 6), (6,)], [P, P], [(4, 6)], [W, W], [W]),
    ("add", [(4, 6)], [P], [(4, 6)], [W], [W]),
    ("mul", [(4, 6), (4, 6)], [P, P], [(4, 6)], [W, W], [W]),
    ("mul", [(2, 4, 6), (4, 6)], [S(1), W], [(2, 4, 6)], [S(1), S(0)], [S(1)]),
    ("mul", [(2, 4, 6), (6,)], [S(1), W], [(2, 4, 6)], [S(1), W], [S(1)]),
    ("mul", [(2, 4, 6), (2, 1, 6)], [S(1), W], [(2, 4, 6)], [S(1), W], [S(1)]),
    ("mul", [(6,), (2, 4, 6)], [S(0), W], [(2, 4, 6)], [S(0), S(2)], [S(2)]),
    # Of two cuts, that of the larger one.
    ("mul", [(6,), (2, 4, 6)], [S(0), S(1)], [(2, 4, 6)], [W, S(1)], [S(1)]),
    ("_softmax", [(4, 6)], [S(0)], [(4, 6)], [S(0)], [S(0)]),
    ("_softmax", [(4, 6)], [S(1)], [(4, 6)], [W], [W]),
    ("_log_softmax", [(4, 6)], [S(1)], [(4, 6)], [S(1)], [S(1)]),
    ("_log_softmax", [(2, 4, 6)], [S(2)], [(2, 4, 6)], [W], [W]),
    ("_log_softmax", [(2, 4, 6)], [S(1)], [(2, 4, 6)], [S(1)], [S(1)]),
    ("_foreach_add", [(4, 6)], [S(1)], [(4, 6)], [S(1)], [S(1)]),
    ("scatter", [(4, 6), (4, 2), (4, 2)], [S(0), W, W], [(4, 6)], [S(0)] * 3, [S(0)]),
    ("scatter", [(4, 6), (4, 2), (4, 2)], [S(1), W, W], [(4, 6)], [W] * 3, [W]),
    ("scatter", [(4, 6), (4, 6), (4, 6)], [S(1), W, W], [(4, 6)], [W] * 3, [W]),
]  # fmt: skip
SUMMED: list[Row] = [
    ("sum", [(4, 6)], [S(0)], [(6,)], [S(0)], [P]),
    ("sum", [(4, 6)], [S(1)], [(6,)], [S(1)], [S(0)]),
    ("sum", [(4, 6)], [S(0)], [(4, 1)], [S(0)], [S(0)]),
    ("sum", [(4, 6)], [S(1)], [(4, 1)], [S(1)], [P]),
    ("sum", [(4, 6)], [P], [(4, 1)], [W], [W]),
    ("mean", [(4, 6)], [S(0)], [(6,)], [W], [W]),
    ("max", [(4, 6)], [S(0)], [(4,), (4,)], [S(0)], [S(0)] * 2),
    ("maximum", [(4, 6), (4, 6)], [S(0), W], [(4, 6)], [S(0)] * 2, [S(0)]),
    ("max", [(4, 6), (4, 6)], [S(0), W], [(4, 6)], [W, W], [W]),
]  # fmt: skip
PRODUCTS: list[Row] = [
    ("addmm", [(6,), (8, 4), (4, 6)], [W, W, S(1)], [(8, 6)], [S(0), W, S(1)], [S(1)]),
    ("addmm", [(6,), (8, 4), (4, 6)], [W, S(1), S(0)], [(8, 6)], [W, S(1), S(0)], [P]),
    ("addmm", [(6,), (8, 4), (4, 6)], [W, S(0), W], [(8, 6)], [W, S(0), W], [S(0)]),
    ("addmm", [(1,), (8, 4), (4, 6)], [W, W, S(1)], [(8, 6)], [W, W, S(1)], [S(1)]),
    ("addmm", [(8, 6), (8, 4), (4, 6)], [W, S(0), W], [(8, 6)], [S(0), S(0), W], [S(0)]),
    ("bmm", [(3, 8, 4), (3, 4, 6)], [S(0), W], [(3, 8, 6)], [S(0), S(0)], [S(0)]),
    ("bmm", [(3, 8, 4), (3, 4, 6)], [W, S(0)], [(3, 8, 6)], [S(0), S(0)], [S(0)]),
    ("bmm", [(3, 8, 4), (3, 4, 6)], [W, S(2)], [(3, 8, 6)], [W, S(2)], [S(2)]),
    ("bmm", [(3, 8, 4), (3, 4, 6)], [S(1), W], [(3, 8, 6)], [S(1), W], [S(1)]),
    ("bmm", [(3, 8, 4), (3, 4, 6)], [W, S(1)], [(3, 8, 6)], [S(2), S(1)], [P]),
    ("bmm", [(3, 8, 4), (3, 4, 6)], [S(2), W], [(3, 8, 6)], [S(2), S(1)], [P]),
    ("baddbmm", [(3, 1, 6), (3, 8, 4), (3, 4, 6)], [W, S(0), S(0)], [(3, 8, 6)], [S(0)] * 3, [S(0)]),
    ("baddbmm", [(3, 1, 6), (3, 8, 4), (3, 4, 6)], [W, S(1), W], [(3, 8, 6)], [W, S(1), W], [S(1)]),
    ("mm", [(8, 4), (4, 6)], [S(0), S(1)], [(8, 6)], [W, S(1)], [S(1)]),
    ("mm", [(8, 4), (4, 6)], [S(1), S(1)], [(8, 6)], [W, S(1)], [S(1)]),
    ("mm", [(8, 4), (4, 6)], [S(1, 2), S(0)], [(8, 6)], [S(1), S(0)], [P]),
    ("_grouped_mm", [(12, 8), (3, 8, 6), (3,)], [W, S(2), W], [(12, 6)], [W, S(2), W], [S(1)]),
    ("_grouped_mm", [(12, 8), (3, 8, 6), (3,)], [S(1), S(1), W], [(12, 6)], [S(1), S(1), W], [E]),
    ("_grouped_mm", [(8, 12), (12, 6), (3,)], [W, S(1), W], [(3, 8, 6)], [W, S(1), W], [S(2)]),
    ("_grouped_mm", [(8, 12), (12, 6), (3,)], [S(0), W, W], [(3, 8, 6)], [S(0), W, W], [S(1)]),
    ("_grouped_mm", [(8, 12), (12, 6), (3,)], [S(1), W, W], [(3, 8, 6)], [W, W, W], [W]),
    ("_grouped_mm", [(12, 8), (3, 8, 6), (3,)], [S(0), W, W], [(12, 6)], [W, W, W], [W]),
    ("embedding", [(50, 8), (4, 6)], [S(0), W], [(4, 6, 8)], [S(0), W], [P]),
    ("embedding", [(50, 8), (4, 6)], [S(1), W], [(4, 6, 8)], [S(1), W], [S(2)]),
    ("embedding", [(50, 8), (4, 6)], [W, S(0)], [(4, 6, 8)], [W, W], [W]),
    ("nll_loss_forward", [(12, 50), (12,)], [S(1), W], [(), ()], [S(1), W], [W, W]),
    ("nll_loss_forward", [(12, 50), (12,)], [S(0), W], [(), ()], [W, W], [W, W]),
    ("nll_loss_forward", [(2, 12, 50), (2, 12)], [S(2), W], [(), ()], [W, W], [W, W]),
    ("index", [(50, 8), (5,)], [S(1), W], [(5, 8)], [S(1), W], [S(1)]),
    ("index", [(50, 8), (5,)], [S(0), W], [(5, 8)], [W, W], [W]),
    ("index", [(50, 8), (5, 2)], [S(1), W], [(5, 2, 8)], [W, W], [W]),
    ("index_put", [(50, 8), (5,), (5, 8)], [W, W, S(1)], [(50, 8)], [S(1), W, S(1)], [S(1)]),
    ("index_put", [(50, 8), (5,), (5, 8)], [S(1), W, W], [(50, 8)], [W, W, W], [W]),
]  # fmt: skip
KERNELS: list[Row] = [
    (FLASH, [Q, Q, Q], [S(1), S(1), S(1)], [Q, LSE], [S(1)] * 3, [S(1), S(1)]),
    (FLASH, [Q, Q, Q], [W, S(1), W], [Q, LSE], [S(1)] * 3, [S(1), S(1)]),
    (FLASH, [Q, KV, KV], [S(1), W, W], [Q, LSE, ()], [S(1), S(1), S(1)], [S(1), S(1), W]),
    (FLASH, [Q, Q, Q], [S(0), S(0), S(0)], [Q, LSE], [W] * 3, [W, W]),
    (f"{FLASH}_backward", [Q, Q, KV, KV, Q, LSE], [W, W, S(1), W, W, W], [Q, KV, KV], [S(1)] * 6, [S(1)] * 3),
    (f"{FLASH}_backward", [Q, Q, KV, KV, Q, LSE], [S(1), W, W, W, W, W], [Q, KV, KV], [W] * 6, [W] * 3),
    ("native_layer_norm", NORM, [S(1), W, W], [(2, 5, 8), (2, 5, 1)], [S(1), W, W], [S(1), S(1)]),
    ("native_layer_norm", NORM, [S(2), W, W], [(2, 5, 8), (2, 5, 1)], [W] * 3, [W, W]),
    ("native_layer_norm", [(2, 5, 8)], [S(1)], [(2, 5, 8), (2, 5, 1)], [S(1)], [S(1), S(1)]),
    ("native_layer_norm", [(2, 5, 8)], [S(2)], [(2, 5, 8), (2, 5, 1)], [W], [W, W]),
    ("native_layer_norm", [(2, 5, 8), (5, 8)], [S(1), W], [(2, 5, 8)], [W, W], [W]),
    ("native_layer_norm", [(2, 5, 8), (5, 8)], [S(0), W], [(2, 5, 8)], [S(0), W], [S(0)]),
    ("native_layer_norm_backward", [(2, 5, 8), *NORM], [S(1), S(1), W, W], [(2, 5, 8), (8,), (8,)],
     [S(1), S(1), W, W], [S(1), P, P]),
    ("_fused_rms_norm", [(2, 5, 8), (8,)], [P, W], [(2, 5, 8)], [W, W], [W]),
]  # fmt: skip


def decided(row: Row, size: int = 2, **more: Any) -> Decision:
    name, inputs, placements, outputs, _, _ = row
    shapes = {"inputs": tuple(inputs), "outputs": tuple(outputs)}
    return decide(OpSchema(name=name, placements=tuple(placements), size=size, **shapes, **more))


@pytest.mark.parametrize("row", [*VIEWED, *BY_ELEMENT, *SUMMED, *PRODUCTS, *KERNELS], ids=lambda row: row[0])
def test_what_an_operator_wants_and_makes(row: Row) -> None:
    assert decided(row) == Decision(tuple(row[4]), tuple(row[5]))


@pytest.mark.parametrize(
    ("size", "heads", "shares"), [(2, 4, 0), (4, 4, 0), (8, 4, 4), (8, 2, 2), (8, 1, 1), (6, 4, 0)]
)
def test_key_heads_that_are_fewer_than_the_ranks_are_held_by_several(size: int, heads: int, shares: int) -> None:
    kv = (2, heads, 64, 16)
    row: Row = (FLASH, [(2, 24, 64, 16), kv, kv], [S(1), W, W], [(2, 24, 64, 16)], [], [])
    assert decided(row, size=size).inputs == (S(1), S(1, shares=shares), S(1, shares=shares))
    split: Row = ("view", [(2, 5, heads * 16)], [S(2)], [(2, 5, heads, 16)], [], [])
    assert decided(split, size=size) == Decision((S(2, shares=shares),), (S(2, shares=shares),))


def test_summands_of_experts_pass_through_what_is_linear_in_them() -> None:
    x, rows = (12, 8), (12, 1)
    cases: list[tuple[str, list[Shape], list[Placement], list[Placement], Placement]] = [
        ("view", [x], [E], [E], E),
        ("neg", [x], [E], [E], E),
        ("mul", [x, rows], [E, W], [E, W], E),
        ("mul", [x, rows], [W, E], [W, E], E),
        ("mul", [x, x], [E, E], [W, W], W),
        ("add", [x, x], [E, E], [E, E], E),
        ("add", [x, x], [E, W], [W, W], W),
        ("gelu", [x], [E], [W], W),
        ("div", [x, rows], [E, W], [E, W], E),
        ("div", [x, rows], [W, E], [W, W], W),
        ("div", [x, rows], [E, E], [W, W], W),
        ("index_put", [x, (12,), x], [W, W, E], [W, W, E], E),
        ("scatter", [x, x, x], [W, W, E], [W, W, E], E),
    ]
    for name, shapes, has, wanted, made in cases:
        row: Row = (name, shapes, has, [x], [], [])
        assert decided(row) == Decision(tuple(wanted), (made,)), (name, has)


def test_gradients_of_a_tokens_ways_add_up_to_its_summands() -> None:
    x = (12, 8)
    for has, made in (([E, E], E), ([E, W], P), ([W, E], P), ([E, P], P)):
        assert decided(("add", [x, x], has, [x], [], []), **BACKWARD) == Decision(tuple(has), (made,))
    # A gradient that is cut is made whole first: so is the summand.
    assert decided(("add", [x, x], [E, S(0)], [x], [], []), **BACKWARD).outputs != (P,)


def test_what_a_forward_operation_wanted_decides_its_gradient() -> None:
    table: Row = ("embedding_dense_backward", [(4, 6, 8), (4, 6)], [W, W], [(50, 8)], [], [])
    for forward, gradient in ((S(0), W), (S(1), S(2)), (W, W)):
        made = decided(table, forward=(forward, W), **BACKWARD)
        assert made == Decision((gradient, W), (forward,))
    assert decided(table, **BACKWARD) == Decision((W, W), (W,))
    loss: Row = ("nll_loss_backward", [(), (12, 50), (12,)], [W, W, W], [(12, 50)], [], [])
    # What autograd keeps of the loss's operand stays as the loss had it.
    assert decided(loss, forward=(S(1), W), **BACKWARD) == Decision((W, S(1), W), (S(1),))
    assert decided(loss, forward=(W, W), **BACKWARD) == Decision((W, W, W), (W,))
    assert decided(loss, **BACKWARD) == Decision((W, W, W), (W,))


def test_an_operator_in_place_follows_the_memory_that_it_writes() -> None:
    copy: Row = ("copy", [(4, 6), (6,)], [W, S(0)], [(4, 6)], [], [])
    assert decided(copy, in_place=S(0)) == Decision((S(0), W), (S(0),))
    assert decided(copy, in_place=S(1)) == Decision((S(1), S(0)), (S(1),))
    assert decided(copy, in_place=W) == Decision((W, W), (W,))
    adds: Row = ("add", [(4, 6), (4, 6)], [P, P], [(4, 6)], [], [])
    assert decided(adds, in_place=W) == Decision((W, W), (W,))
    step: Row = ("_fused_adamw", [(4, 6), (4, 6), ()], [W, W, W], [], [], [])
    assert decided(step, in_place=S(1)) == Decision((S(1), S(1), W), ())


def test_shares_in_common_are_refined_where_a_tensor_has_enough() -> None:
    assert S(1, shares=2).finest((3, 8), 4) == S(1)
    assert S(1, shares=2).finest((3, 6), 4) == S(1, shares=2)
    assert S(1, 2, shares=2).finest((3, 8), 4) == S(1, 2)
    assert S(1, 4, shares=2).finest((3, 8), 4) == S(1, 4, shares=2)
    assert S(1).fitting((3, 2), 4) == S(1, shares=2)
    assert S(1).fitting((3, 8), 4) == S(1)
    assert S(1).fitting((3, 3), 4) == S(1)
    assert S(1, shares=1).fitting((3, 2), 4) == S(1, shares=1)
    assert S(1, 2).extent((3, 8)) == 4
    assert S(1, 2, shares=3).at(0) == S(0, 2, shares=3)
    assert S(1, 2).at(0, 5) == S(0, 5)
    site = OpSchema(name="", inputs=((2,), (3, 3), (4,)), placements=(S(0), S(1), W), outputs=())
    assert site.sharded == [1, 0]


@pytest.mark.parametrize(
    ("name", "source", "made", "placement"),
    [
        ("permute", (6, 6), (6, 6), S(0)),
        ("sum", (4, 4, 6), (4, 6), S(0)),
        ("sum", (4, 4, 6), (4, 6), S(1)),
    ],
)
def test_dims_of_one_extent_that_cannot_be_told_apart(
    name: str, source: Shape, made: Shape, placement: Placement
) -> None:
    with pytest.raises(Ambiguous):
        decided((name, [source], [placement], [made], [], []))

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echograph.errors import PlanError
from echograph.simulator.clusters import GroupPlacement, load_cluster, place


def test_whole_nodes() -> None:
    assert place(range(32), 8, 8) == GroupPlacement(
        ranks=32, nodes=4, ranks_per_node=8, domains=4, ranks_per_domain=8, span=32
    )


def test_one_rank_a_node() -> None:
    placed = load_cluster("dgx-h100").place_strided(128, 8)
    assert (placed.nodes, placed.ranks_per_node, placed.span) == (128, 1, 1017)


def test_rack_scale_domain() -> None:
    placed = load_cluster("gb200-nvl72").place(range(72))
    assert (placed.nodes, placed.ranks_per_node, placed.domains, placed.ranks_per_domain) == (18, 4, 1, 72)


@given(
    size=st.integers(1, 300),
    stride=st.integers(1, 40),
    start=st.integers(0, 50),
    node=st.integers(1, 16),
    nodes=st.integers(1, 9),
)
def test_formula_counts_as_the_list_does(size: int, stride: int, start: int, node: int, nodes: int) -> None:
    group = range(start, start + size * stride, stride)
    assert place(group, node, node * nodes) == place(list(group), node, node * nodes)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ([], "no rank"),
        ([1, 1], "named twice"),
        ([-1, 2], "below 0"),
        (range(-1, 3), "at least 0"),
        (range(0), "no rank"),
    ],
)
def test_bad_groups(group: list[int], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        place(group, 8, 8)


@pytest.mark.parametrize(("size", "stride"), [(0, 1), (4, 0)])
def test_bad_strides(size: int, stride: int) -> None:
    with pytest.raises(PlanError, match="both are at least 1"):
        load_cluster().place_strided(size, stride)

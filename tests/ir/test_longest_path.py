"""Longest paths, against trying every way; circles are left out of the order."""

from __future__ import annotations

from functools import cache

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from echograph.ir.longest_path import longest_paths

Edges = list[tuple[int, int, int]]
SIZE = 9
# From a lower to a higher number, so without circles.
forward = st.lists(
    st.tuples(st.integers(0, SIZE - 2), st.integers(1, SIZE - 1), st.integers(0, 5)).filter(lambda e: e[0] < e[1]),
    max_size=25,
)


def columns(edges: Edges) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    source, target, weight = np.array(edges, np.int64).reshape(-1, 3).T
    return source, target, weight


@given(forward, st.permutations(range(SIZE)))
def test_a_path_is_as_long_as_the_longest_of_all_ways(edges: Edges, names: list[int]) -> None:
    edges = [(names[a], names[b], weight) for a, b, weight in edges]

    @cache
    def longest(node: int) -> int:
        return max((longest(a) + weight for a, b, weight in edges if b == node), default=0)

    found = longest_paths(np.arange(SIZE), *columns(edges))
    assert found.length == [longest(node) for node in range(SIZE)]
    place = {node: at for at, node in enumerate(found.order)}
    assert len(place) == SIZE
    assert all(place[a] < place[b] for a, b, _ in edges)
    for node, edge in enumerate(found.edge):
        assert (edge == -1) == all(b != node for _, b, _ in edges)
        if edge != -1:
            before, after, weight = edges[edge]
            assert after == node
            assert found.length[before] + weight == found.length[node]


def test_a_circle_and_what_is_behind_it_has_no_place() -> None:
    circle = [(0, 1, 1), (1, 2, 1), (2, 1, 1), (2, 3, 1), (4, 3, 1)]
    assert longest_paths(np.arange(5), *columns(circle)).order == [0, 4]


def test_of_equally_long_paths_the_first_that_is_found_counts() -> None:
    edges = [(0, 2, 4), (1, 2, 4), (1, 3, 4), (0, 3, 4)]
    found = [longest_paths(np.array(first), *columns(edges)).edge for first in ([0, 1, 2, 3], [1, 0, 2, 3])]
    assert found == [[-1, -1, 0, 3], [-1, -1, 1, 2]]


def test_no_node_has_no_path() -> None:
    assert longest_paths(np.arange(0), *columns([])).order == []

"""Unions and overlaps, against counting moments one by one."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from echograph.ir.intervals import Intervals, coverage, layered, spent_in_layers, union
from echograph.profiler.analyses.statistics import describe, groups, summary

Spans = list[tuple[int, int]]
spans = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=12)


def merged(found: Spans) -> Intervals:
    start, length = (np.array([pair[i] for pair in found], np.int64) for i in (0, 1))
    return union(start, start + length)


def moments(found: Spans) -> set[int]:
    """The unit steps of time that some interval covers."""
    return {moment for start, length in found for moment in range(start, start + length)}


@given(spans)
def test_a_union_covers_what_any_covers(found: Spans) -> None:
    whole = merged(found)
    assert whole.length == len(moments(found))
    assert (whole.end >= whole.start).all()
    assert (whole.start[1:] > whole.end[:-1]).all()
    again = union(whole.start, whole.end)
    assert again.start.tolist() == whole.start.tolist()
    assert again.end.tolist() == whole.end.tolist()


@given(st.lists(spans, min_size=1, max_size=3))
def test_combinations_add_up(found: list[Spans]) -> None:
    sets = [merged(one) for one in found]
    length, met = coverage(sets)
    covered = [moments(one) for one in found]
    for mask in range(1, 1 << len(found)):
        expected = [
            m for m in set().union(*covered) if all((m in c) == bool(mask >> i & 1) for i, c in enumerate(covered))
        ]
        assert length[mask] == len(expected)
        assert met[mask] or not expected
    assert (length >= 0).all()
    assert length.sum() == len(set().union(*covered))
    assert length[0] == 0
    assert not met[0]


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12), st.integers(0, 3)), max_size=14), st.integers(0, 60)
)
def test_a_moment_is_of_the_first_layer_that_runs(found: list[tuple[int, int, int]], until: int) -> None:
    layers = 4
    start, length, layer = np.array(found, np.int64).reshape(-1, 3).T
    pieces = layered(start, start + length, layer, layers, until)
    moments = []
    for begin, end, of, row in zip(*(column.tolist() for column in pieces), strict=True):
        assert begin < end
        assert (row == -1) == (of == layers)
        if row != -1:
            begun = [at for at, (first, _, its) in enumerate(found) if its == of and first <= begin]
            assert found[row][2] == of and found[row][0] == max(found[at][0] for at in begun)
        moments += [of] * (end - begin)
    running = [[its for first, took, its in found if first <= at < first + took] for at in range(until)]
    assert moments == [min(its, default=layers) for its in running]
    spent = spent_in_layers(start, start + length, layer, layers, until)
    assert spent == [moments.count(of) for of in range(layers + 1)]
    same = (pieces.layer[1:] == pieces.layer[:-1]) & (pieces.row[1:] == pieces.row[:-1])
    assert not same.any()


def test_kinds_that_only_touch_meet_for_no_time() -> None:
    length, met = coverage([merged([(0, 10)]), merged([(10, 5)])])
    assert length.tolist() == [0, 10, 5, 0]
    assert met.tolist()[:3] == [False, True, True]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 100)), max_size=30))
def test_statistics_of_groups_are_those_of_each_group(found: list[tuple[int, int]]) -> None:
    keys, values = np.array([k for k, _ in found], np.int64), np.array([v for _, v in found], np.int64)
    grouped = groups(keys)
    numbers = summary(grouped, values)
    assert grouped.keys.tolist() == sorted({k for k, _ in found})
    for at, key in enumerate(grouped.keys.tolist()):
        own = [v for k, v in found if k == key]
        assert grouped.sizes[at] == len(own)
        assert (numbers.sum[at], numbers.max[at], numbers.min[at]) == (sum(own), max(own), min(own))
        assert np.isclose(numbers.mean[at], np.mean(own))
        assert np.isclose(numbers.std[at], np.std(own, ddof=1) if len(own) > 1 else 0)


def test_a_description_of_nothing_and_of_one() -> None:
    assert describe(np.array([]))[0] == 0
    assert np.isnan(describe(np.array([]))[1:]).all()
    one = describe(np.array([4.0]))
    assert one[0] == 1
    assert np.isnan(one[2])
    assert one[3:] == (4, 4, 4, 4, 4)
    assert describe(np.array([1, 2, 3, 4]))[3:] == (1, 1.75, 2.5, 3.25, 4)

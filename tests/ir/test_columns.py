"""Columns and the rows that they show are the same thing."""

from __future__ import annotations

import numpy as np
import pytest
from conformance_graphs import GRAPHS
from hypothesis import given
from hypothesis import strategies as st

from echograph.ir import columns
from echograph.ir import types as t
from echograph.ir.columns import Ragged, ascending, enumerate_ranges, equal_rows, expand_ranges


def test_ragged_rows() -> None:
    ragged = Ragged(np.array([0, 2, 2, 3]), np.array([7, 8, 9]))
    assert [ragged.row(i) for i in range(3)] == [(7, 8), (), (9,)]
    assert ragged.lengths.tolist() == [2, 0, 1]
    assert ragged.rows.tolist() == [0, 0, 2]
    assert (len(ragged), ragged[0].tolist()) == (3, [7, 8])


@pytest.mark.parametrize("name", GRAPHS)
def test_sizes_in_columns_are_those_of_the_rows(name: str) -> None:
    tensors = GRAPHS[name]().tensors
    assert tensors.nbytes.tolist() == [tensor.nbytes for tensor in tensors]
    assert tensors.numel.tolist() == [tensor.numel for tensor in tensors]


@pytest.mark.parametrize("name", GRAPHS)
def test_views_in_columns_are_those_of_the_rows(name: str) -> None:
    ops = GRAPHS[name]().ops
    assert ops.is_view.tolist() == [isinstance(op, t.Compute) and op.is_view for op in ops]


def test_tables_are_sequences() -> None:
    graph = GRAPHS["two_layers"]()
    assert graph.ops[-1] == graph.ops[len(graph.ops) - 1]
    assert graph.ops[1:3] == [graph.ops[1], graph.ops[2]]
    assert list(graph.tensors) == graph.tensors[:]
    with pytest.raises(IndexError):
        graph.ops[len(graph.ops)]


def test_columns_cannot_be_changed() -> None:
    graph = GRAPHS["two_layers"]()
    for array in (graph.ops.flops, graph.ops.inputs.values, graph.tensors.shape.offsets, graph.programs[0].calls):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_durations_by_device() -> None:
    ops = GRAPHS["kinds"]().ops
    picoseconds, source, spread = ops.duration_on("h100")
    assert picoseconds[:3].tolist() == [1_500_000, 1_500_000, -1]
    assert source[:3].tolist() == [t.Source.MEASURED, t.Source.MEASURED, 0]
    assert spread[0] == np.float32(0.0125)
    assert set(ops.duration_on("no such device")[0].tolist()) == {-1}
    assert [d.device for d in ops[0].durations] == ["h100", "a100", "b200", "mi300x"]


@given(st.lists(st.one_of(st.integers(-3, 3), st.integers(-(2**63), 2**63 - 1))))
def test_rows_are_ordered_and_told_apart_as_numpy_does(numbers: list[int]) -> None:
    values = np.array(numbers, np.int64)
    _, first, of = np.unique(values, return_index=True, return_inverse=True)
    assert ascending(values).tolist() == np.argsort(values, kind="stable").tolist()
    found = equal_rows(values)
    assert (found.first.tolist(), found.of.tolist()) == (first.tolist(), of.tolist())


@given(
    rows=st.lists(
        st.tuples(st.integers(-2, 2), st.sampled_from([0, 2**62, -(2**63)]), st.lists(st.integers(-1, 1)))
    ),
    factor=st.sampled_from([columns._FACTOR, 1, 0]),
)
def test_rows_of_several_columns_are_told_apart(rows: list[tuple[int, int, list[int]]], factor: int) -> None:
    """Also where hashes are equal of rows that are not."""
    values = np.array([row[:2] for row in rows], np.int64).reshape(-1, 2)
    sides = [row[2] for row in rows]
    ragged = Ragged(np.cumsum([0, *map(len, sides)]), np.array([x for side in sides for x in side], np.int64))
    numbers: dict[object, int] = {}
    expected = [numbers.setdefault((*row[:2], tuple(row[2])), len(numbers)) for row in rows]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(columns, "_FACTOR", factor)
        found = equal_rows(values, ragged)
    assert found.of.tolist() == expected
    assert found.first.tolist() == [expected.index(number) for number in range(len(numbers))]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 6)), max_size=20))
def test_ranges_are_written_out_one_after_the_other(ranges: list[tuple[int, int]]) -> None:
    begin, length = np.array(ranges, np.int64).reshape(-1, 2).T
    wanted = [(row, begin + place) for row, (begin, length) in enumerate(ranges) for place in range(length)]
    which, number = enumerate_ranges(begin, begin + length)
    assert list(zip(which.tolist(), number.tolist(), strict=True)) == wanted
    assert expand_ranges(begin, begin + length).tolist() == number.tolist()

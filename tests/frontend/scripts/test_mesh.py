"""Meshes from groups, against groups that torch's own device meshes have."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echograph.errors import CaptureError
from echograph.frontend.scripts.capture import axes_of, infer, place_of, standing_for

SIZES = st.lists(st.sampled_from([2, 3, 4, 8]), min_size=1, max_size=4)


def group(sizes: list[int], chosen: list[int], rank: int) -> list[int]:
    """The ranks that differ from one along some axes only, by numpy's indexing."""
    ranks = np.arange(np.prod(sizes)).reshape(sizes)
    place = np.unravel_index(rank, sizes)
    return ranks[tuple(slice(None) if i in chosen else place[i] for i in range(len(sizes)))].ravel().tolist()


@given(SIZES, st.data())
def test_a_mesh_that_groups_were_made_of_explains_them(sizes: list[int], data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, int(np.prod(sizes)) - 1))
    subsets = st.lists(st.integers(0, len(sizes) - 1), min_size=1, unique=True)
    groups = [group(sizes, chosen, rank) for chosen in data.draw(st.lists(subsets, min_size=1, max_size=4))]
    mesh = infer(groups, int(np.prod(sizes)))
    assert mesh is not None
    assert np.prod(list(mesh.values())) == np.prod(sizes)
    for ranks in groups:
        axes = axes_of(ranks, mesh)
        assert axes is not None
        assert sorted(group(list(mesh.values()), [list(mesh).index(a) for a in axes], rank)) == sorted(ranks)


@given(SIZES, st.data())
def test_the_place_of_a_rank_is_its_index(sizes: list[int], data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, int(np.prod(sizes)) - 1))
    mesh = {f"a{i}": size for i, size in enumerate(sizes)}
    assert tuple(place_of(rank, mesh).values()) == tuple(map(int, np.unravel_index(rank, sizes)))


def test_an_irregular_group_is_no_formula() -> None:
    assert infer([[0, 1, 5]], 8) is None
    assert infer([[0, 1, 2]], 8) is None
    assert axes_of([0, 1, 2, 4], {"a": 2, "b": 4}) is None


def test_axes_are_named_by_what_goes_along_them() -> None:
    assert infer([[0, 1, 2, 3]], 4) == {"dp": 4}
    assert infer([[0, 4], [0, 1, 2, 3]], 8, [[0, 4]]) == {"pp": 2, "dp": 4}
    assert infer([], 1) == {"dp": 1}


def test_ranks_stand_for_the_places_of_some_axes() -> None:
    mesh = {"pp": 2, "dp": 2, "tp": 2}
    assert standing_for([0], mesh) == [{}]
    assert standing_for([0, 4], mesh) == [{"pp": 0}, {"pp": 1}]
    assert standing_for([1, 3, 5, 7], mesh) == [{"pp": p, "dp": d} for p in range(2) for d in range(2)]
    with pytest.raises(CaptureError, match="do not stand for all ranks"):
        standing_for([0, 3, 5], mesh)

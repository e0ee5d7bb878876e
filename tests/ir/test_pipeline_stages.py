"""Layers of each chunk from Megatron's options."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from layered import layered_step

from echograph.errors import PlanError
from echograph.ir.passes.fold import Fold
from echograph.ir.passes.pipeline import Pipeline
from echograph.ir.passes.pipeline.schedules import split_layers


def test_llama_405b_as_it_was_trained() -> None:
    """126 layers on 16 stages: one less on the first and on the last (Llama Team, 2024, section 3.3.2)."""
    assert split_layers(126, 16, embedding=True, loss=True) == (7, *[8] * 14, 7)
    assert split_layers(126, 16, first=7, last=7) == (7, *[8] * 14, 7)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"layers": 12, "stages": 4}, (3, 3, 3, 3)),
        ({"layers": 12, "stages": 2, "chunks": 3}, (2, 2, 2, 2, 2, 2)),
        ({"layers": 11, "stages": 4, "embedding": True}, (2, 3, 3, 3)),
        ({"layers": 11, "stages": 4, "loss": True}, (3, 3, 3, 2)),
        ({"layers": 14, "stages": 4, "chunks": 2, "embedding": True, "loss": True}, (1, 2, 2, 2, 2, 2, 2, 1)),
        ({"layers": 14, "stages": 4, "first": 2}, (2, 4, 4, 4)),
        ({"layers": 14, "stages": 4, "last": 5}, (3, 3, 3, 5)),
        ({"layers": 14, "stages": 2, "first": 6, "last": 8}, (6, 8)),
        ({"layers": 12, "stages": 3, "chunks": 2, "first": 4, "last": 4}, (2, 2, 2, 2, 2, 2)),
        ({"layers": 4, "stages": 6, "embedding": True, "loss": True}, (0, 1, 1, 1, 1, 0)),
    ],
)
def test_stages_get_what_megatron_gives_them(options: dict[str, int], expected: tuple[int, ...]) -> None:
    assert split_layers(**options) == expected  # type: ignore[arg-type]


@given(
    unit=st.integers(1, 5),
    stages=st.integers(1, 9),
    chunks=st.integers(1, 4),
    ends=st.tuples(*[st.booleans()] * 2),
)
def test_chunks_add_up_to_the_model(unit: int, stages: int, chunks: int, ends: tuple[bool, bool]) -> None:
    layers = unit * stages * chunks - sum(ends)
    found = split_layers(layers, stages, chunks, embedding=ends[0], loss=ends[1])
    assert len(found) == stages * chunks
    assert sum(found) == layers
    assert {*found[1:-1]} <= {unit}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": 126, "stages": 16}, "126 layers do not divide among 16 stages: use 14 or 18 stages"),
        ({"layers": 126, "stages": 12, "loss": True}, r"\(127 with embedding or loss\).*use 1 or 127"),
        ({"layers": 12, "stages": 3, "chunks": 3}, "4 layers of a stage do not divide into 3 chunks: use 2 or 4"),
        ({"layers": 14, "stages": 4, "first": 3}, "leave 11 of 14 for the 3 others: give them 2 or 5"),
        ({"layers": 14, "stages": 2, "first": 6, "last": 7}, "leave 1 of 14"),
        ({"layers": 14, "stages": 1, "first": 6, "last": 8}, "of 1 stages"),
        ({"layers": 14, "stages": 4, "first": 15}, "leave -1"),
        ({"layers": 14, "stages": 4, "first": 2, "loss": True}, "cannot count as layers"),
        ({"layers": 14, "stages": 0}, "0 pipeline stages"),
    ],
)
def test_what_does_not_divide_is_refused_in_one_line(options: dict[str, int], message: str) -> None:
    with pytest.raises(PlanError, match=message) as error:
        split_layers(**options)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


def test_the_split_is_what_a_pipeline_takes() -> None:
    job = Pipeline(stages=4, layers=split_layers(10, 4, embedding=True, loss=True))(Fold()(layered_step(10)))
    number = next(n for n, b in enumerate(job.blocks) if len(b.instances) == 10)
    of_stage = [len(set(p.calls[p.calls[:, 0] == number][:, 3].tolist())) for p in job.programs]
    assert of_stage == [2, 3, 3, 2]

"""Tables whose steps a program computed are told from tables of steps that ran."""

from __future__ import annotations

import random

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from echograph.workflow.calibration.form import PredictedStep, step_errors
from echograph.workflow.validation.computed import LEAST_SETS, computed_sources
from echograph.workflow.validation.table import MeasuredStep

SIZES = (8, 16, 32)


def rows(
    source: str, sets: int = LEAST_SETS, noise: float = 0.0, digits: int = 6, seed: int = 0
) -> list[MeasuredStep]:
    """Sets of three rows that differ in their batch alone; every step off its line by up to `noise`."""
    draw = random.Random(seed)
    found = []
    for one in range(sets):
        for samples in SIZES:
            step = (0.1 + 0.013 * one + samples * (0.021 + 0.0007 * one)) * (1 + draw.uniform(-noise, noise))
            said = {"id": f"x-{len(found)}", "model": "m", "layers": str(one), "gpu_type": "A100", "n_gpus": "8"}
            said |= {"global_batch": str(samples), "step_time_s": f"{step:.{digits}f}", "source": source}
            found.append(MeasuredStep(said))
    return found


def test_steps_on_lines_are_computed_ones() -> None:
    """All sets of a source lie on lines: it is named, with how many sets say so; others beside it are not."""
    found = computed_sources([*rows("program"), *rows("log", noise=3e-3)])
    assert found == {"program": LEAST_SETS}


@given(seed=st.integers(0, 10**6), noise=st.floats(1e-3, 2e-2))
@settings(max_examples=50, deadline=None)
def test_steps_that_ran_are_not(seed: int, noise: float) -> None:
    """Runs that differ by a thousandth and more are measurements, whatever their digits."""
    assert computed_sources(rows("log", noise=noise, seed=seed)) == {}


def test_one_set_off_its_line_clears_a_source() -> None:
    """A program leaves no set off its line."""
    table = rows("mixed")
    moved = table[1].columns | {"step_time_s": f"{1.002 * float(table[1].columns['step_time_s']):.6f}"}
    assert computed_sources([*table[:1], MeasuredStep(moved), *table[2:]]) == {}


def test_few_sets_say_nothing() -> None:
    """Fewer sets than `LEAST_SETS`, rows without a source, and sets of two rows judge no source."""
    assert computed_sources(rows("small", sets=LEAST_SETS - 1)) == {}
    assert computed_sources(rows("")) == {}
    pairs = [row for row in rows("pairs", sets=40) if row.columns["global_batch"] != "16"]
    assert computed_sources(pairs) == {}


def test_rows_that_cannot_be_read_are_left_out() -> None:
    """A batch or a step that is no number is no evidence."""
    broken = [MeasuredStep(row.columns | {"global_batch": "many", "id": "b"}) for row in rows("program")[:3]]
    broken += [MeasuredStep(row.columns | {"step_time_s": "fast", "id": "c"}) for row in rows("program")[:3]]
    assert computed_sources([*rows("program"), *broken]) == {"program": LEAST_SETS}


def test_computed_steps_widen_no_interval() -> None:
    """Widths rest on rows that were measured."""
    step = PredictedStep(
        id="a-1",
        family="a",
        measured_s=1.2,
        predicted_s=1.0,
        durations_interval_s=(0.9, 1.1),
        work={"attention": 1.0},
    )
    computed = msgspec.structs.replace(step, family="b", computed=True)
    assert step_errors([step, computed]).family.tolist() == ["a"]

"""No prediction changes unnoticed: 60 plans of nine models, figure by figure."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "predictions"))

from golden import Case, cases, differences, predict

CASES = cases()


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_prediction_is_the_one_written_down(case: Case) -> None:
    changed = list(differences(json.loads(case.stored.read_text()), predict(case)))
    assert changed == [], "on purpose? then run: python tests/golden/predictions/golden.py, and look at git diff"


def test_every_stored_prediction_is_made() -> None:
    stored = {path.stem for path in (Path(__file__).parent / "predictions" / "records").iterdir()}
    assert stored == {case.name for case in CASES}
    assert len(stored) >= 60

"""No lowered job changes unnoticed: plans of nine models, and passes that no plan asks for."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent / "jobs"))

from golden_jobs import STORED, Case, cases, record

CASES = cases()
DENSE = ("bloom", "gpt2-fp16", "llama-clip", "llama-recompute", "phi")
"""Small dense models: `make test` has the plans of larger ones, `make test-all` their jobs as well."""
RECORDS: dict[str, dict[str, Any]] = json.loads(STORED.read_text())


def _when(case: Case) -> Any:
    return pytest.mark.slow if case.graph in DENSE else ()


@pytest.mark.parametrize("case", [pytest.param(case, marks=_when(case), id=name) for name, case in CASES.items()])
def test_a_job_is_the_one_written_down(case: Case) -> None:
    before, after = RECORDS[case.name], record(case)
    changed = {
        key: (before.get(key), after.get(key)) for key in {*before, *after} if before.get(key) != after.get(key)
    }
    assert changed == {}, "on purpose? then run: python tests/golden/jobs/golden_jobs.py, and look at git diff"


def test_every_stored_job_is_made() -> None:
    assert list(RECORDS) == list(CASES)

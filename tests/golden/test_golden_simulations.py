"""Nothing that a simulation says of small jobs changes unnoticed, to the picosecond and the byte."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent / "simulations"))

from golden_simulations import CASES, MEMORIES, STORED, memories, record

RECORDS: dict[str, dict[str, Any]] = json.loads(STORED.read_text()) if STORED.exists() else {}
HINT = "on purpose? then run: python tests/golden/simulations/golden_simulations.py, and look at git diff"


@pytest.mark.parametrize("name", CASES)
def test_a_simulation_says_what_is_written_down(name: str) -> None:
    before, after = RECORDS[name], record(CASES[name])
    changed = {key: (before.get(key), after[key]) for key in after if before.get(key) != after[key]}
    assert changed == {}, HINT


@pytest.mark.parametrize("name", MEMORIES)
def test_memories_hold_what_is_written_down(name: str) -> None:
    before, after = RECORDS[f"memory of {name}"], memories(name)
    changed = {key: (before.get(key), after[key]) for key in after if before.get(key) != after[key]}
    assert changed == {}, HINT


def test_every_stored_simulation_is_made() -> None:
    assert list(RECORDS) == [*CASES, *(f"memory of {name}" for name in MEMORIES)]

"""No cost of a kernel changes unnoticed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent / "costs"))

from golden_costs import DEVICES, STORED, costs


@pytest.fixture(scope="module")
def now() -> dict[str, dict[str, list[Any]]]:
    return costs()


@pytest.mark.parametrize("device", DEVICES)
def test_costs_are_those_written_down(device: str, now: dict[str, dict[str, list[Any]]]) -> None:
    before, after = json.loads(STORED.read_text())[device], now[device]
    assert before.keys() == after.keys()
    changed = {
        kernel: (stored, after[kernel])
        for kernel, stored in before.items()
        if stored[-1] != after[kernel][-1] or stored[:-1] != pytest.approx(after[kernel][:-1], rel=1e-6)
    }
    assert changed == {}, "on purpose? then run: python tests/golden/costs/golden_costs.py, and look at git diff"

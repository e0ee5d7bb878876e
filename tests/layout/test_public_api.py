"""What other programs import changes only knowingly."""

from __future__ import annotations

import difflib

import pytest
from public_api import GOLDEN, MODULES, public_api

from echograph.registry import Table

pytestmark = pytest.mark.torch
pytest.importorskip("torch", reason="the frontend needs the [torch] extra")


def test_the_public_api_is_the_one_written_down() -> None:
    change = list(difflib.unified_diff(GOLDEN.read_text().splitlines(), list(public_api()), lineterm="", n=0))
    assert change == [], "on purpose? then run: python tests/layout/public_api.py"


@pytest.mark.parametrize(
    "path",
    [
        "echograph.ir.passes:PASSES",
        "echograph.simulator.engine:ENGINES",
        "echograph.simulator.collectives:ALGORITHMS",
        "echograph.frontend.pytorch.capture:PRODUCERS",
    ],
)
def test_every_line_of_a_table_leads_somewhere(path: str) -> None:
    (table,) = Table("table", {"it": path}).values()
    assert len(table) > 0
    assert all(callable(entry) or entry for entry in table.values())


def test_every_public_thing_is_documented() -> None:
    from importlib import import_module

    silent = [m for m in MODULES if not (import_module(m).__doc__ or "").strip()]
    assert silent == []

"""What every pass makes of a small graph, as text to look at."""

from __future__ import annotations

import pytest
from make_passes import FOLDER, after, spec

from echograph.ir.passes import PASSES


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_makes_of_its_graph_what_is_written_down(name: str) -> None:
    stored = (FOLDER / f"{name}.after.txt").read_text(encoding="utf-8")
    assert after(spec(name)) == stored, "on purpose? then run: python tests/golden/make_passes.py"


def test_every_pass_has_its_pair_and_does_something() -> None:
    pairs = {f"{name}.{when}.txt" for name in PASSES for when in ("before", "after")}
    assert {path.name for path in FOLDER.iterdir()} == pairs
    for name in PASSES:
        before, made = ((FOLDER / f"{name}.{when}.txt").read_text().splitlines() for when in ("before", "after"))
        assert before[1:] != [line for line in made[1:] if not line.startswith("pass ")], name

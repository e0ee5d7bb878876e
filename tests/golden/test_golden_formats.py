"""No key, bound or default of files written by hand, passes, simulations and costs changes unnoticed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "formats"))

from golden_formats import STORED, defaults, schemas

RECORD = json.loads(STORED.read_text())
HOW = "on purpose? then run: python tests/golden/formats/golden_formats.py, and look at git diff"


def test_files_written_by_hand_may_hold_what_is_written_down() -> None:
    found = json.loads(json.dumps(schemas()))
    assert found.keys() == RECORD["schemas"].keys()
    for kind, schema in found.items():
        before = RECORD["schemas"][kind]
        changed = [name for name in {*before, *schema} if before.get(name) != schema.get(name)]
        assert changed == [], f"{kind}: {HOW}"


def test_what_is_left_out_is_taken_for_what_is_written_down() -> None:
    found = defaults()
    before = RECORD["defaults"]
    changed = {
        name: (before.get(name), found.get(name))
        for name in {*before, *found}
        if before.get(name) != found.get(name)
    }
    assert changed == {}, HOW

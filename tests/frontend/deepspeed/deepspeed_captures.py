"""Captures scripts without ranks, one after the other: deepspeed_captures.py FOLDER, with its cases.json."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from echograph.frontend.deepspeed.adapter import DeepSpeedAdapter
from echograph.frontend.scripts.capture import capture_script
from echograph.frontend.scripts.run import Script
from echograph.frontend.scripts.world import World
from echograph.ir import serde

folder = Path(sys.argv[1])
for name, (script, *arguments) in json.loads((folder / "cases.json").read_text()).items():
    adapter = DeepSpeedAdapter()
    asked = Script(path=Path(script), arguments=arguments, step=adapter.steady_step)
    serde.save(capture_script(asked, World(size=2), adapter).graph, folder / f"{name}.pb")

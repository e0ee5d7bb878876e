"""Captures scripts without ranks, one after the other: deepspeed_captures.py FOLDER RANKS, with its cases.json.

Of each case the job is written, and what every rank communicates, each run by itself.
"""

from __future__ import annotations

import json
import operator
import sys
from pathlib import Path
from typing import Any

from echograph.frontend.deepspeed.adapter import DeepSpeedAdapter
from echograph.frontend.pytorch.annotate import PHASE
from echograph.frontend.scripts.capture import capture_script
from echograph.frontend.scripts.recorder import COMMUNICATION
from echograph.frontend.scripts.run import Script, ScriptRun, run_script
from echograph.frontend.scripts.world import World
from echograph.ir import serde


def calls_of(run: ScriptRun) -> list[list[Any]]:
    """Operation, ranks of its group, bytes, type, the other rank of a message (or -1) and phase, in order."""
    found = []
    for node in run.recorder.graph.nodes:
        call = node.meta.get(COMMUNICATION)
        if call is not None and node.target is not operator.getitem:
            dtype = str(call.dtype).removeprefix("torch.") if call.dtype else ""
            found.append([call.op, list(call.ranks), call.nbytes, dtype, call.peer, node.meta[PHASE]])
    return found


def main(folder: Path, size: int) -> None:
    """Captures the folder's cases."""
    told = {}
    for name, (script, *arguments) in json.loads((folder / "cases.json").read_text()).items():
        adapter = DeepSpeedAdapter()
        asked = Script(path=Path(script), arguments=arguments, step=adapter.steady_step)
        serde.save(capture_script(asked, World(size=size), adapter).graph, folder / f"{name}.pb")
        ranks = [World(rank=rank, size=size) for rank in range(size)]
        told[name] = [calls_of(run_script(asked, world, adapter)) for world in ranks]
        (folder / "captured.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

"""One real rank of a script: it runs as it is, and the tracer is told of its modules, so that it knows the phase.

    python script_rank.py train.py ...

A module is attached as it runs for the first time inside no other; from its next pass on, calls have a phase.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

from torch.nn.modules import module as modules

from echograph.profiler.comms import tracer as tracing


def main() -> None:
    running: list[Any] = []
    attached: set[int] = set()

    def begin(module: Any, _: Any) -> None:
        if not running and id(module) not in attached:
            attached.add(id(module))
            tracing._capture.phases.attach(module)
        running.append(module)

    def end(module: Any, *_: Any) -> None:
        running.remove(module)

    modules.register_module_forward_pre_hook(begin)
    modules.register_module_forward_hook(end, always_call=True)
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()

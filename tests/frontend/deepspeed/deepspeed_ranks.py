"""One real rank: runs a DeepSpeed script as it is, and writes down the collectives of each of its steps, in order.

    torchrun --nproc-per-node 2 deepspeed_ranks.py FOLDER SCRIPT [ARGUMENT]...

What is communicated is the collective tracer's account; which phase it belongs to, the engine's own methods tell.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
from deepspeed.runtime.engine import DeepSpeedEngine

import echograph

RANK = int(os.environ["RANK"])

marks: list[tuple[int, str]] = []
"""(calls so far, phase from here on); "end" where a step of the optimizer has ended."""


def tell_phase(tracer: Any, name: str, phase: str) -> None:
    """Wraps a method of the engine so that it marks where it begins and ends."""
    method: Callable[..., Any] = getattr(DeepSpeedEngine, name)

    def marked(self: Any, *args: Any, **kwargs: Any) -> Any:
        steps = self.global_steps
        marks.append((tracer.calls, phase))
        try:
            return method(self, *args, **kwargs)
        finally:
            marks.append((tracer.calls, "end" if self.global_steps != steps else ""))

    setattr(DeepSpeedEngine, name, marked)


def calls_of(path: Path) -> list[tuple[str, str, int, str]]:
    """(operation, group, bytes, type) of every call of a trace, in the order they were made."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    whats = {line["id"]: line for line in lines if isinstance(line, dict) and line["line"] == "what"}
    # A call that had not ended when it was first written stands twice.
    calls = {(whats[row[0]]["channel"], row[1]): row for row in lines if isinstance(row, list)}
    ordered = (whats[row[0]] for row in sorted(calls.values(), key=lambda row: row[2]))
    return [(what["op"], what["group"], what["bytes"], what.get("dtype", "")) for what in ordered]


def steps_of(calls: list[tuple[str, str, int, str]]) -> list[list[tuple[str, str, int, str, str]]]:
    """The calls of each step, with their phases; what comes before the first forward pass belongs to none."""
    begin = next((at for at, phase in marks if phase == "forward"), 0)
    steps: list[list[Any]] = [[]]
    for number, call in enumerate(calls):
        if number < begin:
            continue
        passed = [phase for at, phase in marks if at <= number]
        while len(steps) <= passed.count("end"):
            steps.append([])
        steps[-1].append((*call, "" if passed[-1] == "end" else passed[-1]))
    return steps


def main() -> None:
    """Traces the script and writes what its steps communicated."""
    folder = Path(sys.argv[1])
    sys.argv = sys.argv[2:]
    # It would compile an extension for ranks of one machine, for minutes.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    tracer = echograph.trace_collectives(folder / "trace.jsonl")
    for name, phase in (("forward", "forward"), ("backward", "backward"), ("step", "optimizer")):
        tell_phase(tracer, name, phase)
    runpy.run_path(sys.argv[0], run_name="__main__")
    tracer.stop()
    steps = steps_of(calls_of(folder / f"trace.{RANK}.jsonl"))
    (folder / f"steps.{RANK}.json").write_text(json.dumps(steps))
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main()

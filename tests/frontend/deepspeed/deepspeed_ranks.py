"""One real rank: runs DeepSpeed scripts as they are, and writes down what their steps communicate, in order.

    torchrun --nproc-per-node 2 deepspeed_ranks.py FOLDER

FOLDER/cases.json holds the cases: name -> [script, argument, ...]. What is communicated is the collective tracer's
account; which phase it belongs to, the engine's own methods and a pipeline's instructions tell.
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
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch.nn.modules import module as modules

import echograph

RANK = int(os.environ["RANK"])
FORWARD = ("LoadMicroBatch", "RecvActivation", "ForwardPass", "SendActivation")
BACKWARD = ("RecvGrad", "BackwardPass", "SendGrad")


class Marks:
    """Where phases begin, by the number of calls so far; "end" where a step of the optimizer has ended."""

    def __init__(self) -> None:
        self.tracer: Any = None
        self.marks: list[tuple[int, str]] = []

    def wrap(self, name: str, phase: str) -> None:
        """Makes a method of the engine mark where it begins and ends."""
        method: Callable[..., Any] = getattr(DeepSpeedEngine, name)

        def marked(engine: Any, *args: Any, **kwargs: Any) -> Any:
            if engine.pipeline_parallelism:
                return method(engine, *args, **kwargs)
            steps = engine.global_steps
            self.marks.append((self.tracer.calls, phase))
            try:
                return method(engine, *args, **kwargs)
            finally:
                self.marks.append((self.tracer.calls, "end" if engine.global_steps != steps else ""))

        setattr(DeepSpeedEngine, name, marked)

    def wrap_pipelines(self) -> None:
        """The same of a pipeline's instructions; what `train_batch` does after all of them ends the step."""
        for kind, method in list(PipelineEngine._INSTRUCTION_MAP.items()):
            name = kind.__name__
            phase = "forward" if name in FORWARD else "backward" if name in BACKWARD else "optimizer"
            PipelineEngine._INSTRUCTION_MAP[kind] = self._between(method, phase, "optimizer")
        PipelineEngine.train_batch = self._between(PipelineEngine.train_batch, "optimizer", "end")

    def watch_modules(self) -> None:
        """Marks what modules do in a backward pass, where they recompute."""
        depth = 0

        def begins(*_: Any) -> None:
            nonlocal depth
            if torch._C._current_autograd_node() is not None:
                self.marks += [(self.tracer.calls, "recompute")] if depth == 0 else []
                depth += 1

        def ends(*_: Any) -> None:
            nonlocal depth
            if depth:
                depth -= 1
                self.marks += [(self.tracer.calls, "backward")] if depth == 0 else []

        modules.register_module_forward_pre_hook(begins)
        modules.register_module_forward_hook(ends, always_call=True)

    def _between(self, method: Callable[..., Any], phase: str, then: str) -> Callable[..., Any]:
        def marked(engine: Any, *args: Any, **kwargs: Any) -> Any:
            self.marks.append((self.tracer.calls, phase))
            made = method(engine, *args, **kwargs)
            self.marks.append((self.tracer.calls, then))
            return made

        return marked

    def steps(self, calls: list[Any]) -> list[list[Any]]:
        """The calls of each step, with their phases; what comes before the first forward pass belongs to none."""
        begin = next((at for at, phase in self.marks if phase == "forward"), 0)
        steps: list[list[Any]] = [[]]
        for number, call in list(enumerate(calls))[begin:]:
            passed = [phase for at, phase in self.marks if at <= number]
            while len(steps) <= passed.count("end"):
                steps.append([])
            steps[-1].append([*call, "" if passed[-1] == "end" else passed[-1]])
        return steps


def calls_of(path: Path) -> list[tuple[str, str, int, str, int]]:
    """(operation, group, bytes, type, peer) of every call of a trace, in the order they were made."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    signatures = {line["id"]: line for line in lines if isinstance(line, dict) and line["line"] == "what"}
    # A call that had not ended when it was first written stands twice.
    calls = {(signatures[row[0]]["channel"], row[1]): row for row in lines if isinstance(row, list)}
    ordered = (signatures[row[0]] for row in sorted(calls.values(), key=lambda row: row[2]))
    return [
        (what["op"], what["group"], what["bytes"], what.get("dtype", ""), what.get("peer", -1)) for what in ordered
    ]


def main(folder: Path) -> None:
    """Traces the scripts and writes what their steps communicated."""
    # It would compile an extension for ranks of one machine, for minutes.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    marks = Marks()
    for name, phase in (("forward", "forward"), ("backward", "backward"), ("step", "optimizer")):
        marks.wrap(name, phase)
    marks.wrap_pipelines()
    marks.watch_modules()
    told = {}
    for name, (script, *arguments) in json.loads((folder / "cases.json").read_text()).items():
        sys.argv = [script, *arguments]
        marks.marks.clear()
        with echograph.trace_collectives(folder / f"{name}.jsonl") as marks.tracer:
            runpy.run_path(script, run_name="__main__")
        told[name] = marks.steps(calls_of(folder / f"{name}.{RANK}.jsonl"))
        (folder / f"steps.{RANK}.json").write_text(json.dumps(told))
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

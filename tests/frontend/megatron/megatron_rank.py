"""One real rank of a Megatron script, over gloo on CPUs, and what its second training step communicates.

    torchrun --nproc-per-node 2 megatron_rank.py FOLDER pretrain.py --distributed-backend gloo ...

Each rank writes `FOLDER/<rank>.json`: in the order of the calls, [phase, operation, ranks of the group, bytes,
type, peer]. The calls are those of the tracer of collectives. Phases are what its hooks on modules and autograd
tell, and, for what runs outside both, what the hooks of the adapter say.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import echograph
from echograph.frontend.megatron.hooks import hooks
from echograph.frontend.megatron.patches import in_place
from echograph.frontend.megatron.shims import shimmed
from echograph.frontend.scripts import device
from echograph.frontend.scripts.adapter import patched, replaced
from echograph.frontend.scripts.world import World
from echograph.profiler.comms import tracer as tracing

STEP = 2


class Place:
    """Where in the step this rank is, by the hooks."""

    def __init__(self, folder: Path) -> None:
        self.phase = ""
        self._folder, self._steps, self._tracer = folder, 0, None

    @contextmanager
    def in_phase(self, phase: str) -> Iterator[None]:
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    @contextmanager
    def _ignored(self, value: Any) -> Iterator[None]:
        del value
        yield

    in_micro_batch = in_chunk = carrying = _ignored

    def step_ends(self) -> None:
        self._steps += 1
        if self._steps == STEP - 1:
            self._tracer = echograph.trace_collectives(self._folder / "trace.jsonl")
            for model in MODELS:
                self._tracer.attach(model)
            phases = tracing._capture.phases
            hooked = phases.here
            phases.here = lambda: self._here(*hooked())
        elif self._steps == STEP:
            self._tracer.stop()

    def _here(self, phase: str, module: str) -> tuple[str, str]:
        # Gradients are clipped, and shares of them added up, outside the optimizer of PyTorch.
        return (self.phase if self.phase == "optimizer" else phase or self.phase), module


MODELS: list[Any] = []


def noted(original: Any) -> Any:
    """Keeps the chunks of the model."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        MODELS.append(self)

    return init


def calls_of(trace: Path) -> list[list[Any]]:
    """The calls of a trace in the order in which they were made."""
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    signatures = {line["id"]: line for line in lines if isinstance(line, dict) and line["line"] == "what"}
    ranks = {line["name"]: line["ranks"] for line in lines if isinstance(line, dict) and line["line"] == "group"}
    rows = {(row[0], row[1]): row for row in lines if isinstance(row, list)}
    ordered = sorted(rows.values(), key=lambda row: row[2])
    return [
        [what["phase"], what["op"], ranks[what["group"]], what["bytes"], what["dtype"], _peer(what)]
        for what in (signatures[row[0]] for row in ordered)
    ]


def _peer(what: dict[str, Any]) -> int:
    if what["op"] not in ("send", "recv"):
        return -1
    sender, receiver = what["channel"].rpartition(":")[2].partition("/")[0].split(">")
    return int(receiver if what["op"] == "send" else sender)


def main() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    folder = Path(sys.argv[1])
    del sys.argv[:2]
    place = Place(folder)
    with (
        shimmed(),
        device.present(World(rank=rank, size=size)),
        # No recorder passes marks on from operands to results: all that a real rank makes is on its device.
        replaced(device, "on_gpu", lambda _: True),
        in_place(hooks(place)),
    ):
        # The shims have megatron-core imported anew.
        from megatron.core.distributed import DistributedDataParallel

        with patched(DistributedDataParallel, "__init__", noted):
            runpy.run_path(sys.argv[0], run_name="__main__")
    (folder / f"{rank}.json").write_text(json.dumps(calls_of(folder / f"trace.{rank}.jsonl")))


if __name__ == "__main__":
    main()

"""One rank of Megatron's tensor- and pipeline-parallel training; what three counters say of its second step.

    torchrun --nproc-per-node 4 megatron_steps.py FOLDER pretrain.py ...

The counters: the tracer of collectives, PyTorch's flight recorder, which writes down what gloo's backend is given,
and one around the function that megatron-core gives its messages to. Each rank writes `FOLDER/<rank>.json`.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import echograph
from echograph.frontend.megatron.hooks import hooks
from echograph.frontend.megatron.patches import in_place
from echograph.frontend.megatron.shims import shimmed
from echograph.frontend.scripts import device
from echograph.frontend.scripts.adapter import patched
from echograph.frontend.scripts.world import World
from echograph.ir.comms.bandwidth import base_operation


def flown() -> Counter[str]:
    """Collectives that the flight recorder has, by kind.

    gloo makes scattered sums of sums over all, and shows those; it has no messages.
    """
    told = torch._C._distributed_c10d._dump_fr_trace_json(includeCollectives=True)
    names = (entry["profiling_name"].partition(":")[2] for entry in json.loads(told).get("entries", []))
    return Counter("all_reduce" if name.startswith("reduce_scatter") else base_operation(name) for name in names)


class Counters:
    """Begin with the first step's end, and answer at the second one's."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.messages: Counter[str] = Counter()
        self._folder, self._rank = folder, rank
        self._before: Counter[str] = Counter()
        self._tracer: Any = None

    def __getattr__(self, name: str) -> Any:
        return lambda *_: nullcontext()

    def step_ends(self) -> None:
        if self._tracer is None:
            self._tracer = echograph.trace_collectives(self._folder / "steps.jsonl")
            self.messages.clear()
            self._before = flown()
            return
        if not self._tracer._running:
            return
        self._tracer.stop()
        told = flown()
        told.subtract(self._before)
        traced: Counter[str] = Counter()
        for (op, _, _), n in self._tracer.counts().items():
            traced["all_reduce" if op.startswith("reduce_scatter") else base_operation(op)] += n
        found = {"flown": dict(+told), "traced": dict(traced), "messages": dict(self.messages)}
        (self._folder / f"{self._rank}.json").write_text(json.dumps(found))

    def batches(self, original: Any) -> Any:
        """Counts the messages of a batch."""

        def batch(operations: Any) -> Any:
            self.messages.update(op.op.__name__.removeprefix("i") for op in operations)
            return original(operations)

        return batch


def main() -> None:
    rank, size, folder = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(sys.argv[1])
    del sys.argv[:2]
    counters = Counters(folder, rank)
    with (
        shimmed(),
        device.present(World(rank=rank, size=size)),
        patched(device, "on_gpu", lambda _: lambda tensor: True),  # tensors here are real, and say nothing of it
        in_place(hooks(counters)),
        patched(dist, "batch_isend_irecv", counters.batches),
    ):
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()

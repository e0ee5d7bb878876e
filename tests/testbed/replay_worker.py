"""One rank of a data-parallel training on the bed, profiled: its compute is a sleep, its all-reduces are real.

    python replay_worker.py RANK WORLD ADDRESS PORT FOLDER STEPS

Writes the rank's trace, and prints the seconds of its steps without the profiler and with it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

FORWARD_S, BACKWARD_S = 0.015, 0.03
LAYERS, ELEMENTS = 6, 1 << 19
c10d: Any = torch.distributed  # whose stubs lack most of what is used here


class Device(torch.autograd.Function):
    """A layer on a device that is not there: it takes its time, and has a gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.shape = weight.shape
        time.sleep(FORWARD_S)
        return x + 0 * weight[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        time.sleep(BACKWARD_S)
        return gradients[0], gradients[0].sum().expand(ctx.shape)


class Net(torch.nn.Module):
    """Layers in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(ELEMENTS)) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = Device.apply(x, weight)  # type: ignore[no-untyped-call]
        return x.sum()


def main() -> None:
    """Trains."""
    rank, world, address, port, folder, steps = sys.argv[1:]
    torch.set_num_threads(1)
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    store = c10d.TCPStore(address, int(port), int(world), is_master=rank == "0", timeout=timedelta(seconds=60))
    c10d.init_process_group("gloo", store=store, rank=int(rank), world_size=int(world))
    model = torch.nn.parallel.DistributedDataParallel(Net(), bucket_cap_mb=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> float:
        began = time.perf_counter()
        optimizer.zero_grad()
        model(torch.ones(1)).backward()
        optimizer.step()
        return time.perf_counter() - began

    count = int(steps)
    free = [step() for _ in range(2 + count)][2:]
    when = schedule(wait=0, warmup=1, active=count, repeat=1)
    seconds = []
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, schedule=when) as profiler:
        for _ in range(1 + count):
            seconds.append(step())
            profiler.step()
    profiler.export_chrome_trace(str(Path(folder) / f"rank{rank}.pt.trace.json"))
    print(json.dumps({"free": free, "profiled": seconds[1:]}), flush=True)
    c10d.destroy_process_group()


if __name__ == "__main__":
    main()

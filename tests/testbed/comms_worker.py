"""One rank of a data-parallel training on the bed, its collectives traced: compute is a sleep, the rest is real.

    python comms_worker.py RANK WORLD ADDRESS PORT FOLDER STEPS

Writes the rank's trace of some steps after the first ones, and prints their seconds, all together.
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
from replay_worker import Net

import echograph

c10d: Any = torch.distributed  # whose stubs lack most of what is used here


def main() -> None:
    """Trains."""
    rank, world, address, port, folder, steps = sys.argv[1:]
    torch.set_num_threads(1)
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    store = c10d.TCPStore(address, int(port), int(world), is_master=rank == "0", timeout=timedelta(seconds=60))
    c10d.init_process_group("gloo", store=store, rank=int(rank), world_size=int(world))
    model = torch.nn.parallel.DistributedDataParallel(Net(), bucket_cap_mb=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        loss = model(torch.ones(1))
        loss.backward()
        optimizer.step()
        c10d.all_reduce(loss.detach())

    for _ in range(2):
        step()
    with echograph.trace_collectives(Path(folder) / "trace.jsonl"):
        # The trace is from its first call to its last end, and so is what is measured.
        c10d.all_reduce(torch.ones(1))
        began = time.perf_counter()
        for _ in range(int(steps)):
            step()
        seconds = time.perf_counter() - began
    print(json.dumps(seconds), flush=True)
    c10d.destroy_process_group()


if __name__ == "__main__":
    main()

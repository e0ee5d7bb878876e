"""A rank of a data-parallel job over gloo, traced; run as a script by `test_comms.py`, not collected."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import echograph

STEPS = 6


def main(folder: Path) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(768, 768) for _ in range(8)])
    wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=4)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        loss = wrapped(torch.ones(64, 768)).square().mean()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach())

    step()
    step()
    dist.barrier()
    with echograph.trace_collectives(folder / "traces" / "job.jsonl"):
        dist.barrier()
        began = time.perf_counter()
        for _ in range(STEPS):
            step()
        dist.barrier()
        seconds = time.perf_counter() - began
    (folder / f"answer.{rank}").write_text(json.dumps(seconds))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""An ordinary training script: data parallelism over NCCL where there are GPUs, over gloo where there are none."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Trains a small network on random numbers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--width", type=int, default=256)
    arguments = parser.parse_args()
    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    width = arguments.width
    layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.GELU())]
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(width, 10)).to(device))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(arguments.steps):
        x = torch.randn(32, width, device=device)
        y = torch.randint(0, 10, (32,), device=device)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

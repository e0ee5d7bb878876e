"""FullyShardedDataParallel, the first of its name."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).to(device) for _ in range(3)]
    layers = [FSDP(part, device_id=device) for part in parts]
    model = FSDP(nn.Sequential(*layers, nn.Linear(64, 10)).to(device), device_id=device)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(args.steps):
        x, y = torch.randn(16, 64, device=device), torch.randint(0, 10, (16,), device=device)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(step, loss.item())


if __name__ == "__main__":
    main()

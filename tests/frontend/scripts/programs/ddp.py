"""Data parallelism as in PyTorch's tutorial."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Model(nn.Module):
    def __init__(self, width, depth, recompute, spare):
        super().__init__()
        self.recompute = recompute
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 10)
        if spare:
            self.spare = nn.Linear(width, 10)

    def forward(self, x):
        if self.recompute == "reentrant":
            x = x.detach().requires_grad_()  # else a layer that gets no gradient is not recomputed
        for layer in self.layers:
            if self.recompute == "none":
                x = torch.relu(layer(x))
            else:
                x = torch.relu(checkpoint(layer, x, use_reentrant=self.recompute == "reentrant"))
        return self.head(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--recompute", default="none", choices=("none", "reentrant", "not-reentrant"))
    parser.add_argument("--spare", action="store_true", help="a layer that no forward pass uses")
    args = parser.parse_args()
    use_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device(f"cuda:{rank}" if use_cuda else "cpu")
    model = Model(args.width, args.depth, args.recompute, args.spare).to(device)
    devices = [rank] if use_cuda else None
    model = DDP(model, device_ids=devices, bucket_cap_mb=1, find_unused_parameters=args.spare)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(1024, args.width), torch.randint(0, 10, (1024,)))
    loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data, shuffle=True))
    loss_function = nn.CrossEntropyLoss()
    for step, (x, y) in zip(range(args.steps), loader, strict=False):
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        loss = loss_function(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""A script that starts its ranks itself, by torch.multiprocessing, with a rendezvous of its own."""

import argparse

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def worker(rank, args):
    dist.init_process_group("gloo", init_method=args.rendezvous, rank=rank, world_size=args.ranks)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(args.steps):
        loss = model(torch.randn(8, 32)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        if rank == 0:
            print(loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rendezvous", default="tcp://127.0.0.1:29671")
    options = parser.parse_args()
    mp.spawn(worker, args=(options,), nprocs=options.ranks, join=True)

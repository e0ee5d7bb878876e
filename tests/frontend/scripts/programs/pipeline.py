"""torch.distributed.pipelining, one stage a rank."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--schedule", default="1f1b", choices=("1f1b", "gpipe"))
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = (
        torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    )
    torch.manual_seed(rank)
    layers = [nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)]
    module = nn.Sequential(*layers, *([nn.Linear(64, 8)] if rank == world - 1 else [])).to(device)
    stage = PipelineStage(module, rank, world, device)
    kind = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[args.schedule]
    schedule = kind(stage, args.micro_batches, loss_fn=nn.functional.cross_entropy)
    optimizer = torch.optim.Adam(module.parameters())
    for step in range(args.steps):
        x, y = torch.randn(16, 64, device=device), torch.randint(0, 8, (16,), device=device)
        if rank == 0:
            schedule.step(x)
        elif rank == world - 1:
            losses = []
            schedule.step(target=y, losses=losses)
            print(step, torch.stack(losses).mean().item())
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

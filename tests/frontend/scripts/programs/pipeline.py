"""torch.distributed.pipelining: schedules of one and of several stages a rank, with replicas or shards beside."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn.parallel import DistributedDataParallel as DDP

SCHEDULES = {
    "1f1b": "Schedule1F1B",
    "gpipe": "ScheduleGPipe",
    "interleaved": "ScheduleInterleaved1F1B",
    "looped": "ScheduleLoopedBFS",
    "zero-bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--schedule", default="1f1b", choices=tuple(SCHEDULES))
    parser.add_argument("--data", default="none", choices=("none", "ddp", "fsdp"))
    args = parser.parse_args()
    dist.init_process_group("gloo")
    device = (
        torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    )
    replicas = 1 if args.data == "none" else 2
    sizes = (dist.get_world_size() // replicas, replicas)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("pp", "dp"))
    rank, ranks, group = mesh.get_local_rank("pp"), mesh["pp"].size(), mesh["pp"].get_group()
    kind = getattr(schedules, SCHEDULES[args.schedule])
    looped = args.schedule not in ("1f1b", "gpipe")
    count = 2 * ranks if looped else ranks
    mine = {"zbv": (rank, count - 1 - rank)}.get(args.schedule, tuple(range(rank, count, ranks)))
    parts, stages = [], []
    for number in mine:
        torch.manual_seed(number)
        layers = [nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)]
        part = nn.Sequential(*layers, *([nn.Linear(64, 8)] if number == count - 1 else [])).to(device)
        if args.data == "ddp":
            part = DDP(part, process_group=mesh["dp"].get_group())
        elif args.data == "fsdp":
            fully_shard(part, mesh=mesh["dp"])
        parts.append(part)
        stages.append(PipelineStage(part, number, count, device, group=group))
    schedule = kind(stages if looped else stages[0], args.micro_batches, loss_fn=nn.functional.cross_entropy)
    optimizer = torch.optim.Adam([p for part in parts for p in part.parameters()])
    for step in range(args.steps):
        x, y = torch.randn(16, 64, device=device), torch.randint(0, 8, (16,), device=device)
        losses = []
        last = {"target": y, "losses": losses} if count - 1 in mine else {}
        schedule.step(*([x] if 0 in mine else []), **last)
        if losses:
            print(step, torch.stack(losses).mean().item())
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

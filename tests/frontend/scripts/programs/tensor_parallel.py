"""DTensor's tensor parallelism, with sequence parallelism, of a feed-forward network."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--sequence", action="store_true")
    parser.add_argument("--fsdp", action="store_true")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group()
    mesh = init_device_mesh(device, (dist.get_world_size() // args.tp, args.tp), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(128) for _ in range(3))).to(device)
    between = Shard(0) if args.sequence else Replicate()
    for layer in model:
        plan = {"up": ColwiseParallel(input_layouts=between), "down": RowwiseParallel(output_layouts=between)}
        parallelize_module(layer, mesh["tp"], plan)
        if args.fsdp:
            fully_shard(layer, mesh=mesh["dp"])
    if args.fsdp:
        fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(args.steps):
        x = torch.randn(32, 128, device=device)
        loss = model(x).pow(2).mean()
        loss.backward()
        if mesh["dp"].size() > 1 and not args.fsdp:
            for parameter in model.parameters():
                gradient = parameter.grad.to_local()
                dist.all_reduce(gradient, group=mesh["dp"].get_group())
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: {loss.item()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Fully sharded data parallelism of a small transformer, mixed precision, gradient accumulation and clipping."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (
            t.view(batch, length, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, vocabulary, width, heads, depth, recompute):
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x) if self.recompute is None else checkpoint(block, x, use_reentrant=self.recompute)
        return self.head(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--recompute", choices=("reentrant", "not-reentrant"))
    args = parser.parse_args()
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group()
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    world = dist.get_world_size()
    if args.replicas > 1:
        sizes, names = (args.replicas, world // args.replicas), ("replicate", "shard")
    else:
        sizes, names = (world,), ("shard",)
    mesh = init_device_mesh(device_type, sizes, mesh_dim_names=names)
    torch.manual_seed(0)
    recompute = args.recompute and args.recompute == "reentrant"
    model = Transformer(512, args.width, 4, args.depth, recompute).to(device_type)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(args.steps):
        for _ in range(args.accumulate):
            tokens = torch.randint(0, 512, (2, 32), device=device_type)
            logits = model(tokens)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
            (loss / args.accumulate).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG if device_type == "cuda" else dist.ReduceOp.SUM)
        print(step, mean.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""GPT-2 under DDP, as a user writes it."""

import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--fail-at", type=int, default=-1)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=options.layers, n_embd=options.width, n_head=4, n_positions=options.length, vocab_size=8192
    )
    model = DistributedDataParallel(GPT2LMHeadModel(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(options.steps):
        tokens = torch.randint(0, config.vocab_size, (4, options.length))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        if step == options.fail_at and dist.get_rank() == 1:
            raise RuntimeError("the script fails here")
        optimizer.step()
        optimizer.zero_grad()
    print(f"loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

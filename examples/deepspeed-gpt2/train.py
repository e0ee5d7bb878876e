"""Trains GPT-2 on random tokens with DeepSpeed, as a user's script would: nothing here knows of echograph.

DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 train.py --deepspeed_config ds_config_zero3.json
"""

from __future__ import annotations

import argparse

import deepspeed
import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel


class RandomTokens(Dataset):
    """Samples of random tokens, each of its own seed."""

    def __init__(self, samples: int, length: int, vocabulary: int) -> None:
        self.samples, self.length, self.vocabulary = samples, length, vocabulary

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(self.vocabulary, (self.length,), generator=generator)


def parse_args() -> argparse.Namespace:
    """The arguments; the size is that of GPT-2 small unless they say otherwise."""
    parser = argparse.ArgumentParser(description="Train GPT-2 with DeepSpeed.")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--length", type=int, default=128, help="tokens of a sample")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--activation-checkpointing", action="store_true")
    parser.add_argument("--local_rank", type=int, default=-1)
    return deepspeed.add_config_arguments(parser).parse_args()


def main() -> None:
    """Trains for some steps and prints the loss of each."""
    args = parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=args.layers, n_embd=args.hidden, n_head=args.heads, vocab_size=args.vocabulary,
        n_positions=args.length, use_cache=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    if args.activation_checkpointing:
        model.gradient_checkpointing_enable()
    model.train()
    engine, _, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    accumulation = engine.gradient_accumulation_steps()
    data = RandomTokens(args.steps * engine.train_batch_size(), args.length, args.vocabulary)
    batches = iter(engine.deepspeed_io(data))
    for step in range(args.steps):
        for _ in range(accumulation):
            tokens = next(batches).to(engine.device)
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
        if engine.global_rank == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()

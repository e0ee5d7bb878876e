"""A training script as users of ZeRO-3 write it: the model is made in shares, from a configuration.

deepspeed_llama.py --deepspeed_config FILE [--layers N] [--hidden N] [--length N]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=32)
parser.add_argument("--hidden", type=int, default=4096)
parser.add_argument("--length", type=int, default=8192)
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--recompute", action="store_true")
parser.add_argument("--local_rank", type=int, default=-1)
args = deepspeed.add_config_arguments(parser).parse_args()

deepspeed.init_distributed()
torch.cuda.set_device(args.local_rank if args.local_rank >= 0 else 0)
config = LlamaConfig(
    vocab_size=128256, hidden_size=args.hidden, intermediate_size=args.hidden * 7 // 2,
    num_hidden_layers=args.layers, num_attention_heads=args.hidden // 128, num_key_value_heads=args.hidden // 512,
    max_position_embeddings=args.length, rope_theta=500000.0, use_cache=False,
)  # fmt: skip
settings = json.loads(Path(args.deepspeed_config).read_text())
sharded = settings["zero_optimization"]["stage"] == 3
with deepspeed.zero.Init(config_dict_or_path=args.deepspeed_config, enabled=sharded):
    model = LlamaForCausalLM(config)
if args.recompute:
    model.gradient_checkpointing_enable()
engine, optimizer, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
size = engine.train_micro_batch_size_per_gpu()
for step in range(args.steps * engine.gradient_accumulation_steps()):
    tokens = torch.randint(config.vocab_size, (size, args.length), device="cuda")
    loss = engine(input_ids=tokens, labels=tokens).loss
    engine.backward(loss)
    engine.step()
    if step % 10 == 0 and engine.global_rank == 0:
        print(f"step {step}: loss {loss.item():.3f}, norm {engine.get_global_grad_norm()}")

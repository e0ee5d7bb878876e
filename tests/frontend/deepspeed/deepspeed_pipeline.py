"""A training script as users of DeepSpeed's pipelines write it: layers, how many stages, and `train_batch`.

deepspeed_pipeline.py --deepspeed_config FILE [--stages N] [--blocks N] [--hidden N] [--tied] [--pair] [--dynamic]
"""

from __future__ import annotations

import argparse

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.utils import RepeatingLoader
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--stages", type=int, default=2)
parser.add_argument("--blocks", type=int, default=4)
parser.add_argument("--hidden", type=int, default=64)
parser.add_argument("--vocabulary", type=int, default=512)
parser.add_argument("--length", type=int, default=16)
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--checkpoint", type=int, default=0, help="layers that are recomputed together")
parser.add_argument("--tied", action="store_true", help="the last layer has the embedding's weight")
parser.add_argument("--pair", action="store_true", help="stages pass a tuple on, of which one part is a mask")
parser.add_argument("--dynamic", action="store_true", help="stages tell each other shapes in every micro-batch")
parser.add_argument("--local_rank", type=int, default=-1)
args = deepspeed.add_config_arguments(parser).parse_args()


class Embedding(nn.Module):
    """Tokens to vectors, and a mask of the positions that count."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(args.vocabulary, args.hidden)

    @property
    def weight(self) -> torch.Tensor:
        """What a tied layer shares."""
        return self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Vectors, with the mask if pairs are passed on."""
        vectors = self.table(tokens)
        return (vectors, (tokens > 0).to(torch.int64)) if args.pair else vectors


class Block(nn.Module):
    """What stands for a layer of a transformer: a normalised, gated product."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(args.hidden)
        self.up = nn.Linear(args.hidden, 4 * args.hidden)
        self.down = nn.Linear(4 * args.hidden, args.hidden)

    def forward(
        self, given: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The same shapes as it was given."""
        x, mask = given if args.pair else (given, None)
        y = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return y if mask is None else (y * mask.unsqueeze(-1), mask)


def score(embedding: Embedding, given: torch.Tensor) -> torch.Tensor:
    """Scores of all words, by the embedding's weight."""
    return nn.functional.linear(given, embedding.weight)


def loss_of(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the next words."""
    return nn.functional.cross_entropy(scores.float().flatten(0, 1), tokens.flatten())


deepspeed.init_distributed()
torch.manual_seed(0)
first = TiedLayerSpec("embedding", Embedding, tied_weight_attr="table.weight") if args.tied else Embedding()
last = (
    TiedLayerSpec("embedding", Embedding, forward_fn=score, tied_weight_attr="table.weight")
    if args.tied
    else LayerSpec(nn.Linear, args.hidden, args.vocabulary, bias=False)
)
drop = [lambda pair: pair[0]] if args.pair else []
model = PipelineModule(
    layers=[first, *(LayerSpec(Block) for _ in range(args.blocks)), *drop, last],
    num_stages=args.stages, loss_fn=loss_of, partition_method="uniform", dynamic_shape=args.dynamic,
    activation_checkpoint_interval=args.checkpoint, checkpointable_layers=["Block"],
)  # fmt: skip
trained = [p for p in model.parameters() if p.requires_grad]
engine, _, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=trained)
samples = [torch.randint(args.vocabulary, (args.length,)) for _ in range(64)]
loader = torch.utils.data.DataLoader(
    [(tokens, tokens) for tokens in samples], batch_size=engine.train_micro_batch_size_per_gpu()
)
batches = iter(RepeatingLoader(loader))
for step in range(args.steps):
    loss = engine.train_batch(data_iter=batches)
    if engine.global_rank == 0:
        print(f"step {step}: loss {loss.item():.3f}", flush=True)

"""What torch's own pipelines do on every stage, recorded without ranks: a fake process group and fake tensors.

    python torch_pipelining.py '{"model": "gpt2", "layers": 8, "schedule": "1f1b", "stages": 4, "chunks": 1,
                                 "micro_batches": 8, "world": 64}'

prints for each stage, in order: ["F" | "B" | "I" | "W", chunk, micro-batch, FLOPs of matrix products] for forward,
backward, backward of inputs, backward of weights; ["send" | "recv", peer stage, bytes] for each message.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from echograph.frontend.pytorch.capture import capture_mode
from echograph.models import build, get_model

SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    # One stage a rank makes it ZB-H1.
    "zb-h1": "ScheduleInterleavedZeroBubble",
    "zb-v": "ScheduleZBVZeroBubble",
    "dualpipe-v": "ScheduleDualPipeV",
}
SEQUENCE = 16


class Stage(nn.Module):
    """Some layers of a model, the embedding in front of the first, the head and loss behind the last."""

    def __init__(self, model: Any, layers: range, total: int) -> None:
        super().__init__()
        self.body = model.transformer if hasattr(model, "transformer") else model.model
        self.layers, self.first, self.last = layers, layers.start == 0, layers.stop == total
        self.head = model.lm_head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        body = self.body
        position = torch.arange(SEQUENCE).unsqueeze(0)
        llama = hasattr(body, "embed_tokens")
        if self.first:
            x = body.embed_tokens(x) if llama else body.wte(x) + body.wpe(position)
        rotary = {"position_embeddings": body.rotary_emb(x, position)} if llama else {}
        for number in self.layers:
            made = (body.layers if llama else body.h)[number](x, **rotary)
            x = made if isinstance(made, torch.Tensor) else made[0]
        return self.head((body.norm if llama else body.ln_f)(x)) if self.last else x


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


class Messages(TorchDispatchMode):
    """Writes down point-to-point messages, and answers what fake tensors cannot."""

    def __init__(self, log: list[list[Any]]) -> None:
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func._schema.name
        if name in ("c10d::send", "c10d::recv_"):
            (tensor,) = args[0]
            verb = "send" if name == "c10d::send" else "recv"
            self.log.append([verb, args[2], tensor.numel() * tensor.element_size()])
        if name == "aten::_local_scalar_dense":
            return 1
        return func(*args, **(kwargs or {}))


def record(stage: PipelineStage, chunk: int, log: list[list[Any]]) -> None:
    """Makes a stage write down when it computes."""

    def wrap(name: str, letter: Any) -> None:
        inner = getattr(stage, name)

        def run(micro_batch: int, *args: Any, **kwargs: Any) -> Any:
            with FlopCounterMode(display=False) as counter:
                made = inner(micro_batch, *args, **kwargs)
            counts = {str(op): n for op, n in counter.get_flop_counts().get("Global", {}).items()}
            products = sum(counts.get(op, 0) for op in ("aten.mm", "aten.addmm"))
            log.append([letter(kwargs), chunk, micro_batch, products])
            return made

        setattr(stage, name, run)

    wrap("forward_one_chunk", lambda _: "F")
    wrap("backward_one_chunk", lambda kwargs: "B" if kwargs.get("full_backward", True) else "I")
    wrap("backward_weight_one_chunk", lambda _: "W")


def run_rank(plan: dict[str, Any], rank: int) -> list[list[Any]]:
    """One step of the rank that holds a stage."""
    stages, chunks, inside = plan["stages"], plan["chunks"], plan["world"] // plan["stages"]
    dist.init_process_group("fake", store=FakeStore(), rank=rank * inside, world_size=plan["world"])
    group = dist.new_group(ranks=[stage * inside for stage in range(stages)])
    log: list[list[Any]] = []
    entry = get_model(plan["model"])
    layers = {"n_layer" if plan["model"] == "gpt2" else "num_hidden_layers": plan["layers"]}
    with capture_mode() as mode:
        torch.set_default_dtype(torch.bfloat16)
        built = build(entry.with_config(**layers), batch_size=1, seq_len=SEQUENCE)
        torch.set_default_dtype(torch.float32)
    width = built.module.config.hidden_size
    parts, turns = stages * chunks, plan["schedule"] in ("zb-v", "dualpipe-v")
    with mode:
        made = []
        for chunk in range(chunks):
            number = parts - 1 - rank if turns and chunk else chunk * stages + rank
            share = range(number * plan["layers"] // parts, (number + 1) * plan["layers"] // parts)
            module = Stage(built.module, share, plan["layers"])
            tokens = torch.zeros(1, SEQUENCE, dtype=torch.int64)
            hidden = torch.zeros(1, SEQUENCE, width, dtype=torch.bfloat16, requires_grad=True)
            logits = torch.zeros(
                1, SEQUENCE, built.module.config.vocab_size, dtype=torch.bfloat16, requires_grad=True
            )
            first, last = number == 0, number == parts - 1
            stage = PipelineStage(
                module, number, parts, torch.device("cpu"), group=group,
                input_args=tokens if first else hidden, input_grads=None if first else hidden.detach(),
                output_args=logits if last else hidden, output_grads=logits.detach() if last else hidden.detach(),
            )  # fmt: skip
            record(stage, chunk, log)
            made.append(stage)
        schedule = getattr(torch_schedules, SCHEDULES[plan["schedule"]])(
            made if plan["schedule"] in ("interleaved", "zb-h1", "zb-v", "dualpipe-v") else made[0],
            plan["micro_batches"],
            loss_fn=loss_of,
        )
        inputs = torch.zeros(plan["micro_batches"], SEQUENCE, dtype=torch.int64)
        with Messages(log):
            has_first, has_last = rank == 0, rank == (0 if turns else stages - 1)
            schedule.step(*([inputs] if has_first else []), **({"target": inputs} if has_last else {}))
    with unset_fake_temporarily():
        dist.destroy_process_group()
    return log


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    for rank in range(asked["stages"]):
        print(json.dumps(run_rank(asked, rank)))

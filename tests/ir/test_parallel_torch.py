"""Plans against PyTorch's own: the same matrix products and collectives as DTensor, FSDP2 and DDP have."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest

from echograph.frontend.pytorch.spec import StepSpec
from echograph.ir import types as t
from echograph.ir.graph import Graph, StepGraph
from echograph.ir.passes.data_parallel import DataParallel
from echograph.ir.passes.fully_shard import FullyShard
from echograph.ir.passes.tensor_parallel import TensorParallel
from echograph.ir.passes.tensor_parallel.plan import PLAN
from echograph.models import get_model
from echograph.workflow.compile import compile_entry

TENSOR, POSITIONS, LAYERS = 8, 128, 2
Work = Counter[tuple[Any, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model of the zoo as it is compared.

    Attributes:
        name: in the zoo.
        changes: of its configuration. Torch cannot tie a shared embedding to a shared head; without dropout it
            draws no random numbers, which DTensor does not do on a CPU.
        whole_vocabulary: BERT's head is tied to its embedding, so its layers alone are shared.
    """

    name: str
    changes: dict[str, Any]
    whole_vocabulary: bool = False


MODELS = {
    "llama": Model(name="llama-3-8b", changes={"num_hidden_layers": LAYERS}),
    "gpt2": Model(
        name="gpt2-medium",
        changes={
            "n_layer": LAYERS,
            "vocab_size": 50304,
            "tie_word_embeddings": False,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        },
    ),
    "bert": Model(
        name="bert-large-uncased",
        changes={
            "num_hidden_layers": LAYERS,
            **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
        },
        whole_vocabulary=True,
    ),
}


@cache
def step_of(model: str) -> StepGraph:
    entry = get_model(MODELS[model].name).with_config(**MODELS[model].changes)
    return compile_entry(entry, StepSpec(), batch_size=1, seq_len=POSITIONS)


def recorded(warm: Path, model: str, ranks: int, plan: str) -> tuple[Work, Work]:
    """Products and collectives of torch, in a process of its own since it makes a default process group."""
    case = {
        "model": MODELS[model].name,
        "changes": MODELS[model].changes,
        "ranks": ranks,
        "tensor": TENSOR,
        "positions": POSITIONS,
        "plans": [plan],
    }
    program = Path(__file__).with_name("torch_parallel.py")
    command = [warm / "python", program, json.dumps(case)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    name, *tables = json.loads(done.stdout.splitlines()[-1])
    assert name == plan
    products, collectives = (Counter({tuple(row[:-1]): row[-1] for row in table}) for table in tables)
    return products, collectives


def planned(model: str, ranks: int, plan: str) -> Graph:
    """What our passes make of the step."""
    step = step_of(model)
    if plan == "ddp":
        return DataParallel(replicas=ranks)(step)
    patterns = {p: style for p, style in PLAN.items() if style != "vocab" or not MODELS[model].whole_vocabulary}
    # Torch does not pad the vocabulary.
    local = TensorParallel(size=TENSOR, plan=patterns, vocab_multiple=1, sequence_parallel=plan == "tp_sp")(step)
    if plan == "fsdp_tp":
        return FullyShard(replicas=ranks // TENSOR, reduce_dtype=t.DType.FP32)(local)
    return local


def work(graph: Graph) -> tuple[Work, Work]:
    """Matrix products by their extents, and collectives by kind, ranks of the group, bytes and type."""
    sizes = {axis.name: axis.size for axis in graph.mesh}
    ranks = [prod(sizes[name] for name in group.axes) for group in graph.groups]
    products: Work = Counter()
    collectives: Work = Counter()
    for _, begin, end, _, _ in graph.programs[0].calls.tolist():
        for op in graph.ops[begin:end]:
            if op.name in ("aten.mm", "aten.addmm"):
                a, b = (graph.tensors.shape.row(i) for i in op.inputs[-2:])
                products[*a, b[1]] += 1
            elif isinstance(op, t.Collective):
                collectives[op.collective.name, ranks[op.group], op.bytes_per_rank, op.dtype.name] += 1
    return products, collectives


CASES = [
    pytest.param(model, ranks, plan, marks=() if model == fast and ranks == 64 else pytest.mark.slow)
    for plan, fast in (("tp", "llama"), ("tp_sp", "gpt2"), ("fsdp_tp", "gpt2"), ("ddp", "bert"))
    for model in MODELS
    for ranks in (64, 1024)
    if (model, plan) != ("bert", "tp_sp")  # with its layers alone, the stream between them is whole
]


def differences(model: str, ranks: int, plan: str) -> Work:
    """What we communicate more often than torch does, or (negative) less often.

    - Sequence parallelism: torch keeps the gathered inputs of column-parallel products, which Megatron gathers
      again in the backward pass: attention, feed-forward part, head. And it leaves the gradients of norms, and of
      biases that are added to shares, as summands for whoever reads them; they are reduced at once here.
    - DDP: buffers are broadcast as bytes here, by their type in torch. Of a weight that lies as [inputs, outputs]
      (GPT-2's), autograd hands on the bias' gradient first, though it is computed last: one that is at the border
      of two buckets is in the one before.
    """
    found: Work = Counter()
    hidden = {"llama": 4096, "gpt2": 1024, "bert": 1024}[model] * 2
    if plan == "tp_sp":
        vectors = 2 if model == "gpt2" else 1  # of a norm
        biases = 2 * LAYERS if model == "gpt2" else 0
        found["ALL_GATHER", TENSOR, POSITIONS * hidden, "BF16"] = 2 * LAYERS + 1
        found["ALL_REDUCE", TENSOR, hidden, "BF16"] = vectors * (2 * LAYERS + 1) + biases
    elif plan == "ddp" and model != "gpt2":
        # Rotary frequencies; positions and token types.
        nbytes, kind = {"llama": (64 * 2 * 4, "FP32"), "bert": (2 * 512 * 8, "INT64")}[model]
        found["BROADCAST", ranks, nbytes, "UINT8"] += 1
        found["BROADCAST", ranks, nbytes, kind] -= 1
    elif plan == "ddp":
        matrices, vectors = 12 * 1024 * 1024 * 2, (3 + 1 + 4 + 1 + 4) * 1024 * 2  # of a layer
        second = 2 * hidden + matrices + vectors + 4 * 1024 * 1024 * 2
        rest = (50304 + 1024) * 1024 * 2 + (LAYERS - 1) * (matrices + vectors) - 4 * 1024 * 1024 * 2
        for moved, count in ((0, 1), (hidden, -1)):
            found["ALL_REDUCE", ranks, second + moved, "BF16"] += count
            found["ALL_REDUCE", ranks, rest - moved, "BF16"] += count
    return found


@pytest.mark.parametrize(("model", "ranks", "plan"), CASES)
def test_products_and_collectives_are_those_of_torch(warm: Path, model: str, ranks: int, plan: str) -> None:
    products, collectives = work(planned(model, ranks, plan))
    theirs, communicated = recorded(warm, model, ranks, plan)
    assert products == theirs
    collectives.subtract(differences(model, ranks, plan))
    assert collectives == communicated

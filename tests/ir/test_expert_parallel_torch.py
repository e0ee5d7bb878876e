"""Expert parallelism against a layer written by hand for ranks that exist in torch alone, as trainers write it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from echograph.frontend.pytorch.spec import StepSpec
from echograph.ir import types as t
from echograph.ir.passes.expert_parallel import ExpertParallel
from echograph.models import get_model
from echograph.workflow.compile import compile_entry

TOKENS, HIDDEN, INNER, EXPERTS, CHOSEN = 64, 64, 96, 8, 2
_DTYPES = {torch.bfloat16: t.DType.BF16, torch.int32: t.DType.INT32}
Work = Counter[tuple[Any, ...]]


class _Layer(nn.Module):
    """One rank's part of a layer of experts: route, exchange, compute expert by expert, exchange, add up."""

    def __init__(self, size: int) -> None:
        super().__init__()
        local = EXPERTS // size
        self.size, self.local = size, local
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(local, HIDDEN, 2 * INNER))
        self.down = nn.Parameter(torch.randn(local, INNER, HIDDEN))

    def forward(self, tokens: Tensor) -> Tensor:
        chance = F.softmax(self.router(tokens), dim=-1)
        # Every expert is chosen equally often, whatever the router would like.
        chosen = (torch.arange(TOKENS * CHOSEN) % EXPERTS).view(TOKENS, CHOSEN)
        weight = chance.gather(1, chosen).flatten()
        order = chosen.flatten().argsort(stable=True)
        rows = tokens[order // CHOSEN]
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS).int()
        # The other ranks do not exist: what they would send stands there before.
        everybodys = counts.repeat(self.size).clone()
        dist.all_gather_into_tensor(everybodys, counts)
        table = everybodys.view(self.size, self.size, self.local)
        sends, receives = table[0].sum(1).tolist(), table[:, 0].sum(1).tolist()
        came = all_to_all_single_autograd(rows, receives, sends, dist.group.WORLD)
        parts = came.split(table[:, 0].flatten().tolist())
        results = list(parts)
        for expert in range(self.local):
            mine = torch.cat(parts[expert :: self.local])
            gate, up = (mine @ self.up[expert]).chunk(2, dim=-1)
            made = (F.silu(gate) * up) @ self.down[expert]
            results[expert :: self.local] = made.split(table[:, 0, expert].tolist())
        back = all_to_all_single_autograd(torch.cat(results), sends, receives, dist.group.WORLD)
        return torch.zeros_like(tokens).index_add(0, order // CHOSEN, back * weight[order, None])


class _Recorder(TorchDispatchMode):
    """Counts collectives by the bytes of their whole buffer, and the work of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: Work = Counter()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in ("aten::mm", "aten::bmm"):
            self.flops += 2 * args[0].numel() * args[1].shape[-1]
        elif name == "c10d::_allgather_base_":
            self.collectives["all_gather", args[0].nbytes, _DTYPES[args[0].dtype]] += 1
        elif name.startswith("_c10d_functional") and "all_to_all" in name:
            self.collectives["all_to_all", args[0].nbytes, _DTYPES[args[0].dtype]] += 1
        elif "c10d" in name and "wait" not in name and "wrap" not in name:
            self.collectives[name, 0, None] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(params=[2, 4, 8])
def size(request: pytest.FixtureRequest) -> Iterator[int]:
    """Ranks, of which this process is the first and the others do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    try:
        yield request.param
    finally:
        dist.destroy_process_group()


def test_collectives_and_work_are_those_of_a_layer_in_torch(size: int) -> None:
    """A layer of Mixtral with all experts, shared by our pass, and the same layer shared by hand."""
    entry = get_model("mixtral-8x7b").with_config(
        hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=128, num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN,
    )  # fmt: skip
    step = ExpertParallel(size=size)(compile_entry(entry, StepSpec(), batch_size=1, seq_len=TOKENS))
    collectives: Work = Counter()
    flops = 0
    for _, begin, end, _, _ in step.programs[0].calls.tolist():
        for op in step.ops[begin:end]:
            if isinstance(op, t.Collective):
                collectives[op.collective.name.lower(), op.bytes_per_rank, op.dtype] += 1
            elif isinstance(op, t.Compute) and ".mlp" in op.module:
                flops += op.flops
    recorder = _Recorder()
    layer = _Layer(size).bfloat16()
    tokens = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    with recorder:
        layer(tokens).sum().backward()
    assert recorder.collectives == collectives
    assert sum(collectives.values()) == 5
    assert recorder.flops == flops

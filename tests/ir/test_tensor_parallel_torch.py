"""Tensor parallelism against PyTorch's own: the same products and collectives as DTensor's parallel plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from echograph.cli.compose import compile_entry
from echograph.frontend.pytorch.capture import capture_mode
from echograph.frontend.pytorch.step import StepSpec
from echograph.ir import types as t
from echograph.ir.graph import StepGraph
from echograph.ir.passes.tensor_parallel import TensorParallel
from echograph.ir.passes.tensor_parallel_plan import PLAN
from echograph.models import ModelEntry, build, get_model

SIZE, POSITIONS, LAYERS = 4, 128, 2
ENTRIES = {
    "llama": get_model("llama-3.2-1b").with_config(num_hidden_layers=LAYERS, tie_word_embeddings=False),
    "bert": get_model("bert-base-uncased").with_config(num_hidden_layers=LAYERS),
}
_DTYPES = {torch.bfloat16: t.DType.BF16, torch.float32: t.DType.FP32}
Work = Counter[tuple[Any, ...]]


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Four ranks, of which this process is one and the others do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=SIZE)
    try:
        yield init_device_mesh("cpu", (SIZE,))
    finally:
        dist.destroy_process_group()


class _Recorder(TorchDispatchMode):
    """Counts matrix products by their extents, and collectives by bytes and type, of local tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.products: Work = Counter()
        self.collectives: Work = Counter()
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm") and not self.paused:
            a, b = args[-2:]
            self.products[*a.shape, b.shape[1]] += 1
        if func.namespace == "_c10d_functional" and name != "wait_tensor":
            name = name.replace("_into_tensor", "").replace("_tensor", "")
            parts = SIZE if name == "all_gather" else 1
            self.collectives[name, parts * args[0].nbytes, _DTYPES[args[0].dtype]] += 1
        return func(*args, **(kwargs or {}))


def _ignore_shape_inference(recorder: _Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """DTensor runs each operator once more on global shapes to learn its result's; that is no work."""
    infer = ShardingPropagator._propagate_tensor_meta_non_cached

    def quietly(*args: Any, **kwargs: Any) -> Any:
        recorder.paused = True
        try:
            return infer(*args, **kwargs)
        finally:
            recorder.paused = False

    monkeypatch.setattr(ShardingPropagator, "_propagate_tensor_meta_non_cached", quietly)


def _llama_plan(between: Placement) -> tuple[dict[str, Any], dict[str, Any]]:
    """Plans of a layer and of the rest; `between` is what activations are between attention and feed-forward."""
    whole = Replicate()
    layer = {
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": between}, desired_input_kwarg_layouts={"hidden_states": whole}
        ),
        "mlp": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(whole,)),
        **{f"self_attn.{x}_proj": ColwiseParallel() for x in "qkv"},
        **{f"mlp.{x}_proj": ColwiseParallel() for x in ("gate", "up")},
    }
    local = between == whole
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        layer[name] = RowwiseParallel(output_layouts=between, use_local_output=local)
    rest: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=whole, output_layouts=between, use_local_output=local),
        "lm_head": ColwiseParallel(input_layouts=between, use_local_output=False),
    }
    if not local:
        layer |= {name: SequenceParallel() for name in ("input_layernorm", "post_attention_layernorm")}
        rest["model.norm"] = SequenceParallel()
    return layer, rest


def _bert_plan() -> dict[str, Any]:
    whole = (Replicate(),)
    columns = [*(f"attention.self.{x}" for x in ("query", "key", "value")), "intermediate.dense"]
    return {
        "attention.self": PrepareModuleInput(input_layouts=whole, desired_input_layouts=whole),
        **{name: ColwiseParallel() for name in columns},
        **{name: RowwiseParallel() for name in ("attention.output.dense", "output.dense")},
    }


def _parallelize(module: torch.nn.Module, case: str, mesh: DeviceMesh) -> None:
    between = Shard(1) if case == "llama, sequence" else Replicate()
    layer_plan, rest = (_bert_plan(), {}) if case == "bert" else _llama_plan(between)
    layers: Any = module.get_submodule("bert.encoder.layer" if case == "bert" else "model.layers")
    for layer in layers:
        parallelize_module(layer, mesh, layer_plan, src_data_rank=None)
    parallelize_module(module, mesh, rest, src_data_rank=None)


def _record(entry: ModelEntry, case: str, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> _Recorder:
    recorder = _Recorder()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with capture_mode() as fake:
            module, inputs, loss = build(entry, batch_size=1, seq_len=POSITIONS)
        with unset_fake_temporarily():
            _parallelize(module, case, mesh)
        _ignore_shape_inference(recorder, monkeypatch)
        with fake, recorder, loss_parallel(), implicit_replication():
            loss(module(**inputs)).backward()
    finally:
        torch.set_default_dtype(before)
    return recorder


def _ours(step: StepGraph) -> tuple[Work, Work]:
    products: Work = Counter()
    collectives: Work = Counter()
    for _, begin, end, _, _ in step.programs[0].calls.tolist():
        for op in step.ops[begin:end]:
            if op.name in ("aten.mm", "aten.addmm"):
                a, b = (step.tensors.shape.row(i) for i in op.inputs[-2:])
                products[*a, b[1]] += 1
            elif isinstance(op, t.Collective):
                collectives[op.collective.name.lower(), op.bytes_per_rank, op.dtype] += 1
    return products, collectives


@pytest.mark.parametrize("case", ["llama", "llama, sequence", "bert"])
def test_products_and_collectives_are_those_of_dtensor(
    case: str, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Llama with embedding, head and loss; BERT's layers alone, as its head is tied to its embedding.

    Torch does not pad the vocabulary, so neither do we here. With sequence parallelism, torch keeps the gathered
    inputs of column-parallel layers, which Megatron gathers again; and it leaves the gradients of norms as
    summands for whoever reads them, which we reduce at once.
    """
    entry = ENTRIES[case.partition(",")[0]]
    step = compile_entry(entry, StepSpec(), batch_size=1, seq_len=POSITIONS)
    plan = {pattern: style for pattern, style in PLAN.items() if style != "vocab" or case != "bert"}
    sequence = case == "llama, sequence"
    ours = TensorParallel(size=SIZE, plan=plan, vocab_multiple=1, sequence_parallel=sequence)(step)
    products, collectives = _ours(ours)
    recorded = _record(entry, case, mesh, monkeypatch)
    assert products == recorded.products
    if sequence:
        collectives["all_gather", POSITIONS * 2048 * 2, t.DType.BF16] -= 2 * LAYERS + 1
        del collectives["all_reduce", 2048 * 2, t.DType.BF16]
    assert collectives == recorded.collectives
    assert sum(collectives.values()) == {"bert": 8, "llama": 13, "llama, sequence": 23}[case]

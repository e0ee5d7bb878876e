"""Ring attention against PyTorch's own, run as the middle rank under a fake process group.

What differs, with its reason (`own_gradients`, `types` below):
- torch starts the backward pass from a rank's own keys, so their gradients travel `size` hops to be home; here, as
  in TransformerEngine, it starts from those that came last, and they travel `size - 1`.
- torch adds gradients up in fp32 (`convert_to_f32`) and sends them so; here in the type of the keys.
- torch's default gathers all keys at once instead of passing them on: as many bytes over the wire.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental._context_parallel import _attention as ring
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from echograph.frontend.pytorch.spec import StepSpec
from echograph.ir import types as t
from echograph.ir.graph import StepGraph
from echograph.ir.passes.context_parallel import ContextParallel
from echograph.models import get_model
from echograph.workflow.compile import compile_entry

BATCH, POSITIONS, LAYERS = 2, 128, 2
SIZES = [2, 4, 8]
CAUSAL = {"llama-3.2-1b": True, "bert-base-uncased": False}
Work = Counter[tuple[Any, ...]]


@pytest.fixture(scope="module")
def steps() -> dict[str, StepGraph]:
    found = {}
    for name in CAUSAL:
        entry = get_model(name).with_config(num_hidden_layers=LAYERS)
        found[name] = compile_entry(entry, StepSpec(), batch_size=BATCH, seq_len=POSITIONS)
    return found


@pytest.fixture
def mesh(size: int) -> Iterator[DeviceMesh]:
    """`size` ranks, of which this process is the middle one and the others do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=size // 2, world_size=size)
    try:
        yield init_device_mesh("cpu", (size,))
    finally:
        dist.destroy_process_group()


class _Recorder(TorchDispatchMode):
    """Counts blocks of attention by their extents, and communications by bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: Work = Counter()
        self.sent: Work = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if "flash_attention" in name:
            names = [argument.name for argument in func._schema.arguments]
            named = dict(zip(names, args, strict=False)) | kwargs
            query, key = named["query"], named["key"]
            self.blocks[name, tuple(query.shape), tuple(key.shape), named.get("is_causal", False)] += 1
        if func.namespace == "_c10d_functional" and name != "wait_tensor":
            self.sent[name, args[0].nbytes] += 1
        return func(*args, **kwargs)


def torch_attention(
    mesh: DeviceMesh, attention: t.Attention, *, gather: bool = False, balance: bool | None = None
) -> _Recorder:
    """Forward and backward of one layer's ring, on fake tensors."""
    size = mesh.size()
    ring._cp_options.enable_load_balance = attention.causal if balance is None else balance
    ring.set_rotate_method("allgather" if gather else "alltoall")
    recorder = _Recorder()
    shape = BATCH, attention.heads, POSITIONS // size, attention.head_dim
    with FakeTensorMode(), torch.no_grad():
        query, gradient = (torch.empty(shape, dtype=torch.bfloat16) for _ in range(2))
        key, value = (torch.empty((BATCH, attention.kv_heads, *shape[2:]), dtype=torch.bfloat16) for _ in range(2))
        with recorder:
            made: Any = ring._scaled_dot_product_ring_flash_attention(
                mesh, query, key, value, is_causal=attention.causal
            )
            out, sums, *rest = made
            backward: Any = ring._scaled_dot_product_ring_flash_attention_backward
            backward(mesh, gradient, query, key, value, out, sums, *rest[:4], 0.0, attention.causal, *rest[4:6])
    return recorder


def ours(graph: StepGraph) -> tuple[Work, Work]:
    """Blocks of attention of one layer, and what it sends, as the recorder counts them."""
    blocks: Work = Counter()
    sent: Work = Counter()
    for op in graph.ops:
        if isinstance(op, t.Compute) and isinstance(op.attributes, t.Attention):
            first = 1 if op.name.endswith("backward") else 0
            query, key = (graph.tensors.shape.row(i) for i in op.inputs[first : first + 2])
            blocks[op.name.removeprefix("aten."), query, key, op.attributes.causal] += 1
        elif isinstance(op, t.Send):
            sent[op.payload, op.phase, op.nbytes] += 1
    return blocks, sent


@pytest.fixture(autouse=True)
def options() -> Iterator[None]:
    """Torch's options are global: they are put back."""
    known = ring._cp_options.enable_load_balance, ring._cp_options.rotate_method
    yield
    ring._cp_options.enable_load_balance, ring._cp_options.rotate_method = known


def layer_attention(graph: StepGraph) -> t.Attention:
    return next(a for a in graph.ops.attribute_values if isinstance(a, t.Attention))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CAUSAL)
def test_blocks_and_sends_are_those_of_torch(
    steps: dict[str, StepGraph], name: str, size: int, mesh: DeviceMesh
) -> None:
    graph = steps[name]
    attention = layer_attention(graph)
    theirs = torch_attention(mesh, attention, gather=False)
    blocks, sent = ours(ContextParallel(size=size)(graph))
    assert blocks == theirs.blocks

    keys = 2 * BATCH * attention.kv_heads * (POSITIONS // size) * attention.head_dim * 2
    forward, backward = t.Phase.FORWARD, t.Phase.BACKWARD
    activation, gradient = t.Payload.ACTIVATION, t.Payload.GRADIENT
    hops = size - 1
    assert sent == Counter(
        {(activation, forward, keys): hops, (activation, backward, keys): hops, (gradient, backward, keys): hops}
    )
    own_gradients, types = 1, 2
    assert theirs.sent == Counter(
        {("all_to_all_single", keys): 2 * hops, ("all_to_all_single", types * keys): hops + own_gradients}
    )


@pytest.mark.parametrize("size", SIZES)
def test_gathering_moves_as_many_bytes(steps: dict[str, StepGraph], size: int, mesh: DeviceMesh) -> None:
    graph = steps["llama-3.2-1b"]
    theirs = torch_attention(mesh, layer_attention(graph), gather=True)
    _, sent = ours(ContextParallel(size=size)(graph))
    gathered = sum(n * nbytes for (name, nbytes), n in theirs.sent.items() if name == "all_gather_into_tensor")
    passed = sum(n * nbytes for (what, _, nbytes), n in sent.items() if what == t.Payload.ACTIVATION)
    assert gathered * (size - 1) == passed


@pytest.mark.parametrize("size", SIZES)
def test_without_balance_the_last_rank_computes_all_blocks(steps: dict[str, StepGraph], size: int) -> None:
    graph = steps["llama-3.2-1b"]
    dist.init_process_group("fake", store=FakeStore(), rank=size - 1, world_size=size)
    try:
        theirs = torch_attention(init_device_mesh("cpu", (size,)), layer_attention(graph), balance=False)
    finally:
        dist.destroy_process_group()
    blocks, _ = ours(ContextParallel(size=size, load_balance=False)(graph))
    assert blocks == theirs.blocks

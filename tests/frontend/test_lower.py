"""The workload graph that a captured step lowers to."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from echograph.errors import CaptureError  # noqa: E402
from echograph.frontend.pytorch.annotate import VAL, call_nodes  # noqa: E402
from echograph.frontend.pytorch.call_nodes import (  # noqa: E402
    graph_flops,
    is_allocation,
    is_multi_tensor,
    is_view,
)
from echograph.frontend.pytorch.lower import lower  # noqa: E402
from echograph.frontend.pytorch.spec import StepSpec  # noqa: E402
from echograph.ir.types import Attention, Convolution, DType, Gemm, MultiTensor, Phase, TensorRole  # noqa: E402

pytestmark = pytest.mark.torch

MODELS = ["bert-base-uncased", "gpt2", "llama-3-8b", "t5-small", "mixtral-8x7b", "resnet-50"]
CLIPPED = StepSpec(clip_grad_norm=1.0)


@pytest.fixture
def lowered(capture_step: Any) -> Any:
    def run(build: Any, *, producer: str = "recorder", **spec: Any) -> Any:
        return lower(capture_step(build, producer=producer, **spec), StepSpec(**spec), name="model")

    return run


def small(zoo: Any, name: str) -> Any:
    return zoo(name, batch_size=2) if name == "resnet-50" else zoo(name, batch_size=2, seq_len=64)


def find(graph: Any, operator: str, phase: Phase = Phase.FORWARD) -> list[Any]:
    return [op for op in graph.ops if op.name == operator and op.phase is phase]


@pytest.mark.parametrize(
    ("name", "producer"),
    [
        *((name, "recorder") for name in MODELS),
        *(pytest.param(name, "aot", marks=() if name == "gpt2" else pytest.mark.slow) for name in MODELS),
    ],
)
def test_every_operation_and_tensor_is_lowered(captured: Any, name: str, producer: str) -> None:
    step = captured(name, producer)
    graph = lower(step, CLIPPED, name=name)
    assert int(graph.ops.flops.sum()) == graph_flops(step)
    launches = [n for n in call_nodes(step) if not n.target._schema.name.startswith("aten::empty")]
    shares = [op for op in graph.ops if isinstance(op.attributes, MultiTensor)]
    assert len(graph.ops) - len(shares) + sum(op.attributes.leads for op in shares) == len(launches)
    backward = [op for op in graph.ops if op.phase is Phase.BACKWARD]
    assert sum(op.forward_op is not None for op in backward) >= 0.99 * len(backward)
    for op in backward:
        assert op.forward_op is None or graph.ops[op.forward_op].phase is Phase.FORWARD
    assert sum(op.is_view for op in graph.ops) >= sum(is_view(n) for n in launches)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_counted_and_updated_once(captured: Any, name: str) -> None:
    graph = lower(captured(name), CLIPPED, name=name)
    tensors = list(graph.tensors)
    parameters = {t.name: t for t in tensors if t.role is TensorRole.PARAMETER and t.alias_of is None}
    assert graph.workload.parameters == sum(t.numel for t in parameters.values())
    final = Counter(t.name for t in tensors if t.role is TensorRole.GRADIENT and t.name.endswith(".grad"))
    assert set(final) == {f"{p}.grad" for p in parameters}
    updates = find(graph, "aten._fused_adamw_", Phase.OPTIMIZER)
    assert len(updates) == len(parameters)
    for op in updates:
        master, gradient, first, second, step = (tensors[i] for i in op.inputs)
        name = master.name.removesuffix(".master")
        assert gradient.name == f"{name}.main_grad" and gradient.dtype is DType.FP32
        assert (first.name, second.name, step.name) == (f"{name}.exp_avg", f"{name}.exp_avg_sq", f"{name}.step")
        assert [tensors[i].alias_of for i in op.outputs] == [master.id, first.id, second.id]
        size = 4 * parameters[name].numel
        assert (op.bytes_read, op.bytes_written) == (4 * size + 4, 3 * size)
        assert op.module == name.rpartition(".")[0]


def test_memory_of_mixed_precision_training(lowered: Any, zoo: Any) -> None:
    """16 bit parameter and gradient; fp32 gradient, master weight and two moments: 2 + 2 + 4 + 4 + 8 bytes."""
    graph = lowered(small(zoo, "llama-3-8b"))
    owned = [t for t in graph.tensors if t.alias_of is None]
    count = graph.workload.parameters
    by_role = Counter({r: sum(t.nbytes for t in owned if t.role is r) for r in TensorRole})
    steps = 4 * sum(t.name.endswith(".step") for t in owned)
    assert by_role[TensorRole.PARAMETER] == 2 * count
    assert by_role[TensorRole.GRADIENT] == 2 * count + 4 * count
    assert by_role[TensorRole.OPTIMIZER_STATE] == 12 * count + steps


def test_workload(lowered: Any, zoo: Any) -> None:
    workload = lowered(small(zoo, "gpt2"), dtype="fp16", optimizer="sgd").workload
    assert (workload.batch_size, workload.sequence_length) == (2, 64)
    assert (workload.dtype, workload.optimizer, workload.master_weights) == (DType.FP16, "sgd", True)
    assert lowered(small(zoo, "resnet-50")).workload.sequence_length == 0


@pytest.mark.parametrize("name", MODELS)
def test_aliases_are_the_tensors_that_share_memory(captured: Any, name: str) -> None:
    """PyTorch's own storages are the oracle of `alias_of`."""
    step = captured(name)
    graph = lower(step, CLIPPED, name=name)
    nodes = [n for n in call_nodes(step) if not is_allocation(n) and not is_multi_tensor(n)]
    ops = [op for op in graph.ops if not isinstance(op.attributes, MultiTensor)]
    root_of_storage: dict[int, int] = {}
    storage_of_root: dict[int, int] = {}
    for node, op in zip(nodes, ops, strict=True):
        if isinstance(node.meta[VAL], torch.Tensor):
            storage = node.meta[VAL].untyped_storage()._cdata
            root = int(graph.root[op.outputs[0]])
            assert root_of_storage.setdefault(storage, root) == root, node.name
            assert storage_of_root.setdefault(root, storage) == storage, node.name
    assert len(root_of_storage) > 50


def test_matrix_product(lowered: Any) -> None:
    graph = lowered(lambda: (torch.nn.Linear(64, 32), (torch.zeros(16, 64),), torch.sum))
    (forward,) = find(graph, "aten.addmm")
    assert forward.attributes == Gemm(transpose_a=False, transpose_b=True)
    assert forward.flops == 2 * 16 * 64 * 32
    assert forward.bytes_read == 2 * (16 * 64 + 64 * 32 + 32) and forward.bytes_written == 2 * 16 * 32
    (weight_gradient,) = find(graph, "aten.mm", Phase.BACKWARD)
    assert weight_gradient.forward_op == forward.id
    # The gradient of a summed output is one number expanded, and is read as such.
    assert weight_gradient.bytes_read == 2 * (1 + 16 * 64)


def test_attention(lowered: Any, zoo: Any) -> None:
    graph = lowered(zoo("llama-3-8b", layers=1, batch_size=1, seq_len=128))
    (forward,) = find(graph, "aten._scaled_dot_product_flash_attention")
    (backward,) = find(graph, "aten._scaled_dot_product_flash_attention_backward", Phase.BACKWARD)
    expected = Attention(heads=32, kv_heads=8, head_dim=128, causal=True, dropout=0.0)
    assert forward.attributes == backward.attributes == expected
    assert backward.forward_op == forward.id and backward.module == forward.module == "model.layers.0.self_attn"


def test_convolution(lowered: Any) -> None:
    layer = lambda: torch.nn.Conv2d(8, 16, 3, stride=2, padding=1, groups=4)  # noqa: E731
    graph = lowered(lambda: (layer(), (torch.zeros(2, 8, 10, 10),), torch.sum))
    (op,) = find(graph, "aten.convolution")
    assert op.attributes == Convolution(stride=(2, 2), padding=(1, 1), dilation=(1, 1), groups=4)


def test_lookup_reads_rows_not_the_table(lowered: Any) -> None:
    graph = lowered(lambda: (torch.nn.Embedding(50000, 8), (torch.zeros(3, dtype=torch.long),), torch.sum))
    (lookup,) = find(graph, "aten.embedding")
    assert (lookup.bytes_read, lookup.bytes_written) == (3 * 8 + 3 * 8 * 2, 3 * 8 * 2)
    (gradient,) = find(graph, "aten.embedding_dense_backward", Phase.BACKWARD)
    assert gradient.bytes_written == 50000 * 8 * 2


def test_write_to_a_part_moves_that_part(lowered: Any) -> None:
    class Scatter(torch.nn.Linear):
        def forward(self, x: Any, index: Any) -> Any:
            out = torch.zeros(1000, 4, dtype=x.dtype)
            return out.index_add_(0, index, super().forward(x)).sum()

    graph = lowered(lambda: (Scatter(4, 4), (torch.zeros(3, 4), torch.zeros(3, dtype=torch.long))))
    (add,) = find(graph, "aten.index_add_")
    assert (add.bytes_read, add.bytes_written) == (2 * 3 * 4 * 2 + 3 * 8, 3 * 4 * 2)
    (zeros,) = find(graph, "aten.zeros")
    assert zeros.outputs[0] in add.inputs and zeros.bytes_written == 1000 * 4 * 2


def test_write_in_place_makes_the_next_version(lowered: Any) -> None:
    class InPlace(torch.nn.Linear):
        def forward(self, x: Any) -> Any:
            y = super().forward(x)
            y[:, :2].mul_(3)
            return (y.relu_() * 2).sum()

    graph = lowered(lambda: (InPlace(4, 4), (torch.zeros(2, 4),)))
    tensors = list(graph.tensors)
    (product,), (scaled,), (relu,) = (find(graph, f"aten.{n}") for n in ("addmm", "mul_", "relu_"))
    assert graph.root[scaled.outputs[0]] == product.outputs[0]
    assert tensors[relu.outputs[0]].alias_of == product.outputs[0]
    # relu_ names memory that mul_ wrote through a view: it waits although it reads another tensor.
    assert relu.deps == (scaled.id,)
    after = [op for op in find(graph, "aten.mul") if op.id > relu.id]
    assert after[0].inputs == relu.outputs


def test_type_that_the_graph_does_not_know(lowered: Any) -> None:
    class Complex(torch.nn.Linear):
        def forward(self, x: Any) -> Any:
            return torch.complex(super().forward(x).double(), x.double()).abs().sum()

    with pytest.raises(CaptureError, match="complex128"):
        lowered(lambda: (Complex(4, 4), (torch.zeros(4, 4),)))


def test_same_input_gives_the_same_graph(lowered: Any, zoo: Any) -> None:
    first, second = (lowered(small(zoo, "gpt2"), clip_grad_norm=1.0) for _ in range(2))
    assert list(first.ops) == list(second.ops) and list(first.tensors) == list(second.tensors)


@pytest.mark.slow
def test_gpt3_175b_with_all_its_layers(lowered: Any, zoo: Any) -> None:
    from echograph.models import dense_flops, get_model

    graph = lowered(zoo("gpt3-175b", layers=None, batch_size=1, seq_len=2048))
    entry = get_model("gpt3-175b")
    assert graph.workload.parameters == entry.parameters
    expected = sum(dense_flops(entry, 1, 2048))
    assert math.isclose(int(graph.ops.flops.sum()), expected, rel_tol=0.01)

"""FLOPs of a graph equal what PyTorch's own counter counts while the step runs, and closed forms."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from echograph.frontend.pytorch.annotate import BACKWARD, FORWARD, PHASE, call_nodes  # noqa: E402
from echograph.frontend.pytorch.call_nodes import graph_flops, grouped_mm_flops, node_flops  # noqa: E402

pytestmark = pytest.mark.torch

MODELS = ["bert-base-uncased", "gpt2", "llama-3-8b", "t5-small", "mixtral-8x7b", "deepseek-v3", "resnet-50"]


# In 16 bits, the tests of whole graphs ask the same of these and more models each time.
@pytest.mark.parametrize("dtype", [pytest.param("bf16", marks=pytest.mark.slow), "fp32"])
@pytest.mark.parametrize("name", MODELS)
def test_equal_to_flop_counter(capture_step: Any, zoo: Any, name: str, dtype: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    if name == "mixtral-8x7b" and dtype == "fp32":
        pytest.skip("torch._grouped_mm takes 16-bit operands only")
    build = zoo(name, batch_size=2) if name == "resnet-50" else zoo(name, batch_size=2, seq_len=64)
    mapping = {torch.ops.aten._grouped_mm: grouped_mm_flops}
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        graph = capture_step(build, dtype=dtype)
    assert graph_flops(graph) == counter.get_total_flops() > 0


@pytest.mark.parametrize("name", ["bert-base-uncased", "gpt2", pytest.param("llama-3-8b", marks=pytest.mark.slow)])
def test_equal_to_closed_form(capture_step: Any, zoo: Any, name: str) -> None:
    """The product of the whole model, all layers, against arithmetic on its configuration."""
    from echograph.models import dense_flops, get_model

    graph = capture_step(zoo(name, layers=None, batch_size=2, seq_len=256))
    expected = dense_flops(get_model(name), 2, 256)
    for phase, flops in ((FORWARD, expected.forward), (BACKWARD, expected.backward)):
        counted = sum(node_flops(n) for n in call_nodes(graph) if n.meta[PHASE] == phase)
        assert counted == pytest.approx(flops, rel=0.01)


@pytest.mark.parametrize(
    ("a", "b", "offsets", "flops"),
    [
        ((4, 6, 8), (4, 8, 3), None, 2 * 4 * 6 * 8 * 3),
        ((24, 8), (4, 8, 3), (4,), 2 * 24 * 8 * 3),
        ((8, 24), (24, 3), (4,), 2 * 8 * 24 * 3),
        ((4, 6, 8), (8, 12), (4,), 2 * 6 * 8 * 12),
    ],
)
def test_grouped_matrix_product(
    a: tuple[int, ...], b: tuple[int, ...], offsets: tuple[int, ...] | None, flops: int
) -> None:
    assert grouped_mm_flops(a, b, offsets) == flops


def test_mixture_of_experts_counts_each_token_once_per_chosen_expert(capture_step: Any, zoo: Any) -> None:
    from echograph.models import get_model

    config = get_model("mixtral-8x7b").config
    graph = capture_step(zoo("mixtral-8x7b", layers=1, batch_size=1, seq_len=128))
    counted = sum(
        node_flops(n)
        for n in call_nodes(graph)
        if n.meta[PHASE] == FORWARD and n.target is torch.ops.aten._grouped_mm.default
    )
    rows = 128 * config["num_experts_per_tok"]
    assert counted == 2 * rows * 3 * config["hidden_size"] * config["intermediate_size"]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 4, 16])
def test_gradients_of_a_convolution_of_groups_are_twice_its_products(groups: int, transposed: bool) -> None:
    """The weight's gradient once, as PyTorch's own formula has it without groups alone."""
    from echograph.frontend.pytorch.call_nodes import formulas

    kind = torch.nn.ConvTranspose2d if transposed else torch.nn.Conv2d
    layer, x = kind(16, 32, 3, groups=groups), torch.ones(2, 16, 9, 9)
    out = layer(x)
    given = (1, 1), (0, 0), (1, 1), transposed, (0, 0), groups
    ahead = formulas()[torch.ops.aten.convolution](x, layer.weight, layer.bias, *given, out_val=out)
    made = torch.ops.aten.convolution_backward(out, x, layer.weight, [32], *given, [True, True, True])
    count = formulas()[torch.ops.aten.convolution_backward]
    back = count(out, x, layer.weight, [32], *given, [True, True, True], out_val=made)
    assert back == 2 * ahead > 0
    assert count(out, x, layer.weight, [32], *given, [False, True, False], out_val=made) == ahead

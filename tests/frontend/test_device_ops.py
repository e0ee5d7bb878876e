"""Fake CPU tensors run CUDA's operators inside the context, and the CPU's again after it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from echograph.frontend.pytorch.annotate import call_nodes  # noqa: E402
from echograph.frontend.pytorch.call_nodes import plain_name  # noqa: E402

pytestmark = pytest.mark.torch


def operators(graph: Any) -> Counter[str]:
    return Counter(plain_name(n) for n in call_nodes(graph))


class Run(torch.nn.Module):
    """Runs a function on a parameter that stands for the activations."""

    def __init__(self, function: Any, *shape: int) -> None:
        super().__init__()
        self.x = torch.nn.Parameter(torch.zeros(shape))
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(self.x, *inputs).sum()


def attend(x: Any, *mask: Any, **options: Any) -> Any:
    return torch.nn.functional.scaled_dot_product_attention(x, x, x, *mask, dropout_p=0.1, **options)


def test_dropout_is_one_operator(capture_step: Any) -> None:
    for drop in (
        lambda x: torch.nn.functional.dropout(x, 0.1),
        torch.nn.Dropout(0.1),
        lambda x: torch.dropout(x, 0.1, True),
    ):
        found = operators(capture_step(lambda: (Run(drop, 4, 4), ())))  # noqa: B023
        assert found["native_dropout"] == found["native_dropout_backward"] == 1
        assert found["bernoulli_"] == found["div_"] == 0


def test_dropout_that_drops_nothing_is_no_operator(capture_step: Any) -> None:
    for p, train in ((0.0, True), (0.5, False)):
        found = operators(capture_step(lambda: (Run(lambda x: torch.dropout(x, p, train), 4, 4), ())))  # noqa: B023
        assert found["native_dropout"] == 0


FLASH = "_scaled_dot_product_flash_attention"
EFFICIENT = "_scaled_dot_product_efficient_attention"


@pytest.mark.parametrize(
    ("dtype", "options", "mask", "expected"),
    [
        ("bf16", {"is_causal": True}, None, FLASH),
        ("fp16", {}, None, FLASH),
        ("fp32", {"is_causal": True}, None, EFFICIENT),
        ("bf16", {}, torch.bool, EFFICIENT),
        ("bf16", {}, torch.float32, EFFICIENT),
    ],
)
def test_attention_with_dropout_stays_one_operator(
    capture_step: Any, dtype: str, options: dict[str, Any], mask: Any, expected: str
) -> None:
    def build() -> tuple[Any, ...]:
        masks = () if mask is None else (torch.zeros(1, 1, 8, 8, dtype=mask),)
        return Run(lambda x, *m: attend(x, *m, **options), 2, 4, 8, 16), masks

    found = operators(capture_step(build, dtype=dtype))
    assert found[expected] == found[f"{expected}_backward"] == 1
    assert found["_softmax"] == found["bmm"] == found["native_dropout"] == 0


def test_attention_pads_an_odd_head_as_flash_needs(capture_step: Any) -> None:
    graph = capture_step(lambda: (Run(lambda x: attend(x, is_causal=True), 2, 4, 8, 20), ()))
    (flash,) = [n for n in call_nodes(graph) if plain_name(n) == FLASH]
    assert flash.args[0].meta["val"].shape[-1] == 24
    assert flash.kwargs["scale"] == pytest.approx(20**-0.5)


def test_grouped_query_attention(capture_step: Any) -> None:
    def grouped(mask: Any) -> Any:
        def run(x: Any) -> Any:
            return torch.nn.functional.scaled_dot_product_attention(x, x[:, :2], x[:, :2], mask, enable_gqa=True)

        return run

    found = operators(capture_step(lambda: (Run(grouped(None), 2, 4, 8, 16), ())))
    assert found[FLASH] == 1
    # No fused kernel takes groups and a mask together.
    found = operators(
        capture_step(lambda: (Run(grouped(torch.zeros(8, 8, dtype=torch.bfloat16)), 2, 4, 8, 16), ()))
    )
    assert found[FLASH] == found[EFFICIENT] == 0 and found["_softmax"] + found["_safe_softmax"] == 1


def test_multihead_attention_module(capture_step: Any) -> None:
    class SelfAttention(torch.nn.MultiheadAttention):
        def forward(self, x: Any) -> Any:  # type: ignore[override]
            return super().forward(x, x, x, need_weights=False)[0].sum()

    found = operators(capture_step(lambda: (SelfAttention(16, 4, dropout=0.1), (torch.zeros(8, 2, 16),))))
    assert found[FLASH] == found[f"{FLASH}_backward"] == 1


def test_rms_norm_is_one_operator(capture_step: Any) -> None:
    found = operators(capture_step(lambda: (torch.nn.RMSNorm(16), (torch.zeros(4, 16),), torch.sum)))
    assert found["_fused_rms_norm"] == found["_fused_rms_norm_backward"] == 1
    assert found["rsqrt"] == found["pow"] == 0


def test_softmax_to_fp32_converts_in_the_kernel_for_fp16_only(capture_step: Any) -> None:
    for dtype, copies in (("fp16", 0), ("bf16", 1)):
        run = lambda x: torch.softmax(x, -1, dtype=torch.float32)  # noqa: E731
        graph = capture_step(lambda: (Run(run, 4, 4), ()), dtype=dtype)  # noqa: B023
        forward = [plain_name(n) for n in call_nodes(graph) if n.meta["phase"] == "forward"]
        assert forward.count("_softmax") == 1 and forward.count("_to_copy") == copies


def test_cpu_runs_its_own_operators_after_the_context() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    from echograph.frontend.pytorch.device_ops import cuda_operators

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with cuda_operators(), Watch():
        torch.dropout(torch.ones(4), 0.5, True)
    assert torch.ops.aten.native_dropout.default in seen
    seen.clear()
    with Watch():
        torch.dropout(torch.ones(4), 0.5, True)
    assert torch.ops.aten.native_dropout.default not in seen


@pytest.mark.parametrize(("kind", "gates"), [(torch.nn.LSTM, 4), (torch.nn.GRU, 3), (torch.nn.RNN, 1)])
def test_recurrent_layers_are_those_of_cudnn(kind: Any, gates: int) -> None:
    """One operator each way, and a gradient for every weight."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    from echograph.frontend.pytorch.device_ops import cuda_operators

    with cuda_operators(), FakeTensorMode(), FlopCounterMode(display=False) as counter:
        layer = kind(16, 32, 2, batch_first=True, bidirectional=True)
        out, _ = layer(torch.ones(4, 10, 16, requires_grad=True))
        assert out.shape == (4, 10, 64)
        out.sum().backward()
        assert all(p.grad.shape == p.shape for p in layer.parameters())
    forward = 2 * 4 * 10 * 2 * gates * 32 * ((16 + 32) + (64 + 32))  # two directions, of two layers
    counted = {str(name): flops for name, flops in counter.get_flop_counts()["Global"].items()}
    assert counted == {"cudnn.rnn": forward, "cudnn.rnn_backward": 2 * forward}

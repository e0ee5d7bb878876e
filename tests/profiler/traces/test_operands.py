"""What a traced operator computes, against what PyTorch says that it does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from echograph.ir.types import Attention, Convolution, Gemm, Phase
from echograph.profiler.traces.operands import TracedOperand, operator_call, traced_work

torch = pytest.importorskip("torch")
F = torch.nn.functional


def recorded(folder: Path, name: str, run: Callable[[], Any]) -> tuple[dict[str, Any], Any]:
    """The arguments of the first operator of a name in a profile of a function, and what that returned."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        result = run()
    seen.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return next(event["args"] for event in events if event.get("name") == name), result


def randn(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.randn(*shape).to(dtype)


CASES = {
    "aten::mm": lambda: randn(6, 4) @ randn(5, 4).T,
    "aten::addmm": lambda: torch.addmm(randn(5), randn(6, 4), randn(4, 5)),
    "aten::bmm": lambda: torch.bmm(randn(3, 6, 4), randn(3, 4, 5)),
    "aten::baddbmm": lambda: torch.baddbmm(randn(3, 6, 5), randn(3, 6, 4), randn(3, 4, 5)),
    "aten::native_layer_norm": lambda: F.layer_norm(randn(6, 4), (4,), randn(4), randn(4)),
    "aten::_softmax": lambda: randn(6, 4).softmax(-1),
    "aten::add": lambda: randn(6, 1, 4) + randn(5, 4),
    "aten::mul": lambda: randn(6, 4, dtype=torch.bfloat16) * torch.tensor(2.0),
    "aten::eq": lambda: randn(6, 4) == randn(4),
    "aten::div": lambda: randn(6, 4, dtype=torch.bfloat16) / randn(6, 1),
    "aten::sum": lambda: randn(6, 5, 4).sum((0, -1)),
    "aten::mean": lambda: randn(6, 4).mean(1),
    "aten::gelu": lambda: F.gelu(randn(6, 4)),
    "aten::clamp_min_": lambda: randn(6, 4).clamp_min_(0),
    "aten::embedding": lambda: F.embedding(torch.tensor([[1, 2], [0, 3]]), randn(10, 4)),
    "aten::index_select": lambda: randn(6, 5).index_select(1, torch.tensor([0, 3])),
    "aten::copy_": lambda: torch.empty(6, 4, dtype=torch.bfloat16).copy_(torch.ones(4)),
}


@pytest.mark.parametrize("name", CASES)
def test_results_have_the_shapes_and_types_that_pytorch_makes(tmp_path: Path, name: str) -> None:
    arguments, result = recorded(tmp_path, name, CASES[name])
    found = traced_work(operator_call(name, Phase.FORWARD, arguments))
    assert found is not None
    (out,) = found.outputs
    assert out.shape == tuple(result.shape)
    assert out.nbytes == result.nbytes == found.op.bytes_written


CONVOLUTIONS = (
    lambda: F.conv2d(randn(2, 6, 9, 8), randn(4, 6, 3, 3), stride=2, padding=1),
    lambda: F.conv2d(randn(2, 6, 9, 8), randn(4, 3, 3, 2), groups=2, dilation=2),
    lambda: F.conv1d(randn(2, 6, 9), randn(4, 6, 3), randn(4)),
    lambda: F.conv3d(randn(2, 2, 5, 6, 7), randn(4, 2, 3, 3, 3), padding=(0, 1, 2)),
    lambda: F.conv_transpose2d(randn(2, 6, 5, 4), randn(6, 4, 3, 3), stride=2, padding=1, output_padding=1),
    lambda: F.conv_transpose2d(randn(2, 6, 5, 4), randn(6, 2, 3, 3), groups=3),
)


@pytest.mark.parametrize("run", CONVOLUTIONS)
def test_convolutions_have_pytorchs_shapes_and_flops(tmp_path: Path, run: Callable[[], Any]) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    arguments, result = recorded(tmp_path, "aten::convolution", run)
    found = traced_work(operator_call("aten::convolution", Phase.FORWARD, arguments))
    assert found is not None and isinstance(found.op.attributes, Convolution)
    assert [out.shape for out in found.outputs] == [tuple(result.shape)]
    if found.op.attributes.groups == 1:  # torch's formula for groups counts all input channels
        with FlopCounterMode(display=False) as counted:
            run()
        assert found.op.flops == counted.get_total_flops()


def test_a_convolutions_gradients_count_those_that_are_wanted(tmp_path: Path) -> None:
    weight = randn(4, 6, 3, 3).requires_grad_()

    def run(image: Any) -> None:
        F.conv2d(image, weight, padding=1).sum().backward()

    of = {}
    for wanted in (True, False):
        image = randn(2, 6, 9, 8).requires_grad_(wanted)
        arguments, _ = recorded(tmp_path, "aten::convolution_backward", lambda image=image: run(image))
        of[wanted] = traced_work(operator_call("aten::convolution_backward", Phase.BACKWARD, arguments))
    assert of[True] is not None and of[False] is not None
    forward = 2 * 2 * 9 * 8 * 4 * 6 * 9
    assert (of[True].op.flops, of[False].op.flops) == (2 * forward, forward)
    assert [out.shape for out in of[False].outputs] == [(4, 6, 3, 3)]


def said(*operands: tuple[list[int], str], values: tuple[str, ...] = ()) -> dict[str, Any]:
    shapes, types = [list(one[0]) for one in operands], [one[1] for one in operands]
    missing = len(values) - len(operands)
    return {
        "Input Dims": shapes + [[]] * missing,
        "Input type": types + ["Scalar"] * missing,
        "Concrete Inputs": list(values),
    }


def test_a_product_says_how_its_operands_lie() -> None:
    given = said(([6, 4], "float"), ([4, 5], "float")) | {"Input Strides": [[4, 1], [1, 4]]}
    found = traced_work(operator_call("aten::mm", Phase.FORWARD, given))
    assert found is not None and found.op.attributes == Gemm(transpose_b=True)
    assert found.op.flops == 2 * 6 * 4 * 5
    assert (found.op.bytes_read, found.op.bytes_written) == (4 * (24 + 20), 4 * 30)


@pytest.mark.parametrize("causal", (True, False))
def test_attention_leaves_out_what_a_mask_hides(causal: bool) -> None:
    head = ([2, 8, 128, 64], "c10::BFloat16")
    given = said(head, head, head, values=("", "", "", "0.", str(causal), "False", "0.125"))
    found = traced_work(operator_call("aten::_scaled_dot_product_flash_attention", Phase.FORWARD, given))
    assert found is not None and isinstance(found.op.attributes, Attention)
    assert found.op.attributes.causal is causal
    assert found.op.flops == (2 if causal else 4) * 2 * 8 * 128 * 128 * 64
    assert found.op.bytes_read + found.op.bytes_written == 4 * 2 * 8 * 128 * 64 * 2


def test_flash_attentions_own_operators_have_heads_behind_the_sequence() -> None:
    query, key = ([2, 128, 8, 64], "c10::Half"), ([2, 256, 2, 64], "c10::Half")
    given = said(query, key, key, values=("", "", "", "0.", "0.125", "False"))
    found = traced_work(operator_call("flash_attn::_flash_attn_forward", Phase.FORWARD, given))
    assert found is not None
    assert found.op.attributes == Attention(heads=8, kv_heads=2, head_dim=64, causal=False)
    assert found.op.flops == 4 * 2 * 8 * 128 * 256 * 64


def test_a_repeated_dimension_moves_no_bytes_of_its_own() -> None:
    given = said(([6, 4], "float"), ([6, 4], "float")) | {"Input Strides": [[4, 1], [0, 1]]}
    found = traced_work(operator_call("aten::add", Phase.FORWARD, given))
    assert found is not None
    assert found.op.bytes_read == 4 * (24 + 4)


@pytest.mark.parametrize(
    ("name", "arguments"),
    (
        ("aten::mm", {}),
        ("aten::mm", said(([6, 4], "float"), ([5, 4], "float"))),
        ("aten::mm", said(([6, 4], "float"), ([4], "float"))),
        ("aten::mm", {"Input Dims": [[6, -4], [4, 5]], "Input type": ["float", "float"]}),
        ("aten::mm", {"Input Dims": [[2**40, 2**40], [2**40, 5]], "Input type": ["float", "float"]}),
        ("aten::mm", {"Input Dims": "no", "Input type": 3}),
        ("aten::add", said(([6, 4], "float"), ([5, 4], "float"))),
        ("aten::convolution", said(([2, 6, 9, 8], "float"), ([4, 6, 3, 3], "float"))),
        ("aten::convolution", said(([2, 6, 9, 8], "float"), ([4, 6, 3, 3], "float"), values=("",) * 9)),
        ("aten::cat", said(([6, 4], "float"))),
        ("mine::fused", said(([6, 4], "float"))),
    ),
)
def test_what_the_trace_does_not_say_is_not_guessed(name: str, arguments: dict[str, Any]) -> None:
    assert traced_work(operator_call(name, Phase.FORWARD, arguments)) is None


def test_an_operand_knows_how_it_lies() -> None:
    from echograph.ir.types import DType

    assert TracedOperand((4, 5), DType.FP32, (1, 4)).by_columns
    assert not TracedOperand((4, 5), DType.FP32, (5, 1)).by_columns
    assert TracedOperand((0, 5), DType.FP32, (0, 1)).nbytes == 0

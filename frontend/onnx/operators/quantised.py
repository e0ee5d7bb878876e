"""Operators on integers that stand for real numbers: conversions, and products between conversions.

A product of integers is one of the step's type: both operands are converted, multiplied, and the result converted
back, as PyTorch runs it without a kernel of its own. FLOPs are those of the product; bytes those of all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from echograph.errors import CaptureError
from echograph.frontend.onnx.call import NodeCall, Operator, extents
from echograph.frontend.onnx.operators.network import convolve, lstm, packed_attention

_MICROSOFT = "com.microsoft."


def _spread(value: Any, rank: int, axis: int) -> Any:
    """A scale or a zero point of each slice along a dimension, so that it broadcasts."""
    if not isinstance(value, Tensor) or value.dim() != 1 or value.numel() == 1:
        return value.reshape([]) if isinstance(value, Tensor) and value.numel() == 1 else value
    return value.reshape([-1 if i == axis % rank else 1 for i in range(rank)])


def _real(call: NodeCall, x: Tensor, scale: Any, zero: int, axis: int) -> Tensor:
    """Integers as the numbers that they stand for; `scale` None leaves them integers, of the step's type."""
    wide = scale.dtype if isinstance(scale, Tensor) else call.dtypes.step
    made = x.to(wide)
    known = call.known[zero] if zero < len(call.known) else None
    if call.get(zero) is not None and (known is None or known.any()):
        made = made - _spread(call[zero], x.dim(), axis).to(wide)
    return made if scale is None else made * _spread(scale, x.dim(), axis)


def _operand(call: NodeCall, at: int, axis: int = 0) -> Tensor:
    """A tensor that is followed by its scale and its zero point."""
    return _real(call, call[at], call[at + 1], at + 2, axis)


def _integers(
    call: NodeCall, x: Tensor, scale: Any, zero: Any, axis: int = 0, dtype: torch.dtype | None = None
) -> Any:
    """Numbers as integers: divided, rounded, moved, and cut to the type."""
    dtype = dtype or (torch.uint8 if zero is None else zero.dtype)
    made = x / _spread(scale, x.dim(), axis)
    if dtype.is_floating_point:
        return made.to(dtype)
    made = torch.round(made)
    if zero is not None:
        made = made + _spread(zero, x.dim(), axis).to(made.dtype)
    return torch.clamp(made, torch.iinfo(dtype).min, torch.iinfo(dtype).max).to(dtype)


def _result(call: NodeCall, x: Tensor, at: int) -> Any:
    return _integers(call, x, call[at], call.get(at + 1))


def _whole(call: NodeCall) -> None:
    if call.integer("block_size"):
        raise CaptureError("its scales are of blocks: export it with scales of tensors or channels")


def _quantize(call: NodeCall) -> Any:
    _whole(call)
    number = call.integer("output_dtype")
    dtype = call.dtypes.of(number, call.node.name) if number else None
    return _integers(call, call[0], call[1], call.get(2), call.integer("axis", 1), dtype)


def _dequantize(call: NodeCall) -> Any:
    _whole(call)
    return _real(call, call[0], call[1], 2, call.integer("axis", 1))


def _dynamic(call: NodeCall) -> Any:
    x = call[0]
    low, high = torch.clamp(torch.amin(x), max=0.0), torch.clamp(torch.amax(x), min=0.0)
    scale = (high - low) / 255
    zero = torch.clamp(torch.round(-low / scale), 0, 255).to(torch.uint8)
    return _integers(call, x, scale, zero), scale, zero


def _matmul_integer(call: NodeCall) -> Any:
    a, b = _real(call, call[0], None, 2, -2), _real(call, call[1], None, 3, -1)
    return torch.matmul(a, b).to(torch.int32)


def _conv_integer(call: NodeCall) -> Any:
    x, weight = _real(call, call[0], None, 2, 0), _real(call, call[1], None, 3, 0)
    return convolve(call, x, weight, None).to(torch.int32)


def _qlinear_matmul(call: NodeCall) -> Any:
    return _result(call, torch.matmul(_operand(call, 0, -2), _operand(call, 3, -1)), 6)


def _qlinear_conv(call: NodeCall) -> Any:
    bias = call.get(8)
    if bias is not None:
        bias = bias.to(call[1].dtype) * (call[1].reshape([]) * call[4].reshape(-1))
    return _result(call, convolve(call, _operand(call, 0), _operand(call, 3), bias), 6)


def _qlinear_binary(function: Callable[[Tensor, Tensor], Tensor], call: NodeCall) -> Any:
    return _result(call, function(_operand(call, 0), _operand(call, 3)), 6)


def _qlinear_unary(function: Callable[[NodeCall, Tensor], Tensor], call: NodeCall) -> Any:
    return _result(call, function(call, _operand(call, 0)), 3)


def _qlinear_concat(call: NodeCall) -> Any:
    parts = [_operand(call, at) for at in range(2, len(call.operands), 3)]
    return _result(call, torch.cat(parts, call.integer("axis")), 0)


def _q_gemm(call: NodeCall) -> Any:
    a, b, c = _operand(call, 0), _operand(call, 3, -1), call.get(6)
    a = a.t() if call.integer("transA") else a
    b = b.t() if call.integer("transB") else b
    product = torch.mm(a, b) * call.real("alpha", 1.0)
    if c is not None:
        product = product + c.to(product.dtype) * (call[1].reshape([]) * call[4].reshape(-1))
    return product if call.get(7) is None else _result(call, product, 7)


def _dynamic_quantize_matmul(call: NodeCall) -> Any:
    product = torch.matmul(call[0], _real(call, call[1], call[2], 3, -1))
    return product if call.get(4) is None else product + call[4]


def _matmul_integer_to_float(call: NodeCall) -> Any:
    a, b = _real(call, call[0], call[2], 4, -2), _real(call, call[1], call[3], 5, -1)
    product = torch.matmul(a, b)
    return product if call.get(6) is None else product + call[6]


def _matmul_n_bits(call: NodeCall) -> Any:
    """Weights of 2, 4 or 8 bits, packed from the low bits up, with a scale for every block of a row."""
    bits, block = call.integer("bits", 4), call.integer("block_size", 32)
    inner, columns = call.integer("K"), call.integer("N")
    if bits not in (2, 4, 8) or call.get(4) is not None:
        raise CaptureError("it has an order of groups (g_idx), or a width that is not 2, 4 or 8 bits")
    x, blocks = call[0], -(-inner // block)
    weight = _unpacked(call[1].reshape([columns, -1]), bits).reshape([columns, blocks, block]).to(x.dtype)
    zero: Any = 2 ** (bits - 1)
    if call.get(3) is not None:
        zeros = call[3].reshape([columns, -1])
        zeros = zeros if zeros.is_floating_point() else _unpacked(zeros, bits)
        zero = zeros[:, :blocks].reshape([columns, blocks, 1]).to(x.dtype)
    weight = (weight - zero) * call[2].reshape([columns, blocks, 1]).to(x.dtype)
    return F.linear(x, weight.reshape([columns, -1])[:, :inner], call.get(5))


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return packed
    parts = [torch.bitwise_and(packed >> shift, 2**bits - 1) for shift in range(0, 8, bits)]
    return torch.stack(parts, -1).reshape([extents(packed)[0], -1])


def _dynamic_quantize_lstm(call: NodeCall) -> Any:
    """Its weights lie transposed: [directions, input, gates]."""
    of_input, of_state = (
        (_by_direction(call, call[at], at + zero)).transpose(1, 2) for at, zero in ((1, 7), (2, 8))
    )
    return lstm(call, weights=(of_input, of_state))


def _by_direction(call: NodeCall, weight: Tensor, scale_at: int) -> Tensor:
    scale, zero = call[scale_at], call.get(scale_at + 1)
    shape = [-1, 1, 1] if scale.dim() == 1 else [int(weight.shape[0]), 1, -1]
    made = weight.to(scale.dtype)
    made = made if zero is None else made - zero.reshape(shape).to(made.dtype)
    real: Tensor = made * scale.reshape(shape)
    return real


def _q_attention(call: NodeCall) -> Any:
    x, weight = _real(call, call[0], call[3], 6, 0), _real(call, call[1], call[4], 7, -1)
    return packed_attention(call, x, weight, call.get(2), call.get(5))


def _sigmoid(call: NodeCall, x: Tensor) -> Tensor:
    return torch.sigmoid(x)


def _leaky(call: NodeCall, x: Tensor) -> Tensor:
    return F.leaky_relu(x, call.real("alpha", 0.01))


def _softmax(call: NodeCall, x: Tensor) -> Tensor:
    return F.softmax(x, call.axis(-1, x.dim()))


def _global_average(call: NodeCall, x: Tensor) -> Tensor:
    last = call.integer("channels_last")
    return torch.mean(x, list(range(1, x.dim() - 1)) if last else list(range(2, x.dim())), keepdim=True)


OPERATORS: Mapping[str, Operator] = {
    "QuantizeLinear": _quantize,
    "DequantizeLinear": _dequantize,
    "DynamicQuantizeLinear": _dynamic,
    "MatMulInteger": _matmul_integer,
    "ConvInteger": _conv_integer,
    "QLinearMatMul": _qlinear_matmul,
    "QLinearConv": _qlinear_conv,
    f"{_MICROSOFT}QuantizeLinear": _quantize,
    f"{_MICROSOFT}DequantizeLinear": _dequantize,
    f"{_MICROSOFT}QLinearAdd": partial(_qlinear_binary, torch.add),
    f"{_MICROSOFT}QLinearMul": partial(_qlinear_binary, torch.mul),
    f"{_MICROSOFT}QLinearSigmoid": partial(_qlinear_unary, _sigmoid),
    f"{_MICROSOFT}QLinearLeakyRelu": partial(_qlinear_unary, _leaky),
    f"{_MICROSOFT}QLinearSoftmax": partial(_qlinear_unary, _softmax),
    f"{_MICROSOFT}QLinearGlobalAveragePool": partial(_qlinear_unary, _global_average),
    f"{_MICROSOFT}QLinearConcat": _qlinear_concat,
    f"{_MICROSOFT}QGemm": _q_gemm,
    f"{_MICROSOFT}QAttention": _q_attention,
    f"{_MICROSOFT}DynamicQuantizeMatMul": _dynamic_quantize_matmul,
    f"{_MICROSOFT}DynamicQuantizeLSTM": _dynamic_quantize_lstm,
    f"{_MICROSOFT}MatMulIntegerToFloat": _matmul_integer_to_float,
    f"{_MICROSOFT}MatMulNBits": _matmul_n_bits,
}

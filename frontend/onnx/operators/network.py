"""Layers: convolutions, pooling, normalisation, attention, losses."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from echograph.errors import CaptureError
from echograph.frontend.onnx.call import NodeCall, Operator, extents


def _matmul(call: NodeCall) -> Any:
    return torch.matmul(call[0], call[1])


def gemm(call: NodeCall) -> Any:
    """`Gemm`: alpha A B + beta C, A and B transposed or not."""
    a, b, c = call[0], call[1], call.get(2)
    a = a.t() if call.integer("transA") else a
    b = b.t() if call.integer("transB") else b
    alpha, beta = call.real("alpha", 1.0), call.real("beta", 1.0)
    if c is not None and beta != 0.0:
        return torch.addmm(c, a, b, alpha=alpha, beta=beta)
    product: Tensor = torch.mm(a, b)
    return product if alpha == 1.0 else product * alpha


def _einsum(call: NodeCall) -> Any:
    return torch.einsum(call.text("equation"), [call[i] for i in range(len(call.operands))])


_CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
_MAX_POOLS = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGE_POOLS = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


def _dimensions(table: Mapping[int, Any], x: Tensor) -> Any:
    function = table.get(x.dim() - 2)
    if function is None:
        raise CaptureError(f"its input has {x.dim()} dimensions: 3, 4 and 5 are known")
    return function


def _window(call: NodeCall, x: Tensor, kernel: list[int]) -> tuple[list[int], list[int], list[int], list[int]]:
    """Stride, dilation, and padding before and after, one entry per spatial dimension."""
    count = len(kernel)
    stride, dilation = call.ints("strides", default=[1] * count), call.ints("dilations", default=[1] * count)
    mode = call.text("auto_pad", "NOTSET")
    if mode == "NOTSET":
        pads = call.ints("pads", default=[0] * (2 * count))
        return stride, dilation, pads[:count], pads[count:]
    if mode == "VALID":
        return stride, dilation, [0] * count, [0] * count
    sizes = zip(extents(x)[2:], kernel, stride, dilation, strict=True)
    total = [max(0, (-(-size // s) - 1) * s + (k - 1) * d + 1 - size) for size, k, s, d in sizes]
    half = [pad // 2 for pad in total]
    rest = [pad - low for pad, low in zip(total, half, strict=True)]
    return (stride, dilation, half, rest) if mode == "SAME_UPPER" else (stride, dilation, rest, half)


def _even(x: Tensor, before: list[int], after: list[int], value: float = 0.0) -> tuple[Tensor, list[int]]:
    """Kernels pad both sides alike; another padding is written out first."""
    if before == after:
        return x, before
    widths = [width for pair in zip(reversed(before), reversed(after), strict=True) for width in pair]
    return F.pad(x, widths, value=value), [0] * len(before)


def _bias(call: NodeCall, position: int) -> Tensor | None:
    """A bias; one that is known to be zero is what an exporter writes for none."""
    known = call.known[position] if position < len(call.known) else None
    return None if known is not None and not known.any() else call.get(position)


def convolve(call: NodeCall, x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
    """The convolution that a node's attributes say."""
    stride, dilation, before, after = _window(call, x, extents(weight)[2:])
    function = _dimensions(_CONVOLUTIONS, x)
    x, padding = _even(x, before, after)
    return function(x, weight, bias, stride, padding, dilation, call.integer("group", 1))


def _conv(call: NodeCall) -> Any:
    return convolve(call, call[0], call[1], _bias(call, 2))


def _conv_transpose(call: NodeCall) -> Any:
    x, weight = call[0], call[1]
    stride, dilation, before, after = _window(call, x, extents(weight)[2:])
    extra = call.ints("output_padding", default=[0] * len(before))
    mode = call.text("auto_pad", "NOTSET")
    wanted = call.node.attributes.get("output_shape")
    if wanted is not None or mode.startswith("SAME"):
        sizes = list(zip(extents(x)[2:], stride, extents(weight)[2:], dilation, extra, strict=True))
        wanted = wanted or [size * s for size, s, *_ in sizes]
        total = [(n - 1) * s + e + (k - 1) * d + 1 for n, s, k, d, e in sizes]
        total = [whole - out for whole, out in zip(total, wanted[-len(sizes) :], strict=True)]
        # What is wanted beyond the whole is output without input.
        extra = [e + max(0, -pad) for e, pad in zip(extra, total, strict=True)]
        total = [max(0, pad) for pad in total]
        half = [pad // 2 for pad in total]
        rest = [pad - low for pad, low in zip(total, half, strict=True)]
        before, after = (half, rest) if mode == "SAME_UPPER" else (rest, half)
    # What is cut off the end less than off the front is more output there.
    extra = [e + low - high for e, low, high in zip(extra, before, after, strict=True)]
    function = _dimensions(_TRANSPOSED, x)
    return function(x, weight, _bias(call, 2), stride, before, extra, call.integer("group", 1), dilation)


def _max_pool(call: NodeCall) -> Any:
    kernel = call.ints("kernel_shape")
    stride, dilation, before, after = _window(call, call[0], kernel)
    x, padding = _even(call[0], before, after, float("-inf"))
    both = len(call.node.outputs) > 1 and bool(call.node.outputs[1])
    pool = _dimensions(_MAX_POOLS, x)
    return pool(x, kernel, stride, padding, dilation, bool(call.integer("ceil_mode")), both)


def _average_pool(call: NodeCall) -> Any:
    kernel = call.ints("kernel_shape")
    stride, _, before, after = _window(call, call[0], kernel)
    x, padding = _even(call[0], before, after)
    counts = bool(call.integer("count_include_pad"))
    if any(step != 1 for step in call.ints("dilations", default=[1])):
        raise CaptureError("its windows are dilated: no kernel averages such")
    return _dimensions(_AVERAGE_POOLS, x)(x, kernel, stride, padding, bool(call.integer("ceil_mode")), counts)


def _global_pool(call: NodeCall, *, largest: bool) -> Any:
    x = call[0]
    axes = list(range(2, x.dim()))
    return torch.amax(x, axes, keepdim=True) if largest else torch.mean(x, axes, keepdim=True)


def _batch_norm(call: NodeCall) -> Any:
    """In training, an inference graph's fixed statistics are those of the batch again."""
    momentum = 1.0 - call.real("momentum", 0.9)
    training = call.training or bool(call.integer("training_mode"))
    out = F.batch_norm(call[0], call[3], call[4], call[1], call[2], training, momentum, call.real("epsilon", 1e-5))
    return (out, call[3], call[4]) if len(call.node.outputs) > 1 else out


def _instance_norm(call: NodeCall) -> Any:
    return F.instance_norm(call[0], weight=call[1], bias=call[2], eps=call.real("epsilon", 1e-5))


def _group_norm(call: NodeCall) -> Any:
    return F.group_norm(call[0], call.integer("num_groups", 1), call[1], call[2], call.real("epsilon", 1e-5))


def _layer_norm(call: NodeCall) -> Any:
    x = call[0]
    shape = extents(x)[call.axis(-1, x.dim()) :]
    if len(call.node.outputs) > 1:  # mean and inverse deviation too
        return torch.native_layer_norm(x, shape, call[1], call.get(2), call.real("epsilon", 1e-5))
    return F.layer_norm(x, shape, call[1], call.get(2), call.real("epsilon", 1e-5))


def _rms_norm(call: NodeCall) -> Any:
    x = call[0]
    return F.rms_norm(x, extents(x)[call.axis(-1, x.dim()) :], call[1], call.real("epsilon", 1e-5))


def _lp_norm(call: NodeCall) -> Any:
    return F.normalize(call[0], call.integer("p", 2), call.axis(-1, call[0].dim()), eps=0.0)


def _local_response_norm(call: NodeCall) -> Any:
    return F.local_response_norm(
        call[0], call.integer("size", 1), call.real("alpha", 1e-4), call.real("beta", 0.75), call.real("bias", 1.0)
    )


def _dropout(call: NodeCall) -> Any:
    x = call[0]
    ratio = call.number(1) if call.get(1) is not None else call.real("ratio", 0.5)
    if not call.training or not ratio:
        return (x, torch.ones(extents(x), dtype=torch.bool)) if len(call.node.outputs) > 1 else x
    return torch.native_dropout(x, float(ratio), True)


def _loss(call: NodeCall, *, of_logits: bool) -> Any:
    scores, labels, weight = call[0], call[1], call.get(2)
    ignored = call.integer("ignore_index", -100)
    reduction = call.text("reduction", "mean")
    if not of_logits:
        return F.nll_loss(scores, labels, weight, ignore_index=ignored, reduction=reduction)
    loss = F.cross_entropy(scores, labels, weight, ignore_index=ignored, reduction=reduction)
    return (loss, F.log_softmax(scores, 1)) if len(call.node.outputs) > 1 else loss


OPERATORS: Mapping[str, Operator] = {
    "MatMul": _matmul,
    "Gemm": gemm,
    "Einsum": _einsum,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "MaxPool": _max_pool,
    "AveragePool": _average_pool,
    "GlobalAveragePool": partial(_global_pool, largest=False),
    "GlobalMaxPool": partial(_global_pool, largest=True),
    "BatchNormalization": _batch_norm,
    "InstanceNormalization": _instance_norm,
    "GroupNormalization": _group_norm,
    "LayerNormalization": _layer_norm,
    "RMSNormalization": _rms_norm,
    "LpNormalization": _lp_norm,
    "LRN": _local_response_norm,
    "Dropout": _dropout,
    "SoftmaxCrossEntropyLoss": partial(_loss, of_logits=True),
    "NegativeLogLikelihoodLoss": partial(_loss, of_logits=False),
}

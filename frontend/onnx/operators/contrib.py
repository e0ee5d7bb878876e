"""ONNX Runtime's fused operators that are one layer each (domain `com.microsoft`).

Its attentions stand in `attention`, its layers of integers in `quantised`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from echograph.errors import CaptureError
from echograph.frontend.onnx.call import NodeCall, Operator, extents
from echograph.frontend.onnx.operators.network import convolve, gemm


def _fast_gelu(call: NodeCall) -> Any:
    x = call[0] if call.get(1) is None else call[0] + call[1]
    return F.gelu(x, approximate="tanh")


def _quick_gelu(call: NodeCall) -> Any:
    return call[0] * torch.sigmoid(call.real("alpha", 1.702) * call[0])


def _fused_matmul(call: NodeCall) -> Any:
    a, b = call[0], call[1]
    a = a.transpose(-2, -1) if call.integer("transA") else a
    b = b.transpose(-2, -1) if call.integer("transB") else b
    alpha = call.real("alpha", 1.0)
    product = torch.matmul(a, b)
    return product if alpha == 1.0 else product * alpha


def _skip_layer_norm(call: NodeCall) -> Any:
    total = call[0] + call[1] if call.get(4) is None else call[0] + call[1] + call[4]
    out = F.layer_norm(total, extents(total)[-1:], call[2], call.get(3), call.real("epsilon", 1e-12))
    return out, None, None, total


def _simplified_layer_norm(call: NodeCall) -> Any:
    x = call[0]
    return F.rms_norm(x, extents(x)[call.axis(-1, x.dim()) :], call[1], call.real("epsilon", 1e-5))


def _skip_simplified_layer_norm(call: NodeCall) -> Any:
    total = call[0] + call[1] if call.get(3) is None else call[0] + call[1] + call[3]
    return F.rms_norm(total, extents(total)[-1:], call[2], call.real("epsilon", 1e-5)), None, None, total


_ACTIVATIONS: Mapping[str, Any] = {
    "Relu": F.relu,
    "Tanh": torch.tanh,
    "Sigmoid": torch.sigmoid,
    "HardSigmoid": F.hardsigmoid,
}


def _activated(call: NodeCall, x: Tensor) -> Any:
    name = call.text("activation")
    if name == "LeakyRelu":
        return F.leaky_relu(x, (call.node.attributes.get("activation_params") or [0.01])[0])
    if name and name not in _ACTIVATIONS:
        raise CaptureError(f"its activation '{name}' is not known: {', '.join(_ACTIVATIONS)}, LeakyRelu are")
    return _ACTIVATIONS[name](x) if name else x


def _fused_conv(call: NodeCall) -> Any:
    made = convolve(call, call[0], call[1], call.get(2))
    return _activated(call, made if call.get(3) is None else made + call[3])


def _fused_gemm(call: NodeCall) -> Any:
    return _activated(call, gemm(call))


OPERATORS: Mapping[str, Operator] = {
    "com.microsoft.Gelu": lambda call: F.gelu(call[0]),
    "com.microsoft.BiasGelu": lambda call: F.gelu(call[0] + call[1]),
    "com.microsoft.FastGelu": _fast_gelu,
    "com.microsoft.QuickGelu": _quick_gelu,
    "com.microsoft.FusedMatMul": _fused_matmul,
    "com.microsoft.FusedConv": _fused_conv,
    "com.microsoft.FusedGemm": _fused_gemm,
    "com.microsoft.SkipLayerNormalization": _skip_layer_norm,
    "com.microsoft.SkipSimplifiedLayerNormalization": _skip_simplified_layer_norm,
    "SimplifiedLayerNormalization": _simplified_layer_norm,
}

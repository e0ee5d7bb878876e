"""Attention and what belongs to it, in ONNX's own form and in that of ONNX Runtime's fused layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from echograph.errors import CaptureError
from echograph.frontend.onnx.call import NodeCall, Operator, extents

_KNOWN = ("is_causal", "q_num_heads", "kv_num_heads", "scale", "softmax_precision", "qk_matmul_output_mode")


def _attention(call: NodeCall) -> Any:
    """Standard attention (version 23): heads apart, or side by side in the last dimension."""
    query, key, value, mask = call[0], call[1], call[2], call.get(3)
    if any(call.get(i) is not None for i in (4, 5, 6)) or call.real("softcap", 0.0):
        raise CaptureError("it has a cache, a softcap or lengths: export a step without them")
    if unknown := next(
        (name for name, value in call.node.attributes.items() if value and name not in _KNOWN), None
    ):
        raise CaptureError(f"its '{unknown}' is not known: export a step without it")
    apart = query.dim() == 4
    if not apart:
        heads, kv_heads = call.integer("q_num_heads"), call.integer("kv_num_heads")
        query = query.unflatten(-1, (heads, -1)).transpose(1, 2)
        key, value = (t.unflatten(-1, (kv_heads, -1)).transpose(1, 2) for t in (key, value))
    scale = call.node.attributes.get("scale")
    out = F.scaled_dot_product_attention(
        query, key, value, mask, 0.0, bool(call.integer("is_causal")), scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return out if apart else out.transpose(1, 2).flatten(-2)


def packed_attention(call: NodeCall, x: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor | None) -> Any:
    """ONNX Runtime's attention of one packed projection [input, query + key + value].

    Raises:
        CaptureError: it has a cache, or a mask that is not one of keys.
    """
    if any(
        call.get(i) is not None for i in range(4, len(call.operands)) if call.node.operator.endswith(".Attention")
    ):
        raise CaptureError("it has a cache or a bias of its own: export the model before that fusion")
    widths = call.optional_ints("qkv_hidden_sizes") or [int(weight.shape[-1]) // 3] * 3
    projected = torch.matmul(x, weight)
    projected = projected if bias is None else projected + bias
    query, key, value = torch.split(projected, widths, -1)
    return _heads(call, query, key, value, mask, bool(call.integer("unidirectional")))


def _packed(call: NodeCall) -> Any:
    return packed_attention(call, call[0], call[1], call.get(2), call.get(3))


def _multi_head(call: NodeCall) -> Any:
    """Query, key and value projected already, their bias [query + key + value] not yet added."""
    query, key, value, bias = call[0], call.get(1), call.get(2), call.get(3)
    if (
        key is None
        or value is None
        or query.dim() != 3
        or key.dim() != 3
        or any(call.get(i) is not None for i in range(5, len(call.operands)))
    ):
        raise CaptureError("its operands are packed, or it has a cache: export the model before that fusion")
    if bias is not None:
        parts = bias.split([int(t.shape[-1]) for t in (query, key, value)])
        query, key, value = (t + part for t, part in zip((query, key, value), parts, strict=True))
    return _heads(call, query, key, value, call.get(4), bool(call.integer("unidirectional")))


def _heads(call: NodeCall, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> Any:
    heads = call.integer("num_heads")
    operands: tuple[Any, ...] = (query, key, value)
    query, key, value = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in operands)
    kept = None
    if mask is not None:
        if extents(mask) != [int(query.shape[0]), int(key.shape[2])]:
            raise CaptureError(f"its mask {extents(mask)} is not one of [batch, keys]")
        kept = (mask != 0)[:, None, None, :]
    scale = call.node.attributes.get("scale") or None
    out = F.scaled_dot_product_attention(query, key, value, kept, 0.0, causal and kept is None, scale=scale)
    return out.transpose(1, 2).flatten(-2)


def _rotary(positions_at: int, call: NodeCall) -> Any:
    """Rotates pairs of a head's numbers; [batch, heads, sequence, head] or heads side by side."""
    x = call[0]
    cos, sin = call[2 if positions_at == 1 else 1], call[3 if positions_at == 1 else 2]
    positions = call.get(positions_at)
    apart = x.dim() == 4
    heads = call.integer("num_heads")
    if not apart:
        heads = heads or int(x.shape[-1]) // (2 * int(cos.shape[-1]))
        x = x.unflatten(-1, (heads, -1)).transpose(1, 2)
    if positions is not None:
        if positions.numel() == 1:  # an offset
            positions = positions.reshape([1, 1]) + torch.arange(int(x.shape[2]))
        cos, sin = F.embedding(positions, cos), F.embedding(positions, sin)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    width = call.integer("rotary_embedding_dim") or int(x.shape[-1])
    turned, rest = x[..., :width], x[..., width:]
    interleaved = bool(call.integer("interleaved"))
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    low, high = a * cos - b * sin, b * cos + a * sin
    turned = torch.stack([low, high], -1).flatten(-2) if interleaved else torch.cat([low, high], -1)
    out = torch.cat([turned, rest], -1) if rest.shape[-1] else turned
    return out if apart else out.transpose(1, 2).flatten(-2)


def _embed_layer_norm(call: NodeCall) -> Any:
    """The sum of three lookups, normalised; a mask becomes its lengths."""
    tokens = call[0]
    positions = call.get(8)
    if positions is None:
        positions = torch.arange(int(tokens.shape[1]), dtype=tokens.dtype).unsqueeze(0).expand(tokens.shape)
    total = F.embedding(tokens, call[2]) + F.embedding(positions, call[3])
    if call.get(1) is not None and call.get(4) is not None:
        total = total + F.embedding(call[1], call[4])
    out = F.layer_norm(total, extents(total)[-1:], call[5], call[6], call.real("epsilon", 1e-12))
    mask = call.get(7)
    lengths = torch.zeros([int(tokens.shape[0])], dtype=torch.int32) if mask is None else mask.sum(1)
    return out, lengths, total


OPERATORS: Mapping[str, Operator] = {
    "Attention": _attention,
    "RotaryEmbedding": lambda call: _rotary(3, call),
    "com.microsoft.RotaryEmbedding": lambda call: _rotary(1, call),
    "com.microsoft.Attention": _packed,
    "com.microsoft.MultiHeadAttention": _multi_head,
    "com.microsoft.EmbedLayerNormalization": _embed_layer_norm,
}

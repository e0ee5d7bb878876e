"""Layers: convolutions, pooling, normalisation, attention, recurrence, losses.

Attention stands in ONNX's own form and in that of ONNX Runtime's fused layers (domain `com.microsoft`), whose
layers of integers are in `quantised`. Recurrent layers run step by step: one product for the inputs of all steps,
one a step for the state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

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


MAX_STEPS = 10_000
_X, _W, _R, _B, _LENGTHS, _H, _C, _P = range(8)
_REVERSE = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "Sigmoid": torch.sigmoid, "Tanh": torch.tanh, "Relu": F.relu, "Softsign": F.softsign, "Softplus": F.softplus,
    "HardSigmoid": lambda x: torch.clamp(x * 0.2 + 0.5, 0.0, 1.0), "Elu": F.elu,
}  # fmt: skip


class Weights(NamedTuple):
    """One direction's: of the input [gates, input], of the state [gates, hidden], both biases, and peepholes."""

    of_input: Tensor
    of_state: Tensor
    bias: Tensor | None
    state_bias: Tensor | None
    peepholes: Sequence[Tensor] | None


class Cell(NamedTuple):
    """How a layer computes.

    Attributes:
        activations: one function for each kind of gate.
        before_reset: a GRU applies its state's weights before the reset gate.
        coupled: an LSTM forgets what it does not take in.
    """

    activations: Sequence[Callable[[Tensor], Tensor]]
    before_reset: bool
    coupled: bool


_CellState = tuple[Tensor, ...]
_CellStep = Callable[[Cell, Weights, Tensor, _CellState], _CellState]
"""(cell, weights, the input's share of the gates, state) -> state; the first of a state is what a layer shows."""


def recurrent(
    step: _CellStep, gates: int, states: int, call: NodeCall, weights: tuple[Any, Any] | None = None
) -> Any:
    """Runs a layer.

    Args:
        step: of the cell.
        gates: how many there are.
        states: tensors of the state: 2 of an LSTM.
        call: operands as ONNX orders them.
        weights: for the input and the state, where they are not operands 1 and 2.

    Raises:
        CaptureError: it has activations or a length that are not known.
    """
    reverse = _REVERSE.get(call.text("direction", "forward"))
    if reverse is None or call.node.attributes.get("clip") or call.node.attributes.get("activation_alpha"):
        raise CaptureError("its direction is unknown, or it clips or scales its gates: export it without")
    x, first = call[_X], call.integer("layout")
    x = x.transpose(0, 1) if first else x
    if not 0 < x.shape[0] <= MAX_STEPS:
        raise CaptureError(f"it runs {int(x.shape[0])} steps: 1 to {MAX_STEPS} are possible")
    of_input, of_state = weights or (call[_W], call[_R])
    hidden = int(of_state.shape[-1])
    shown, ends = [], []
    for number, backward in enumerate(reverse):
        its = _weights(call, of_input[number], of_state[number], number, gates * hidden, hidden)
        state = tuple(_initial(call, at, number, x, hidden, first) for at in (_H, _C)[:states])
        outputs, state = _direction(step, _cell(call, step, number), its, x, state, backward, call.get(_LENGTHS))
        shown.append(torch.stack(outputs))
        ends.append(state)
    whole = torch.stack(shown, 1)  # [steps, directions, batch, hidden]
    lasts = [torch.stack([end[i] for end in ends]) for i in range(states)]
    if first:
        whole, lasts = whole.permute(2, 0, 1, 3), [last.transpose(0, 1) for last in lasts]
    return (whole, *lasts)


def _cell(call: NodeCall, step: _CellStep, number: int) -> Cell:
    default = _DEFAULTS[step]
    names = call.node.attributes.get("activations") or list(default) * (number + 1)
    names = names[number * len(default) : (number + 1) * len(default)]
    if unknown := [name for name in names if name not in _ACTIVATIONS]:
        raise CaptureError(f"its activation '{unknown[0]}' is not known: {', '.join(_ACTIVATIONS)} are")
    return Cell(
        activations=[_ACTIVATIONS[name] for name in names],
        before_reset=bool(call.integer("linear_before_reset")),
        coupled=bool(call.integer("input_forget")),
    )


def _weights(call: NodeCall, of_input: Tensor, of_state: Tensor, number: int, width: int, hidden: int) -> Weights:
    bias, peepholes = call.get(_B), call.get(_P)
    own, of_states = (None, None) if bias is None else bias[number].split(width)
    return Weights(
        of_input, of_state, own, of_states, None if peepholes is None else peepholes[number].split(hidden)
    )


def _initial(call: NodeCall, position: int, number: int, x: Tensor, hidden: int, first: int) -> Tensor:
    given = call.get(position)
    if given is None:
        return torch.zeros([int(x.shape[1]), hidden], dtype=x.dtype)
    chosen: Tensor = given.select(1 if first else 0, number)
    return chosen


def _direction(
    step: _CellStep, cell: Cell, its: Weights, x: Tensor, state: _CellState, backward: bool, lengths: Tensor | None
) -> tuple[list[Tensor], _CellState]:
    count, batch, _ = extents(x)
    shares = F.linear(x.reshape(count * batch, -1), its.of_input, its.bias).reshape(count, batch, -1)
    outputs = []
    for position in reversed(range(count)) if backward else range(count):
        after = step(cell, its, shares[position], state)
        shown = after[0]
        if lengths is not None:  # of a sequence that has ended the state stays, and nothing is shown
            runs = (lengths > position).unsqueeze(-1)
            after = tuple(torch.where(runs, new, old) for new, old in zip(after, state, strict=True))
            shown = torch.where(runs, shown, torch.zeros_like(shown))
        outputs.append(shown)
        state = after
    return (outputs[::-1] if backward else outputs), state


def _lstm(cell: Cell, its: Weights, share: Tensor, state: _CellState) -> _CellState:
    hidden, memory = state
    sigmoid, tanh, last = cell.activations
    i, o, f, c = (share + F.linear(hidden, its.of_state, its.state_bias)).chunk(4, -1)
    if its.peepholes is not None:
        i, f = i + its.peepholes[0] * memory, f + its.peepholes[2] * memory
    taken = sigmoid(i)
    kept = 1 - taken if cell.coupled else sigmoid(f)
    memory = kept * memory + taken * tanh(c)
    if its.peepholes is not None:
        o = o + its.peepholes[1] * memory
    return sigmoid(o) * last(memory), memory


def _gru(cell: Cell, its: Weights, share: Tensor, state: _CellState) -> _CellState:
    (hidden,) = state
    width = int(hidden.shape[-1])
    sigmoid, tanh = cell.activations
    z, r, h = share.chunk(3, -1)
    if cell.before_reset:
        of_z, of_r, of_h = F.linear(hidden, its.of_state, its.state_bias).chunk(3, -1)
        new = tanh(h + sigmoid(r + of_r) * of_h)
    else:
        gates, rest = its.of_state[: 2 * width], its.of_state[2 * width :]
        bias = its.state_bias
        biases = (None, None) if bias is None else (bias[: 2 * width], bias[2 * width :])
        of_z, of_r = F.linear(hidden, gates, biases[0]).chunk(2, -1)
        new = tanh(h + F.linear(sigmoid(r + of_r) * hidden, rest, biases[1]))
    update = sigmoid(z + of_z)
    return ((1 - update) * new + update * hidden,)


def _rnn(cell: Cell, its: Weights, share: Tensor, state: _CellState) -> _CellState:
    return (cell.activations[0](share + F.linear(state[0], its.of_state, its.state_bias)),)


_DEFAULTS: Mapping[_CellStep, tuple[str, ...]] = {
    _lstm: ("Sigmoid", "Tanh", "Tanh"), _gru: ("Sigmoid", "Tanh"), _rnn: ("Tanh",)
}  # fmt: skip
lstm = partial(recurrent, _lstm, 4, 2)


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


_CONV_ACTIVATIONS: Mapping[str, Any] = {
    "Relu": F.relu,
    "Tanh": torch.tanh,
    "Sigmoid": torch.sigmoid,
    "HardSigmoid": F.hardsigmoid,
}


def _activated(call: NodeCall, x: Tensor) -> Any:
    name = call.text("activation")
    if name == "LeakyRelu":
        return F.leaky_relu(x, (call.node.attributes.get("activation_params") or [0.01])[0])
    if name and name not in _CONV_ACTIVATIONS:
        raise CaptureError(f"its activation '{name}' is not known: {', '.join(_CONV_ACTIVATIONS)}, LeakyRelu are")
    return _CONV_ACTIVATIONS[name](x) if name else x


def _fused_conv(call: NodeCall) -> Any:
    made = convolve(call, call[0], call[1], call.get(2))
    return _activated(call, made if call.get(3) is None else made + call[3])


def _fused_gemm(call: NodeCall) -> Any:
    return _activated(call, gemm(call))


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
    "Attention": _attention,
    "RotaryEmbedding": lambda call: _rotary(3, call),
    "com.microsoft.RotaryEmbedding": lambda call: _rotary(1, call),
    "com.microsoft.Attention": _packed,
    "com.microsoft.MultiHeadAttention": _multi_head,
    "com.microsoft.EmbedLayerNormalization": _embed_layer_norm,
    "LSTM": lstm,
    "GRU": partial(recurrent, _gru, 3, 1),
    "RNN": partial(recurrent, _rnn, 1, 1),
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

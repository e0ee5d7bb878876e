"""Recurrent layers as cuDNN runs them on a GPU: all layers, directions and steps in one operation each way.

On a CPU PyTorch writes them out cell by cell. Here `aten::lstm`, `gru`, `rnn_tanh` and `rnn_relu` call
`cudnn::rnn`, which stands for `aten::_cudnn_rnn` (aten/src/ATen/native/cudnn/RNN.cpp): samples come second, as
cuDNN has them, so a batch that comes first is copied. Of packed sequences, which `aten::lstm.data` and its like
take, it has all rows one after the other, and how many samples each step has. An LSTM's projections stay cells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

_LIBRARY: Any = torch.library.Library("cudnn", "DEF")  # type: ignore[no-untyped-call]
_GIVEN = "Tensor input, Tensor[] states, Tensor[] weights, int layers, int directions, float dropout"
_PACKED = "Tensor? batch_sizes=None"
_KEPT = "Tensor output, Tensor reserve"
_LIBRARY.define(f"rnn({_GIVEN}, bool train, {_PACKED}) -> Tensor[]")
_LIBRARY.define(f"rnn_backward(Tensor[] gradients, {_GIVEN}, {_KEPT}, {_PACKED}) -> Tensor[]")
_OPS: Any = torch.ops.cudnn


def _forward(
    x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], layers: int, directions: int, dropout: float,
    train: bool, batch_sizes: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """Output [steps, samples, directions x hidden], last states, and what training keeps for backward.

    Packed sequences have all their rows as steps of one sample.

    The reserve has the gates of each cell and what an LSTM's cells hold, in the type of the input; cuDNN does not
    publish how large it is (assumed).
    """
    steps, samples, hidden = *x.shape[:2], states[0].shape[2]
    of_cell = weights[0].shape[0] + hidden * (len(states) - 1)
    kept = x.new_empty(steps, samples, layers * directions * of_cell if train else 0)
    return [x.new_empty(steps, samples, directions * hidden), *map(torch.empty_like, states), kept]


def _backward(
    gradients: Sequence[Tensor], x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], *_: Any
) -> list[Tensor]:
    return [*map(torch.empty_like, (x, *states, *weights))]


_LIBRARY.impl("rnn", _forward, "Meta")
_LIBRARY.impl("rnn_backward", _backward, "Meta")


def _products(x: Any, weights: Any) -> int:
    """FLOPs of a forward pass: each weight's matrix with the input, or the state, of every step and sample."""
    elements: int = sum(shape[0] * shape[1] for shape in weights if len(shape) == 2)
    return 2 * int(x[0] * x[1]) * elements


@register_flop_formula(_OPS.rnn)
def _forward_flops(x: Any, states: Any, weights: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return _products(x, weights)


@register_flop_formula(_OPS.rnn_backward)
def _backward_flops(
    gradients: Any, x: Any, states: Any, weights: Any, *_: Any, out_shape: Any = None, **__: Any
) -> int:
    return 2 * _products(x, weights)


class _Rnn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, layers: int, directions: int, dropout: float, train: bool, sizes: Any, states: int, *given: Any
    ) -> Any:
        x, its, weights = given[0], given[1 : 1 + states], given[1 + states :]
        output, *last, reserve = _OPS.rnn(x, list(its), list(weights), layers, directions, dropout, train, sizes)
        ctx.save_for_backward(*given, output, reserve)
        ctx.sizes = sizes
        ctx.settings = layers, directions, dropout, states
        return output, *last

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        layers, directions, dropout, states = ctx.settings
        x, *rest, output, reserve = ctx.saved_tensors
        its, weights = rest[:states], rest[states:]
        given = [gradient for gradient in gradients if gradient is not None]
        made = _OPS.rnn_backward(given, x, its, weights, layers, directions, dropout, output, reserve, ctx.sizes)
        return None, None, None, None, None, None, *made


def _run(
    original: Callable[..., Any], x: Tensor, states: Any, weights: list[Tensor], has_biases: bool, layers: int,
    dropout: float, train: bool, bidirectional: bool, batch_first: bool, sizes: Tensor | None = None,
) -> Any:  # fmt: skip
    """A layer as `aten::lstm.input` and its like take it."""
    own = list(states) if isinstance(states, list | tuple) else [states]
    directions = 2 if bidirectional else 1
    if len(weights) != layers * directions * (4 if has_biases else 2):  # an LSTM's projections
        return original(x, states, weights, has_biases, layers, dropout, train, bidirectional, batch_first)
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        x, own, weights = x.to(dtype), [s.to(dtype) for s in own], [w.to(dtype) for w in weights]
    x = (x.transpose(0, 1) if batch_first else x).contiguous()
    apply: Any = _Rnn.apply
    output, *last = apply(layers, directions, dropout, train, sizes, len(own), x, *own, *weights)
    return (output.transpose(0, 1) if batch_first else output, *last)


def _run_packed(
    original: Callable[..., Any], x: Tensor, sizes: Tensor, states: Any, weights: list[Tensor], has_biases: bool,
    layers: int, dropout: float, train: bool, bidirectional: bool,
) -> Any:  # fmt: skip
    """A layer as `aten::lstm.data` and its like take it: rows [rows, width], and how many each step has."""

    def step_by_step(_: Tensor, *given: Any) -> Any:
        return original(x, sizes, *given[:-1])

    given = (states, weights, has_biases, layers, dropout, train, bidirectional, False)
    output, *last = _run(step_by_step, x[:, None], *given, sizes=sizes)
    return (output[:, 0] if output.dim() == 3 else output, *last)


_KINDS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
CALLS: dict[str, Callable[..., Any]] = {
    f"{name}.{given}": partial(run, getattr(getattr(torch.ops.aten, name), given).decompose)
    for name in _KINDS
    for given, run in (("input", _run), ("data", _run_packed))
}
"""What runs in place of PyTorch's composite operators, by their names."""

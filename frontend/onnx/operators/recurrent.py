"""Recurrent layers, step by step: one product for the inputs of all steps, one a step for the state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from echograph.errors import CaptureError
from echograph.frontend.onnx.call import NodeCall, Operator, extents

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
OPERATORS: Mapping[str, Operator] = {
    "LSTM": lstm,
    "GRU": partial(recurrent, _gru, 3, 1),
    "RNN": partial(recurrent, _rnn, 1, 1),
}

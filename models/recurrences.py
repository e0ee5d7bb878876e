"""Recurrent layers other than Mamba-2's as single operations, and which function of a modeling file runs which.

Transformers writes them out in PyTorch, chunk by chunk or position by position; trainers run the kernels of
flash-linear-attention and state-spaces/mamba. So a capture holds one operation each, and one for each gradient
(`models.mamba2` says how).

The gated delta rule (Yang et al. 2024, arXiv:2412.06464, section 3.3) over chunks of C positions has, for each
position and value head, with K and V numbers in a head's key and value,

    2 C (3 K + 2 V)     K K^T, T (beta K), T (beta V), Q K^T and what that gives
    6 K V               what the state gives to the values and to the queries, and what it takes in

FLOPs. Its gradient computes T (beta K), T (beta V) and the states again, and has two products for each
of the eight. Kimi's delta attention (Kimi Team 2025, arXiv:2510.26692, section 3) has the same products, and a
decay for each number of a key in place of one for each head.

The selective scan (Gu and Dao 2023, arXiv:2312.00752, algorithm 2) of D channels with N states has 9 N FLOPs a
position and channel, as state-spaces/mamba counts them; its gradient computes the states again, and twice that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from echograph.models.mamba2 import causal_conv1d, ssd_scan

CHUNK = 64
"""Positions of a chunk (flash-linear-attention, fla/ops/gated_delta_rule/chunk.py)."""

_LIBRARY: Any = torch.library.Library("recurrent", "DEF")  # type: ignore[no-untyped-call]
_OF_RULE = "Tensor query, Tensor key, Tensor value, Tensor decay, Tensor beta"
_OF_SCAN = "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor D, Tensor gate, Tensor dt_bias"
_LIBRARY.define(f"gated_delta_rule({_OF_RULE}) -> Tensor")
_LIBRARY.define(f"gated_delta_rule_backward(Tensor gradient, {_OF_RULE}) -> ({', '.join(['Tensor'] * 5)})")
_LIBRARY.define(f"selective_scan({_OF_SCAN}) -> Tensor")
_LIBRARY.define(f"selective_scan_backward(Tensor gradient, {_OF_SCAN}) -> ({', '.join(['Tensor'] * 8)})")
_LIBRARY.impl("gated_delta_rule", lambda _q, _k, value, *_: torch.empty_like(value), "Meta")
_LIBRARY.impl("selective_scan", lambda x, *_: torch.empty_like(x), "Meta")
for _name in ("gated_delta_rule_backward", "selective_scan_backward"):
    _LIBRARY.impl(_name, lambda _, *inputs: tuple(map(torch.empty_like, inputs)), "Meta")
_OPS: Any = torch.ops.recurrent


def _differentiable(name: str) -> Callable[..., Tensor]:
    """An operator with its gradient."""

    class Recurrence(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            ctx.save_for_backward(*inputs)
            return getattr(_OPS, name)(*inputs)

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return getattr(_OPS, f"{name}_backward")(gradient, *ctx.saved_tensors)

    apply: Callable[..., Tensor] = Recurrence.apply
    return apply


_RULE, _SCAN = _differentiable("gated_delta_rule"), _differentiable("selective_scan")


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """The gated delta rule, in place of what transformers writes out.

    Args:
        query: [batch, sequence, key heads, head dim].
        key: like the queries.
        value: [batch, sequence, value heads, head dim].
        g: logarithms of the decays [batch, sequence, value heads], or like the keys.
        beta: [batch, sequence, value heads].

    Returns:
        What the values are like, and no state: training keeps none.
    """
    return _RULE(query, key, value, g, beta), None


def selective_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor, delta_bias: Tensor, **_: Any
) -> Tensor:
    """The scan of a Mamba layer, in place of transformers' `mamba_selective_scan`.

    Args:
        x: [batch, channels, sequence].
        dt: like x.
        A: [channels, states].
        B: [batch, states, sequence].
        C: like B.
        D: [channels].
        z: the gate, like x.
        delta_bias: [channels].

    Returns:
        What x is like.
    """
    return _SCAN(x, dt, A, B, C, D, z, delta_bias)


_KERNELS: dict[str, Callable[..., Any]] = {
    "mamba2_chunk_scan": ssd_scan,
    "mamba2_split_conv1d_scan_combined": lambda *_, **__: None,  # None says that there is none
    "mamba_selective_scan": selective_scan,
    "torch_chunk_gated_delta_rule": gated_delta_rule,
    "chunk_kimi_delta_attention": gated_delta_rule,
    "causal_conv1d_fn": causal_conv1d,
}
"""What modeling files of transformers call the kernels."""


def run_single_kernels(module: nn.Module) -> None:
    """Makes the recurrent layers of a module, while it runs, run each kernel as one operation."""
    files = [sys.modules[name] for name in sorted({type(part).__module__ for part in module.modules()})]
    found = [(file, name) for file in files for name in _KERNELS if hasattr(file, name)]
    if not found:
        return
    entered: list[Any] = []

    def enter(*_: Any) -> None:
        entered.append(_single_kernels(found))
        entered[-1].__enter__()

    def leave(*_: Any) -> None:
        entered.pop().__exit__(None, None, None)

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)


@contextmanager
def _single_kernels(found: list[tuple[Any, str]]) -> Iterator[None]:
    before = [getattr(file, name) for file, name in found]
    try:
        for file, name in found:
            setattr(file, name, _KERNELS[name])
        yield
    finally:
        for (file, name), function in zip(found, before, strict=True):
            setattr(file, name, function)


def _rule_flops(key: Any, value: Any) -> tuple[int, int]:
    """FLOPs that the rule takes, and those that its gradient takes again, of shapes."""
    (batch, sequence, heads, v), k, chunk = value, key[-1], min(CHUNK, value[1])
    positions = batch * sequence * heads
    again = positions * (2 * chunk * (k + v) + 4 * k * v)
    return positions * (2 * chunk * (3 * k + 2 * v) + 6 * k * v), again


def _scan_flops(x: Any, A: Any) -> int:
    """FLOPs of a scan, of shapes."""
    batch, _channels, sequence = x
    channels, states = A
    return 9 * int(batch) * int(sequence) * int(channels) * int(states)


@register_flop_formula(_OPS.gated_delta_rule)
def _forward_rule_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return _rule_flops(key, value)[0]


@register_flop_formula(_OPS.gated_delta_rule_backward)
def _backward_rule_flops(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    forward, again = _rule_flops(key, value)
    return 2 * forward + again


@register_flop_formula(_OPS.selective_scan)
def _forward_scan_flops(x: Any, dt: Any, A: Any, *_: Any, **__: Any) -> int:
    return _scan_flops(x, A)


@register_flop_formula(_OPS.selective_scan_backward)
def _backward_scan_flops(gradient: Any, x: Any, dt: Any, A: Any, *_: Any, **__: Any) -> int:
    return 3 * _scan_flops(x, A)

"""Mamba-2's kernels of state-spaces/mamba and causal-conv1d, for where they are not installed.

A capture holds one operation for the causal convolution with its SiLU, one for the scan with its gate, one for the
gated norm, and one each for their gradients. They have shapes and floating-point operations, and no values.

`mamba_split_conv1d_scan_combined` keeps what it is given, and in backward convolves again before the scan's
gradient, as there (`ops/triton/ssd_combined.py`). FLOPs are those of the chunks' products (Dao and Gu 2024,
arXiv:2405.21060, section 6): for S positions in chunks of Q, H heads of size P, and G groups of B and C of state
size N, C B^T has S Q N G multiply-adds, its product with X S Q P H, and what chunks leave and are given 2 S N P H.
The gradient computes the first and the states again, and has two products for each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.utils.flop_counter import register_flop_formula

from echograph.errors import CaptureError
from echograph.frontend.scripts.host_work import known_as

# A part of the namespace: the models that a step is compiled of have operations of it for other functions.
_LIBRARY: Any = torch.library.Library("mamba2", "FRAGMENT")  # type: ignore[no-untyped-call]
_SCAN = "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor D, Tensor dt_bias, Tensor z, int chunk"
_CONVOLUTION = "Tensor x, Tensor weight, Tensor bias"
_LIBRARY.define(f"ssd_scan_gated({_SCAN}) -> Tensor")
_LIBRARY.define(f"ssd_scan_gated_backward(Tensor gradient, {_SCAN}, Tensor(a!)[] out) -> ()")
_LIBRARY.define(f"causal_conv1d_fwd({_CONVOLUTION}) -> Tensor")
_LIBRARY.define(f"causal_conv1d_bwd(Tensor gradient, {_CONVOLUTION}, Tensor(a!)[] out) -> ()")
_LIBRARY.define("gated_rms_norm(Tensor x, Tensor? z, Tensor weight) -> Tensor")
_LIBRARY.define(
    "gated_rms_norm_backward(Tensor gradient, Tensor x, Tensor? z, Tensor weight, Tensor(a!)[] out) -> ()"
)
_OPS: Any = torch.ops.mamba2


def _like(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in tensors)


for _name in ("ssd_scan_gated", "causal_conv1d_fwd", "gated_rms_norm"):
    _LIBRARY.impl(_name, lambda x, *_: _like(x)[0], "Meta")
for _name in ("ssd_scan_gated_backward", "causal_conv1d_bwd", "gated_rms_norm_backward"):
    _LIBRARY.impl(_name, lambda *_: None, "Meta")


def _sizes(x: Any, B: Any, chunk: int) -> tuple[int, int, int, int]:
    """Positions, and multiply-adds of each for C B^T, for its product with X, and for states."""
    batch, sequence, heads, head = x
    groups, state = B[-2:]
    q = min(chunk, sequence)
    return batch * sequence, q * state * groups, q * head * heads, state * head * heads


@register_flop_formula(_OPS.ssd_scan_gated)
def _scan_flops(x: Any, dt: Any, A: Any, B: Any, *rest: Any, **_: Any) -> int:
    del dt, A
    positions, pairs, within, states = _sizes(x, B, rest[-1])
    return 2 * positions * (pairs + within + 2 * states)


@register_flop_formula(_OPS.ssd_scan_gated_backward)
def _scan_backward_flops(gradient: Any, x: Any, dt: Any, A: Any, B: Any, *rest: Any, **_: Any) -> int:
    del gradient, dt, A
    positions, pairs, within, states = _sizes(x, B, rest[-2])
    return 2 * positions * (3 * pairs + 2 * within + 5 * states)


@known_as("mamba_split_conv1d_scan_combined")
def split_conv1d_scan(
    zxbcdt: Tensor, conv1d_weight: Tensor, conv1d_bias: Tensor, dt_bias: Tensor, A: Tensor, D: Tensor,
    chunk_size: int, *, seq_idx: Any = None, headdim: int | None = None, ngroups: int = 1,
    norm_before_gate: bool = True, state_dtype: Any = None, activation: str = "silu", **_: Any,
) -> Tensor:  # fmt: skip
    """`mamba_ssm.ops.triton.ssd_combined.mamba_split_conv1d_scan_combined`.

    Args:
        zxbcdt: [batch, sequence, 2 x heads x head dim + 2 x groups x state + heads].
        conv1d_weight: [channels of x, B and C, kernel].
        conv1d_bias: [channels].
        dt_bias: [heads].
        A: [heads].
        D: [heads], or [heads, head dim].
        chunk_size: positions of a chunk.
        seq_idx: of packed sequences; it changes no kernel.
        headdim: size of a head; None: that of D.
        ngroups: of B and C.
        norm_before_gate: of a norm that is not here.
        state_dtype: of chunks' states; not counted.
        activation: of the convolution.

    Returns:
        [batch, sequence, heads x head dim].

    Raises:
        CaptureError: it has values.
    """
    del seq_idx, norm_before_gate, state_dtype, activation
    _fake(zxbcdt)
    heads = dt_bias.shape[0]
    sizes = heads, headdim or D.shape[1], ngroups, chunk_size
    made: Tensor = _Combined.apply(zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, sizes)  # type: ignore[no-untyped-call]
    return made


def _fake(given: Tensor) -> None:
    if not isinstance(given, FakeTensor):
        raise CaptureError("Mamba's kernels are there in a capture alone: install mamba_ssm to run the script")


def _parts(zxbcdt: Tensor, channels: int, sizes: tuple[int, ...]) -> list[Tensor]:
    """Of a projection: z, what is convolved (x, B and C), and the steps."""
    heads, head, *_ = sizes
    return list(torch.split(zxbcdt, [heads * head, channels, heads], dim=-1))


def _scanned(convolved: Tensor, sizes: tuple[int, ...]) -> list[Tensor]:
    """X [batch, sequence, heads, head dim], B and C [batch, sequence, groups, state]."""
    heads, head, groups, _ = sizes
    state = (convolved.shape[-1] - heads * head) // (2 * groups)
    x, b, c = torch.split(convolved, [heads * head, groups * state, groups * state], dim=-1)
    shape = convolved.shape[:2]
    return [x.view(*shape, heads, head), b.view(*shape, groups, state), c.view(*shape, groups, state)]


class _Combined(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, zxbcdt: Tensor, weight: Tensor, bias: Tensor, dt_bias: Tensor, A: Tensor, D: Tensor,
        sizes: tuple[int, ...],
    ) -> Tensor:  # fmt: skip
        z, xbc, dt = _parts(zxbcdt, weight.shape[0], sizes)
        x, b, c = _scanned(_OPS.causal_conv1d_fwd(xbc, weight, bias), sizes)
        out = _OPS.ssd_scan_gated(x, dt, A, b, c, D, dt_bias, z.view(x.shape), sizes[-1])
        ctx.save_for_backward(zxbcdt, weight, bias, dt_bias, A, D)
        ctx.sizes = sizes
        made: Tensor = out.flatten(2)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        zxbcdt, weight, bias, dt_bias, A, D = ctx.saved_tensors
        sizes = ctx.sizes
        z, xbc, dt = _parts(zxbcdt, weight.shape[0], sizes)
        convolved = _OPS.causal_conv1d_fwd(xbc, weight, bias)
        x, b, c = _scanned(convolved, sizes)
        # Gradients of z, of the steps and of what is convolved are written where they belong.
        of_given, of_convolved = torch.empty_like(zxbcdt), torch.empty_like(convolved)
        of_z, of_xbc, of_dt = _parts(of_given, weight.shape[0], sizes)
        of_parameters = [torch.empty_like(parameter) for parameter in (A, D, dt_bias)]
        _OPS.ssd_scan_gated_backward(
            gradient.view(x.shape), x, dt, A, b, c, D, dt_bias, z.view(x.shape), sizes[-1],
            [of_convolved, of_z, of_dt, *of_parameters],
        )  # fmt: skip
        of_weight, of_bias = torch.empty_like(weight), torch.empty_like(bias)
        _OPS.causal_conv1d_bwd(of_convolved, xbc, weight, bias, [of_xbc, of_weight, of_bias])
        of_A, of_D, of_dt_bias = of_parameters
        return of_given, of_weight, of_bias, of_dt_bias, of_A, of_D, None


def chunk_scan(*_: Any, **__: Any) -> Any:
    """`mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined`."""
    raise CaptureError(
        "--disable-mamba-mem-eff-path: mamba_ssm is not installed, and what stands in has none of it"
    )


def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None = None, **named: Any) -> Tensor:
    """`causal_conv1d.causal_conv1d_fn`.

    Args:
        x: [batch, channels, sequence].
        weight: [channels, kernel].
        bias: [channels].
        named: those of packed sequences and states, which change no kernel, and the activation.
    """
    del named
    _fake(x)
    bias = weight.new_zeros(weight.shape[0]) if bias is None else bias
    made: Tensor = _Convolution.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return made


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Any:
        ctx.save_for_backward(*inputs)
        return _OPS.causal_conv1d_fwd(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        made = [torch.empty_like(tensor) for tensor in ctx.saved_tensors]
        _OPS.causal_conv1d_bwd(gradient, *ctx.saved_tensors, made)
        return tuple(made)


class GatedNorm(nn.Module):
    """`mamba_ssm.ops.triton.layernorm_gated.RMSNorm`: one kernel.

    Args:
        hidden_size: channels.
        eps: added to squares.
        group_size: channels that are normalised together; None: all.
        norm_before_gate: whether the gate comes after the norm.
        device: of the weight.
        dtype: of the weight.
    """

    def __init__(
        self, hidden_size: int, eps: float = 1e-5, group_size: int | None = None, norm_before_gate: bool = True,
        device: Any = None, dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.eps, self.group_size, self.norm_before_gate = eps, group_size or hidden_size, norm_before_gate
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Normalises groups of the last dim, gated by z."""
        if isinstance(x, FakeTensor):
            return _gated_norm(x, z, self.weight)
        gate = 1.0 if z is None else functional.silu(z)
        given = x if self.norm_before_gate else x * gate
        groups = functional.rms_norm(
            given.view(*given.shape[:-1], -1, self.group_size), (self.group_size,), eps=self.eps
        )
        normed = groups.flatten(-2) * self.weight
        return normed * gate if self.norm_before_gate else normed


@known_as("RMSNorm gated")
def _gated_norm(x: Tensor, z: Tensor | None, weight: Tensor) -> Tensor:
    made: Tensor = _Norm.apply(x, z, weight)  # type: ignore[no-untyped-call]
    return made


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor | None, weight: Tensor) -> Any:
        ctx.save_for_backward(x, z, weight)
        return _OPS.gated_rms_norm(x, z, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, z, weight = ctx.saved_tensors
        made = [None if tensor is None else torch.empty_like(tensor) for tensor in (x, z, weight)]
        _OPS.gated_rms_norm_backward(gradient, x, z, weight, [tensor for tensor in made if tensor is not None])
        return tuple(made)

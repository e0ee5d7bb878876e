"""Layers of Transformer Engine 2, made of PyTorch's operators, for where it is not installed.

They have the shapes of its kernels and its collectives, without user buffers: a normalisation is one kernel,
a product and its bias two, attention PyTorch's flash kernel. Weights' gradients are added by the product that
makes them where Megatron asks for that. Of FP8 and of what else is Transformer Engine's alone there is nothing.

megatron-core's own classes (`core.extensions.transformer_engine`) derive from these by the names that they have in
Transformer Engine, and what they are given is what Transformer Engine takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from echograph.errors import CaptureError
from echograph.frontend.megatron.stub_modules import accumulate

VERSION = "2.6.0"
"""Version that the stand-ins are of."""

_FOR = "Transformer Engine is not installed, and what stands in for it"


def refused(what: str, remedy: str) -> CaptureError:
    """What the stand-ins do not do."""
    return CaptureError(f"{what}: {_FOR} has none: {remedy}")


class _Parameters(nn.Module):
    """What layers have in common: they make parameters, marked as Megatron wants them."""

    def __init__(self, params_dtype: torch.dtype, device: Any) -> None:
        super().__init__()
        self._made = {"dtype": params_dtype, "device": device}

    def _new(self, name: str, *shape: int, **marks: Any) -> nn.Parameter:
        parameter = nn.Parameter(torch.empty(*shape, **self._made))
        for mark, value in marks.items():
            setattr(parameter, mark, value)
        self.register_parameter(name, parameter)
        return parameter

    def _norm(self, prefix: str, kind: str, size: int, sequence_parallel: bool) -> None:
        self._kind, self._size = kind, (size,)
        nn.init.ones_(self._new(f"{prefix}weight", size, sequence_parallel=sequence_parallel))
        if kind == "LayerNorm":
            nn.init.zeros_(self._new(f"{prefix}bias", size, sequence_parallel=sequence_parallel))

    def _normalised(self, given: Tensor, eps: float, prefix: str = "") -> Tensor:
        weight, bias = (self._parameters.get(f"{prefix}{name}") for name in ("weight", "bias"))
        if self._kind == "LayerNorm":
            return functional.layer_norm(given, self._size, weight, bias, eps)
        return functional.rms_norm(given, self._size, weight, eps)


class LayerNorm(_Parameters):
    """`transformer_engine.pytorch.LayerNorm`."""

    kind = "LayerNorm"

    def __init__(
        self, *, hidden_size: int, eps: float, sequence_parallel: bool, params_dtype: torch.dtype,
        device: Any = None, **_: Any,
    ) -> None:  # fmt: skip
        super().__init__(params_dtype, device)
        self.eps = eps
        self._norm("", self.kind, hidden_size, sequence_parallel)

    def forward(self, given: Tensor) -> Tensor:
        """Normalises the last dim."""
        return self._normalised(given, self.eps)


class RMSNorm(LayerNorm):
    """`transformer_engine.pytorch.RMSNorm`."""

    kind = "RMSNorm"


class Linear(_Parameters):
    """`transformer_engine.pytorch.Linear`: by columns, by rows, or of one rank alone."""

    def __init__(
        self, *, in_features: int, out_features: int, sequence_parallel: bool, fuse_wgrad_accumulation: bool,
        tp_group: Any, tp_size: int, init_method: Any, bias: bool, return_bias: bool, parallel_mode: str | None,
        params_dtype: torch.dtype, device: Any = None, delay_wgrad_compute: bool = False, **_: Any,
    ) -> None:  # fmt: skip
        super().__init__(params_dtype, device)
        if delay_wgrad_compute:
            raise refused("--delay-wgrad-compute", "leave it out")
        self.in_features, self.out_features = in_features, out_features
        self.parallel_mode, self.tp_size, self.sequence_parallel = parallel_mode, tp_size, sequence_parallel
        self.use_bias, self._returns_bias = bias, return_bias
        self._group, self._fuses = tp_group, fuse_wgrad_accumulation
        by_rows, by_columns = parallel_mode == "row", parallel_mode == "column"
        rows = out_features // (tp_size if by_columns else 1)
        columns = in_features // (tp_size if by_rows else 1)
        self._add_norm()
        marks = {"tensor_model_parallel": True, "partition_stride": 1}
        init_method(self._new("weight", rows, columns, partition_dim=int(by_rows), **marks))
        if bias:
            of_it = {"sequence_parallel": sequence_parallel} if by_rows else marks | {"partition_dim": 0}
            nn.init.zeros_(self._new("bias", rows, **of_it))
        else:
            self.register_parameter("bias", None)

    def _add_norm(self) -> None:
        """Registers what comes before the weight."""

    def forward(self, given: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """A product, and what it exchanges with the other ranks of the group.

        Args:
            given: [sequence, batch, in], of which by columns with sequence parallelism each rank has a part.
            is_first_microbatch: of weights that are cast once a step; not used.
        """
        from megatron.core.tensor_parallel import layers, mappings

        by_columns, several = self.parallel_mode == "column", self.tp_size > 1
        out = layers.linear_with_grad_accumulation_and_async_allreduce(
            input=given,
            weight=self.weight,
            bias=self.bias if by_columns and not self._returns_bias else None,
            gradient_accumulation_fusion=self._fuses,
            allreduce_dgrad=by_columns and several and not self.sequence_parallel,
            sequence_parallel=by_columns and several and self.sequence_parallel,
            tp_group=self._group,
        )
        if self.parallel_mode == "row" and several:
            reduce = (
                mappings.reduce_scatter_to_sequence_parallel_region
                if self.sequence_parallel
                else mappings.reduce_from_tensor_model_parallel_region
            )
            out = reduce(out, group=self._group)
        if self._returns_bias:
            return out, self.bias
        return out if by_columns or self.bias is None else out + self.bias


class LayerNormLinear(Linear):
    """`transformer_engine.pytorch.LayerNormLinear`: a normalisation and a product."""

    def __init__(
        self, *, in_features: int, eps: float, sequence_parallel: bool, normalization: str = "LayerNorm",
        **named: Any,
    ) -> None:  # fmt: skip
        self.eps = eps
        self._before = (normalization, in_features, sequence_parallel)
        super().__init__(in_features=in_features, sequence_parallel=sequence_parallel, **named)

    def _add_norm(self) -> None:
        self._norm("layer_norm_", *self._before)

    def forward(self, given: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """Normalises, then as `Linear`."""
        return super().forward(self._normalised(given, self.eps, "layer_norm_"), is_first_microbatch)


class GroupedLinear(_Parameters):
    """`transformer_engine.pytorch.GroupedLinear`: a product for each expert, into one output."""

    def __init__(
        self, *, num_gemms: int, in_features: int, out_features: int, init_method: Any, bias: bool,
        fuse_wgrad_accumulation: bool, params_dtype: torch.dtype, device: Any = None, **_: Any,
    ) -> None:  # fmt: skip
        super().__init__(params_dtype, device)
        if bias:
            raise refused("biases of experts", "give --disable-bias-linear")
        self.num_gemms, self.use_bias, self._fuses = num_gemms, bias, fuse_wgrad_accumulation
        marks = {"tensor_model_parallel": True, "partition_stride": 1, "partition_dim": 0}
        for number in range(num_gemms):
            init_method(self._new(f"weight{number}", out_features, in_features, **marks))

    def forward(self, given: Tensor, m_splits: Sequence[int], is_first_microbatch: bool | None = None) -> Tensor:
        """Products of consecutive rows of [tokens, in] with the weight of an expert each."""
        weights = [getattr(self, f"weight{number}") for number in range(self.num_gemms)]
        return _Grouped.apply(given, list(m_splits), self._fuses, *weights)  # type: ignore[no-any-return, no-untyped-call]


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor, splits: list[int], fuses: bool, *weights: Tensor) -> Tensor:
        out = given.new_empty(given.shape[0], weights[0].shape[0])
        for rows, result, weight in zip(
            torch.split(given, splits), torch.split(out, splits), weights, strict=True
        ):
            torch.mm(rows, weight.t(), out=result)
        ctx.save_for_backward(given, *weights)
        ctx.splits, ctx.fuses, ctx.weights = splits, fuses, weights
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        given = ctx.saved_tensors[0]
        gradient = gradient.contiguous()
        out = torch.empty_like(given)
        divided = (torch.split(tensor, ctx.splits) for tensor in (given, gradient, out))
        parts = list(zip(*divided, ctx.weights, strict=True))
        for _, above, result, weight in parts:
            torch.mm(above, weight, out=result)
        made: list[Tensor | None] = []
        for rows, above, _, weight in parts:
            if not ctx.fuses:
                made.append(above.t() @ rows)
                continue
            accumulate(rows, above, weight.main_grad)
            weight.grad_added_to_main_grad = True
            made.append(torch.empty_like(weight))
        return out, None, None, *made


class DotProductAttention(nn.Module):
    """`transformer_engine.pytorch.DotProductAttention`: PyTorch's flash attention."""

    def __init__(
        self, *, attention_dropout: float, cp_group: Any = None, softmax_scale: float | None = None,
        window_size: Any = None, softmax_type: str = "vanilla", return_max_logit: bool = False,
        cp_comm_type: str = "", **_: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        if window_size is not None or softmax_type != "vanilla" or return_max_logit:
            raise refused("attention in windows, with other softmaxes or with its largest logit", "leave it out")
        if cp_group is not None and cp_comm_type != "a2a":
            raise refused(f"--cp-comm-type {cp_comm_type}", "give --cp-comm-type a2a")
        self._dropout, self._scale, self._sequence = attention_dropout, softmax_scale, cp_group

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *, attn_mask_type: str,
        core_attention_bias: Tensor | None = None, qkv_format: str = "sbhd", **_: Any,
    ) -> Tensor:  # fmt: skip
        """Attends.

        Args:
            query: [sequence, batch, heads, channels].
            key: the same, with as many heads or fewer.
            value: the same as the key.
            mask: not used, as attention that is causal uses none.
            attn_mask_type: "causal" or "no_mask".
            core_attention_bias: refused.
            qkv_format: "sbhd"; others are of packed sequences.

        Returns:
            [sequence, batch, heads x channels].
        """
        if qkv_format != "sbhd" or core_attention_bias is not None or attn_mask_type not in ("causal", "no_mask"):
            raise refused(f"attention with mask '{attn_mask_type}', a bias or packed sequences", "leave it out")
        if self._sequence is not None:
            query, key, value = (_heads_divided(tensor, self._sequence) for tensor in (query, key, value))
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        out = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=self._dropout if self.training else 0.0,
            is_causal=attn_mask_type == "causal",
            scale=self._scale,
            enable_gqa=query.shape[1] != key.shape[1],
        ).permute(2, 0, 1, 3)
        if self._sequence is not None:
            out = _sequence_divided(out, self._sequence)
        return out.reshape(*out.shape[:2], -1)


def _heads_divided(tensor: Tensor, group: Any) -> Tensor:
    """[sequence / n, batch, heads, channels] of each -> [sequence, batch, heads / n, channels]: all to all."""
    from megatron.core.tensor_parallel import mappings

    ranks = group.size()
    length, batch, heads, channels = tensor.shape
    parts = tensor.reshape(length, batch, ranks, heads // ranks, channels).permute(2, 0, 1, 3, 4)
    got: Tensor = mappings.all_to_all(group, parts.contiguous())
    return got.reshape(ranks * length, batch, heads // ranks, channels)


def _sequence_divided(tensor: Tensor, group: Any) -> Tensor:
    """The other way around."""
    from megatron.core.tensor_parallel import mappings

    ranks = group.size()
    length, batch, heads, channels = tensor.shape
    parts = tensor.reshape(ranks, length // ranks, batch, heads, channels)
    got: Tensor = mappings.all_to_all(group, parts.contiguous())
    return got.permute(1, 2, 0, 3, 4).reshape(length // ranks, batch, ranks * heads, channels)


def apply_rotary_pos_emb(
    tensor: Tensor, freqs: Tensor, *, tensor_format: str, interleaved: bool = False, **_: Any
) -> Tensor:
    """Rotates [sequence, batch, heads, channels] by its positions, in several operators."""
    from megatron.core.models.common.embeddings import rope_utils

    if tensor_format != "sbhd":
        raise refused("rotary embeddings of packed sequences", "give --no-rope-fusion")
    return rope_utils._apply_rotary_pos_emb_bshd(tensor, freqs, rotary_interleaved=interleaved)  # type: ignore[no-any-return]


class DelayedScaling:
    """`transformer_engine.common.recipe.DelayedScaling`: there is no FP8."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise refused("FP8", "leave out --fp8-format")


class Formats:
    """`transformer_engine.common.recipe.Format`."""

    def __getattr__(self, name: str) -> Any:
        raise refused("FP8", "leave out --fp8-format")


class CudaRNGStatesTracker:
    """`transformer_engine.pytorch.distributed.CudaRNGStatesTracker`: a capture draws no random numbers."""

    def __init__(self) -> None:
        raise refused("--te-rng-tracker", "leave it out")


def without_fp8(*_: Any, **__: Any) -> Any:
    """What begins FP8."""
    raise refused("FP8", "leave out --fp8-format")


def not_at_once(*_: Any, **__: Any) -> Any:
    """Kernels that permute tokens: `experts` runs their single operators in place of them."""
    raise refused("--moe-permute-fusion with this dispatcher", "leave it out")


def checkpoint(function: Any, *args: Any, **_: Any) -> Any:
    """Recomputation of layers in FP8."""
    raise refused("recomputation in FP8", "leave out --fp8-format")

"""Layers of Transformer Engine 2, made of PyTorch's operators, for where it is not installed.

They have the shapes of its kernels and its collectives, without user buffers: a normalisation is one kernel,
rotary embeddings are one, a product and its bias two, attention PyTorch's flash kernel. Weights' gradients are
added by the product that makes them where Megatron asks for that, and products are in FP8 (`fp8`) where Megatron
says so. Of what else is Transformer Engine's alone there is nothing.

megatron-core's own classes (`core.extensions.transformer_engine`) derive from these by the names that they have in
Transformer Engine, and what they are given is what Transformer Engine takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from echograph.frontend.megatron import fp8
from echograph.frontend.megatron.apex import accumulate
from echograph.frontend.megatron.attention import DotProductAttention, refused
from echograph.frontend.megatron.kernels import within
from echograph.ir.passes.fuse import FUSED

__all__ = ["DotProductAttention"]

VERSION = "2.6.0"
"""Version that the stand-ins are of."""


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
        with within(FUSED):
            if self._kind == "LayerNorm":
                return functional.layer_norm(given, self._size, weight, bias, eps)
            return functional.rms_norm(given, self._size, weight, eps)


class LayerNorm(_Parameters):
    """`transformer_engine.pytorch.LayerNorm`."""

    kind = "LayerNorm"

    def __init__(
        self, *, hidden_size: int = 0, normalized_shape: int = 0, eps: float, sequence_parallel: bool,
        params_dtype: torch.dtype, device: Any = None, **_: Any,
    ) -> None:  # fmt: skip
        super().__init__(params_dtype, device)
        self.eps = eps
        self._norm("", self.kind, normalized_shape or hidden_size, sequence_parallel)

    def forward(self, given: Tensor) -> Tensor:
        """Normalises the last dim."""
        return self._normalised(given, self.eps)


class RMSNorm(LayerNorm):
    """`transformer_engine.pytorch.RMSNorm`."""

    kind = "RMSNorm"


class Linear(_Parameters):
    """`transformer_engine.pytorch.Linear`: by columns, by rows, or of one rank alone."""

    weight: nn.Parameter
    bias: nn.Parameter | None

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
        self._copies, self.save_original_input = fp8.Copies(), False  # the latter is Megatron's to set
        marks = {"tensor_model_parallel": True, "partition_stride": 1}
        init_method(fp8.mark(self._new("weight", rows, columns, partition_dim=int(by_rows), **marks)))
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
            is_first_microbatch: of weights that are cast once a step.
        """
        from megatron.core.tensor_parallel import layers, mappings

        if fp8.State.recipe is not None:
            return self._narrow(given, fp8.State.recipe, is_first_microbatch)
        by_columns, several = self.parallel_mode == "column", self.tp_size > 1
        with within(FUSED):
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

    def _narrow(self, given: Tensor, recipe: fp8.ScalingRecipe, first: bool | None) -> Any:
        """The product in FP8."""
        layer = fp8.DividedLayer(
            recipe=recipe, group=self._group if self.tp_size > 1 else None, parallel_mode=self.parallel_mode,
            sequence_parallel=self.sequence_parallel, fuses=self._fuses, weight=self.weight,
            keeps_given=self.save_original_input,
        )  # fmt: skip
        (weight,) = self._copies.of([self.weight], recipe, first)
        out = fp8.linear(given.reshape(-1, given.shape[-1]), weight, layer)
        out = out.view(-1, *given.shape[1:-1], out.shape[-1])
        if self._returns_bias:
            return out, self.bias
        return out if self.bias is None else out + self.bias


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
        self._copies, self.save_original_input = fp8.Copies(), False  # the latter is Megatron's to set
        marks = {"tensor_model_parallel": True, "partition_stride": 1, "partition_dim": 0}
        for number in range(num_gemms):
            init_method(fp8.mark(self._new(f"weight{number}", out_features, in_features, **marks)))

    def forward(self, given: Tensor, m_splits: Sequence[int], is_first_microbatch: bool | None = None) -> Tensor:
        """Products of consecutive rows of [tokens, in] with the weight of an expert each."""
        weights = [getattr(self, f"weight{number}") for number in range(self.num_gemms)]
        recipe = fp8.State.recipe
        if recipe is not None:
            copies = self._copies.of(weights, recipe, is_first_microbatch)
            return fp8.grouped(given, list(m_splits), copies, weights, recipe, self._fuses)
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


def apply_rotary_pos_emb(
    tensor: Tensor, freqs: Tensor, *, tensor_format: str, interleaved: bool = False, **_: Any
) -> Tensor:
    """Rotates [sequence, batch, heads, channels] by its positions."""
    from megatron.core.models.common.embeddings import rope_utils

    if tensor_format != "sbhd":
        raise refused("rotary embeddings of packed sequences", "give --no-rope-fusion")
    with within(FUSED):
        return rope_utils._apply_rotary_pos_emb_bshd(tensor, freqs, rotary_interleaved=interleaved)  # type: ignore[no-any-return]


class CudaRNGStatesTracker:
    """`transformer_engine.pytorch.distributed.CudaRNGStatesTracker`: names of generators, which draw nothing."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets all."""
        self.states_: dict[str, Any] = {}
        self.seeds_: set[int] = set()

    def get_states(self) -> dict[str, Any]:
        """By name."""
        return dict(self.states_)

    def set_states(self, states: dict[str, Any]) -> None:
        """As `get_states` gave them."""
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        """A generator of a name."""
        self.states_[name] = seed

    def fork(self, name: str = "model-parallel-rng") -> Any:
        """What draws in the context draws from that one."""
        del name
        return nullcontext()


def not_at_once(*_: Any, **__: Any) -> Any:
    """Kernels that permute tokens: `experts` runs their single operators in place of them."""
    raise refused("--moe-permute-fusion with this dispatcher", "leave it out")


class FusedOperation:
    """Any class of `transformer_engine.pytorch.ops`.

    megatron-core up to 0.14 derives from one, and lists others, when it is imported.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        raise refused("--use-transformer-engine-op-fuser", "leave it out")


def checkpoint(function: Any, *args: Any, distribute_saved_activations: bool = False, **_: Any) -> Any:
    """`transformer_engine.pytorch.distributed.checkpoint`: what is computed again is in FP8, as it was."""
    from megatron.core import tensor_parallel

    recipe = fp8.State.recipe

    def again(*given: Any) -> Any:
        with fp8.autocast(enabled=recipe is not None, fp8_recipe=recipe):
            return function(*given)

    return tensor_parallel.checkpoint(again, distribute_saved_activations, *args)

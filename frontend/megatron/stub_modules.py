"""Packages for GPUs that megatron-core imports, and what stands in for them where they are not installed.

A stand-in is a module in `sys.modules` for as long as a script runs. It has what megatron-core imports from the
real one, and refuses what cannot be done without it.
"""

from __future__ import annotations

import sys
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import typing_extensions
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from echograph.errors import CaptureError
from echograph.frontend.megatron import apex

_MEGATRON = "megatron"
_ENGINE = "transformer_engine"
_MAMBA, _CAUSAL = "mamba_ssm", "causal_conv1d"
_MUON = "emerging_optimizers"
_GRADIENTS = "fused_weight_gradient_mlp_cuda"
_SOFTMAXES = ("scaled_upper_triang_masked_softmax_cuda", "scaled_masked_softmax_cuda", "scaled_softmax_cuda")
_PERMUTATIONS = ("moe_permute", "moe_permute_with_probs", "moe_unpermute", "moe_sort_chunks_by_index",
                 "moe_sort_chunks_by_index_with_probs")  # fmt: skip
_INVARIANT = "megatron.core.transformer.custom_layers.batch_invariant_kernels"
_STASH = "megatron.core.transformer.moe.ops.paged_stash"
_CONVOLUTION = "megatron.core.ssm.ops.common.causal_conv1d_varlen"
_STATES = "megatron.core.ssm.ops.mamba2.batch_invariant_decode"
_IN_TRITON = (_INVARIANT, _STASH, _CONVOLUTION, _STATES)


@contextmanager
def standing_in() -> Iterator[None]:
    """In the context, what is not installed of what megatron-core imports has a stand-in.

    megatron-core looks for some of it once, where it is imported: in the context it is imported anew.
    """
    made = [make() for name, make in _STAND_INS.items() if not _is_installed(name)]
    modules = {module.__name__: module for several in made for module in several}
    before = _taken_out()
    sys.modules.update(modules)
    try:
        with _names_of_python():
            yield
    finally:
        _taken_out()
        for name in modules:
            sys.modules.pop(name, None)
        sys.modules.update(before)


@contextmanager
def _names_of_python() -> Iterator[None]:
    """In the context, there is what Megatron-LM 0.18 takes of Python 3.12 and an older one lacks: one name."""
    if hasattr(typing, "override"):
        yield
        return
    typing.override = typing_extensions.override  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del typing.override  # type: ignore[attr-defined]


def _taken_out() -> dict[str, ModuleType]:
    """Forgets what is imported of Megatron; returns it."""
    found = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == _MEGATRON}
    for name in found:
        del sys.modules[name]
    return found


def _is_installed(name: str) -> bool:
    return find_spec("triton" if name in _IN_TRITON else name) is not None


def _kernels(module: str, what: str, **harmless: Any) -> list[ModuleType]:
    """A module of kernels in Triton, which Megatron imports whether or not it runs them: running one is refused.

    Args:
        module: its name.
        what: runs them.
        harmless: what is asked of it without.
    """

    def refuse(*_: Any, **__: Any) -> None:
        raise CaptureError(f"{what} runs kernels of Triton, which is not installed: leave it out")

    def kernel(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return refuse

    return [_module(module, __getattr__=kernel, **harmless)]


def _batch_invariant() -> list[ModuleType]:
    return _kernels(
        _INVARIANT,
        "--batch-invariant-mode",
        disable_batch_invariant_mode=lambda: None,
        is_batch_invariant_mode_enabled=lambda: False,
    )


def _weight_gradients() -> list[ModuleType]:
    """Apex's kernels that add a weight's gradient to the sum of its gradients."""
    return [_module(_GRADIENTS, wgrad_gemm_accum_fp32=apex.accumulate, wgrad_gemm_accum_fp16=apex.accumulate)]


def _softmaxes() -> list[ModuleType]:
    """Apex's softmax, by the three modules that it is in: causal, with a mask, and plain."""

    def backward(gradient: Tensor, out: Tensor, scale: Tensor) -> Tensor:
        return apex.softmax_backward(gradient, out, _number(scale))

    def causal(scores: Tensor, scale: Tensor) -> Tensor:
        return apex.softmax(scores, None, True, _number(scale))

    def masked(scores: Tensor, mask: Tensor, scale: Tensor) -> Tensor:
        return apex.softmax(scores, mask, False, _number(scale))

    def plain(scores: Tensor, scale: Tensor) -> Tensor:
        return apex.softmax(scores, None, False, _number(scale))

    return [
        _module(name, forward=forward, backward=backward, get_batch_per_block=apex.batch_per_block)
        for name, forward in zip(_SOFTMAXES, (causal, masked, plain), strict=True)
    ]


def _number(scale: Tensor) -> float:
    return 1.0 if isinstance(scale, FakeTensor) else float(scale)


def _engine() -> list[ModuleType]:
    """Transformer Engine's packages, as far as megatron-core imports them at once."""
    from echograph.frontend.megatron import fp8
    from echograph.frontend.megatron import transformer_engine as te

    names = ("Linear", "LayerNormLinear", "GroupedLinear", "LayerNorm", "RMSNorm", "DotProductAttention")
    recipe = _module(
        f"{_ENGINE}.common.recipe", Recipe=fp8.ScalingRecipe, Format=fp8.Format, DelayedScaling=fp8.DelayedScaling,
        Float8CurrentScaling=fp8.Float8CurrentScaling, Float8BlockScaling=fp8.Float8BlockScaling,
        MXFP8BlockScaling=fp8.MXFP8BlockScaling,
    )  # fmt: skip
    common = _module(f"{_ENGINE}.common", recipe=recipe)
    narrow: dict[str, Any] = {"fp8_autocast": fp8.autocast, "fp8_model_init": fp8.model_init}
    state = _module(f"{_ENGINE}.pytorch.fp8", FP8GlobalStateManager=fp8.State, **narrow)
    distributed = _module(
        f"{_ENGINE}.pytorch.distributed",
        CudaRNGStatesTracker=te.CudaRNGStatesTracker,
        activation_recompute_forward=te.not_at_once,
        checkpoint=te.checkpoint,
    )
    raw = _module(
        f"{_ENGINE}.pytorch.tensor.utils", replace_raw_data=fp8.replace_raw_data,
        cast_master_weights_to_fp8=fp8.cast_master_weights,
    )  # fmt: skip
    tensor = _module(f"{_ENGINE}.pytorch.tensor", QuantizedTensor=fp8.QuantizedTensor, utils=raw)
    rope = _module(f"{_ENGINE}.pytorch.attention.rope", apply_rotary_pos_emb=te.apply_rotary_pos_emb)
    attention = _module(f"{_ENGINE}.pytorch.attention", rope=rope)
    permutation = _module(f"{_ENGINE}.pytorch.permutation", **dict.fromkeys(_PERMUTATIONS, te.not_at_once))
    operations = ("Sequential", "FusibleOperation", "GELU", "GEGLU", "ReGLU", "ReLU", "SwiGLU")
    fused = _module(f"{_ENGINE}.pytorch.ops", **dict.fromkeys(operations, te.FusedOperation))
    within = {"fp8": state, "distributed": distributed, "tensor": tensor, "attention": attention, "ops": fused}
    within["permutation"] = permutation
    narrow |= {"Fp8Padding": fp8.Padding, "Fp8Unpadding": fp8.Unpadding}
    pytorch = _module(f"{_ENGINE}.pytorch", **within, **narrow, **{name: getattr(te, name) for name in names})
    whole = _module(_ENGINE, __version__=te.VERSION, common=common, pytorch=pytorch)
    return [whole, pytorch, common, recipe, rope, raw, *within.values()]


def _mamba() -> list[ModuleType]:
    """state-spaces/mamba: the kernels that megatron-core takes from it."""
    from echograph.frontend.megatron import mamba

    norm = _module(f"{_MAMBA}.ops.triton.layernorm_gated", RMSNorm=mamba.GatedNorm)
    combined = _module(
        f"{_MAMBA}.ops.triton.ssd_combined", mamba_chunk_scan_combined=mamba.chunk_scan,
        mamba_split_conv1d_scan_combined=mamba.split_conv1d_scan,
    )  # fmt: skip
    triton = _module(f"{_MAMBA}.ops.triton", layernorm_gated=norm, ssd_combined=combined)
    ops = _module(f"{_MAMBA}.ops", triton=triton)
    return [_module(_MAMBA, __version__="2.2.5", ops=ops), ops, triton, norm, combined]


def _causal_convolution() -> list[ModuleType]:
    from echograph.frontend.megatron import mamba

    contents = {"causal_conv1d_fn": mamba.causal_conv1d, "causal_conv1d_update": mamba.chunk_scan}
    return [_module(_CAUSAL, __version__="1.5.2", **contents)]


def _muon() -> list[ModuleType]:
    """NVIDIA's package of optimizers, of which it has Muon."""
    from echograph.frontend.megatron import muon

    def refuse(*_: Any, **__: Any) -> None:
        raise CaptureError(
            "--optimizer lion or soap: emerging_optimizers is not installed: give adam, sgd or muon"
        )

    name = f"{_MUON}.orthogonalized_optimizers"
    utils = _module(f"{name}.muon_utils", NSCoeffT=muon.Coefficients, newton_schulz_tp=muon.newton_schulz_tp)
    registry = _module(f"{_MUON}.registry", get_optimizer_name_list=muon.no_optimizers, get_optimizer_cls=refuse)
    orthogonalized = _module(
        name, muon_utils=utils, AdaptiveMuon=muon.AdaptiveMuon,
        OrthogonalizedOptimizer=muon.OrthogonalizedOptimizer, get_muon_scale_factor=muon.scale_factor,
    )  # fmt: skip
    scalar, soap = _module(f"{_MUON}.scalar_optimizers", Lion=refuse), _module(f"{_MUON}.soap", SOAP=refuse)
    whole = _module(_MUON, __version__="0.3.0", registry=registry, orthogonalized_optimizers=orthogonalized)
    return [whole, registry, orthogonalized, utils, scalar, soap]


def _module(name: str, **contents: Any) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    module.__dict__.update(contents)
    return module


_STAND_INS: dict[str, Callable[[], list[ModuleType]]] = {
    _INVARIANT: _batch_invariant,
    _STASH: lambda: _kernels(_STASH, "--moe-paged-stash"),
    _CONVOLUTION: lambda: _kernels(_CONVOLUTION, "a Mamba layer for sequences of several lengths"),
    _STATES: lambda: _kernels(_STATES, "a Mamba layer that decodes"),
    _GRADIENTS: _weight_gradients,
    _SOFTMAXES[0]: _softmaxes,
    _ENGINE: _engine,
    _MUON: _muon,
    _MAMBA: _mamba,
    _CAUSAL: _causal_convolution,
}

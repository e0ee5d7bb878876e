"""Packages for GPUs that megatron-core imports, and what stands in for them where they are not installed.

A stand-in is a module in `sys.modules` for as long as a script runs. It has what megatron-core imports from the
real one, and refuses what cannot be done without it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from echograph.errors import CaptureError

_MEGATRON = "megatron"
_ENGINE = "transformer_engine"
_GRADIENTS = "fused_weight_gradient_mlp_cuda"
_PERMUTATIONS = ("moe_permute", "moe_permute_with_probs", "moe_unpermute", "moe_sort_chunks_by_index",
                 "moe_sort_chunks_by_index_with_probs")  # fmt: skip
_INVARIANT = "megatron.core.transformer.custom_layers.batch_invariant_kernels"


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
        yield
    finally:
        _taken_out()
        for name in modules:
            sys.modules.pop(name, None)
        sys.modules.update(before)


def _taken_out() -> dict[str, ModuleType]:
    """Forgets what is imported of Megatron; returns it."""
    found = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == _MEGATRON}
    for name in found:
        del sys.modules[name]
    return found


def _is_installed(name: str) -> bool:
    return find_spec("triton" if name == _INVARIANT else name) is not None


def _batch_invariant() -> list[ModuleType]:
    """Kernels in Triton, which Megatron-LM imports whether or not it runs them."""

    def enable(*_: Any, **__: Any) -> None:
        raise CaptureError("--batch-invariant-mode runs kernels of Triton, which is not installed: leave it out")

    return [
        _module(
            _INVARIANT,
            enable_batch_invariant_mode=enable,
            set_batch_invariant_mode=enable,
            disable_batch_invariant_mode=lambda: None,
            is_batch_invariant_mode_enabled=lambda: False,
        )
    ]


def accumulate(given: Tensor, gradient: Tensor, total: Tensor) -> None:
    """Adds the gradient of a weight to the sum of its gradients, by a product that adds.

    Args:
        given: input of the linear layer [tokens, in].
        gradient: of its output [tokens, out].
        total: [out, in], of a wider type, perhaps.
    """
    if isinstance(total, FakeTensor):
        torch.ops.aten.addmm.dtype_out(total, gradient.t(), given, total.dtype, out=total)
    else:
        total.add_(gradient.t() @ given)  # on CPUs there is no product of two types


def _weight_gradients() -> list[ModuleType]:
    """Apex's kernels that add a weight's gradient to the sum of its gradients."""
    return [_module(_GRADIENTS, wgrad_gemm_accum_fp32=accumulate, wgrad_gemm_accum_fp16=accumulate)]


def _engine() -> list[ModuleType]:
    """Transformer Engine's packages, as far as megatron-core imports them at once."""
    from echograph.frontend.megatron import transformer_engine as te

    class Manager:
        """`FP8GlobalStateManager`: nothing is in FP8."""

        is_fp8_enabled = staticmethod(lambda: False)

    names = ("Linear", "LayerNormLinear", "GroupedLinear", "LayerNorm", "RMSNorm", "DotProductAttention")
    recipe = _module(
        f"{_ENGINE}.common.recipe",
        DelayedScaling=te.DelayedScaling,
        Format=te.Formats(),
    )
    common = _module(f"{_ENGINE}.common", recipe=recipe)
    fp8 = _module(f"{_ENGINE}.pytorch.fp8", FP8GlobalStateManager=Manager, fp8_autocast=te.without_fp8)
    distributed = _module(
        f"{_ENGINE}.pytorch.distributed",
        CudaRNGStatesTracker=te.CudaRNGStatesTracker,
        activation_recompute_forward=te.without_fp8,
        checkpoint=te.checkpoint,
    )
    tensor = _module(f"{_ENGINE}.pytorch.tensor", QuantizedTensor=type("QuantizedTensor", (), {}))
    rope = _module(f"{_ENGINE}.pytorch.attention.rope", apply_rotary_pos_emb=te.apply_rotary_pos_emb)
    attention = _module(f"{_ENGINE}.pytorch.attention", rope=rope)
    permutation = _module(f"{_ENGINE}.pytorch.permutation", **dict.fromkeys(_PERMUTATIONS, te.not_at_once))
    fused = _module(f"{_ENGINE}.pytorch.ops", Sequential=None, FusibleOperation=None)
    within = {"fp8": fp8, "distributed": distributed, "tensor": tensor, "attention": attention, "ops": fused}
    within["permutation"] = permutation
    pytorch = _module(f"{_ENGINE}.pytorch", **within, **{name: getattr(te, name) for name in names})
    whole = _module(_ENGINE, __version__=te.VERSION, common=common, pytorch=pytorch)
    return [whole, pytorch, common, recipe, rope, *within.values()]


def _module(name: str, **contents: Any) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    module.__dict__.update(contents)
    return module


_STAND_INS: dict[str, Callable[[], list[ModuleType]]] = {
    _INVARIANT: _batch_invariant,
    _GRADIENTS: _weight_gradients,
    _ENGINE: _engine,
}

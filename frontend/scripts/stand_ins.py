"""Packages that need a GPU: what scripts import of them, where they are not installed, and what of them is known.

A stand-in is there for as long as a script runs. What its functions make is known (attention, whichever kernel
makes it), so they are made of PyTorch's operators, those of a GPU. A kernel in Triton can be imported and not be
run, unless it does nothing but write what it was given: `WRITES_ONLY`. All else of them ends in one line with its
name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from echograph.errors import CaptureError
from echograph.frontend.scripts.values import NoteTaker

WRITES_ONLY = ("_fill_indices_kernel",)
"""Kernels in Triton, by name, that write a tensor which they were given and read small ones: places of tokens in
the order of their experts (torchtitan). Their few microseconds are left out."""


@contextmanager
def standing_in(note: NoteTaker) -> Iterator[None]:
    """In the context, what is not installed of `_STAND_INS` has a stand-in.

    Args:
        note: is told what was used of them.
    """
    missing = [name for name in _STAND_INS if _is_missing(name)]
    for name in missing:
        sys.modules.update({module.__name__: module for module in _STAND_INS[name](note)})
    parts = _Parts(missing)
    sys.meta_path.append(parts)
    try:
        yield
    finally:
        sys.meta_path.remove(parts)
        for name in [name for name in sys.modules if name.partition(".")[0] in missing]:
            del sys.modules[name]


class _Parts(Loader, MetaPathFinder):
    """Finds modules of stand-ins that are not there themselves: whatever is imported of them is a name."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        """One for each module of a stand-in."""
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self._names else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """A module of names."""
        return _module(spec.name, __getattr__=partial(_name_in, spec.name))

    def exec_module(self, module: ModuleType) -> None:
        """It is complete."""


def _is_missing(name: str) -> bool:
    return name not in sys.modules and find_spec(name) is None


def _module(name: str, **contents: Any) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    module.__dict__.update(contents)
    return module


# -- Triton --------------------------------------------------------------------------------------------------


class _Kernel:
    """What `triton.jit` makes of a function."""

    def __init__(self, function: Any, note: NoteTaker) -> None:
        self.fn, self._note = function, note
        self.__name__ = str(getattr(function, "__name__", function))

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self

    def __call__(self, *_: Any, **__: Any) -> None:
        if self.__name__ not in WRITES_ONLY:
            raise CaptureError(
                f"the kernel {self.__name__} is written in Triton, and a capture cannot look into it: choose "
                "PyTorch's own operators, or make it a custom operator with a fake implementation "
                "(torch.library.register_fake)"
            )
        self._note(f"the kernel {self.__name__} (Triton) is left out: it writes indices, for some microseconds")

    run = __call__


class _Config:
    """`triton.Config`: scripts read back what they gave, to choose among several."""

    def __init__(
        self, kwargs: dict[str, Any], num_warps: int = 4, num_stages: int = 3, num_ctas: int = 1, **others: Any
    ) -> None:
        self.kwargs, self.num_warps, self.num_stages, self.num_ctas = kwargs, num_warps, num_stages, num_ctas
        vars(self).update(others)


class _Name(type):
    """Whatever else of a package a module names where it is imported: classes, constants, decorators."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(name, (), {})

    def __call__(cls, *given: Any, **__: Any) -> Any:
        """As a decorator it leaves what it is given."""
        return given[0] if len(given) == 1 and callable(given[0]) else cls

    def __getitem__(cls, _: Any) -> Any:
        return cls


def _name_in(module: str, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Name(name, (), {"__module__": module})


def _triton(note: NoteTaker) -> list[ModuleType]:
    def jit(function: Any = None, **_: Any) -> Any:
        return jit if function is None else _Kernel(function, note)

    def configured(*_: Any, **__: Any) -> Callable[[Any], Any]:
        return lambda kernel: kernel

    named = partial(_name_in, "triton")
    language = _module("triton.language", __getattr__=named, constexpr=_Name("constexpr", (), {}))
    whole = _module(
        "triton", jit=jit, autotune=configured, heuristics=configured, language=language, __version__="3.5.0",
        Config=_Config,
        cdiv=lambda a, b: -(-a // b), next_power_of_2=lambda n: 1 << (n - 1).bit_length(), __getattr__=named,
    )  # fmt: skip
    return [whole, language]


# -- attention -----------------------------------------------------------------------------------------------


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **_: Any,
) -> Tensor:
    """`flash_attn_func` of FlashAttention 2 and 3: PyTorch's fused kernel, which is the same.

    Args:
        q: (batch, sequence, heads, head), as k and v, which may have fewer heads.
        k: keys.
        v: values.
        dropout_p: of the scores.
        softmax_scale: of the scores; None: 1 / sqrt(head).
        causal: whether positions see those before them alone.
        window_size: how many positions to the left and right are seen; -1 is all.
        softcap: bound of the scores; 0 is none.
        alibi_slopes: biases of the scores.
        deterministic: whether gradients are added up in one order.
        return_attn_probs: whether the scores are asked for.
    """
    if window_size[0] >= k.shape[1]:
        window_size = (-1, -1)
    if tuple(window_size) not in ((-1, -1), (-1, 0)) or softcap or alibi_slopes is not None or return_attn_probs:
        raise CaptureError(
            "flash_attn with a window, a cap, ALiBi's slopes or its scores returned is no kernel of PyTorch's: "
            "leave these out"
        )
    query, key, value = (part.transpose(1, 2) for part in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        dropout_p=dropout_p,
        is_causal=causal,
        scale=softmax_scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)


def _packed(qkv: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    q, k, v = qkv.unbind(dim=-3)
    return flash_attention(q, k, v, *args, **kwargs)


def _packed_keys(q: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    k, v = kv.unbind(dim=-3)
    return flash_attention(q, k, v, *args, **kwargs)


def _not_packed(*_: Any, **__: Any) -> None:
    raise CaptureError(
        "flash_attn_varlen takes sequences whose lengths only values tell: give it sequences of one length "
        "(flash_attn_func), or PyTorch's scaled_dot_product_attention"
    )


class _Rotated(torch.autograd.Function):
    """FlashAttention's rotary embedding: one kernel that reads and writes its input, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, inplace: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return grads[0] * 1.0, None, None, None


def _rotary(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, inplace: bool = False, **_: Any
) -> Tensor:
    out: Tensor = _Rotated.apply(x, cos, sin, inplace)  # type: ignore[no-untyped-call]
    return out


class _RmsNorm(torch.nn.RMSNorm):
    """`flash_attn.ops.rms_norm.RMSNorm`, and Triton's of the same name."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-5, device: Any = None, dtype: Any = None, **_: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps, device=device, dtype=dtype)

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        """One kernel."""
        return torch.nn.functional.rms_norm(x, self.normalized_shape, self.weight, self.eps)


def _layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None, eps: float = 1e-6,
    is_rms_norm: bool = False, **given: Any,
) -> Tensor:  # fmt: skip
    if residual is not None or given.get("prenorm") or given.get("dropout_p"):
        raise CaptureError(
            "flash_attn's layer_norm_fn with a residual or dropout is one kernel that PyTorch has not"
        )
    shape, functional = (x.shape[-1],), torch.nn.functional
    if is_rms_norm:
        return functional.rms_norm(x, shape, weight, eps)
    return functional.layer_norm(x, shape, weight, bias, eps)


def _flash_attn(note: NoteTaker) -> list[ModuleType]:
    def attention(*args: Any, **kwargs: Any) -> Tensor:
        note("flash_attn is not installed: its attention is PyTorch's flash attention, the same kernel")
        return flash_attention(*args, **kwargs)

    functions = {
        "flash_attn_func": attention, "flash_attn_qkvpacked_func": _packed,
        "flash_attn_kvpacked_func": _packed_keys,
        "flash_attn_varlen_func": _not_packed, "flash_attn_varlen_qkvpacked_func": _not_packed,
        "flash_attn_varlen_kvpacked_func": _not_packed, "flash_attn_with_kvcache": _not_packed,
    }  # fmt: skip
    name = "flash_attn"
    interface = _module(f"{name}.flash_attn_interface", **functions)
    rotary = _module(f"{name}.layers.rotary", apply_rotary_emb=_rotary, apply_rotary_emb_func=_rotary)
    layers = _module(f"{name}.layers", rotary=rotary)
    norm = _module(f"{name}.ops.triton.layer_norm", layer_norm_fn=_layer_norm, RMSNorm=_RmsNorm)
    triton = _module(f"{name}.ops.triton", layer_norm=norm)
    rms = _module(f"{name}.ops.rms_norm", RMSNorm=_RmsNorm)
    ops = _module(f"{name}.ops", triton=triton, rms_norm=rms)
    whole = _module(name, __version__="2.8.3", flash_attn_interface=interface, layers=layers, ops=ops, **functions)
    third = _module("flash_attn_interface", flash_attn_func=attention, flash_attn_varlen_func=_not_packed)
    return [whole, interface, layers, rotary, ops, triton, norm, rms, third]


_STAND_INS: dict[str, Callable[[NoteTaker], list[ModuleType]]] = {"triton": _triton, "flash_attn": _flash_attn}

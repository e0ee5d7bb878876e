"""Autocast as CUDA's operators have it, of the CPU's tensors that stand for a GPU's.

PyTorch's dispatcher casts by where a tensor is, and what it casts differs: on a GPU norms, softmax, powers and
sums are computed in fp32 under autocast, on a CPU in 16 bits. So in a capture the CPU's operators follow CUDA's
lists (PyTorch's documentation, "CUDA Op-Specific Behavior"; ATen/autocast_mode.h), and what is asked and set of
CUDA's autocast holds for the tensors that stand in.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, fallthrough_kernel
from torch.utils._pytree import tree_leaves, tree_map_only

from echograph.frontend.scripts.adapter import replaced

_CPU, _CUDA = "AutocastCPU", "AutocastCUDA"
_IN_16_BITS = frozenset((
    "_convolution.deprecated", "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d",
    "conv_transpose2d.input", "conv_transpose3d.input", "convolution", "cudnn_convolution",
    "cudnn_convolution_transpose", "prelu", "addmm", "addmv", "addr", "matmul", "einsum", "mm", "mv",
    "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot",
    "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell",
    "rnn_relu_cell", "_scaled_dot_product_flash_attention", "scaled_dot_product_attention",
))  # fmt: skip
# Their results are of fp32; the type of the operands is the kernel's to cast.
_SUMMED_IN_FP32 = frozenset((
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm",
    "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList", "norm.Scalar",
    "norm.ScalarOpt_dim",
))  # fmt: skip
_IN_THE_WIDEST = frozenset((
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put",
    "tensordot", "scatter_add",
))  # fmt: skip
_REFUSED = frozenset(["binary_cross_entropy"])
# All others that CUDA's autocast knows have operands of fp32.
_TYPED = {"Scalar": "ScalarOpt_dtype", "ScalarOpt_dim": "ScalarOpt_dim_dtype"}


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """In the context, autocast of "cuda" holds for tensors of the CPU, by CUDA's lists of operators."""
    rules = list[Any]()

    def enable(*words: Any, **named: Any) -> None:
        """`torch.set_autocast_enabled`, whose device may be left out."""
        set_enabled(*words, **named)
        enabled = named.get("enabled", words[-1] if words else False)
        if _is_cuda(named.get("device_type", words[0] if len(words) > 1 else "cuda")):
            if enabled and not rules:
                rules.append(_rules())
            set_enabled("cpu", enabled)

    def narrow(device_type: str, dtype: torch.dtype) -> None:
        """`torch.set_autocast_dtype`."""
        set_dtype(device_type, dtype)
        if _is_cuda(device_type):
            set_dtype("cpu", dtype)

    set_enabled, set_dtype = torch.set_autocast_enabled, torch.set_autocast_dtype
    before = [
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")
    ]
    try:
        with (
            replaced(torch, "set_autocast_enabled", enable),
            replaced(torch, "set_autocast_dtype", narrow),
            replaced(torch, "set_autocast_gpu_dtype", partial(narrow, "cuda")),
        ):
            yield
    finally:
        for device, enabled, dtype in before:
            set_enabled(device, enabled)
            set_dtype(device, dtype)
        for library in rules:
            library._destroy()


def _is_cuda(device_type: str) -> bool:
    return str(device_type).partition(":")[0] == "cuda"


def _rules() -> Any:
    """CUDA's, put in place of the CPU's in the dispatcher until the library is destroyed."""
    library: Any = Library("aten", "IMPL", _CPU)  # type: ignore[no-untyped-call]
    of_cuda, of_cpu = _registered(_CUDA), _registered(_CPU)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an operator has another kernel for a time
        for name in of_cpu - of_cuda:
            library.impl(name, fallthrough_kernel)
        for name in of_cuda - (_IN_16_BITS & of_cpu):
            library.impl(name, _kernel(name))
    return library


def _registered(key: str) -> frozenset[str]:
    """Names of ATen's operators that have a kernel of their own for a dispatch key."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return frozenset(name.removeprefix("aten::") for name in names if name.startswith("aten::"))


def _kernel(name: str) -> Callable[..., Any]:
    """What is run of an operator under autocast, in place of the operator."""
    if name in _REFUSED:
        return _refused
    packet, _, overload = name.partition(".")
    run = getattr(getattr(torch.ops.aten, packet), overload or "default")
    if name in _SUMMED_IN_FP32:
        return _outside(_of_fp32(getattr(torch.ops.aten, packet), run))
    type_of = _narrow if name in _IN_16_BITS else _widest if name in _IN_THE_WIDEST else _fp32

    def cast_and_run(*args: Any, **kwargs: Any) -> Any:
        to = type_of(args)
        args, kwargs = tree_map_only(Tensor, lambda one: one.to(to) if _eligible(one) else one, (args, kwargs))
        return run(*args, **kwargs)

    return _outside(cast_and_run)


def _outside(run: Callable[..., Any]) -> Callable[..., Any]:
    """The same, in which nothing is cast any more."""
    autocast = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(autocast):
            return run(*args, **kwargs)

    return kernel


def _of_fp32(overloads: Any, run: Any) -> Callable[..., Any]:
    """An operator whose result is of fp32 where none is asked for."""
    arguments = run._schema.arguments
    # Norms have another overload that is told the type, whose arguments have no defaults.
    typed = run if any(one.name == "dtype" for one in arguments) else getattr(overloads, _TYPED[run._overloadname])
    defaults = {one.name: one.default_value for one in arguments if one.has_default_value()}

    def with_type(*args: Any, **kwargs: Any) -> Any:
        if not _eligible(args[0]):
            return run(*args, **kwargs)
        given = defaults | {one.name: value for one, value in zip(arguments, args, strict=False)} | kwargs
        return typed(**given | {"dtype": given.get("dtype") or torch.float32})

    return with_type


def _refused(*_: Any, **__: Any) -> Any:
    raise RuntimeError(
        "binary_cross_entropy and BCELoss are refused under autocast on a GPU: "
        "take binary_cross_entropy_with_logits or BCEWithLogitsLoss"
    )


def _eligible(given: Any) -> bool:
    """Of floating point, and not of 64 bits."""
    return isinstance(given, Tensor) and given.is_floating_point() and given.dtype != torch.float64


def _narrow(_: Any) -> torch.dtype:
    return torch.get_autocast_dtype("cuda")


def _fp32(_: Any) -> torch.dtype:
    return torch.float32


def _widest(args: Any) -> torch.dtype:
    types = {one.dtype for one in tree_leaves(args) if _eligible(one)}
    return torch.float32 if torch.float32 in types else torch.get_autocast_dtype("cuda")

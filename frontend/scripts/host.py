"""Values of small tensors on the host: random indices of a data set, schedules, masks, what a file holds.

A script computes with such before it gives a batch to the GPU: `data[i : i + length] for i in torch.randint(...)`
would give empty batches, if each number that is read were 1. So what PyTorch makes on the host of settings alone
is computed as well, and so is what is made of that, as long as it is small; the values are kept beside the fake
tensor. What a communication writes, or what unknown values come into, loses them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import _disable_current_modes

from echograph.frontend.scripts.adapter import patched

MOST_INTEGERS = 1 << 20
MOST_NUMBERS = 1 << 12
_VALUES = "_echograph_values"
_UNKNOWN = object()
_WRITING = ("__set__", "__setitem__")
_ASKING = ("__index__", "__int__", "__invert__", "__iter__")
# Makes tensors of settings alone; torch.empty has no values to know.
_MADE = (
    torch.tensor, torch.as_tensor, torch.arange, torch.linspace, torch.zeros, torch.ones,
    torch.full, torch.eye, torch.rand, torch.randint, torch.randperm, torch.tril_indices, torch.triu_indices,
)  # fmt: skip
_READS = (
    Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__index__,
    Tensor.__format__, Tensor.__repr__, Tensor.__contains__, Tensor.__array__, Tensor.equal, torch.equal,
    torch.allclose, torch.is_nonzero,
)  # fmt: skip


def real(given: Any) -> Any:
    """A tensor's values where they are known; else what is given."""
    known = _with_values(given) if isinstance(given, FakeTensor) else _UNKNOWN
    return given if known is _UNKNOWN else known


def read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any] | None:
    """What a question about values answers, in a tuple; None where the values are not known."""
    if func not in _READS:
        return None
    given = _with_values((args, kwargs))
    if given is _UNKNOWN:
        return None
    with _disable_current_modes():
        return (func(*given[0], **given[1]),)


def follow(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    """Gives what a function of PyTorch made the values that it has, if those of its arguments are known."""
    first = args[0] if args else None
    if func not in _MADE and not _may_be_known(first):
        return
    in_place = _is_in_place(func, kwargs)
    made = [out] if isinstance(out, Tensor) else list(out) if isinstance(out, tuple | list) else []
    if not any(isinstance(tensor, FakeTensor) for tensor in (made if made or not in_place else (first,))):
        return  # a real tensor was written already
    given: Any = _with_values((args, kwargs)) if all(_is_small(tensor) for tensor in made) else _UNKNOWN
    if given is _UNKNOWN:
        if in_place:
            forget(kwargs.get("out", first))
        return
    try:
        with _disable_current_modes():
            values = func(*given[0], **given[1])
    except (RuntimeError, TypeError, ValueError, IndexError):
        return
    for tensor, value in zip(made, [values] if isinstance(values, Tensor) else values or (), strict=False):
        if isinstance(tensor, FakeTensor) and isinstance(value, Tensor) and tensor.shape == value.shape:
            setattr(tensor, _VALUES, value)


def forget(tensor: Any) -> None:
    """What lies in the memory of a tensor, or of several, is no longer known, for views neither."""
    for one in tensor if isinstance(tensor, list | tuple) else (tensor,):
        values = getattr(one, _VALUES, None)
        if values is not None:
            delattr(one, _VALUES)
            with suppress(RuntimeError):  # memory of NumPy's stays as it is
                values.untyped_storage().resize_(0)


def installed() -> Iterator[AbstractContextManager[None]]:
    """In the contexts, arrays of NumPy give their values, and what a communication is given is forgotten."""
    yield patched(torch, "from_numpy", _from_array)
    for name in ("_check_single_tensor", "_check_tensor_list"):
        yield patched(distributed_c10d, name, _checked)


def _from_array(original: Callable[..., Any]) -> Callable[..., Any]:
    def make(array: Any) -> Tensor:
        made: Tensor = original(array)
        if isinstance(made, FakeTensor) and _is_small(made):
            with _disable_current_modes():
                setattr(made, _VALUES, original(array))
        return made

    return make


def _checked(original: Callable[..., Any]) -> Callable[..., Any]:
    def check(given: Any, *args: Any, **kwargs: Any) -> Any:
        forget(given)
        return original(given, *args, **kwargs)

    return check


def _is_in_place(func: Any, kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    dunder = name.endswith("__")
    return "out" in kwargs or (
        name in _WRITING or (name.startswith("__i") and name not in _ASKING) if dunder else name.endswith("_")
    )


def _may_be_known(value: Any) -> bool:
    """Of a first argument, cheaply: most are tensors of the GPU."""
    if isinstance(value, tuple | list):
        return bool(value) and _may_be_known(value[0])
    return hasattr(value, _VALUES) or (type(value) is Tensor and not value.requires_grad)


def _is_small(tensor: Any) -> bool:
    if not isinstance(tensor, Tensor):
        return True
    return tensor.numel() <= (MOST_NUMBERS if tensor.is_floating_point() else MOST_INTEGERS)


def _with_values(given: Any) -> Any:
    """Arguments with the values of their tensors in place of these; `_UNKNOWN` where one has none."""
    if isinstance(given, Tensor):
        if isinstance(given, FakeTensor):
            values = getattr(given, _VALUES, None)
            known = values is not None and (values.numel() == 0 or values.untyped_storage().nbytes() > 0)
            return values if known else _UNKNOWN
        return given if type(given) is Tensor and not given.requires_grad and _is_small(given) else _UNKNOWN
    if isinstance(given, dict):
        made = {key: _with_values(value) for key, value in given.items()}
        return _UNKNOWN if any(value is _UNKNOWN for value in made.values()) else made
    if type(given) in (tuple, list):
        parts = [_with_values(value) for value in given]
        return _UNKNOWN if any(part is _UNKNOWN for part in parts) else type(given)(parts)
    return given

"""Works out once what an operator makes of arguments of given layouts.

PyTorch's fake tensors ask an operator's shape rule, or a cache of their own behind a long key, each time that it
runs. A training step runs the same operators on the same layouts thousands of times over, and most of a capture
would be spent there. What is remembered here is what that cache remembers (after `FakeTensorMode.
_validate_cache_key` and `_make_cache_entry` of PyTorch 2.13), under less conditions: operators of ATen whose results
follow from the layouts of their arguments, each result new memory, a view of the first argument, or an argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_ATEN = torch.ops.aten
_UNSAID_VIEW = _ATEN._unsafe_view.default
# They keep the values of what they are given, or take part in what the fake mode does besides shapes.
_LEFT_OUT = (_ATEN.lift_fresh.default, _ATEN.lift_fresh_copy.default, _ATEN.detach.default, _ATEN.alias.default)
_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
_PLAIN = frozenset(
    {type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format}
)


class _Made(NamedTuple):
    """How one result is made.

    Attributes:
        argument: which of the positional arguments it is; -1 for a new tensor.
        views: whether it lies in the memory of the first argument.
        shape: extents.
        stride: in elements.
        offset: first element in its memory.
        dtype: of its elements.
        device: that it says it is on.
    """

    argument: int = -1
    views: bool = False
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")


_REFUSED = object()
_UNKNOWN = object()


class Shapes:
    """Calls operators for fake tensors of one mode; a call like an earlier one does not ask the mode.

    Args:
        mode: of the fake tensors; no other dispatch mode may stand between it and the caller.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._results: dict[tuple[Any, ...], Any] = {}
        self._blank: dict[torch.device, dict[str, Any]] = {}

    def call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What `func(*args, **kwargs)` is in the mode."""
        key = self._key(func, args, kwargs) if _follows_layouts(func) else None
        if key is None:
            return func(*args, **kwargs)
        result = self._results.get(key, _UNKNOWN)
        if result is _REFUSED:
            return func(*args, **kwargs)
        if result is _UNKNOWN:
            out = func(*args, **kwargs)
            self._results[key] = self._learn(func, args, kwargs, out)
            return out
        if result is None or type(result) is _Made:
            return self._make(result, args)
        kind, parts = result
        return kind([self._make(part, args) for part in parts])

    # -- what a call is known by -----------------------------------------------------------------------------

    def _key(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
        if torch.is_inference_mode_enabled():
            return None
        key = [func, torch.get_default_dtype(), torch._C._get_default_device()]
        if not self._describe(key, args):
            return None
        for name, value in kwargs.items():
            key.append(name)
            if not self._describe(key, (value,)):
                return None
        if _renames(func):
            if not isinstance(args[0], FakeTensor):
                return None
            key.append(args[0].untyped_storage().nbytes())
        return tuple(key)

    def _describe(self, key: list[Any], values: Iterable[Any]) -> bool:
        """Appends what a result may depend on; False where that is more than layouts and plain values."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if value.fake_mode is not self._mode or value.constant is not None:
                    return False
                if value.layout is not torch.strided or value.dtype.is_complex:
                    return False
                key += (
                    value.dtype, value.shape, value.stride(), value.storage_offset(), value.requires_grad,
                    value._fake_device,
                )  # fmt: skip
            elif kind in _PLAIN:
                key += (kind, value)
            elif kind is list or kind is tuple:
                key += (kind, len(value))
                if not self._describe(key, value):
                    return False
            else:
                return False
        return True

    # -- what is remembered ----------------------------------------------------------------------------------

    def _learn(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> Any:
        if out is None:
            return None
        given = [t for value in (*args, *kwargs.values()) for t in _tensors(value)]
        memory = {t.untyped_storage()._cdata for t in given}
        if type(out) in (list, tuple):
            parts = [None if part is None else self._learn_one(func, args, part, memory) for part in out]
            return _REFUSED if _REFUSED in parts else (type(out), tuple(parts))
        return self._learn_one(func, args, out, memory)

    def _learn_one(self, func: Any, args: tuple[Any, ...], out: Any, memory: set[int]) -> Any:
        """How a result is made; refused where it would not be the same if made so."""
        for i, value in enumerate(args):
            if out is value:
                return _Made(argument=i)
        if type(out) is not FakeTensor or out.constant is not None or out.requires_grad:
            return _REFUSED
        if out.layout is not torch.strided or out.dtype.is_complex:
            return _REFUSED
        views = _renames(func)
        storage = out.untyped_storage()
        if (storage._cdata in memory) != views:
            return _REFUSED
        made = _Made(
            views=views, shape=tuple(out.shape), stride=out.stride(), offset=out.storage_offset(), dtype=out.dtype,
            device=out.fake_device,
        )  # fmt: skip
        # Two results may share memory of their own, which no two made apart would.
        memory.add(storage._cdata)
        again = self._make(made, args)
        same = (
            (again.shape, again.stride(), again.storage_offset()) == (out.shape, out.stride(), out.storage_offset())
            and again.untyped_storage().nbytes() == storage.nbytes()
            and torch._C._dispatch_keys(again).raw_repr() == torch._C._dispatch_keys(out).raw_repr()
        )
        return made if same else _REFUSED

    def _make(self, made: _Made | None, args: tuple[Any, ...]) -> Any:
        if made is None:
            return None
        if made.argument >= 0:
            return args[made.argument]
        with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
            data = torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device="meta")
            if made.views:
                data.set_(args[0].untyped_storage(), made.offset, made.shape, made.stride)  # type: ignore[call-overload]
        blank = self._blank.get(made.device)
        if blank is None:
            blank = self._blank[made.device] = dict(vars(FakeTensor(self._mode, data, made.device)))
        # As the constructor of fake tensors does, which takes five times as long to find out what to write.
        tensor = Tensor._make_subclass(
            FakeTensor, data, False, dispatch_device=True, device_for_backend_keys=made.device
        )  # type: ignore[call-arg]
        torch._C._set_throw_on_mutable_data_ptr(tensor)
        vars(tensor).update(blank)
        return tensor


@cache
def _follows_layouts(func: Any) -> bool:
    """Whether what an operator returns follows from layouts and plain values alone, and it changes no layout."""
    if not isinstance(func, OpOverload) or func.namespace != "aten" or func in _LEFT_OUT:
        return False
    if any(tag in func.tags for tag in _TAGS):
        return False
    # What is given as `out=` takes the shape of the result.
    by_name = [a.alias_info for a in func._schema.arguments if a.kwarg_only]
    return not any(alias is not None and alias.is_write for alias in by_name)


@cache
def _renames(func: Any) -> bool:
    return bool(func.is_view) or func is _UNSAID_VIEW


def _tensors(value: Any) -> Iterable[FakeTensor]:
    if isinstance(value, FakeTensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)

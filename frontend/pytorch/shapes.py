"""Works out once what an operator makes of arguments of given layouts.

PyTorch's fake tensors ask an operator's shape rule, or a cache of their own behind a long key, each time that it
runs. A training step runs the same operators on the same layouts thousands of times over, and most of a capture
would be spent there. Remembered are operators of ATen whose results follow from layouts and plain values, each
result new memory, a view of the first argument, or an argument; all others go to the fake mode.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

_stack_length = torch._C._len_torch_dispatch_stack
_active = torch._C._get_dispatch_mode
_FAKE = torch._C._TorchDispatchModeKey.FAKE
_ATEN = torch.ops.aten
_UNSAID_VIEW = _ATEN._unsafe_view.default
# Where these begin in memory, and whether they end in it, is not said from where their argument begins.
_ANYWHERE = (_ATEN.as_strided.default, _ATEN.view.dtype)
# What they make may keep the values that they are given.
_LIFTS = (_ATEN.lift_fresh.default, _ATEN.lift_fresh_copy.default)
_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
_PLAIN = frozenset(
    {type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format}
)


class _Rule(NamedTuple):
    """An operator.

    Attributes:
        func: the overload.
        remembered: whether what it returns follows from layouts and plain values, and it changes no layout.
        renames: whether its results lie in the memory of its first argument.
        anywhere: whether they begin anywhere in it, and not so far behind that argument wherever that begins.
        fills: whether it writes what it is given by name, which then takes the layout of the result.
        communicates: whether it is one of torch.distributed's.
    """

    func: Any
    remembered: bool = False
    renames: bool = False
    anywhere: bool = False
    fills: bool = False
    communicates: bool = False


class _Made(NamedTuple):
    """How one result is made.

    Attributes:
        argument: which of the positional arguments it is, or the name of another one; -1 for a new tensor.
        views: whether it lies in the memory of the first argument.
        shape: extents.
        stride: in elements.
        offset: first element in its memory, of a view counted from the first argument's.
        dtype: of its elements.
        device: that it says it is on.
    """

    argument: int | str = -1
    views: bool = False
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")


Results = dict[tuple[Any, ...], Any]
"""What calls make, by what that depends on."""
_REFUSED = object()
_UNKNOWN = object()


class Shapes:
    """Calls operators for fake tensors of one mode; a call like an earlier one does not ask the mode.

    Args:
        mode: of the fake tensors.
        results: of earlier calls, of any mode; those to come are added.
    """

    def __init__(self, mode: FakeTensorMode, results: Results | None = None) -> None:
        self._mode = mode
        self._results = {} if results is None else results
        self._rules: dict[int, _Rule] = {}
        self._blank: dict[torch.device, dict[str, Any]] = {}

    def call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What `func(*args, **kwargs)` is."""
        if _stack_length() != 1 or _active(_FAKE) is not self._mode:
            # Somebody else looks on, or the mode is put aside for real values.
            return func(*args, **kwargs)
        # By its number, since operators take long to say their hash.
        rule = self._rules.get(id(func))
        if rule is None:
            rule = self._rules[id(func)] = _rule(func)
        key = self._key(rule, args, kwargs) if rule.remembered else None
        if key is None:
            return self._ask(rule, args, kwargs)
        result = self._results.get(key, _UNKNOWN)
        if result is _UNKNOWN:
            with self._without_cache():
                out = func(*args, **kwargs)
            changed = rule.fills and self._key(rule, args, kwargs) != key
            self._results[key] = _REFUSED if changed else self._learn(rule, args, kwargs, out)
            return out
        if result is _REFUSED:
            return func(*args, **kwargs)
        if result is None or type(result) is _Made:
            return self._make(result, args, kwargs)
        kind, parts = result
        return kind([self._make(part, args, kwargs) for part in parts])

    @contextmanager
    def _without_cache(self) -> Iterator[None]:
        """In the context the mode remembers nothing: it is asked once, and its keys take as long as its rules."""
        before, self._mode.cache_enabled = self._mode.cache_enabled, False
        try:
            yield
        finally:
            self._mode.cache_enabled = before

    def _ask(self, rule: _Rule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        tensors = list(_tensors(args)) if rule.communicates else []
        if not tensors or not all(map(self._owns, tensors)):
            return rule.func(*args, **kwargs)
        # It gives back what it is given, with something to wait for: there are no shapes to ask for.
        with in_kernel_invocation_manager(self._mode):
            return rule.func(*args, **kwargs)

    def _owns(self, tensor: Tensor) -> bool:
        return isinstance(tensor, FakeTensor) and tensor.fake_mode is self._mode and tensor.constant is None

    # -- what a call is known by -----------------------------------------------------------------------------

    def _key(self, rule: _Rule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
        if torch.is_inference_mode_enabled():
            return None
        key = [id(rule.func), torch.get_default_dtype(), torch._C._get_default_device()]
        if not self._describe(key, args):
            return None
        for name, value in kwargs.items():
            key.append(name)
            if not self._describe(key, (value,)):
                return None
        if rule.renames and not isinstance(args[0], FakeTensor):
            return None
        if rule.anywhere:
            key += (args[0].storage_offset(), args[0].untyped_storage().nbytes())
        return tuple(key)

    def _describe(self, key: list[Any], values: Iterable[Any]) -> bool:
        """Appends what a result may depend on; False where that is more than layouts and plain values."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if not self._owns(value) or value.layout is not torch.strided or value.dtype.is_complex:
                    return False
                key += (
                    value.dtype, value.shape, value.stride(), value.requires_grad, value._fake_device,
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

    def _learn(self, rule: _Rule, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> Any:
        if out is None:
            return None
        given = [t for value in (*args, *kwargs.values()) for t in _tensors(value)]
        memory = {t.untyped_storage()._cdata for t in given}
        if type(out) in (list, tuple):
            parts = [None if part is None else self._learn_one(rule, args, kwargs, part, memory) for part in out]
            return _REFUSED if _REFUSED in parts else (type(out), tuple(parts))
        return self._learn_one(rule, args, kwargs, out, memory)

    def _learn_one(
        self, rule: _Rule, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any, memory: set[int]
    ) -> Any:
        """How a result is made; refused where it would not be the same if made so."""
        given: tuple[tuple[int | str, Any], ...] = (*enumerate(args), *kwargs.items())
        for at, value in given:
            if out is value:
                return _Made(argument=at)
        if type(out) is not FakeTensor or out.constant is not None or out.requires_grad:
            return _REFUSED
        if out.layout is not torch.strided or out.dtype.is_complex:
            return _REFUSED
        storage = out.untyped_storage()
        if (storage._cdata in memory) != rule.renames:
            return _REFUSED
        made = _Made(
            views=rule.renames, shape=tuple(out.shape), stride=out.stride(),
            offset=int(out.storage_offset()) - (args[0].storage_offset() if rule.renames else 0),
            dtype=out.dtype, device=out.fake_device,
        )  # fmt: skip
        # Two results may share memory of their own, which no two made apart would.
        memory.add(storage._cdata)
        again = self._make(made, args, kwargs)
        same = (
            (again.shape, again.stride(), again.storage_offset())
            == (out.shape, out.stride(), out.storage_offset())
            and again.untyped_storage().nbytes() == storage.nbytes()
            and torch._C._dispatch_keys(again).raw_repr() == torch._C._dispatch_keys(out).raw_repr()
        )
        return made if same else _REFUSED

    def _make(self, made: _Made | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if made is None:
            return None
        at = made.argument
        if at != -1:
            return kwargs[at] if isinstance(at, str) else args[at]
        with torch._C._DisableTorchDispatch():
            data = torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device="meta")
            if made.views:
                begin = args[0].storage_offset() + made.offset
                data.set_(args[0].untyped_storage(), begin, made.shape, made.stride)
        blank = self._blank.get(made.device)
        if blank is None:
            blank = self._blank[made.device] = dict(vars(FakeTensor(self._mode, data, made.device)))
        # As the constructor of fake tensors does, which takes five times as long to find out what to write.
        tensor = Tensor._make_subclass(
            FakeTensor, data, False, dispatch_device=True, device_for_backend_keys=made.device
        )
        torch._C._set_throw_on_mutable_data_ptr(tensor)
        vars(tensor).update(blank)
        return tensor


def _rule(func: Any) -> _Rule:
    if not isinstance(func, OpOverload):
        return _Rule(func)
    by_name = [a.alias_info for a in func._schema.arguments if a.kwarg_only]
    remembered = func.namespace == "aten" and func not in _LIFTS and not any(tag in func.tags for tag in _TAGS)
    return _Rule(
        func,
        remembered=remembered,
        renames=bool(func.is_view) or func is _UNSAID_VIEW,
        anywhere=func in _ANYWHERE,
        fills=any(alias is not None and alias.is_write for alias in by_name),
        communicates=func.namespace == "c10d",
    )


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)

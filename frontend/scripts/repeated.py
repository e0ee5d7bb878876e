"""What modules make again and again before the step that is recorded: samples that a script draws first, rollouts.

A model of diffusion runs a thousand times for one batch of samples. What it makes without gradients, of what has
the same shapes and types, has the same shapes and types: after two calls that made alike, and changed nothing that
the module holds, further ones are not run. Nothing is left out of the recorded step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from echograph.frontend.pytorch.known_values import is_known
from echograph.frontend.scripts.adapter import patched
from echograph.frontend.scripts.places import on_gpu
from echograph.frontend.scripts.recorder import ScriptRecorder

_PLAIN = (type(None), bool, int, str, torch.dtype, torch.device)
_CALLS = 2


class _NotAlike(Exception):
    """Something that is no tensor of the capture, and no plain value."""


@contextmanager
def left_out(recorder: ScriptRecorder) -> Iterator[None]:
    """In the context, modules are not run whose results are known to be as before, while nothing is recorded."""
    made: dict[Hashable, tuple[int, Hashable, Any, list[Any]]] = {}
    held: dict[int, torch.nn.Module] = {}  # an address is of one module as long as that is there

    def calling(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not recorder.is_early or torch.is_grad_enabled():
                return original(module, *args, **kwargs)
            try:
                given, structure = tree_flatten((args, kwargs))
                key = (id(module), module.training, str(structure), *map(_layout, given))
            except _NotAlike:
                return original(module, *args, **kwargs)
            count, alike, spec, results = made.get(key, (0, None, None, []))
            if count >= _CALLS:
                recorder.note(
                    f"{type(module).__name__} is run {_CALLS} times without gradients before the step, and not "
                    "again where it makes the same shapes of the same"
                )
                return tree_unflatten([_anew(result) for result in results], spec)
            before = _state(module)
            out = original(module, *args, **kwargs)
            try:
                results, spec = tree_flatten(out)
                now: Hashable = (str(spec), *map(_layout, results))
            except _NotAlike:
                return out
            if before is None or _state(module) != before or _shares(results, given, module):
                return out
            held[id(module)] = module
            made[key] = (count + 1 if alike in (None, now) else 0, now, spec, results)
            return out

        return call

    with patched(torch.nn.Module, "__call__", calling):
        yield


def _layout(value: Any) -> Hashable:
    """What a call depends on, and what it made, but for the values of tensors and of real numbers.

    Raises:
        _NotAlike: it may hold anything.
    """
    if isinstance(value, FakeTensor):
        with torch._C.DisableTorchFunction():
            return value.shape, value.stride(), value.dtype, on_gpu(value)
    if type(value) is float:
        return float
    if type(value) in _PLAIN:
        return type(value), value
    raise _NotAlike


def _anew(result: Any) -> Any:
    return torch.empty_like(result) if isinstance(result, Tensor) else result


def _state(module: torch.nn.Module) -> Hashable:
    """What a module and its parts hold, each thing by its identity, or its length; None: hooks look on."""
    found: list[Hashable] = []
    for part in module.modules():
        if part._forward_hooks or part._forward_pre_hooks:
            return None
        for holder in (vars(part), part._buffers):
            for name, value in holder.items():
                sized = len(value) if isinstance(value, list | dict | set) else 0
                found.append((name, value if type(value) in (int, float, bool, str) else id(value), sized))
    return tuple(found)


def _shares(results: list[Any], given: list[Any], module: torch.nn.Module) -> bool:
    """Whether results lie in memory that was there before, or have values that are known."""
    tensors = [result for result in results if isinstance(result, FakeTensor)]
    before: list[Tensor] = [value for value in given if isinstance(value, FakeTensor)]
    before += [*module.parameters(), *module.buffers()]
    places = {value.untyped_storage()._cdata for value in before}
    return any(is_known(tensor) or tensor.untyped_storage()._cdata in places for tensor in tensors)

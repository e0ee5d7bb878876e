"""What modules make again and again before the step that is recorded: samples that a script draws first, rollouts.

A model of diffusion runs a thousand times for one batch of samples. What it makes of what has the same shapes and
types, where nothing has gradients, has the same shapes and types: after two calls that made alike, and changed
nothing that the module holds, further ones are not run. A model of language runs once for each word, on one word
more. After calls of three lengths along whose sizes the sizes of what they made went, others are not run either,
but for one at each doubling, which is held against that. Nothing is left out of the recorded step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from echograph.frontend.pytorch.known_values import is_known
from echograph.frontend.scripts.adapter import patched
from echograph.frontend.scripts.places import on_gpu
from echograph.frontend.scripts.recorder import ScriptRecorder

_PLAIN = (type(None), bool, str, torch.dtype, torch.device)
_CALLS = 2
_LENGTHS = 3


class _NotAlike(Exception):
    """Something that is no tensor of the capture, and no plain value."""


class _Layout(NamedTuple):
    """What a call is given, or makes, but for the values of tensors and of real numbers.

    Attributes:
        kinds: what it is made of.
        sizes: extents of its tensors, and integers, one after the other.
    """

    kinds: Hashable
    sizes: tuple[int, ...]


class _Made(NamedTuple):
    """What a call made: its layout, the results, and how they are put together."""

    layout: _Layout
    results: list[Any]
    structure: Any


class _Calls:
    """What calls of a module made of what differs in sizes alone."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, ...], int] = {}
        self._made: dict[tuple[int, ...], _Made] = {}
        # Calls since the last one that made otherwise than those before it; the first two say how.
        self._line: list[tuple[int, ...]] = []
        self._furthest = 0

    def made_of(self, sizes: tuple[int, ...]) -> tuple[list[Any], Any, tuple[int, ...]] | None:
        """Results of a call, their structure, and their sizes now; None where it has to be run."""
        if self._counts.get(sizes, 0) >= _CALLS:
            made = self._made[sizes]
            return made.results, made.structure, made.layout.sizes
        if sizes in self._made or len(self._line) < _LENGTHS:
            return None
        step = self._step_of(sizes)
        expected = None if step is None or step > 2 * self._furthest else self._expected(step)
        made = self._made[self._line[-1]]
        return None if expected is None else (made.results, made.structure, expected)

    def learn(self, sizes: tuple[int, ...], made: _Made) -> None:
        """A call was run."""
        known = self._made.get(sizes)
        self._counts[sizes] = 1 + (self._counts[sizes] if known and known.layout == made.layout else 0)
        self._made[sizes] = made
        if sizes in self._line:
            self._line = self._line if known and known.layout == made.layout else [sizes]
            return
        step = self._step_of(sizes) if len(self._line) > 1 else 1
        alike = not self._line or self._made[self._line[0]].layout.kinds == made.layout.kinds
        if alike and (len(self._line) < 2 or (step and self._expected(step) == made.layout.sizes)):
            self._line.append(sizes)
            self._furthest = max(self._furthest, step or 0)
        else:
            self._line, self._furthest = [sizes], 0

    def _step_of(self, sizes: tuple[int, ...]) -> int | None:
        """How many steps sizes lie behind the first ones, on the line through the first two; None: beside it."""
        first, second = self._line[:2]
        apart = [there - here for here, there in zip(first, second, strict=True)]
        unit = gcd(*apart)
        far = [there - here for here, there in zip(first, sizes, strict=True)]
        steps = {there * unit // here for here, there in zip(apart, far, strict=True) if here}
        step = steps.pop()
        return step if not steps and far == [here // unit * step for here in apart] else None

    def _expected(self, step: int) -> tuple[int, ...] | None:
        """Sizes of what a call makes so many steps behind the first one; None where that is no whole number."""
        first, second = self._line[:2]
        here, there = (self._made[sizes].layout.sizes for sizes in (first, second))
        unit = gcd(*(b - a for a, b in zip(first, second, strict=True)))
        grown = [divmod(b - a, unit) for a, b in zip(here, there, strict=True)]
        expected = tuple(a + each * step for a, (each, _) in zip(here, grown, strict=True))
        return expected if all(size >= 0 for size in expected) and not any(rest for _, rest in grown) else None


@contextmanager
def left_out(recorder: ScriptRecorder) -> Iterator[None]:
    """In the context, modules are not run whose results are known to be as before, while nothing is recorded."""
    calls: dict[Hashable, _Calls] = {}
    held: dict[int, torch.nn.Module] = {}  # an address is of one module as long as that is there

    def calling(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if not recorder.is_early:
                return original(module, *args, **kwargs)
            try:
                given, structure = tree_flatten((args, kwargs))
                layout = _layout(given)
            except _NotAlike:
                return original(module, *args, **kwargs)
            if torch.is_grad_enabled() and _has_gradients(module, given):
                return original(module, *args, **kwargs)
            key = (id(module), module.training, torch.is_grad_enabled(), str(structure), layout.kinds)
            known = calls.setdefault(key, _Calls())
            if (found := known.made_of(layout.sizes)) is not None:
                recorder.note(
                    f"{type(module).__name__} is run a few times without gradients before the step, and not again "
                    "where it makes the same shapes of the same, or one more of one more"
                )
                return _anew(*found)
            before = _state(module)
            out = original(module, *args, **kwargs)
            try:
                results, spec = tree_flatten(out)
                made = _layout(results)
            except _NotAlike:
                return out
            if before is None or _state(module) != before or _shares(results, given, module):
                return out
            held[id(module)] = module
            known.learn(layout.sizes, _Made(_Layout((str(spec), made.kinds), made.sizes), results, spec))
            return out

        return call

    with patched(torch.nn.Module, "__call__", calling):
        yield


def _has_gradients(module: torch.nn.Module, given: Sequence[Any]) -> bool:
    tensors = (value for value in given if isinstance(value, Tensor))
    return any(tensor.requires_grad for tensor in (*tensors, *module.parameters()))


def _layout(values: Sequence[Any]) -> _Layout:
    """What a call depends on, or made.

    Raises:
        _NotAlike: it may hold anything.
    """
    kinds: list[Hashable] = []
    sizes: list[int] = []
    for value in values:
        if isinstance(value, FakeTensor):
            with torch._C.DisableTorchFunction():
                ordered = value.is_contiguous()
                kinds.append((value.dtype, on_gpu(value), value.dim(), ordered or value.stride()))
                sizes += value.shape
        elif type(value) is int:
            kinds.append(int)
            sizes.append(value)
        elif type(value) is float:
            kinds.append(float)
        elif type(value) in _PLAIN:
            kinds.append((type(value), value))
        else:
            raise _NotAlike
    return _Layout(tuple(kinds), tuple(sizes))


def _anew(results: Sequence[Any], structure: Any, sizes: tuple[int, ...]) -> Any:
    """What a call makes that is not run: as another one made, in these sizes."""
    made: list[Any] = []
    place = 0
    for result in results:
        if isinstance(result, Tensor):
            shape = sizes[place : place + result.dim()]
            made.append(torch.empty_like(result) if shape == tuple(result.shape) else result.new_empty(shape))
            place += result.dim()
        elif type(result) is int:
            made.append(sizes[place])
            place += 1
        else:
            made.append(result)
    return tree_unflatten(made, structure)


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
    """Whether results lie in memory that was there before, or have values that are known, or gradients."""
    tensors = [result for result in results if isinstance(result, FakeTensor)]
    before: list[Tensor] = [value for value in given if isinstance(value, FakeTensor)]
    before += [*module.parameters(), *module.buffers()]
    places = {value.untyped_storage()._cdata for value in before}
    return any(
        tensor.requires_grad or is_known(tensor) or tensor.untyped_storage()._cdata in places for tensor in tensors
    )

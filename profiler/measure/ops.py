"""Measures the invocations of a step one by one. Each finds in the cache what the step would have left there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from math import prod
from typing import Any

import torch

from echograph.errors import InputError
from echograph.ir.profile import Environment, Invocation, Measurement, Part, Profile
from echograph.profiler.measure.device import Device
from echograph.profiler.measure.operands import Operands, Prepared, operator_of
from echograph.profiler.measure.sampling import Samples, sample
from echograph.progress import Progress, silent
from echograph.units import format_bytes, to_ps

_WARM_UP = 2
_LONGEST_TEXT = 400
_SAVE_EVERY_S = 2.0
_DATA_DEPENDENT = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
_COMPARED = ("device", "hardware", "driver", "torch", "cuda", "threads")

Save = Callable[[Profile], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How long to measure.

    Attributes:
        repeats: samples of one invocation at most.
        budget_s: seconds for all invocations; each gets an equal share of what is left.
        kernels: whether to look up the names of device kernels.
    """

    repeats: int = 200
    budget_s: float = 300.0
    kernels: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of it.

    Attributes:
        profile: all that is measured, earlier runs included.
        refused: invocations that cannot be measured, and why.
        left: invocations for which there was no time.
    """

    profile: Profile
    refused: tuple[tuple[str, str], ...] = ()
    left: tuple[str, ...] = ()


def label(invocation: Invocation) -> str:
    """The text under which an invocation's measurement is kept: short, and another one for another invocation."""
    if len(invocation.text) <= _LONGEST_TEXT:
        return invocation.text
    digest = sha256(invocation.text.encode()).hexdigest()[:16]
    return f"{invocation.operator}.{invocation.overload} of {len(invocation.operands)} tensors, {digest}"


def measure(
    invocations: Sequence[Invocation],
    device: Device,
    profile: Profile,
    options: Options,
    *,
    save: Save = lambda _: None,
    say: Progress = silent,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Measures the invocations that a profile does not have yet.

    Args:
        invocations: distinct ones.
        device: where.
        profile: of this device; its measurements are kept.
        options: how long.
        save: gets the profile as it grows, every few seconds and at the end.
        say: gets what is going on.
        clock: what the budget is counted with.
    """
    known = {(m.arguments, m.signature) for m in profile.measurements}
    waiting = [i for i in invocations if any((label(i), part.signature) not in known for part in i.parts)]
    measurer = _Measurer(device, options)
    refused: list[tuple[str, str]] = []
    began = saved = clock()
    for done, invocation in enumerate(waiting):
        left_s = began + options.budget_s - clock()
        if left_s <= 0:
            save(profile)
            return Outcome(profile=profile, refused=tuple(refused), left=tuple(label(c) for c in waiting[done:]))
        share = left_s / (len(waiting) - done)
        say("measuring operations", done, len(waiting))
        try:
            found = measurer.measure(invocation, share)
        except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError, IndexError) as error:
            refused.append((invocation.text[:_LONGEST_TEXT], " ".join(str(error).split())[:200]))
            continue
        new = [m for m in found if (m.arguments, m.signature) not in known]
        profile = replace(profile, measurements=(*profile.measurements, *new))
        if clock() - saved > _SAVE_EVERY_S:
            save(profile)
            saved = clock()
    save(profile)
    return Outcome(profile=profile, refused=tuple(refused))


def continued(found: Profile, here: Environment, name: str) -> Profile:
    """A profile that is to be gone on with.

    Raises:
        InputError: it was measured elsewhere, or with other versions.
    """
    for field in _COMPARED:
        then, now = getattr(found.environment, field), getattr(here, field)
        if then != now:
            raise InputError(
                f"{name}: was measured with {field} '{then}', and here it is '{now}': give another --output"
            )
    return found


class _Measurer:
    def __init__(self, device: Device, options: Options) -> None:
        self._device, self._options = device, options
        self._operands = Operands(device.name)
        self._baseline = device.baseline()

    def measure(self, invocation: Invocation, budget_s: float) -> list[Measurement]:
        """Measurements of an invocation: one for each part that a graph tells apart.

        Raises:
            RuntimeError: it does not run, or not within the memory that is free.
        """
        self._check(invocation)
        with _kernels_alone():
            prepared = self._operands.make(invocation)
            peak = self._device.peak_bytes(prepared.run, prepared.tensors)
            for _ in range(_WARM_UP - 1):
                prepared.run()
            kernels = self._device.kernels(prepared.run) if self._options.kernels else ()
            samples = sample(lambda: self._once(prepared), max_samples=self._options.repeats, budget_s=budget_s)
        return [_measurement(invocation, part, samples, kernels, peak) for part in invocation.parts]

    def _check(self, invocation: Invocation) -> None:
        tags = operator_of(invocation).tags
        if any(tag in tags for tag in _DATA_DEPENDENT):
            raise RuntimeError("its work depends on the values of its tensors")
        given = sum(o.extent * _itemsize(o.dtype) for o in invocation.operands)
        need = given + max(map(_result_bytes, invocation.parts))
        free = self._device.free_bytes()
        if need > free:
            raise RuntimeError(f"it takes {format_bytes(need)}, and {format_bytes(free)} are free")

    def _once(self, prepared: Prepared) -> float:
        prepared.restore()
        if prepared.cold:
            self._device.flush()
            prepared.touch()
        self._device.start()
        result = prepared.run()
        seconds = self._device.stop()
        del result
        return max(0.0, seconds - self._baseline)


@contextmanager
def _kernels_alone() -> Iterator[None]:
    """Operators run without autograd, as the capture saw them."""
    with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
        yield


def _measurement(
    invocation: Invocation, part: Part, samples: Samples, kernels: tuple[str, ...], peak: int
) -> Measurement:
    signature = part.signature
    return Measurement(
        operator=signature.operator,
        inputs=signature.inputs,
        outputs=signature.outputs,
        attributes=signature.attributes,
        mean_picoseconds=to_ps(samples.mean * part.share),
        median_picoseconds=to_ps(samples.median * part.share),
        samples=len(samples.seconds),
        spread=samples.spread,
        kernels=kernels,
        arguments=label(invocation),
        runs=part.runs,
        peak_bytes=round(peak * part.share),
    )


def _itemsize(dtype: str) -> int:
    kind: Any = getattr(torch, dtype)
    return int(kind.itemsize)


def _result_bytes(part: Part) -> int:
    return sum(t.dtype.itemsize * prod(t.shape) for t in part.signature.outputs)

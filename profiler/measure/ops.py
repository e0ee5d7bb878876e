"""Measures the invocations of a step one by one, on real tensors of the recorded types, strides and identities.

Each finds in the cache what the step would have left there: what it used before is used again, in that order and
with as much else in between.

What the host adds to an operation: an eager framework's bookkeeping, beyond running the operator itself. Two
modules of ordinary layers, so small that their arithmetic takes no time, are trained step by step; one has views
between its layers, the other has not. What their steps take beyond their operators, run on their own, is the
host's. No model's step time is used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from itertools import zip_longest
from math import inf, prod
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from echograph.errors import InputError, UsageError
from echograph.ir.profile import Argument, Environment, Invocation, Measurement, Named, Operand, Part, Profile
from echograph.profiler.measure.device import MeasuringDevice
from echograph.profiler.measure.sampling import Samples, sample
from echograph.progress import Progress, silent
from echograph.units import format_bytes, to_ps

_BLOCK = 2**20
"""Random numbers that are drawn; larger tensors repeat them."""
_SEED = 0
_UNORDERED = (torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64)
"""Types that have no largest element; few small tensors have them."""

CallArguments = Mapping[str, Any]


def _along(values: str, indices: str = "index") -> Callable[[CallArguments], dict[str, int]]:
    """Indices into one dimension of a tensor."""
    return lambda a: {indices: _size(a[values], a["dim"])}


def _classes(a: CallArguments) -> dict[str, int]:
    return {"target": _size(a["self"], 1 if len(a["self"].shape) > 1 else 0)}


def _each(a: CallArguments) -> dict[str, int]:
    """One tensor of indices for each of the first dimensions."""
    return {f"indices.{i}": a["self"].shape[i] for i, index in enumerate(a["indices"]) if index is not None}


_INDICES: dict[str, Callable[[CallArguments], dict[str, int]]] = {
    "aten.embedding": lambda a: {"indices": a["weight"].shape[0]},
    "aten.embedding_dense_backward": lambda a: {"indices": a["num_weights"]},
    "aten.nll_loss_forward": _classes,
    "aten.nll_loss_backward": _classes,
    "aten.nll_loss2d_forward": _classes,
    "aten.nll_loss2d_backward": _classes,
    "aten.gather": _along("self"),
    "aten.scatter": _along("self"),
    "aten.scatter_": _along("self"),
    "aten.scatter_add": _along("self"),
    "aten.scatter_add_": _along("self"),
    "aten.index_select": _along("self"),
    "aten.index_add": _along("self"),
    "aten.index_add_": _along("self"),
    "aten.index_copy_": _along("self"),
    "aten.index": _each,
    "aten._unsafe_index": _each,
    "aten.index_put": _each,
    "aten.index_put_": _each,
    "aten._index_put_impl_": _each,
    "aten.take": lambda a: {"index": prod(a["self"].shape)},
    "aten.max_pool2d_with_indices_backward": lambda a: {"indices": prod(a["self"].shape[-2:])},
}
"""Operator -> names of its arguments that hold indices, with their bounds. Other whole numbers are 0, which is
an index into anything."""


def _grouped(a: CallArguments) -> tuple[str, int]:
    """Where the groups of `_grouped_mm` end: along the rows, what is summed over, or the columns."""
    left, right = a["self"].shape, a["mat2"].shape
    return "offs", (left[0] if len(right) == 3 else left[1]) if len(left) == 2 else right[-1]


_ENDS: dict[str, Callable[[CallArguments], tuple[str, int]]] = {"aten._grouped_mm": _grouped}
"""Operator -> name of its argument that holds the ends of groups, with the last end; groups are made equal."""


class RealOperands:
    """Makes the arguments of invocations on a device.

    Args:
        device: PyTorch's name of it.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._blocks: dict[tuple[str, bool], Tensor] = {}

    def make(self, invocation: Invocation) -> PreparedCall:
        """The operator, its arguments, and the tensors among them.

        What an argument's maker alone can give is taken from one run of the maker.
        """
        operator = operator_of(invocation)
        bounds, ends = _bounds(invocation, operator), _ends(invocation, operator)
        made: dict[str, Any] = {}
        tensors = {}
        for operand in invocation.operands:
            if operand.maker is None:
                tensors[operand.number] = self._tensor(operand, bounds.get(operand.number, 0), invocation.products)
                if operand.number in ends:
                    count = operand.extent
                    equal = [ends[operand.number] * (i + 1) // count for i in range(count)]
                    tensors[operand.number].copy_(torch.tensor(equal))
                continue
            maker, index = operand.maker
            if maker.text not in made:
                made[maker.text] = self.make(maker).run()
            result = made[maker.text]
            tensors[operand.number] = result[index] if isinstance(result, tuple | list) else result
        args = tuple(self._argument(a, tensors) for a in invocation.arguments)
        kwargs = {name: self._argument(a, tensors) for name, a in invocation.keywords}
        return PreparedCall(operator, args, kwargs, [(tensors[o.number], o.since) for o in invocation.operands])

    def _argument(self, argument: Argument, tensors: dict[int, Tensor]) -> Any:
        if isinstance(argument, Operand):
            return tensors[argument.number]
        if isinstance(argument, tuple):
            return [self._argument(item, tensors) for item in argument]
        if isinstance(argument, Named):
            return torch.device(self._device) if argument.kind == "device" else getattr(torch, argument.name)
        return argument

    def _tensor(self, operand: Operand, bound: int, signed: bool) -> Tensor:
        dtype: torch.dtype = getattr(torch, operand.dtype)
        memory = torch.empty(operand.extent, dtype=dtype, device=self._device)
        if bound > 0:
            generator = torch.Generator(self._device).manual_seed(_SEED)
            memory.random_(0, bound, generator=generator)
        elif dtype.is_floating_point or dtype == torch.bool:
            self._fill(memory, signed)
        else:
            memory.zero_()
        return memory.as_strided(operand.shape, operand.strides)

    def _fill(self, memory: Tensor, signed: bool) -> None:
        """Products get numbers of both signs (a device's power depends on them), others none that make NaN."""
        key = str(memory.dtype), signed
        if key not in self._blocks:
            generator = torch.Generator(self._device).manual_seed(_SEED)
            block = torch.rand(_BLOCK, device=self._device, generator=generator)
            block = block * 2 - 1 if signed else block * 0.8 + 0.1
            self._blocks[key] = block > 0.5 if memory.dtype == torch.bool else block.to(memory.dtype)
        block, whole = self._blocks[key], memory.numel() // _BLOCK * _BLOCK
        memory[:whole].view(-1, _BLOCK).copy_(block)
        memory[whole:].copy_(block[: memory.numel() - whole])


class PreparedCall:
    """An invocation that can be run again and again.

    Attributes:
        run: runs it, and returns what it returns.
        tensors: what it is given.
        cold: whether some of that is not in the cache when the step runs it.
    """

    def __init__(
        self,
        operator: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: list[tuple[Tensor, int | None]],
    ) -> None:
        self.run: Callable[[], Any] = lambda: operator(*args, **kwargs)
        self.tensors = [tensor for tensor, _ in given]
        self.cold = any(since is None for _, since in given)
        self._given = given
        self._written = [t for argument in _written(operator, args, kwargs) for t in _flat(argument)]

    def restore(self) -> None:
        """Gives what the invocation overwrites ordinary numbers again, lest they run away over the repeats."""
        for tensor in self._written:
            tensor.fill_(0.5 if tensor.dtype.is_floating_point else 0)

    def uses(self) -> list[_Use]:
        """What the step leaves in the cache of what it is given."""
        return [
            _Use(since=since, nbytes=t.untyped_storage().nbytes(), again=partial(torch.amax, t, ()))
            for t, since in self._given
            if since is not None and t.numel() and t.dtype not in _UNORDERED
        ]


class _Use(NamedTuple):
    """What the step used before an invocation.

    Attributes:
        since: bytes that it used after that.
        nbytes: of it.
        again: uses it again.
    """

    since: int
    nbytes: int
    again: Callable[[], Any]


def operator_of(invocation: Invocation) -> Any:
    """PyTorch's operator of an invocation.

    Raises:
        AttributeError: this PyTorch has none of that name.
    """
    namespace, _, name = invocation.operator.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), invocation.overload)


def _ends(invocation: Invocation, operator: Any) -> dict[int, int]:
    """For a tensor of ends of groups, by its number, the last end."""
    rule = _ENDS.get(invocation.operator)
    if rule is None:
        return {}
    given = _given(operator, invocation.arguments, dict(invocation.keywords))
    name, end = rule(given)
    return {} if given[name] is None else {given[name].number: end}


def _bounds(invocation: Invocation, operator: Any) -> dict[int, int]:
    """For every tensor of indices, by its number, the first value that is not one."""
    rule = _INDICES.get(invocation.operator)
    if rule is None:
        return {}
    given = _given(operator, invocation.arguments, dict(invocation.keywords))
    bounds = {}
    for name, bound in rule(given).items():
        argument, _, position = name.partition(".")
        operand = given[argument][int(position)] if position else given[argument]
        bounds[operand.number] = bound
    return bounds


def _size(tensor: Operand, dim: int) -> int:
    return tensor.shape[dim] if tensor.shape else 1


def _written(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    names = [a.name for a in operator._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    given = _given(operator, args, kwargs)
    return [given[name] for name in names if given.get(name) is not None]


def _given(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by their names in the schema; those left out are None."""
    names = [argument.name for argument in operator._schema.arguments]
    return {**dict.fromkeys(names), **dict(zip(names, args, strict=False)), **kwargs}


def _flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for item in value for t in _flat(item)] if isinstance(value, tuple | list) else []


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

    Raises:
        UsageError: the seconds are no number, or below 0.
    """

    repeats: int = 200
    budget_s: float = 300.0
    kernels: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.budget_s < inf:
            raise UsageError(f"--budget {self.budget_s:g}: give seconds, 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTiming:
    """Result of measuring the invocations of a step.

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
    device: MeasuringDevice,
    profile: Profile,
    options: Options,
    *,
    save: Save = lambda _: None,
    progress: Progress = silent,
    clock: Callable[[], float] = time.monotonic,
) -> OpTiming:
    """Measures the invocations that a profile does not have yet.

    Args:
        invocations: distinct ones.
        device: where.
        profile: of this device; its measurements are kept.
        options: how long.
        save: gets the profile as it grows, every few seconds and at the end.
        progress: gets what is going on.
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
            return OpTiming(profile=profile, refused=tuple(refused), left=tuple(label(c) for c in waiting[done:]))
        share = left_s / (len(waiting) - done)
        progress("measuring operations", done, len(waiting))
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
    return OpTiming(profile=profile, refused=tuple(refused))


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
    def __init__(self, device: MeasuringDevice, options: Options) -> None:
        self._device, self._options = device, options
        self._operands = RealOperands(device.name)
        self._baseline = device.baseline()

    def measure(self, invocation: Invocation, budget_s: float) -> list[Measurement]:
        """Measurements of an invocation: one for each part that a graph tells apart.

        Raises:
            RuntimeError: it does not run, or not within the memory that is free.
        """
        self._check(invocation)
        with _kernels_alone(), _rounding(invocation.tf32):
            prepared = self._operands.make(invocation)
            peak = self._device.peak_bytes(prepared.run, prepared.tensors)
            for _ in range(_WARM_UP - 1):
                prepared.run()
            kernels = self._device.kernels(prepared.run) if self._options.kernels else ()
            uses = [*self._of_code(invocation), *prepared.uses()]
            uses.sort(key=lambda use: use.since, reverse=True)
            samples = sample(
                lambda: self._once(prepared, uses), max_samples=self._options.repeats, budget_s=budget_s
            )
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

    def _of_code(self, invocation: Invocation) -> Iterator[_Use]:
        """The use of an operator's code, by an equal call of other tensors, if these leave room for others."""
        nbytes = sum(o.extent * _itemsize(o.dtype) for o in invocation.operands)
        if invocation.since is not None and nbytes + invocation.since <= self._device.cache_bytes:
            yield _Use(since=invocation.since, nbytes=nbytes, again=self._operands.make(invocation).run)

    def _once(self, prepared: PreparedCall, uses: Sequence[_Use]) -> float:
        prepared.restore()
        if prepared.cold:
            self._device.flush()
        if prepared.cold or (uses and uses[0].since):
            for use, after in zip_longest(uses, uses[1:]):
                use.again()
                self._device.use_other(use.since - (after.since + after.nbytes if after else 0))
        self._device.host_clock()  # its code is not in the cache, either
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


@contextmanager
def _rounding(tf32: bool | None) -> Iterator[None]:
    """Products and convolutions of fp32 may be rounded to TF32, or may not; None: as PyTorch does by default."""
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, convolutions.allow_tf32
    products.allow_tf32, convolutions.allow_tf32 = tf32 is True, tf32 is not False
    try:
        yield
    finally:
        products.allow_tf32, convolutions.allow_tf32 = before


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
    return sum(t.dtype.nbytes(prod(t.shape)) for t in part.signature.outputs)


_WIDTH = 8
_LAYERS = 24
_ROUNDS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class EagerOverhead:
    """Seconds to issue an operation beyond running its operator, and to issue a view."""

    op_s: float
    view_s: float


class _Layer(nn.Module):
    """Layers whose steps dispatch a known kind of operator: with views between them, or without."""

    def __init__(self, views: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.act = nn.GELU()
        self.scale = nn.Parameter(torch.ones(_WIDTH))
        self.views = views

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.norm(x) * self.scale)
        if self.views:
            y = y.view(2, 2, _WIDTH).transpose(0, 1).transpose(0, 1).view(4, _WIDTH)
        out: Tensor = x + y
        return out


class _Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operators that ran, with their arguments; and how many of them were views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work: list[tuple[Any, Any, Any]] = []
        self.views = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        returns = func._schema.returns
        if returns and all(r.alias_info is not None and not r.alias_info.is_write for r in returns):
            self.views += func is not torch.ops.aten.detach.default
        else:
            self.work.append((func, args, kwargs or {}))
        return out


def measure_host(device: MeasuringDevice, rounds: int = _ROUNDS) -> EagerOverhead:
    """Measures the host that feeds a device.

    Where the host runs ahead, issuing is all that it does, the operators' own part included; where it computes
    itself, what the operators take alone is taken off.
    """
    modules = [nn.Sequential(*(_Layer(views) for _ in range(_LAYERS))).to(device.name) for views in (False, True)]
    counts, alone = [], []
    for module in modules:
        with _Seen() as seen:
            _step(module, device)
        counts.append((len(seen.work), seen.views))
        alone.append(seen.work)
    samples = []
    for _ in range(rounds):
        steps = [_timed(lambda m=m: _step(m, device), device) for m in modules]  # type: ignore[misc]
        own = [0.0 if device.runs_ahead else _timed(lambda w=w: _alone(w), device) for w in alone]  # type: ignore[misc]
        samples.append([step - kernels for step, kernels in zip(steps, own, strict=True)])
    first, second = (median(s[i] for s in samples) for i in range(2))
    return _solved(counts, (first, second))


def _solved(counts: list[tuple[int, int]], seconds: tuple[float, float]) -> EagerOverhead:
    """The two unknowns from two steps: seconds = operations * op_s + views * view_s."""
    (a, b), (c, d) = counts
    determinant = a * d - b * c
    op_s = (seconds[0] * d - b * seconds[1]) / determinant
    view_s = (a * seconds[1] - c * seconds[0]) / determinant
    return EagerOverhead(op_s=max(0.0, op_s), view_s=max(0.0, view_s))


def _step(module: nn.Module, device: MeasuringDevice) -> None:
    loss = module(torch.ones(4, _WIDTH, device=device.name)).sum()
    loss.backward()
    for parameter in module.parameters():
        parameter.grad = None


def _alone(work: list[tuple[Any, Any, Any]]) -> None:
    with _below_autograd():
        for func, args, kwargs in work:
            func(*args, **kwargs)


@contextmanager
def _below_autograd() -> Iterator[None]:
    with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
        yield


def _timed(run: Callable[[], None], device: MeasuringDevice) -> float:
    device.synchronize()
    began = device.host_clock()
    run()
    return device.host_clock() - began

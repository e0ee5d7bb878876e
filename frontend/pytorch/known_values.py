"""Values of small tensors on the host, kept beside fake tensors: grids of patches, indices, schedules, masks.

A program computes with such before, or beside, what the GPU does: `data[i : i + length] for i in
torch.randint(...)`, `grid.prod(-1).tolist()`. So what PyTorch makes on the host of settings alone is computed as
well, and so is what is made of that, as long as it is small. What unknown values come into has none. Where a shape
depends on values, it is that of the known ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.nn import init
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from echograph.notes import tell

_TORCH = str(Path(torch.__file__).parent)
MOST_KNOWN = 1 << 20
MOST_OF_GPU = 1 << 16
"""Real numbers of a tensor that is on the GPU, or of a batch, which goes there."""
MOST_REPEATED = 1 << 26
"""Of a view that repeats what is small, as a mask of tokens does for each number of a token."""
_REPEATING = (Tensor.expand, torch.broadcast_to)
_VALUES = "_echograph_values"
_UNKNOWN = object()
_BLANK = "_echograph_blank"
MOST_FILLED = 1 << 12
"""Elements of a tensor of no values yet that are followed as they are given one by one."""
_ALIKE = "_echograph_alike"
_COUNTING = (torch.histc, Tensor.histc, torch.bincount, Tensor.bincount)
_EXCHANGES = ("_c10d_functional::all_to_all_single", "_c10d_functional::wait_tensor")
_WRITING = ("__set__", "__setitem__")
_ASKING = ("__index__", "__int__", "__invert__", "__iter__")
# Makes tensors of settings alone; torch.empty has no values to know.
_MADE = frozenset((
    torch.tensor, torch.as_tensor, torch.arange, torch.linspace, torch.zeros, torch.ones,
    torch.full, torch.eye, torch.rand, torch.randn, torch.randint, torch.randperm, torch.tril_indices,
    torch.triu_indices, torch.logspace, torch.bartlett_window, torch.blackman_window, torch.hamming_window,
    torch.hann_window, torch.kaiser_window, torch.scalar_tensor, torch.fft.fftfreq, torch.fft.rfftfreq,
    torch.normal,
))  # fmt: skip
# Of these, what the GPU draws is not known, as what a model draws is not.
_DRAWN = (torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal)
# The same, as large as another tensor, whose own values do not come into it.
_MADE_LIKE = frozenset((
    torch.zeros_like, torch.ones_like, torch.full_like, Tensor.new_zeros, Tensor.new_ones, Tensor.new_full,
))  # fmt: skip
# Writes all of a tensor, whose own values do not come into it: numbers that are drawn, or given.
_DRAWING = frozenset((
    Tensor.normal_, Tensor.uniform_, Tensor.exponential_, Tensor.random_, Tensor.bernoulli_,
    init.normal_, init.uniform_, init.kaiming_uniform_,
))  # fmt: skip
_FILLING = _DRAWING | {init.constant_, Tensor.fill_, Tensor.zero_, Tensor.copy_}
_READS = frozenset((
    Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__index__,
    Tensor.__format__, Tensor.__repr__, Tensor.__contains__, Tensor.__array__, Tensor.equal, torch.equal,
    torch.allclose, Tensor.allclose, torch.is_nonzero,
))  # fmt: skip


class Guess:
    """Of a number that stands for one that nobody has: what is made of it is not known."""


@contextmanager
def apart() -> Iterator[None]:
    """In the context, PyTorch computes: neither a capture sees it, nor does a default device (`cuda`) count."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def real(given: Any) -> Any:
    """A tensor's values where they are known; else what is given."""
    known = _with_values(given) if isinstance(given, FakeTensor) else _UNKNOWN
    return given if known is _UNKNOWN else known


def is_known(tensor: Tensor) -> bool:
    """Whether the host has the values of a fake tensor."""
    return getattr(tensor, "constant", None) is not None or _with_values(tensor) is not _UNKNOWN


def read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any] | None:
    """What a question about values answers, in a tuple; None where the values are not known."""
    if func not in _READS:
        return None
    given = _with_values((args, kwargs))
    if given is _UNKNOWN:
        return None
    with apart():
        return (func(*given[0], **given[1]),)


def follow(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, most: int = MOST_KNOWN) -> None:
    """Gives what a function of PyTorch made the values that it has, if those of its arguments are known.

    Args:
        func: of PyTorch.
        args: its arguments.
        kwargs: those by name.
        out: what it made.
        most: real numbers of a tensor that are computed.
    """
    if func is Tensor.expand_as:  # of the other one the shape alone counts
        func, args, kwargs = Tensor.expand, (args[0], *(args[1].shape if args[1:] else kwargs["other"].shape)), {}
    first = first_of(func, args, kwargs)
    if func is torch.empty and isinstance(out, FakeTensor) and out.numel() <= MOST_FILLED:
        with apart():
            parts = torch.zeros(out.shape, dtype=out.dtype), torch.zeros(out.shape, dtype=torch.bool)
        setattr(out, _BLANK, parts)
    elif _BLANK in getattr(first, "__dict__", ()):
        blank = first.__dict__.pop(_BLANK)  # whoever else is given it may write to it
        if func is Tensor.__setitem__:
            _fill(first, blank, args[1:])
            return
    if func in _MADE_LIKE and isinstance(out, FakeTensor) and is_small(out):
        with apart():
            args = (torch.empty(first.shape if "like" in func.__name__ else 0, dtype=torch.bool), *args[1:])
        kwargs = {name: value for name, value in kwargs.items() if value is not first} | {"dtype": out.dtype}
    elif func in _FILLING and _is_own(first):
        memory = _memory(first)
        args, kwargs = tree_map_only(Tensor, lambda given: memory if given is first else given, (args, kwargs))
    elif func not in _MADE and not _may_be_known(first):
        return
    in_place = is_in_place(func, kwargs)
    if _is_own(kwargs.get("out")):
        kwargs = {**kwargs, "out": _memory(kwargs["out"])}
    made = [out] if isinstance(out, Tensor) else list(out) if isinstance(out, tuple | list) else []
    if not any(isinstance(tensor, FakeTensor) for tensor in (made if made or not in_place else (first,))):
        return  # a real tensor was written already
    kept = func in _REPEATING and made[0].numel() <= MOST_REPEATED
    kept = kept or all(is_small(tensor, most) for tensor in made)
    given: Any = _with_values((args, kwargs)) if kept else _UNKNOWN
    if given is _UNKNOWN:
        if in_place:
            forget(kwargs.get("out", first))
        elif func in _MADE:
            forget(out)  # PyTorch itself keeps small ones
        return
    try:
        with apart():
            values = (_histogram if func in _COUNTING[:2] else func)(*given[0], **given[1])
    except (RuntimeError, TypeError, ValueError, IndexError):
        if in_place:  # as where all elements are one in memory
            forget(kwargs.get("out", first))
        return
    for tensor, value in zip(made, [values] if isinstance(values, Tensor) else values or (), strict=False):
        if isinstance(tensor, FakeTensor) and isinstance(value, Tensor) and tensor.shape == value.shape:
            setattr(tensor, _VALUES, value)
            if rest_on_ranks(args):
                setattr(tensor, _ALIKE, True)


def _fill(tensor: FakeTensor, blank: tuple[Tensor, Tensor], item: tuple[Any, ...]) -> None:
    """Follows what a tensor of no values is given part by part: once it has them all, they are known."""
    values, given = blank
    part: Any = _with_values(item) if _is_own(tensor) else _UNKNOWN
    if part is _UNKNOWN:
        return
    with apart():
        values[part[0]], given[part[0]] = part[1], True
        done = bool(given.all())
    setattr(tensor, _VALUES if done else _BLANK, values if done else blank)


def first_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The first tensor, or tensors, that a function was given, by name or not: `torch.sort(input=x)`."""
    if not args:
        return next(iter(kwargs.values()), None)
    return args[func is torch.einsum or (len(args) > 1 and type(args[0]) in (int, float))]


def _memory(tensor: Tensor) -> Tensor:
    """Of a tensor whose values are all written next."""
    with apart():
        return torch.empty(tensor.shape, dtype=tensor.dtype)


def _histogram(counted: Tensor, *sizes: Any, **given: Any) -> Tensor:
    """`torch.histc`, which counts integers on GPUs alone."""
    return torch.histc(counted.double(), *sizes, **given).to(counted.dtype)


def follow_made(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    """The same of what is made on the GPU: of settings alone, or like a tensor."""
    if func in _MADE_LIKE or (func in _MADE and func not in _DRAWN):
        follow(func, args, kwargs, out)


def follow_on_gpu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    """The same of what a tensor of the GPU becomes."""
    if func in _DRAWING:
        forget(first_of(func, args, kwargs))
    else:
        follow(func, args, kwargs, out, MOST_OF_GPU)


def know(tensor: FakeTensor, values: Tensor, *, alike: bool = False) -> None:
    """Gives a tensor the values that it has, if it is small.

    Args:
        tensor: whose.
        values: of its shape and type.
        alike: whether they are so only if all ranks gave what this one did.
    """
    if is_small(tensor):
        setattr(tensor, _VALUES, values)
        if alike:
            setattr(tensor, _ALIKE, True)


@contextmanager
def rewritten(tensors: Sequence[Tensor], given: Tensor, made: Tensor | None) -> Iterator[None]:
    """In the context, what others write to tensors is known: they hold it after, and so do their views.

    Args:
        tensors: that are written.
        given: that is read, and stays as it is.
        made: what each of them holds then, repeated to its size; None: nobody knows.
    """
    if made is None:
        yield
        return
    held = [(tensor, tensor.__dict__.pop(_VALUES, None)) for tensor in (*tensors, given)]
    yield
    for tensor, values in reversed(held):
        if values is not None:
            setattr(tensor, _VALUES, values)
    for tensor in tensors:
        if not made.numel() or tensor.numel() % made.numel() or made.dtype != tensor.dtype:
            forget(tensor)
            continue
        with apart(), torch.no_grad():
            values = made.flatten().repeat(tensor.numel() // made.numel()).view(tensor.shape)
            if _with_values(tensor) is not _UNKNOWN:
                values = getattr(tensor, _VALUES).copy_(values)
        know(tensor, values, alike=True)  # type: ignore[arg-type]


def rest_on_ranks(given: Any) -> bool:
    """Whether known values of a tensor, or of one of several, are so only if ranks are alike."""
    if isinstance(given, tuple | list):
        return any(map(rest_on_ranks, given))
    return isinstance(given, FakeTensor) and hasattr(given, _ALIKE)


def told(tensor: Tensor) -> Tensor | None:
    """A copy of what is known of a tensor, by PyTorch alone too (`torch.LongTensor([1])`); None: nothing is."""
    values = real(tensor)
    if values is tensor and not tensor.is_floating_point():
        values = getattr(tensor, "constant", None)
    return None if values is None or values is tensor else copied(values)


def copied(values: Tensor) -> Tensor:
    """Values in memory of their own, which what is written to the tensor that they are of does not change."""
    with apart():
        return values.detach().clone()


def keep(tensor: Tensor, out: Tensor) -> None:
    """What a tensor becomes that is brought elsewhere has its values."""
    known = _with_values(tensor)
    if known is not _UNKNOWN and isinstance(out, FakeTensor) and out.shape == tensor.shape:
        with apart():
            setattr(out, _VALUES, known.to(out.dtype, copy=True))


def given(fake: Callable[[Tensor], Tensor], part: Any) -> Any:
    """Of what a loader gives: a fake tensor for a tensor of the host, with its values if it is small."""
    if type(part) is not Tensor:
        return part
    made = fake(part)
    if is_small(part, MOST_OF_GPU):
        setattr(made, _VALUES, part)
    return made


def lifted(part: Any, made: Any) -> None:
    """Of what PyTorch made below its functions, as by `torch.Tensor(array)`, the values are known.

    Args:
        part: numbers in memory of their own, or a known tensor.
        made: of it: of the same memory, if a tensor; of any type.
    """
    known: Any = (
        _with_values(part) if isinstance(made, FakeTensor) and type(part) in (Tensor, FakeTensor) else _UNKNOWN
    )
    if known is _UNKNOWN or not is_small(part, MOST_OF_GPU):
        return
    shared = part is not known and part.untyped_storage()._cdata == made.untyped_storage()._cdata
    with apart():
        setattr(made, _VALUES, known if shared else known.to(made.dtype, copy=True))


def spread(func: Any, args: tuple[Any, ...], out: Any) -> bool:
    """Whether a function counts numbers that nobody has, whose counts are then taken to be even."""
    counts = func in _COUNTING and bool(args) and isinstance(args[0], FakeTensor) and not is_known(args[0])
    if counts:
        _count_evenly(args[0], out)
    return counts


def _count_evenly(counted: FakeTensor, out: Any) -> None:
    """How often each of some numbers is there, of which nobody has the values: as often as any other.

    What counts so in a training step are the tokens that each expert takes, whose places decide shapes.
    """
    if isinstance(out, FakeTensor) and out.dim() == 1 and not counted.is_floating_point() and is_small(out):
        each, more = divmod(counted.numel(), max(1, out.numel()))
        with apart():
            setattr(out, _VALUES, torch.full(out.shape, each, dtype=out.dtype))
            getattr(out, _VALUES)[:more] += 1
        setattr(out, _ALIKE, True)


def exchanged(func: Any, args: tuple[Any, ...], out: Any) -> None:
    """Gives what ranks exchange of known counts, or wait for, the values that it has: ranks have the same."""
    name = func._schema.name
    if name not in _EXCHANGES or not isinstance(out, FakeTensor) or not hasattr(args[0], _VALUES):
        return
    if out.is_floating_point():
        return
    from torch.distributed import distributed_c10d

    mine = getattr(args[0], _VALUES)
    with apart():
        if name == _EXCHANGES[0] and out.shape == args[0].shape:
            group = distributed_c10d._resolve_process_group(args[3])  # type: ignore[attr-defined]
            mine = mine.view(group.size(), -1)[group.rank()].repeat(group.size())
        if out.shape == mine.shape:
            setattr(out, _VALUES, mine.clone())
            if name == _EXCHANGES[0] or rest_on_ranks(args[0]):
                setattr(out, _ALIKE, True)


def forget(tensor: Any) -> None:
    """What lies in the memory of a tensor, or of several, is no longer known, for views neither."""
    for one in tensor if isinstance(tensor, list | tuple) else (tensor,):
        constant = getattr(one, "constant", None)
        if constant is not None:  # what PyTorch itself keeps of a small tensor, and of its views
            one.fake_mode.fake_tensor_converter.invalidate_constant_aliases(constant)
        values = getattr(one, _VALUES, None)
        if values is not None:
            delattr(one, _VALUES)
            one.__dict__.pop(_ALIKE, None)
            with suppress(RuntimeError):  # memory of NumPy's stays as it is
                values.untyped_storage().resize_(0)


def is_in_place(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a function of PyTorch writes its first argument, or what is given as `out`."""
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


def _is_own(tensor: Any) -> bool:
    """Whether nothing else looks into the memory of a small tensor of which nobody has values yet."""
    if type(tensor) is not FakeTensor or tensor.requires_grad or not is_small(tensor) or hasattr(tensor, _VALUES):
        return False
    # A view that was made before would be written to without anybody knowing. Who asks has the memory, too.
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) == 2


def is_small(tensor: Any, most: int = MOST_KNOWN) -> bool:
    """Whether values of a tensor would be kept, of real numbers so many; of anything else they are."""
    if not isinstance(tensor, Tensor):
        return True
    return tensor.numel() <= (most if tensor.is_floating_point() else MOST_KNOWN)


def _with_values(given: Any) -> Any:
    """Arguments with the values of their tensors in place of these; `_UNKNOWN` where one has none."""
    if isinstance(given, Tensor):
        if isinstance(given, FakeTensor):
            values = getattr(given, _VALUES, None)
            known = values is not None and (values.numel() == 0 or values.untyped_storage().nbytes() > 0)
            return values if known else _UNKNOWN
        return given if type(given) is Tensor and not given.requires_grad and is_small(given) else _UNKNOWN
    if isinstance(given, dict):
        made = {key: _with_values(value) for key, value in given.items()}
        return _UNKNOWN if any(value is _UNKNOWN for value in made.values()) else made
    if type(given) in (tuple, list):
        parts = [_with_values(value) for value in given]
        return _UNKNOWN if any(part is _UNKNOWN for part in parts) else type(given)(parts)
    if type(given) is slice:
        bounds = _with_values((given.start, given.stop, given.step))
        return _UNKNOWN if bounds is _UNKNOWN else slice(*bounds)
    return _UNKNOWN if isinstance(given, Guess) else given


@contextmanager
def knowing_values() -> Iterator[None]:
    """In the context, values that are known are followed, and answered where they are asked for."""
    entered = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    if any(isinstance(mode, _Following) for mode in entered):
        yield  # what is written in place is followed once
        return
    with _Following():
        yield


class _Following(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self._guessed: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = read(func, args, kwargs)
        if known is not None:
            return known[0]
        if func is Tensor.__iter__ and is_known(args[0]):
            return iter(self.__torch_function__(torch.unbind, types, args, kwargs))
        if func is torch.tensor:
            args = (plain(args[0]), *args[1:])
        elif func in _INDEXING:
            args = (args[0], _positions(args[1]), *args[2:])
        call = ctc_loss if func is torch.nn.functional.ctc_loss else func
        try:
            out = call(*args, **kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException):
            return computed(func, args, kwargs)
        if func in _EQUALS and _equals_none(func, args, out):
            where = _asking()
            if where not in self._guessed:
                self._guessed.add(where)
                tell([f"{where} compares numbers that have no values with {args[1]}: they are taken to be others"])
            return out
        if func not in _RANDOM:
            follow(func, args, kwargs, out)
        elif func.__name__.endswith("_"):
            forget(args[0])
        return out


def _asking() -> str:
    """`file.py:line` of the innermost code that is neither PyTorch's nor of here."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, __file__, "<")):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame is not None else "PyTorch"


_EQUALS: dict[Any, bool] = {
    torch.eq: False, Tensor.eq: False, Tensor.__eq__: False, torch.ne: True, Tensor.ne: True, Tensor.__ne__: True,
}  # fmt: skip


def _equals_none(func: Any, args: tuple[Any, ...], out: Any) -> bool:
    """Numbers that nobody has are taken to be other ones than a number that they are compared with.

    What a model asks so is whether an image is nothing but padding, or a mask hides what it has not got.
    """
    numbers, plain_numbers = args[0], [arg for arg in args[1:] if isinstance(arg, int | float)]
    unknown = isinstance(numbers, FakeTensor) and numbers.is_floating_point() and not is_known(numbers)
    if not unknown or not plain_numbers or not isinstance(out, FakeTensor):
        return False
    with apart():  # one element, however large the tensor
        setattr(out, _VALUES, torch.tensor(_EQUALS[func]).expand(out.shape))
    return True


_RANDOM = (
    torch.rand, torch.randint, torch.randperm, torch.normal, torch.bernoulli, torch.multinomial,
    torch.nn.functional.dropout, Tensor.bernoulli, Tensor.multinomial, Tensor.bernoulli_, Tensor.random_,
    Tensor.uniform_, Tensor.normal_, Tensor.exponential_,
)  # fmt: skip
"""What a model draws is not known: a layer that it leaves out by chance would be left out of every step."""
_SELECTING = (torch.masked_select, Tensor.masked_select)
_INDEXING = (Tensor.__getitem__, Tensor.__setitem__)


def _positions(index: Any) -> Any:
    """An index whose masks are the positions where they are true, and bounds numbers, as far as they are known."""
    parts = index if isinstance(index, tuple) else (index,)
    made: list[Any] = []
    for part in parts:
        if isinstance(part, slice):
            made.append(slice(*map(_number, (part.start, part.stop, part.step))))
        elif isinstance(part, FakeTensor) and part.dtype == torch.bool and part.dim() and is_known(part):
            with apart():
                places = real(part).nonzero(as_tuple=True)
            made += [_fake(place, part) for place in places]
        else:
            made.append(part)
    return tuple(made) if isinstance(index, tuple) or len(made) != 1 else made[0]


def placed(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of `tensor[index] = value`, known masks as positions, of which its gradient has the length."""
    return (args[0], _positions(args[1]), args[2])


def _number(given: Any) -> Any:
    """The number of a known tensor of one element, the numbers of a known vector; anything else as it is."""
    known = real(given)
    if known is given or known.dim() > 1:
        return given
    with apart():
        return known.tolist()


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """Connectionist temporal classification, by lengths that are numbers where they are known.

    There is a shape rule for such. Of the mean PyTorch's own code reads from memory what it divides by
    (ATen/native/LossCTC.cpp), so here the losses are divided as it divides them.
    """
    heard, spoken = _number(input_lengths), _number(target_lengths)
    if isinstance(heard, Tensor) or isinstance(spoken, Tensor):
        return torch.nn.functional.ctc_loss(
            log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity
        )
    each = "none" if reduction == "mean" else reduction
    losses = torch.nn.functional.ctc_loss(log_probs, targets, heard, spoken, blank, each, zero_infinity)
    return (losses / losses.new_tensor(spoken).clamp_min(1)).mean() if reduction == "mean" else losses


def plain(data: Any) -> Any:
    """What `torch.tensor` is given: numbers in place of known tensors; where one is not known, a tensor of all."""
    made = tree_map_only(Tensor, _number, _beside_numbers(data))
    unknown = isinstance(made, list | tuple) and any(isinstance(part, FakeTensor) for part in tree_leaves(made))
    return _stacked(made) if unknown else made


def _beside_numbers(data: Any) -> Any:
    """Nested lists in which a tensor of one element is a number, whatever its dimensions, as in PyTorch."""
    if isinstance(data, list | tuple):
        return [_one_number(part) for part in data]
    return data


def _one_number(part: Any) -> Any:
    if not isinstance(part, Tensor) or part.numel() != 1:
        return _beside_numbers(part)
    if not is_known(part):
        return part.reshape(())
    with apart():
        return real(part).item()


def _stacked(parts: Any) -> Tensor:
    if isinstance(parts, list | tuple):
        return torch.stack([_stacked(part) for part in parts])
    return parts.reshape(()) if isinstance(parts, Tensor) else torch.tensor(parts)


def computed(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operator makes whose shape depends on values, if those are known.

    Raises:
        DynamicOutputShapeException: they are not.
        DataDependentOutputException: the same.
    """
    given: Any = _with_values((args, kwargs))
    if given is _UNKNOWN:
        # The tensor itself is not known, but how it is to be cut: its second argument and later ones.
        if func in _INDEXING:
            return func(args[0], _positions(args[1]), *args[2:])
        if func in _SELECTING and len(args) == 2 and is_known(args[1]):
            # As a GPU does it: an index by the mask, each of the two repeated to the other's shape.
            with apart():
                mask = real(args[1]) & torch.ones((), dtype=torch.bool).expand(args[0].shape)
                places = mask.nonzero(as_tuple=True)
            return args[0].expand(mask.shape)[tuple(_fake(place, args[1]) for place in places)]
        cuts = tree_map_only(FakeTensor, _number, (args[1:], kwargs))
        return func(args[0], *cuts[0], **cuts[1])
    with apart():
        values = func(*given[0], **given[1])
    like = next(value for value in tree_leaves((args, kwargs)) if isinstance(value, FakeTensor))
    return tree_map_only(Tensor, lambda value: _fake(value, like), values)


def _fake(values: Tensor, like: FakeTensor) -> FakeTensor:
    fake: FakeTensor = like.fake_mode.from_tensor(values)
    know(fake, values)
    return fake

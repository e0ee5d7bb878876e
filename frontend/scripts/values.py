"""What a script reads from a tensor that has no data.

A number that is read (a loss for the log) is answered by one that stands for it: 1. It may be printed, added and
averaged, but not compared, and no tensor is true or false: a script that goes one way or another by it would be
captured going one of them, so it is refused unless the user said which (`deciding`). All values are taken to be
finite: who asks whether one is not a number is told that it is one. What libraries ask of values is answered
in the same way, and not refused.

Values of small tensors on the host: random indices of a data set, schedules, masks, what a file holds. A script
computes with such before it gives a batch to the GPU: `data[i : i + length] for i in torch.randint(...)` would
give empty batches, if each number that is read were 1. So what PyTorch makes on the host of settings alone is
computed as well, and so is what is made of that, as long as it is small; the values are kept beside the fake
tensor. What a communication writes, or what unknown values come into, loses them.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from echograph.errors import CaptureError
from echograph.frontend.scripts.adapter import patched

_TORCH = str(Path(torch.__file__).parent)
_OWN = str(Path(__file__).parent)
_PYTHON = str(Path(runpy.__file__).parent)
# Frameworks that are also run from a checkout, beside which scripts lie.
_FRAMEWORKS = ("megatron.",)
# Where PyTorch itself passes a question to a tensor on.
_THROUGH = ("torch/_tensor.py", "torch/_ops.py", "torch/overrides.py", "torch/utils/_device.py",
            "torch/_subclasses/fake_tensor.py", "torch/utils/_python_dispatch.py")  # fmt: skip

NoteTaker = Callable[[str], None]

_DECIDED: ContextVar[Mapping[str, bool]] = ContextVar("decided")
_FINITE = "_echograph_finite"


def answer(tensor: Tensor, note: NoteTaker) -> Any:
    """The number that stands for the one element of a tensor.

    Args:
        tensor: of one element.
        note: is told which line of the script read it.
    """
    known: bool | None = getattr(tensor, _FINITE, None)
    if known is not None:
        return known
    constant = getattr(tensor, "constant", None)
    if constant is not None and not tensor.is_floating_point():
        # Numbers that follow from a script's own are known: how many tokens an expert takes, say.
        with unset_fake_temporarily():
            return constant.item()
    line = caller()
    if line is not None:
        note(f"{line} reads a tensor's value, which a capture does not have: 1 stands for it")
    if tensor.dtype == torch.bool:
        return True
    return StandInNumber(1.0) if tensor.is_floating_point() else 1


@contextmanager
def deciding(lines: Mapping[str, bool]) -> Iterator[None]:
    """In the context, a script goes the way that was chosen where values decide: `file.py:line` -> which."""
    token = _DECIDED.set(lines)
    try:
        yield
    finally:
        _DECIDED.reset(token)


def _decided(where: str, what: str) -> bool:
    """Which way the script goes at a line.

    Raises:
        CaptureError: nobody said.
    """
    chosen = _DECIDED.get({}).get(where)
    if chosen is None:
        raise CaptureError(
            f"{where}: {what} decides what the script does, and a capture has no values: decide on steps or "
            f"settings instead, or say which way it goes by --decide {where}=yes (or =no)"
        )
    return chosen


def caller() -> str | None:
    """`file:line` of the script, where it was its own code that asked a tensor; None where a library did."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_OWN, "<")) and not name.endswith(_THROUGH):
            module = str(frame.f_globals.get("__name__", ""))
            library = name.startswith(_TORCH) or "site-packages" in name or module.startswith(_FRAMEWORKS)
            return None if library else f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def line_of_script() -> str:
    """`file:line` of the innermost code of the script itself; "" where it is all of libraries."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_OWN, _TORCH, _PYTHON, "<")) and "site-packages" not in name:
            return f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


class StandInNumber(float):
    """A number that stands for one that is not known."""

    def _unknown(self, other: Any) -> Any:
        del other
        where = caller()
        return NotImplemented if where is None else _decided(where, "a comparison with a tensor's value")


def _arithmetic(name: str) -> Any:
    plain = getattr(float, name)

    def operate(self: StandInNumber, *others: Any) -> Any:
        made = plain(self, *others)
        return StandInNumber(made) if isinstance(made, float) else made

    return operate


for _name in ("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__",
              "__neg__", "__abs__"):  # fmt: skip
    setattr(StandInNumber, _name, _arithmetic(_name))


def _compare(name: str) -> Any:
    plain = getattr(float, name)

    def compare(self: StandInNumber, other: Any) -> Any:
        made = self._unknown(other)
        return plain(self, other) if made is NotImplemented else made

    return compare


for _name in ("__lt__", "__le__", "__gt__", "__ge__"):
    setattr(StandInNumber, _name, _compare(_name))


def _item(note: NoteTaker, tensor: Tensor) -> Any:
    return answer(tensor, note)


def _list(note: NoteTaker, tensor: Tensor) -> Any:
    return [_list(note, row) for row in tensor] if tensor.dim() else answer(tensor, note)


def _array(note: NoteTaker, tensor: Tensor, *_: Any, **__: Any) -> Any:
    line = caller()
    if line is not None:
        note(f"{line} reads a tensor's values as an array, which a capture does not have: 1 stands for each")
    with _disable_current_modes():
        return torch.ones((), dtype=tensor.dtype).expand(tensor.shape).numpy().copy()


def _true(note: NoteTaker, tensor: Tensor) -> bool:
    where = caller()
    if where is None or hasattr(tensor, _FINITE):
        return bool(answer(tensor, note))
    return _decided(where, "whether a tensor is true")


def _format(note: NoteTaker, tensor: Tensor, form: str) -> str:
    return format(answer(tensor, note), form) if tensor.dim() == 0 else object.__format__(tensor, form)


QUESTIONS: dict[Any, Callable[..., Any]] = {
    Tensor.item: _item,
    Tensor.tolist: _list,
    Tensor.numpy: _array,
    Tensor.__array__: _array,
    Tensor.__bool__: _true,
    Tensor.__float__: lambda note, tensor: float(answer(tensor, note)),
    Tensor.__int__: lambda note, tensor: int(answer(tensor, note)),
    Tensor.__format__: _format,
}
"""Methods that read values, and what stands in for each: takes where notes go, and the method's arguments."""

_ASKING_FINITE = {
    **dict.fromkeys((torch.isnan, Tensor.isnan, torch.isinf, Tensor.isinf), False),
    **dict.fromkeys((torch.isfinite, Tensor.isfinite), True),
}
_PASSING = (torch.any, Tensor.any, torch.all, Tensor.all, Tensor.detach, Tensor.cpu, Tensor.to, Tensor.cuda)
_NOT = (Tensor.__invert__, torch.logical_not, Tensor.logical_not)


def keep_finite(func: Any, args: tuple[Any, ...], out: Any) -> None:
    """Marks a tensor that says whether values are finite, or is made of one that does, with what it says."""
    if not isinstance(out, Tensor):
        return
    known = _ASKING_FINITE.get(func)
    if known is None and (func in _PASSING or func in _NOT):
        known = getattr(args[0], _FINITE, None)
        known = (not known) if known is not None and func in _NOT else known
    if known is not None:
        setattr(out, _FINITE, known)


MOST_INTEGERS = 1 << 20
MOST_NUMBERS = 1 << 12
_VALUES = "_echograph_values"
_EVEN = "_echograph_even"
_UNKNOWN = object()
_COUNTING = (torch.histc, Tensor.histc, torch.bincount, Tensor.bincount)
_EXCHANGES = ("_c10d_functional::all_to_all_single", "_c10d_functional::wait_tensor")
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
    with _disable_current_modes():
        return (func(*given[0], **given[1]),)


def follow(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, note: NoteTaker) -> None:
    """Gives what a function of PyTorch made the values that it has, if those of its arguments are known."""
    first = args[0] if args else None
    if func in _COUNTING and isinstance(first, FakeTensor) and not is_known(first):
        note("how many tokens each expert takes is not known: they are taken to be spread evenly")
        _count_evenly(first, out)
        return
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
            if any(hasattr(argument, _EVEN) for argument in args):
                setattr(tensor, _EVEN, True)


def computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a function makes whose shape depends on values, such as `nonzero`; None where these are not known."""
    known: Any = _with_values((args, kwargs))
    if known is _UNKNOWN:
        return None
    with _disable_current_modes():
        made = func(*known[0], **known[1])
    return tree_map(partial(given, lambda part: torch.empty(part.shape, dtype=part.dtype)), made)


def _count_evenly(counted: FakeTensor, out: Any) -> None:
    """How often each of some numbers is there, of which nobody has the values: as often as any other.

    What counts so in a training step are the tokens that each expert takes, whose places decide shapes.
    """
    if isinstance(out, FakeTensor) and out.dim() == 1 and not counted.is_floating_point() and _is_small(out):
        each, more = divmod(counted.numel(), max(1, out.numel()))
        with _disable_current_modes():
            setattr(out, _VALUES, torch.full(out.shape, each, dtype=out.dtype))
            getattr(out, _VALUES)[:more] += 1
        setattr(out, _EVEN, True)


def exchanged(func: Any, args: tuple[Any, ...], out: Any) -> None:
    """Gives what ranks exchange of even counts, or wait for, the values that it has: ranks have the same."""
    name = func._schema.name
    if name not in _EXCHANGES or not isinstance(out, FakeTensor) or not hasattr(args[0], _EVEN):
        return
    mine = getattr(args[0], _VALUES)
    with _disable_current_modes():
        if name == _EXCHANGES[0] and out.shape == args[0].shape:
            group = distributed_c10d._resolve_process_group(args[3])  # type: ignore[attr-defined]
            mine = mine.view(group.size(), -1)[group.rank()].repeat(group.size())
        if out.shape == mine.shape:
            setattr(out, _VALUES, mine.clone())
            setattr(out, _EVEN, True)


def forget(tensor: Any) -> None:
    """What lies in the memory of a tensor, or of several, is no longer known, for views neither."""
    for one in tensor if isinstance(tensor, list | tuple) else (tensor,):
        values = getattr(one, _VALUES, None)
        if values is not None:
            delattr(one, _VALUES)
            with suppress(RuntimeError):  # memory of NumPy's stays as it is
                values.untyped_storage().resize_(0)


def keep(tensor: Tensor, out: Tensor) -> None:
    """What a tensor becomes that is brought elsewhere has its values."""
    known = _with_values(tensor)
    if known is not _UNKNOWN and isinstance(out, FakeTensor) and out.shape == tensor.shape:
        with _disable_current_modes():
            setattr(out, _VALUES, known.to(out.dtype, copy=True))


def given(fake: Callable[[Tensor], Tensor], part: Any) -> Any:
    """Of what a loader gives: a fake tensor for a tensor of the host, with its values if it is small."""
    if type(part) is not Tensor:
        return part
    made = fake(part)
    if _is_small(part):
        setattr(made, _VALUES, part)
    return made


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

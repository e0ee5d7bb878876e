"""What a script reads from a tensor that has no data.

A number that is read (a loss for the log) is answered by one that stands for it: 1. It may be printed, added and
averaged, but the script may not compare it, and no tensor is true or false: a script that goes one way or another
by it would be captured going one of them, so it is refused unless the user said which (`deciding`). All values are
taken to be finite: who asks whether one is not a number is told that it is one. What libraries ask of values is
answered in the same way: an integer that they compare is refused too, anything else is noted.

What the host knows of small tensors (`frontend.pytorch.known_values`) is answered as it is.
"""

from __future__ import annotations

import math
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed import distributed_c10d
from torch.overrides import has_torch_function

from echograph.errors import CaptureError
from echograph.frontend.pytorch.known_values import (
    Guess,
    apart,
    forget,
    is_in_place,
    is_known,
    is_small,
    know,
    real,
)
from echograph.frontend.scripts.adapter import patched, replaced
from echograph.frontend.scripts.assertions import (
    bounded,
    extreme,
    goes_round,
    guessed,
    holds,
    is_kept,
    looks_up,
    writes_back,
)
from echograph.frontend.scripts.found import ALL
from echograph.frontend.scripts.installed import is_of_library, package_of

_TORCH = str(Path(torch.__file__).parent)
_OWN = str(Path(__file__).parent)
_PYTHON = str(Path(runpy.__file__).parent)
# Where PyTorch itself passes a question to a tensor on.
_THROUGH = ("torch/_tensor.py", "torch/_ops.py", "torch/overrides.py", "torch/utils/_device.py",
            "torch/_subclasses/fake_tensor.py", "torch/utils/_python_dispatch.py")  # fmt: skip

NoteTaker = Callable[[str], None]
_NOTE: ContextVar[NoteTaker] = ContextVar("note")
_WARN: ContextVar[NoteTaker] = ContextVar("warn")
_PRINTED: ContextVar[bool] = ContextVar("printed", default=False)

_DECIDED: ContextVar[Mapping[str, bool | int]] = ContextVar("decided")
_ASKED: ContextVar[set[str]] = ContextVar("asked")
_GUESSED: ContextVar[list[str]] = ContextVar("guessed")
_ROUNDS: ContextVar[dict[str, int]] = ContextVar("rounds")
_FINITE = "_echograph_finite"
_COUNTS, _MASK = "_echograph_counts", "_echograph_mask"


def answer(tensor: Tensor, note: NoteTaker) -> Any:
    """The number that stands for an element of a tensor.

    Args:
        tensor: of one element, or of several that are all unknown.
        note: is told which line of the script read it.
    """
    known: bool | None = getattr(tensor, _FINITE, None)
    if known is not None:
        return known
    values = real(tensor)
    if values is not tensor:  # asked below functions of PyTorch: bounds of a slice are
        with apart():
            return values.item()
    constant = getattr(tensor, "constant", None)
    if constant is not None and not tensor.is_floating_point():
        # Numbers that follow from a script's own are known: how many tokens an expert takes, say.
        with unset_fake_temporarily():
            return constant.item()
    line = caller()
    if line is None and tensor.is_floating_point():
        return StandInNumber(1.0)
    if line is not None and not tensor.is_floating_point() and type(said := _chosen(line)) is int:
        return said
    if not _PRINTED.get():
        note(f"{line or asked()} reads a tensor's value, which a capture does not have: 1 stands for it")
    if line is None and tensor.dtype == torch.bool:
        return True
    if tensor.is_floating_point():
        return StandInNumber(1.0, line or "")
    return StandInInteger(1, line or "", counts=hasattr(tensor, _COUNTS))


def _nobody(_: str) -> None:
    """Takes no notes."""


@contextmanager
def deciding(
    lines: Mapping[str, bool | int],
    note: NoteTaker = _nobody,
    asked: set[str] | None = None,
    warn: NoteTaker = _nobody,
) -> Iterator[None]:
    """In the context, a script goes the way that was chosen where values decide: `file.py:line` -> which.

    Where they decide how many elements an operator finds, that is. One of `file.py` is of all its lines that
    have none of their own. What a library decides is noted; `asked` gets those of the lines that were asked for,
    `warn` what is as long as a value says.
    """
    tokens = _DECIDED.set(lines), _NOTE.set(note), _ASKED.set(set() if asked is None else asked)
    guessed, warned, rounds = _GUESSED.set([]), _WARN.set(warn), _ROUNDS.set({})
    try:
        yield
    finally:
        _ROUNDS.reset(rounds)
        _GUESSED.reset(guessed)
        _WARN.reset(warned)
        _DECIDED.reset(tokens[0])
        _NOTE.reset(tokens[1])
        _ASKED.reset(tokens[2])


def printed(original: Callable[..., Any]) -> Callable[..., Any]:
    """A function that reads values to print them: what it compares decides what is printed, and no work."""

    @wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        token = _PRINTED.set(True)
        try:
            return original(*args, **kwargs)
        finally:
            _PRINTED.reset(token)

    return run


def _decided(where: str, what: str) -> bool:
    """Which way the script goes at a line: as the user said, else as it goes on (`assertions`).

    Raises:
        CaptureError: nobody said, and it goes on either way.
    """
    chosen = _chosen(where)
    if not isinstance(chosen, bool):
        chosen = _going_on()
    if chosen is None:
        raise CaptureError(
            f"{where}: {what} decides what the script does, and a capture has no values: decide on steps or "
            f"settings instead, or say which way it goes by --decide {where}=yes (or =no)"
        )
    return chosen


def _loops(otherwise: bool) -> bool | None:
    """Whether a loop goes round, of which values say how often: as often as the user said.

    Args:
        otherwise: what stands for the value; a loop that it ends at once is no question.

    Returns:
        What the value is; None where it is no loop's, or ends it.

    Raises:
        CaptureError: nobody said, and the loop would have no end.
    """
    frame = None if _PRINTED.get() else _asking()
    again = None if frame is None else goes_round(frame)
    where = caller() or asked()
    said = _chosen(where) if again is not None else None
    if again is not None and type(said) is int:
        rounds = _ROUNDS.get({})
        rounds[where] = rounds.get(where, 0) + 1 if rounds.get(where, 0) < said else 0
        return again if rounds[where] else not again
    if again is None or again != otherwise or said is not None:
        return None
    raise CaptureError(
        f"{where}: a tensor's value decides how often a loop goes round, which a capture does not have: say how "
        f"often by --decide {where}=4 (or another number), or take a fixed number of steps"
    )


def _going_on() -> bool | None:
    """What is true where whoever asks would raise or print otherwise; None where nobody would."""
    frame = None if _PRINTED.get() else _asking()
    required = None if frame is None else holds(frame)
    if required is not None and frame is not None and guessed(frame):
        way = "yes" if required else "no"
        _WARN.get(_nobody)(
            f"{asked()} leaves a loop, or a round of it, or fills a list by values, which a capture does not "
            f"have: the loop goes on, and the list is filled (--decide {asked()}={way}; else say the other)"
        )
    elif required is not None:
        _NOTE.get(_nobody)(
            f"{asked()} raises, prints or counts by values, which a capture does not have, or keeps the best of "
            "them: it is taken to do none of it, and what comes is better"
        )
    return required


def _chosen(where: str) -> bool | int | None:
    lines = _DECIDED.get({})
    for said in (where, where.partition(":")[0]):
        if said in lines:
            _ASKED.get().add(said)
            return lines[said]
    return None


def any_guessed() -> bool:
    """Whether any number stands for an integer by now."""
    return bool(_GUESSED.get([]))


def decided_size(operator: str, masks: Sequence[Tensor], note: NoteTaker, warn: NoteTaker) -> int:
    """How many elements an operator finds, of which values say how many.

    What a mask chooses (`x[mask]`, `mask.nonzero()`), or what is not suppressed (`nms`), is all of it, unless the
    user says otherwise: valid pixels, points within a box, tokens that count are most. Where the mask says whether
    the largest of several is a certain one (`chosen == expert`), each of them is as often as any other. What is
    looked for otherwise (`nonzero` of numbers, `unique`) may be a few of many.

    Args:
        operator: by name, for the line that asks.
        masks: by which elements are chosen, or they themselves; none: they are looked for.
        note: is told where it does not matter how many: they are written to where they are read.
        warn: is told where all are taken of what a mask chooses.

    Raises:
        CaptureError: nobody said.
    """
    where = caller() or asked()
    chosen = _chosen(where)
    if chosen is None and (frame := _asking()) is not None and writes_back(frame):
        note(f"{where} writes elements to where it reads them, which values choose: all are taken to be chosen")
        return ALL
    among = next((getattr(mask, _ONE_OF) for mask in masks if hasattr(mask, _ONE_OF)), 0)
    if chosen is None and among:
        share = max(1, masks[0].numel() // among)
        warn(
            f"{where} takes what one of {among} is chosen for, which values decide: all are taken to be chosen as "
            f"often, {share:,} times of {masks[0].numel():,}; --decide {where}=COUNT says how many"
        )
        return share
    if chosen is None and masks:
        warn(
            f"{where} takes what a mask chooses, which values decide: all {masks[0].numel():,} elements of it are "
            f"taken; --decide {where}=COUNT says how many"
        )
        return ALL
    if chosen is None or isinstance(chosen, bool):
        raise CaptureError(
            f"{where}: how many elements '{operator}' finds depends on the values of a tensor, which a capture "
            f"does not have: say how many by --decide {where}=64 (or another number), or leave it out"
        )
    return chosen


def caller() -> str | None:
    """`file:line` of the script, where it was its own code that asked a tensor; None where a library did.

    None, too, of what only prints.
    """
    frame = None if _PRINTED.get() else _asking()
    if frame is None:
        return None
    name = frame.f_code.co_filename
    library = name.startswith(_TORCH) or bool(package_of(name)) or is_of_library(name)
    return None if library else f"{Path(name).name}:{frame.f_lineno}"


def _asking() -> FrameType | None:
    """The innermost code that asks a tensor: neither of here, nor PyTorch's way to it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_OWN, "<")) and not name.endswith(_THROUGH):
            return frame
        frame = frame.f_back
    return None


def line_of_script() -> str:
    """`file:line` of the innermost code of the script itself; "" where it is all of libraries."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_OWN, _TORCH, _PYTHON, "<")) and not package_of(name):
            return f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def asked() -> str:
    """`file:line` of the innermost code that is neither PyTorch's nor of here; "PyTorch" where there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_OWN, _TORCH, "<")):
            return f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return "PyTorch"


class StandInNumber(Guess, float):
    """A number that stands for one that is not known, other than 0.

    Attributes:
        where: `file:line` that read it from a tensor, or what it was computed from; "": not the script's.
    """

    where: str

    def __new__(cls, value: float, where: str = "") -> StandInNumber:
        """A number in place of one that a line read."""
        made = super().__new__(cls, value)
        made.where = where
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (float(self), self.where)


class StandInInteger(Guess, int):
    """The same of integers, and of what is true or false; these may be 0."""

    where: str
    counts: bool

    def __new__(cls, value: int, where: str = "", *, counts: bool = False) -> StandInInteger:
        """A number in place of one that a line read; of how many a mask chooses, which are some."""
        made = super().__new__(cls, value)
        made.where, made.counts = where, counts
        _GUESSED.get([]).append(where)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (int(self), self.where)

    def told(self) -> str:
        """Who read it, and how the user may say what it is."""
        read = f"{self.where} reads it" if self.where else "a library reads it"
        remedy = f"; --decide {self.where}=NUMBER says what it is" if self.where else ""
        return f"{read}, and a capture does not have it: 1 stands for it{remedy}"

    def __bool__(self) -> bool:
        if self.counts and _chosen(caller() or asked()) is None:
            _tell_some()
            return True
        where = caller()
        if where is None:
            return _going_on() is not False
        return _decided(where, "whether a tensor's value is true")


def _arithmetic(kind: type, name: str) -> Any:
    plain = getattr(kind, name)

    def operate(self: Any, *others: Any) -> Any:
        if others and isinstance(others[0], list | tuple):
            _WARN.get(_nobody)(
                f"{line_of_script()} repeats a list as often as a tensor's value says: {self.told()}"
            )
        made = plain(self, *others)
        if isinstance(made, float):
            return StandInNumber(made, self.where)
        counts = (
            getattr(self, "counts", False)
            and name in ("__add__", "__radd__")
            and not any(map(_is_less_than_none, others))
        )
        return StandInInteger(made, self.where, counts=counts) if type(made) is int else made

    return operate


_SOME = {("gt", 0): True, ("ne", 0): True, ("ge", 1): True, ("eq", 0): False, ("lt", 1): False, ("le", 0): False}
"""What a comparison says of how many a mask chooses, which are some, as many as there are or fewer."""


def _tell_some() -> None:
    _NOTE.get(_nobody)(f"{asked()} asks whether a mask chooses any elements, which values decide: it does")


def _is_less_than_none(given: Any) -> bool:
    return not isinstance(given, int) or (not isinstance(given, Guess) and given < 0)


_ANOTHER = "{} asks whether a number is 0, which a capture does not have: it is another"


def _is_zero(given: Any) -> bool:
    return type(given) in (int, float) and not given


def _compare(kind: type, name: str) -> Any:
    plain = getattr(kind, name)

    def compare(self: Any, other: Any) -> Any:
        where = caller()
        # A number is itself, and finite.
        if _PRINTED.get() or other is self or (isinstance(other, float) and not math.isfinite(other)):
            return plain(self, other)
        if kind is float and name in ("__eq__", "__ne__") and _is_zero(other) and _going_on() is None:
            _NOTE.get(_nobody)(_ANOTHER.format(asked()))
            return plain(self, other)
        some = _SOME.get((name.strip("_"), other)) if type(other) is int else None
        if some is not None and getattr(self, "counts", False) and _chosen(where or asked()) is None:
            _tell_some()
            return some
        frame = _asking()
        if kind is int and name == "__eq__" and frame is not None and looks_up(frame):
            return plain(self, other)
        if frame is not None and (of := extreme(frame)):
            # A number that stands for one is the largest, or the smallest: what comes out stands for one as well.
            return name in ("__gt__", "__ge__") if of == "max" else name in ("__lt__", "__le__")
        if kind is int and frame is not None and bounded(frame) and _chosen(where or asked()) is None:
            _NOTE.get(_nobody)(
                f"{asked()} holds an integer that a capture does not have against bounds: it is within"
            )
            return True
        if (again := _loops(bool(plain(self, other)))) is not None:
            return again
        if where is None and kind is float:
            required = _going_on()
            if required is not None:
                return required
            _NOTE.get(_nobody)(
                f"{asked()} compares a tensor's value, which a capture does not have: 1 stands for it"
            )
            return plain(self, other)
        return _decided(where or asked(), "a comparison with a tensor's value")

    return compare


_ARITHMETIC = ("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__",
               "__floordiv__", "__rfloordiv__", "__mod__", "__rmod__", "__pow__", "__rpow__", "__neg__", "__pos__",
               "__abs__", "__round__", "__floor__", "__ceil__", "__trunc__")  # fmt: skip
for _kind, _plain in ((StandInNumber, float), (StandInInteger, int)):
    for _name in _ARITHMETIC:
        setattr(_kind, _name, _arithmetic(_plain, _name))
    for _name in ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__"):
        setattr(_kind, _name, _compare(_plain, _name))
    _kind.__hash__ = _plain.__hash__  # type: ignore[method-assign]


def _item(note: NoteTaker, tensor: Tensor) -> Any:
    return answer(tensor, note)


def _list(note: NoteTaker, tensor: Tensor) -> Any:
    """Numbers in lists as deep as a tensor, one for all elements, which nobody knows apart."""
    constant = getattr(tensor, "constant", None)
    if constant is not None and not tensor.is_floating_point():
        with unset_fake_temporarily():
            return constant.tolist()
    return _nested(tensor.shape, answer(tensor, note) if tensor.numel() else None)


def _nested(sizes: Sequence[int], one: Any) -> Any:
    return [_nested(sizes[1:], one) for _ in range(sizes[0])] if sizes else one


def _array(note: NoteTaker, tensor: Tensor, *_: Any, **__: Any) -> Any:
    line = caller()
    if line is not None:
        note(f"{line} reads a tensor's values as an array, which a capture does not have: 1 stands for each")
    with apart():
        return torch.ones((), dtype=tensor.dtype).expand(tensor.shape).numpy().copy()


def _true(note: NoteTaker, tensor: Tensor) -> bool:
    where = caller()
    if hasattr(tensor, _FINITE):
        return bool(answer(tensor, note))
    if hasattr(tensor, _COUNTS) and not is_known(tensor) and _chosen(where or asked()) is None:
        _tell_some()
        return True
    if not is_known(tensor) and (again := _loops(True)) is not None:
        return again
    if where is None:
        required = None if is_known(tensor) else _going_on()
        return bool(answer(tensor, note)) if required is None else required
    return _decided(where, "whether a tensor is true")


def _format(note: NoteTaker, tensor: Tensor, form: str) -> str:
    return format(answer(tensor, note), form) if tensor.dim() == 0 else object.__format__(tensor, form)


def _equal(_: NoteTaker, tensor: Tensor, other: Any, *__: Any) -> bool:
    """Whether two tensors are the same: those of other shapes are not, and one is as itself."""
    if tensor is other or not isinstance(other, Tensor) or tensor.shape != other.shape:
        return tensor is other
    return _decided(asked(), "whether tensors are equal")


def _close(_: NoteTaker, tensor: Tensor, other: Tensor, *__: Any) -> bool:
    """Whether two tensors are nearly the same, as one is as itself."""
    return tensor is other or _decided(asked(), "whether tensors are close")


QUESTIONS: dict[Any, Callable[..., Any]] = {
    torch.equal: _equal,
    Tensor.equal: _equal,
    torch.allclose: _close,
    Tensor.allclose: _close,
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
_PASSING = (
    torch.any, Tensor.any, torch.all, Tensor.all, Tensor.detach, Tensor.cpu, Tensor.to, Tensor.cuda,
    Tensor.__getitem__, Tensor.view, Tensor.reshape, Tensor.flatten,
)  # fmt: skip
_NOT = (Tensor.__invert__, torch.logical_not, Tensor.logical_not)
_EITHER = (torch.logical_or, Tensor.logical_or, torch.bitwise_or, Tensor.bitwise_or, Tensor.__or__)
_BOTH = (torch.logical_and, Tensor.logical_and, torch.bitwise_and, Tensor.bitwise_and, Tensor.__and__)
_COUNTING = (torch.sum, Tensor.sum, torch.count_nonzero, Tensor.count_nonzero)
# A value that is no number is unequal to itself.
_ITSELF = {
    **dict.fromkeys((torch.ne, Tensor.ne, Tensor.__ne__), False),
    **dict.fromkeys((torch.eq, Tensor.eq, Tensor.__eq__), True),
}

_WITH_ZERO = {
    **dict.fromkeys((torch.eq, Tensor.eq, Tensor.__eq__), False),
    **dict.fromkeys((torch.ne, Tensor.ne, Tensor.__ne__), True),
}


def _is_no_zero(args: tuple[Any, ...], out: Tensor) -> bool:
    """Whether 0 is compared with a real number that nobody has, which is then another, as where it is read."""
    one = args[0]
    if out.dim() or len(args) < 2 or not _is_zero(args[1]) or not isinstance(one, FakeTensor):
        return False
    frame = _asking()
    if is_known(one) or not one.is_floating_point() or (frame is not None and holds(frame) is not None):
        return False
    _NOTE.get(_nobody)(_ANOTHER.format(asked()))
    return True


_CHOOSING = {
    **dict.fromkeys((Tensor.gt, Tensor.__gt__), "max"), **dict.fromkeys((Tensor.lt, Tensor.__lt__), "min"),
}  # fmt: skip


_CASTING = (
    Tensor.float, Tensor.double, Tensor.half, Tensor.long, Tensor.int, Tensor.to, Tensor.type, Tensor.cpu,
    Tensor.cuda, Tensor.detach,
)  # fmt: skip
_COMPARING = {
    getattr(owner, name): name.strip("_")
    for owner in (torch, Tensor)
    for name in ("gt", "ge", "lt", "le", "eq", "ne", "__gt__", "__ge__", "__lt__", "__le__", "__eq__", "__ne__")
    if hasattr(owner, name)
}


def _count(func: Any, args: tuple[Any, ...], out: Tensor) -> bool | None:
    """Marks how many a mask chooses, and what casts one; gives what a comparison says of whether that is any."""
    one = args[0] if args and isinstance(args[0], FakeTensor) else None
    if one is None or not isinstance(out, FakeTensor) or out is one:
        return None
    if func in _COMPARING and hasattr(one, _COUNTS) and len(args) == 2 and type(args[1]) is int:
        some = _SOME.get((_COMPARING[func], args[1]))
        if some is not None and not is_known(one) and _chosen(caller() or asked()) is None:
            _tell_some()
            return some
    elif func in _CASTING:
        for mark in (_COUNTS, _MASK):
            if hasattr(one, mark):
                setattr(out, mark, True)
        if one.dtype == torch.bool:
            setattr(out, _MASK, True)
    elif func in _COUNTING and not out.dim() and (one.dtype == torch.bool or hasattr(one, _MASK)):
        setattr(out, _COUNTS, True)
    return None


def _ordered(func: Any, args: tuple[Any, ...], out: Tensor) -> bool | None:
    """What a comparison of one number says that `max` or `min` chooses by, or that keeps the best of them."""
    frame = None if out.dim() or func not in _COMPARING else _asking()
    if frame is None or not any(isinstance(one, FakeTensor) and not is_known(one) for one in args[:2]):
        return None
    if func in _CHOOSING and (of := extreme(frame)):
        return of == _CHOOSING[func]  # as numbers that stand for one: the tensor is what `max` and `min` choose
    return _going_on() if is_kept(frame) else None


_ONE_OF = "_echograph_one_of"
"""Of indices of the largest of several, and of masks that say where it is a certain one: how many these are."""
_LARGEST = (torch.topk, Tensor.topk, torch.max, Tensor.max, torch.argmax, Tensor.argmax)
_RESHAPING = (
    Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten, Tensor.squeeze, torch.squeeze,
    Tensor.unsqueeze, torch.unsqueeze, Tensor.permute, torch.permute, Tensor.transpose, torch.transpose, Tensor.t,
    Tensor.__getitem__, Tensor.bool, Tensor.detach, Tensor.clone, Tensor.contiguous, Tensor.to, Tensor.cuda,
    Tensor.cpu, Tensor.long, Tensor.int, Tensor.unbind, torch.unbind,
)  # fmt: skip


def _keep_one_of(func: Any, args: tuple[Any, ...], out: Any) -> None:
    """Marks indices of the largest of several (`scores.topk(2)`), and where these are one of them."""
    one = args[0] if args and isinstance(args[0], FakeTensor) else None
    if one is None or is_known(one):
        return
    if func in _LARGEST:
        made = out if isinstance(out, Tensor) else out[1]
        if made.is_floating_point() or not made.numel() or not one.dim():
            return
        sizes = zip(one.shape, made.shape, strict=False)
        cut = [size for size, left in sizes if size != left] if made.dim() == one.dim() else []
        count = cut[0] if cut else one.shape[-1] if made.dim() == one.dim() else one.numel() // made.numel()
        setattr(made, _ONE_OF, count)
    elif func is torch.nn.functional.one_hot:
        setattr(out, _ONE_OF, out.shape[-1])
    elif hasattr(one, _ONE_OF) and (func in _RESHAPING or _COMPARING.get(func) == "eq"):
        for made in out if isinstance(out, tuple | list) else (out,):
            if isinstance(made, FakeTensor) and made is not one:
                setattr(made, _ONE_OF, getattr(one, _ONE_OF))


def keep_finite(func: Any, args: tuple[Any, ...], out: Any) -> None:
    """Marks a tensor that says whether values are finite, or is made of one that does, with what it says.

    A small one has it as values that are known, so that it is known what is made of these in any other way.
    """
    _keep_one_of(func, args, out)
    if not isinstance(out, Tensor):
        return
    known = _ASKING_FINITE.get(func)
    if func in _ITSELF and len(args) == 2 and args[0] is args[1]:
        known = _ITSELF[func]
    elif func in _WITH_ZERO and _is_no_zero(args, out):
        known = _WITH_ZERO[func]
    elif (said := _ordered(func, args, out)) is not None or (said := _count(func, args, out)) is not None:
        known = said
    elif func in _EITHER or func in _BOTH:
        told = [getattr(part, _FINITE, None) for part in args[:2]]
        known = None if None in told else (any if func in _EITHER else all)(told)
    elif known is None and (func in _PASSING or func in _NOT):
        known = getattr(args[0], _FINITE, None)
        known = (not known) if known is not None and func in _NOT else known
    elif known is None and hasattr(out, _FINITE) and is_in_place(func, {}):
        delattr(out, _FINITE)  # other values are written there, and known, or nobody has them
    elif known is None and func in _COUNTING and not out.dim() and hasattr(args[0], _FINITE):
        _know_all(out, args[0].numel() * getattr(args[0], _FINITE))
    if known is None or (isinstance(out, FakeTensor) and is_known(out)):
        return
    setattr(out, _FINITE, known)
    _know_all(out, known)


def _know_all(out: Tensor, value: int) -> None:
    """All values of a small tensor are one that is known."""
    if isinstance(out, FakeTensor) and is_small(out):
        with apart():
            know(out, torch.full(out.shape, value, dtype=out.dtype))


class _KindOfGenerator(type(torch.Generator)):  # type: ignore[misc]
    def __instancecheck__(cls, given: object) -> bool:
        return type.__instancecheck__(torch._C.Generator, given)


class HostGenerator(torch.Generator, metaclass=_KindOfGenerator):
    """A generator whose state ranks tell each other: what came back has no values, and it is what it was.

    One of a GPU draws as one of the host does.
    """

    def __new__(cls, device: Any = "cpu") -> HostGenerator:
        """Of whichever device."""
        del device
        return super().__new__(cls)

    def set_state(self, new_state: Tensor) -> HostGenerator:
        """Takes a state that has values; a generator that ranks share is taken to be alike on all."""
        if not isinstance(new_state, FakeTensor):
            super().set_state(new_state)
        return self


def _with_a_state(original: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    return lambda state: None if isinstance(state, FakeTensor) else original(state)


def installed() -> Iterator[AbstractContextManager[None]]:
    """In the contexts, arrays of NumPy give their values, and what a communication is given is forgotten.

    Generators of random numbers take no state without values.
    """
    yield patched(torch, "from_numpy", _from_array)
    yield patched(FakeTensor, "tolist", _at_once)
    yield replaced(torch, "Generator", HostGenerator)
    for owner in (torch, torch.random):
        yield patched(owner, "set_rng_state", _with_a_state)
    for name in ("_check_single_tensor", "_check_tensor_list"):
        yield patched(distributed_c10d, name, _checked)


def _from_array(original: Callable[..., Any]) -> Callable[..., Any]:
    def make(array: Any) -> Tensor:
        made: Tensor = original(array)
        if isinstance(made, FakeTensor):
            with apart():
                know(made, original(array))
        return made

    return make


def _at_once(original: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """`tolist` of a fake tensor, which would ask for each element, as the one question of other tensors."""
    return lambda tensor: Tensor.tolist(tensor) if has_torch_function((tensor,)) else original(tensor)


def _checked(original: Callable[..., Any]) -> Callable[..., Any]:
    def check(given: Any, *args: Any, **kwargs: Any) -> Any:
        forget(given)
        return original(given, *args, **kwargs)

    return check

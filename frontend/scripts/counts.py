"""Integers that a script makes of values that nobody has, followed to where they become sizes.

`int(labels.max()) + 1` is a plain integer in Python, whatever it was made of, and `range` takes what it is given.
So calls of these two in the script's own files are compiled as calls that keep a number that stands for one what
it is, and PyTorch's functions are looked at for it. A size or a bound of a loop that is such a number is a
warning, since what is captured may be another step than the script's.
"""

from __future__ import annotations

import ast
import builtins
import re
import runpy
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any, TypeGuard

import torch
from torch import Tensor

from echograph.frontend.scripts.adapter import patched
from echograph.frontend.scripts.imports import is_of_script
from echograph.frontend.scripts.installed import is_of_library
from echograph.frontend.scripts.values import NoteTaker, StandInInteger, StandInNumber, any_guessed, line_of_script

_FOLLOWED = "_echograph_followed"
_COUNTING = re.compile(rb"(?<![\w.])(?:int|range)\s*\(")


@contextmanager
def followed(warn: NoteTaker) -> Iterator[None]:
    """In the context, calls of `int` and `range` in a script's own files keep what stands for a number what it is.

    Args:
        warn: is told which loops such a number bounds.
    """

    def looping(*bounds: Any) -> range:
        plain = [whole(bound) if isinstance(bound, Tensor) else bound for bound in bounds]
        for bound in plain:
            if isinstance(bound, StandInInteger):
                warn(f"{line_of_script()} loops as often as a tensor's value says: {bound.told()}")
        return range(*plain)

    instead = {int: whole, range: looping}

    def following(called: Any) -> Any:
        return instead.get(called, called) if isinstance(called, type) else called

    with ExitStack() as stack:
        setattr(builtins, _FOLLOWED, following)
        stack.callback(delattr, builtins, _FOLLOWED)
        stack.enter_context(patched(SourceFileLoader, "get_code", _imported))
        stack.enter_context(patched(runpy, "_get_code_from_file", _run))
        yield


def whole(*given: Any, **named: Any) -> int:
    """`int`, of which a number that stands for one makes another such."""
    one = given[0] if len(given) == 1 and not named else None
    if isinstance(one, Tensor):
        one = one.item()
    if isinstance(one, StandInNumber | StandInInteger):
        return StandInInteger(int(one), one.where)
    return int(*given, **named) if one is None else int(one)


def _imported(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_code(loader: Any, name: str) -> Any:
        path = loader.get_filename(name)
        own = is_of_script(path) and not is_of_library(path)
        return (_compiled(path) if own else None) or original(loader, name)

    return get_code


def _run(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_code(*args: Any) -> Any:
        made, code = original(*args), _compiled(args[-1])
        if code is None:
            return made
        return (code, *made[1:]) if isinstance(made, tuple) else code

    return get_code


def _compiled(path: str) -> CodeType | None:
    """A file's code, in which calls of `int` and `range` are followed; None where there are none, or no source."""
    with suppress(OSError, SyntaxError, ValueError):
        about = Path(path).stat()
        return _followed_in(path, about.st_mtime_ns, about.st_size)
    return None


@cache
def _followed_in(path: str, _: int, __: int) -> CodeType | None:
    """The same of a file as it is; each rank that is run imports it anew."""
    text = Path(path).read_bytes()
    if not _COUNTING.search(text):
        return None
    tree = ast.parse(text, path)
    for node in filter(_counts, ast.walk(tree)):
        following = ast.copy_location(ast.Name(_FOLLOWED, ast.Load()), node.func)
        node.func = ast.copy_location(ast.Call(following, [node.func], []), node.func)
    made: CodeType = compile(tree, path, "exec", dont_inherit=True)
    return made


def _counts(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("int", "range")


_AS_VALUES = frozenset(
    (
        *("add", "sub", "subtract", "rsub", "mul", "multiply", "div", "divide", "true_divide", "floor_divide"),
        *("pow", "remainder", "fmod", "radd", "rmul", "rdiv", "rtruediv", "rfloordiv", "rpow", "rmod", "mod"),
        *("truediv", "floordiv", "iadd", "isub", "imul", "itruediv", "ifloordiv", "ipow", "eq", "ne", "lt", "le"),
        *("gt", "ge", "fill", "full_like", "new_full", "masked_fill", "index_fill", "scatter", "clamp", "clip"),
        *("clamp_min", "clamp_max", "where", "lerp", "addcmul", "addcdiv", "addmm", "baddbmm", "tensor"),
        *("as_tensor", "scalar_tensor", "manual_seed", "maximum", "minimum", "nll_loss", "cross_entropy"),
        *("select", "item", "dropout", "contains", "bitwise_and", "bitwise_or", "and", "or", "xor"),
        *("logical_and", "logical_or", "embedding", "leaky_relu"),
    )
)  # fmt: skip
"""Functions of PyTorch to which a number is a value, by their names without underscores: no size depends on it."""


def guessed_size(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StandInInteger | None:
    """A number that stands for one and becomes a size in a call of PyTorch; None where there is none.

    Args:
        func: that is called.
        args: with what.
        kwargs: those by name.
    """
    name = getattr(func, "__name__", "").strip("_")
    if not any_guessed() or name in _AS_VALUES:
        return None
    if func is torch.full:
        args = args[:1]
    if name in ("getitem", "setitem"):
        parts = args[1] if isinstance(args[1], tuple) else (args[1],)
        args = tuple((part.start, part.stop, part.step) for part in parts if isinstance(part, slice))
    return next(_guesses((*args, *kwargs.values())), None)


def _guesses(values: Iterable[Any]) -> Iterator[StandInInteger]:
    """Numbers that stand for integers among values, and in the tuples and lists of these."""
    for value in values:
        if isinstance(value, StandInInteger):
            yield value
        elif isinstance(value, tuple | list):
            yield from _guesses(value)

"""Loops that are written once: interpreted where there is little to do, compiled where there is much.

Loading the compiler takes as long as interpreting some hundred thousand steps. What it made is kept on disk: this
is the one place that says where.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import stat
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt

Function = TypeVar("Function", bound=Callable[..., Any])
Outputs = TypeVar("Outputs", bound=NamedTuple)
Number = TypeVar("Number", bound=np.generic)


def interpreted(loop: Callable[..., None], *inputs: Any, outputs: Outputs) -> None:
    """Runs a loop as it is written.

    Args:
        loop: a function of all inputs, then the outputs; it indexes them and nothing else, so that arrays and
            lists are alike to it.
        inputs: arrays, scalars, or named tuples of them.
        outputs: the arrays that it changes.
    """
    # Lists are several times quicker to index than arrays.
    lists = _lists(outputs)
    loop(*map(_lists, inputs), lists)
    for array, values in zip(cast(tuple[Any, ...], outputs), lists, strict=True):
        array[...] = values


def _lists(value: Any) -> Any:
    if isinstance(value, tuple):
        return type(value)(*map(_lists, value))
    return value.tolist() if isinstance(value, np.ndarray) else value


def array(values: npt.ArrayLike, dtype: type[Number]) -> npt.NDArray[Number]:
    """An array of one type and one layout, for which a loop is compiled once."""
    return np.require(values, dtype, ["C", "W"])


@cache
def compiled(loop: Function, *parts: Callable[..., Any]) -> Function:
    """A loop as machine code, from the cache on disk if it was compiled before.

    Args:
        loop: a function of arrays, scalars and named tuples of them.
        parts: functions that it calls.
    """
    from numba.extending import register_jitable

    for part in parts:
        register_jitable(part)
    return kept(loop, *parts)


OPTIONS: Any = {"nogil": True, "error_model": "numpy", "_nrt": False}
"""Of `numba.njit`. Without its runtime: nothing is allocated, and references to arrays, else half of the event
loop's time, not counted."""


def kept(function: Function, *parts: Callable[..., Any]) -> Function:
    """Compiles a function when it is called first, or takes it from disk.

    It is kept where numba keeps it, beside the sources or in the cache of the user. Where neither can be written,
    as of a shared installation and a user without a home, it is kept in a temporary folder; else not at all.

    Args:
        function: what is compiled.
        parts: functions of other modules that it calls.
    """
    import numba

    # Numba looks at the time of one file, and only after it has read what is kept, with types of arguments that
    # another version may not have. So what is kept is called by the sources that it was made of.
    function.__qualname__ = f"{function.__name__}_{_digest(function, *parts)}"
    try:
        return cast(Function, numba.njit(cache=True, **OPTIONS)(function))
    except RuntimeError:  # no place to keep it in
        folder = temporary_cache()
    settings: Any = numba.config
    before, settings.CACHE_DIR = settings.CACHE_DIR, str(folder or "")
    try:
        return cast(Function, numba.njit(cache=folder is not None, **OPTIONS)(function))
    finally:
        settings.CACHE_DIR = before


def _digest(*functions: Callable[..., Any]) -> str:
    """What changes with the files of functions."""
    files = dict.fromkeys(inspect.getfile(function) for function in functions)
    return hashlib.sha256(b"".join(Path(file).read_bytes() for file in files)).hexdigest()[:16]


def temporary_cache() -> Path | None:
    """A folder under the temporary one that nobody else can write to; None if there is none.

    What is read from a cache is run, and others can write to the temporary folder.
    """
    user = os.getuid() if hasattr(os, "getuid") else ""
    try:
        folder = Path(tempfile.gettempdir(), f"echograph-{user}")
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode):
            return None
        if user != "" and (found.st_uid != user or found.st_mode & 0o077):
            return None
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return None
    return folder

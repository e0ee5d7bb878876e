"""The compiler, and where what it made is kept: the one place that says so."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])


def kept(function: Function, **options: Any) -> Function:
    """Compiles a function when it is called first, or takes it from disk.

    It is kept where numba keeps it, beside the sources or in the cache of the user. Where neither can be written,
    as of a shared installation and a user without a home, it is kept in a temporary folder; else not at all.

    Args:
        function: what is compiled.
        options: of `numba.njit`.
    """
    try:
        return cast(Function, numba.njit(cache=True, **options)(function))
    except RuntimeError:  # no place to keep it in
        folder = temporary_cache()
    settings: Any = numba.config
    before, settings.CACHE_DIR = settings.CACHE_DIR, str(folder or "")
    try:
        return cast(Function, numba.njit(cache=folder is not None, **options)(function))
    finally:
        settings.CACHE_DIR = before


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

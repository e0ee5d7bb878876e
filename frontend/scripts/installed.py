"""Which files are of installed packages, and none of a script's own.

Packages lie in folders called `site-packages`, or Debian's `dist-packages`, and in any other that `pip install
--target` filled: what pip installed has its `.dist-info` beside it. A framework in whose checkout a script lies
(`of_library`) is no package, and none of the script's own either: it asks values as an installed one does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path

_FOLDERS = ("site-packages", "dist-packages")
_LIBRARY: ContextVar[tuple[str, ...]] = ContextVar("library", default=())


@contextmanager
def of_library(*folders: str) -> Iterator[None]:
    """In the context, what lies in some folders is a framework's, wherever they lie."""
    token = _LIBRARY.set((*_LIBRARY.get(), *(f"{folder}{os.sep}" for folder in folders)))
    try:
        yield
    finally:
        _LIBRARY.reset(token)


def is_of_library(file: str) -> bool:
    """Whether a file is of such a framework."""
    return file.startswith(_LIBRARY.get())


@cache
def package_of(file: str) -> str:
    """The package that a file is of where packages are installed, by its folder's name; "": it is of none."""
    path = Path(file)
    folders = path.parents if path.is_absolute() else [part for part in path.parents if part.name in _FOLDERS]
    there = next((folder for folder in folders if folder.name in _FOLDERS or _holds_packages(folder)), None)
    return "" if there is None else path.relative_to(there).parts[0]


@cache
def _holds_packages(folder: Path) -> bool:
    return next(folder.glob("*.dist-info"), None) is not None

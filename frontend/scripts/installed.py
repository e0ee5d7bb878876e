"""Which files are of installed packages, and none of a script's own.

Packages lie in folders called `site-packages`, or Debian's `dist-packages`, and in any other that `pip install
--target` filled: what pip installed has its `.dist-info` beside it.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

_FOLDERS = ("site-packages", "dist-packages")


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

"""A folder of results that appears whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from echograph.errors import OutputError


@contextmanager
def whole_folder(path: Path, mark: str) -> Iterator[Path]:
    """An empty folder to write in, which takes the place of `path` at the end, if nothing went wrong.

    Args:
        path: where the folder is to be.
        mark: name of a file that every such folder holds: an older one is replaced, another folder is not.

    Raises:
        OutputError: the path is a file, holds something else, or cannot be written.
    """
    path = path.resolve()
    check_replaceable(path, mark)
    try:
        scratch = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name[:64]}."))
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from None
    try:
        new = scratch / "new"
        new.mkdir()
        yield new
        if path.exists():
            path.rename(scratch / "old")
        new.rename(path)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        if (scratch / "old").exists() and not path.exists():
            (scratch / "old").rename(path)
        shutil.rmtree(scratch, ignore_errors=True)


def check_replaceable(path: Path, mark: str) -> None:
    """Fails where a folder cannot be written, or would replace what it is not an older version of.

    Raises:
        OutputError: as `whole_folder`.
    """
    if not path.parent.is_dir():
        raise OutputError(f"cannot write {path}: no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise OutputError(f"cannot write {path}: {path.parent} is read-only")
    if path.exists() and not path.is_dir():
        raise OutputError(f"cannot write {path}: it is a file, and a folder is written")
    if path.is_dir() and any(path.iterdir()) and not (path / mark).is_file():
        raise OutputError(f"cannot write {path}: it is not empty, and no earlier export: give another folder")

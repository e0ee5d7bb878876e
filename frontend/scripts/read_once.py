"""What the files of a script hold is read once, though the script runs as several ranks and is imported for each.

Modules of the script are forgotten after each run, and made anew for the next one. What they are made of is the
same: the code that Python compiles of a file, which is not left beside it (`without_bytecode`), and the
lines of a class, of which frameworks read what its fields say of themselves.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

from echograph.frontend.scripts.adapter import patched


@contextmanager
def read_once() -> Iterator[None]:
    """In the context, what a file holds is remembered as long as it stays as it is."""
    codes: dict[Hashable, CodeType] = {}
    sources: dict[Hashable, tuple[list[str], int]] = {}

    def code(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_code(loader: SourceFileLoader, name: str) -> CodeType | None:
            key = name, _state(loader.path)
            if key not in codes and (made := original(loader, name)) is not None:
                codes[key] = made
            return codes.get(key)

        return get_code

    def source(original: Callable[[Any], tuple[list[str], int]]) -> Callable[..., Any]:
        def lines(of: Any) -> tuple[list[str], int]:
            file = None
            with suppress(TypeError, OSError):  # of no file
                file = _state(inspect.getsourcefile(of) or "") if isinstance(of, type) else None
            if file is None:
                return original(of)
            key = of.__qualname__, file
            if key not in sources:
                sources[key] = original(of)
            found, first = sources[key]
            return list(found), first

        return lines

    with ExitStack() as stack:
        stack.enter_context(patched(SourceFileLoader, "get_code", code))
        stack.enter_context(patched(inspect, "getsourcelines", source))
        yield


def _state(file: str) -> Hashable:
    """A file, as it is now.

    Raises:
        OSError: there is none.
    """
    there = Path(file).stat()
    return file, there.st_mtime_ns, there.st_size

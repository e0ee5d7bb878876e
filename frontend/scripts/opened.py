"""Who is told which files are opened or moved in this process, by whichever way: the interpreter's audit events.

A hook of the interpreter is for good: there is one, which tells nobody where nobody asks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

OnOpen = Callable[[str, str], None]
"""Takes the path of a file that is about to be opened, and the mode, as `open` has it but for "b" and "t"; "" of
what is opened below `open`."""

OnMove = Callable[[str, str], None]
"""Takes the path of a file or folder that is about to be moved, and where to."""

_listeners: list[OnOpen] = []
_movers: list[OnMove] = []
_hooks: list[Callable[[str, tuple[object, ...]], None]] = []


@contextmanager
def listening(listener: OnOpen, mover: OnMove | None = None) -> Iterator[None]:
    """In the context, a listener is told of each file before it is opened, another of what is moved."""
    if not _hooks:
        _hooks.append(_hear)
        sys.addaudithook(_hear)
    movers = [] if mover is None else [mover]
    _listeners.append(listener)
    _movers.extend(movers)
    try:
        yield
    finally:
        _listeners.remove(listener)
        for each in movers:
            _movers.remove(each)


def _hear(event: str, told: tuple[object, ...]) -> None:
    if event == "open" and _listeners and isinstance(told[0], str | bytes):
        path, mode = os.fsdecode(told[0]), told[1]
        for listener in tuple(_listeners):
            listener(path, mode if isinstance(mode, str) else "")
    elif event == "os.rename" and _movers:
        source, target = told[:2]
        if isinstance(source, str | bytes | os.PathLike) and isinstance(target, str | bytes | os.PathLike):
            for mover in tuple(_movers):
                mover(os.fsdecode(source), os.fsdecode(target))

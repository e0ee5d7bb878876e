"""Who is told which files are opened in this process, by whichever way: the interpreter's own audit events.

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

_listeners: list[OnOpen] = []
_hooks: list[Callable[[str, tuple[object, ...]], None]] = []


@contextmanager
def listening(listener: OnOpen) -> Iterator[None]:
    """In the context, a listener is told of each file before it is opened."""
    if not _hooks:
        _hooks.append(_hear)
        sys.addaudithook(_hear)
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def _hear(event: str, told: tuple[object, ...]) -> None:
    if event == "open" and _listeners and isinstance(told[0], str | bytes):
        path, mode = os.fsdecode(told[0]), told[1]
        for listener in tuple(_listeners):
            listener(path, mode if isinstance(mode, str) else "")

"""Kernels of Transformer Engine's own that a capture runs as several operators: which are in one.

    with within(FUSED):    # or COMPILED: what it gives torch.compile
        ...

Outside of a capture nothing is said to anyone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any


def _untold(maker: str) -> AbstractContextManager[None]:
    del maker
    return nullcontext()


_region: Callable[[str], AbstractContextManager[Any]] = _untold


def within(maker: str) -> AbstractContextManager[None]:
    """In the context, what runs is one kernel: of Transformer Engine (`FUSED`), or a compiler's (`COMPILED`)."""
    return _region(maker)


@contextmanager
def told(region: Callable[[str], AbstractContextManager[Any]]) -> Iterator[None]:
    """In the context, what runs within a kernel that Transformer Engine has of its own is in such a region."""
    global _region
    before, _region = _region, region
    try:
        yield
    finally:
        _region = before

"""What the library says beside its answers: to the logger `echograph`, which a program may read or silence."""

from __future__ import annotations

import logging
from collections.abc import Iterable

LOGGER = logging.getLogger("echograph")


def tell(notes: Iterable[str]) -> None:
    """Says what an answer leaves out or takes for something, a line each."""
    for note in notes:
        LOGGER.warning("note: %s", note)


def warn(warnings: Iterable[str]) -> None:
    """Says what of an answer is unlikely to be meant, a line each."""
    for warning in warnings:
        LOGGER.warning("warning: %s", warning)

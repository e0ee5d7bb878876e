"""What long work tells of itself: functions of the library take a `Progress`, and never print."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """A callback for progress: told the current stage and how far that is."""

    def __call__(self, stage: str, done: int = 0, total: int = 0) -> None:
        """Takes note.

        Args:
            stage: what is being done, in the same words as long as it is the same.
            done: units of work that are done.
            total: units of work in all; 0 where that is not known, or nothing is counted.
        """


def silent(stage: str, done: int = 0, total: int = 0) -> None:
    """Takes no note."""

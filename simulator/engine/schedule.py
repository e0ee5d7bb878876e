"""What an engine answers."""

from __future__ import annotations

from dataclasses import dataclass

from echograph.ir.columns import Int64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Starts:
    """When each task starts, and why not sooner.

    Attributes:
        start: picoseconds.
        cause: the task whose end let it start: the one before it on its resource if that ended last, else the
            first of its dependencies that did; -1 when it waited for nothing.
    """

    start: Int64
    cause: Int64

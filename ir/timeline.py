"""What ran when: the columns that simulations and measured traces share."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from echograph.ir.columns import Int32, Int64, UInt8

if TYPE_CHECKING:
    from echograph.ir.graph import Graph


class Lane(IntEnum):
    """What kind of resource an interval occupied."""

    HOST = 0
    DEVICE = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timeline:
    """Intervals of work, one row each; all columns have the same length.

    Attributes:
        program: number of the program (the rank or role) that ran it.
        lane: a `Lane`.
        stream: index into `streams`.
        op: row of the graph's operation table, or -1.
        instance: block instance.
        micro_batch: micro-batch.
        start: picoseconds since the step began.
        duration: picoseconds.
        cause: row whose end let this one start (the one before it on its resource, or a dependency; of what
            several programs start together, that of the program that was ready last); -1 when it started at once.
        programs: names of the programs.
        streams: names of the streams.
        graph: the graph whose rows `op` are, which analyses ask for names and kinds; None where nobody kept it.
    """

    program: Int32
    lane: UInt8
    stream: Int32
    op: Int64
    instance: Int32
    micro_batch: Int32
    start: Int64
    duration: Int64
    cause: Int64
    programs: tuple[str, ...]
    streams: tuple[str, ...]
    graph: Graph | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.start)

    @property
    def end(self) -> Int64:
        """Picoseconds at which each interval ends."""
        return self.start + self.duration

    @property
    def makespan(self) -> int:
        """Picoseconds from the start of the step to the end of the last interval."""
        return int(self.end.max(initial=0))

    def critical_path(self) -> Int64:
        """Rows of the chain of causes that ends last, first row first."""
        if len(self) == 0:
            return np.zeros(0, np.int64)
        row, rows = int(np.argmax(self.end)), []
        while row >= 0:
            rows.append(row)
            row = int(self.cause[row])
        return np.array(rows[::-1], np.int64)

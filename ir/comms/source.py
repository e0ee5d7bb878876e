"""What every reader of a trace of collectives gives: the calls of one rank, in pieces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from echograph.ir.comms.record import COLUMNS, Stuck, What

Rows = NDArray[np.int64]
# In the end's place of a row: the call has ended, and nobody knows when.
NO_TIME = -2


class Source:
    """One file of one rank.

    Attributes:
        path: the file.
        kind: whose trace it is.
        rank: global rank.
        world: ranks of the job, as the file says.
        host: name of the machine, "" where not known.
        timed: whether the rows tell when a call began; if not, only how long it took.
        whats: what the rows' first column points into.
        groups: ranks of each group.
        problems: what could not be read, in words, and how often.
        stuck: calls that were reported as not ending.
        complete: whether the file says that its run ended in order.
        dropped: calls that the tracer could not write.
    """

    kind = ""
    timed = True

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rank = 0
        self.world = 1
        self.host = ""
        self.whats: list[What | None] = []
        self.groups: dict[str, tuple[int, ...]] = {}
        self.problems: Counter[str] = Counter()
        self.stuck: list[Stuck] = []
        self.complete = True
        self.dropped = 0

    def open(self) -> None:
        """Reads what stands before the first row, so that ranks and groups are known.

        Raises:
            InputError: the file cannot be read at all.
        """
        raise NotImplementedError

    def rows(self) -> Iterator[Rows]:
        """Rows as in the trace format (what, sequence, queued, start, end, wait), some ten thousand at a time."""
        raise NotImplementedError


def known_rows(rows: Rows, source: Source) -> Rows:
    """Rows whose description has been read; the others are counted."""
    table = np.array([what is not None for what in source.whats], dtype=np.bool_)
    inside = (rows[:, 0] >= 0) & (rows[:, 0] < len(table))
    inside[inside] = table[rows[inside, 0]]
    if not inside.all():
        source.problems["rows without a description"] += int((~inside).sum())
    return rows[inside]


def no_rows() -> Rows:
    """None."""
    return np.empty((0, COLUMNS), dtype=np.int64)

"""What one rank did, as pieces: work on a line (a thread or a stream), and the pieces that had to end before it.

Pieces of a line follow each other. What lies between the moment at which a piece could have begun and that at
which it did is a piece of its own, so that running the pieces again gives the measured times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from echograph.ir.types import Phase
from echograph.profiler.traces.collectives import Call
from echograph.profiler.traces.trace import NONE


class Work(Enum):
    """What a piece is."""

    HOST = "host"
    COMPUTE = "compute"
    COPY = "copy"
    COLLECTIVE = "collective"
    MESSAGE = "message"


@dataclass(slots=True, kw_only=True, eq=False)
class Piece:
    """A piece of work; times are picoseconds of the trace.

    Attributes:
        work: what it is.
        name: its operator.
        line: name of its thread or stream.
        start: when it began.
        duration: how long it took.
        key: what orders the program: for work on a device the moment of its launch.
        after: pieces that had to end first, beside that before it on its line.
        phase: part of the step.
        forward: sequence number of the forward operation that it differentiates, or -1.
        sequence: its own sequence number as a forward operation, or -1.
        call: the collective that it is.
        nbytes: bytes copied.
        step: picoseconds that a step took which ends here; -1 for all else.
        cost: of the duration, what recording added to it.
    """

    work: Work
    name: str
    line: str
    start: int
    duration: int
    key: int
    after: list[Piece] = field(default_factory=list)
    phase: Phase = Phase.OTHER
    forward: int = NONE
    sequence: int = NONE
    call: Call | None = None
    nbytes: int = 0
    step: int = NONE
    cost: int = 0

    @property
    def end(self) -> int:
        """When it ended."""
        return self.start + self.duration


@dataclass(slots=True)
class Pieces:
    """The pieces of a rank as they are found."""

    all: list[Piece] = field(default_factory=list)
    last: dict[str, Piece] = field(default_factory=dict)

    def add(self, piece: Piece) -> Piece:
        """Puts a piece at the end of its line; a program's order is never against a line's."""
        before = self.last.get(piece.line)
        if before is not None:
            piece.key = max(piece.key, before.key)
        self.last[piece.line] = piece
        self.all.append(piece)
        return piece

    def ready(self, line: str, after: Iterable[Piece]) -> int:
        """When a line could have gone on."""
        before = self.last.get(line)
        return max((piece.end for piece in (*after, *([before] if before else []))), default=0)

    def in_order(self) -> tuple[list[Piece], int]:
        """The pieces, each after all that it waits for; and how many waits were left out as against the clock."""
        placed = sorted(range(len(self.all)), key=lambda at: (self.all[at].key, at))
        order = [self.all[at] for at in placed]
        place = {id(piece): at for at, piece in enumerate(order)}
        dropped = 0
        for at, piece in enumerate(order):
            kept = [one for one in dict.fromkeys(piece.after) if place[id(one)] < at]
            dropped += len(set(piece.after)) - len(kept)
            piece.after = kept
        return order, dropped

    def by_line(self) -> dict[str, list[Piece]]:
        """The pieces of each line, in order."""
        found: dict[str, list[Piece]] = defaultdict(list)
        for piece in self.all:
            found[piece.line].append(piece)
        return found

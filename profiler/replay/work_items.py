"""What one rank did, as work items on a line (a thread or a stream), and the items that had to end before each.

Work items of a line follow each other. What lies between the moment at which a work item could have begun and that
at which it did is a work item of its own, so that running the work items again gives the measured times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from echograph.ir.types import Phase
from echograph.profiler.traces.collectives import CollectiveCall
from echograph.profiler.traces.trace import NONE


class WorkKind(Enum):
    """What a work item is."""

    HOST = "host"
    COMPUTE = "compute"
    COPY = "copy"
    COLLECTIVE = "collective"
    MESSAGE = "message"


@dataclass(slots=True, kw_only=True, eq=False)
class WorkItem:
    """An item of work; times are picoseconds of the trace.

    Attributes:
        work: what it is.
        name: its operator.
        line: name of its thread or stream.
        start: when it began.
        duration: how long it took.
        key: what orders the program: for work on a device the moment of its launch.
        after: work items that had to end first, beside that before it on its line.
        phase: part of the step.
        forward: sequence number of the forward operation that it differentiates, or -1.
        sequence: its own sequence number as a forward operation, or -1.
        call: the collective that it is.
        nbytes: bytes copied.
        step: picoseconds that a step took which ends here; -1 for all else.
        cost: of the duration, what recording added to it.
    """

    work: WorkKind
    name: str
    line: str
    start: int
    duration: int
    key: int
    after: list[WorkItem] = field(default_factory=list)
    phase: Phase = Phase.OTHER
    forward: int = NONE
    sequence: int = NONE
    call: CollectiveCall | None = None
    nbytes: int = 0
    step: int = NONE
    cost: int = 0

    @property
    def end(self) -> int:
        """When it ended."""
        return self.start + self.duration


@dataclass(slots=True)
class WorkItems:
    """The work items of a rank as they are found."""

    all: list[WorkItem] = field(default_factory=list)
    last: dict[str, WorkItem] = field(default_factory=dict)

    def add(self, item: WorkItem) -> WorkItem:
        """Puts a work item at the end of its line; a program's order is never against a line's."""
        before = self.last.get(item.line)
        if before is not None:
            item.key = max(item.key, before.key)
        self.last[item.line] = item
        self.all.append(item)
        return item

    def ready(self, line: str, after: Iterable[WorkItem]) -> int:
        """When a line could have gone on."""
        before = self.last.get(line)
        return max((item.end for item in (*after, *([before] if before else []))), default=0)

    def in_order(self) -> tuple[list[WorkItem], int]:
        """The items, each after all that it waits for; and how many waits were left out as against the clock."""
        placed = sorted(range(len(self.all)), key=lambda at: (self.all[at].key, at))
        order = [self.all[at] for at in placed]
        place = {id(item): at for at, item in enumerate(order)}
        dropped = 0
        for at, item in enumerate(order):
            kept = [one for one in dict.fromkeys(item.after) if place[id(one)] < at]
            dropped += len(set(item.after)) - len(kept)
            item.after = kept
        return order, dropped

    def by_line(self) -> dict[str, list[WorkItem]]:
        """The work items of each line, in order."""
        found: dict[str, list[WorkItem]] = defaultdict(list)
        for item in self.all:
            found[item.line].append(item)
        return found

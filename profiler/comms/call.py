"""One call on its way: from the moment it is issued until its end is known."""

from __future__ import annotations

import time
from typing import Any, Protocol

from echograph.ir.comms.record import UNKNOWN, CallRow
from echograph.profiler.comms.groups import TracedGroup

# The wall clock of a process: read once, so that later steps of the system's clock do not tear calls apart.
WALL_NS = time.time_ns() - time.perf_counter_ns()


class CallKind:
    """What calls have in common: the fields of a `What`, without its number. Equal is what is one object."""

    __slots__ = ("asynchronous", "bytes", "channel", "coalesced", "group", "op", "peer", "site", "what")

    def __init__(self, **fields: Any) -> None:
        self.what = fields
        self.op: str = fields["op"]
        self.group: str = fields["group"]
        self.channel: str = fields["channel"]
        self.bytes: int = fields["bytes"]
        self.asynchronous: bool = fields["asynchronous"]
        self.coalesced: bool = fields["coalesced"]
        self.peer: int = fields["peer"]
        self.site: str = fields["site"]


class Listener(Protocol):
    """What is told of calls; from any thread, and must not raise."""

    def issued(self, call: TracedCall) -> None:
        """A call is about to be made."""

    def refused(self, call: TracedCall) -> None:
        """PyTorch raised an error instead of making it."""

    def ended(self, call: TracedCall) -> None:
        """A call has ended, or will never be seen to end."""


class TracedCall:
    """One call of a collective or of a point-to-point operation.

    Attributes:
        kind: what it has in common with others.
        group: its group.
        sequence: its number in its channel, from 0.
        queued: when it was issued, in nanoseconds of `perf_counter`.
        start: when it could begin, likewise; -1 where not known.
        end: when it ended, likewise; -1 where not known.
        wait: when the caller first waited for it, likewise; -1 if never.
        listeners: who is told of its end.
        holder: weak reference to the Work that an asynchronous caller was given.
        work: the Work, held only as long as its end must be found from it.
        timer: what a clock needs.
        written: whether it stands in the file as not ended.
    """

    __slots__ = (
        "end", "group", "holder", "kind", "listeners", "queued", "sequence", "start", "timer", "wait", "work",
        "written",
    )  # fmt: skip

    def __init__(self, kind: CallKind, group: TracedGroup, sequence: int, listeners: tuple[Listener, ...]) -> None:
        self.kind = kind
        self.group = group
        self.sequence = sequence
        self.listeners = listeners
        self.start = self.end = self.wait = UNKNOWN
        self.holder: Any = None
        self.work: Any = None
        self.timer: Any = None
        self.written = False
        self.queued = time.perf_counter_ns()

    def row(self, what: int) -> CallRow:
        """The call as a line of the trace.

        Args:
            what: number of its `What`.
        """
        queued, start, end, wait = self.queued, self.start, self.end, self.wait
        return (
            what,
            self.sequence,
            queued + WALL_NS,
            UNKNOWN if start == UNKNOWN else start - queued,
            UNKNOWN if end == UNKNOWN else end - queued,
            UNKNOWN if wait == UNKNOWN else wait - queued,
        )

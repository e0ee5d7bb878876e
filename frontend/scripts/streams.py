"""Streams and events of a captured device: what waits for what, as CUDA orders it.

Work is issued to the current stream. An event that is recorded on a stream is the work issued to it so far; a
stream that waits for an event begins its next work after that. The recorder asks for both, and so a script's (or a
framework's) own streams become those of the graph.

Where the host itself waits, it issues nothing until then: who counts the host's work is told
(`CapturedStream.host_waits`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

COMPUTE = "compute"
"""Name of the stream that calls are issued to where nobody says another."""
STREAM = "stream"
AFTER = "after"
"""Of nodes: the stream that a call is issued to, and the call nodes that this stream had waited for."""


_THERE: WeakSet[CapturedEvent | CapturedStream] = WeakSet()


def forget_issued() -> None:
    """What was issued so far is no work of the graph."""
    for each in list(_THERE):
        each.forget()


class CapturedEvent:
    """`torch.cuda.Event`: the work of a stream up to a moment."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.after: frozenset[Any] = frozenset()
        _THERE.add(self)

    def forget(self) -> None:
        """Nothing was issued before it."""
        self.after = frozenset()

    def record(self, stream: CapturedStream | None = None) -> None:
        """Takes in what was issued to a stream so far."""
        self.after = (stream or CapturedStream.current).reached

    def wait(self, stream: CapturedStream | None = None) -> None:
        """Makes a stream wait for it."""
        (stream or CapturedStream.current).wait_event(self)

    def query(self) -> bool:
        """Whether it is over."""
        return True

    def synchronize(self) -> None:
        """The host waits: what it issues next comes later."""
        CapturedStream.current.wait_event(self)
        CapturedStream.host_waits(self.after)

    def elapsed_time(self, end_event: CapturedEvent) -> float:
        """Milliseconds from this one to another: there are no times, and none is 0, since scripts divide by it."""
        del end_event
        return 1.0


class CapturedStream:
    """`torch.cuda.Stream`.

    Attributes:
        number: 0 for the default one, then counted as they are made.
        last: the last work that was issued to it, a call node of the recorded graph.
        awaited: work of other streams that its next work comes after.
        host_waits: is told for which work the host waits, as call nodes; None: for all that was issued.
    """

    current: CapturedStream
    default: CapturedStream
    made: int = 0
    host_waits: Callable[[frozenset[Any] | None], None]

    def __init__(self, *_: Any, **__: Any) -> None:
        self.number = CapturedStream.made
        CapturedStream.made += 1
        self.last: Any = None
        self.awaited: frozenset[Any] = frozenset()
        self.cuda_stream = self.stream_id = self.number
        self.device = self.device_index = 0
        _THERE.add(self)

    def forget(self) -> None:
        """Nothing was issued to it, and it waits for nothing."""
        self.last, self.awaited = None, frozenset()

    @property
    def name(self) -> str:
        """As the graph names it."""
        return f"{COMPUTE}.{self.number}" if self.number else COMPUTE

    @property
    def reached(self) -> frozenset[Any]:
        """What must have ended before the next work of the stream begins."""
        return self.awaited if self.last is None else self.awaited | {self.last}

    def issue(self, node: Any) -> frozenset[Any]:
        """Appends work; returns what of other streams it comes after."""
        before, self.awaited, self.last = self.awaited, frozenset(), node
        return before

    def after(self, nodes: frozenset[Any]) -> None:
        """What is issued next comes after these too."""
        self.awaited |= nodes - {self.last}

    def wait_event(self, event: CapturedEvent) -> None:
        """What is issued next comes after an event."""
        self.after(event.after)

    def wait_stream(self, stream: CapturedStream) -> None:
        """What is issued next comes after what was issued to another stream so far."""
        self.after(stream.reached)

    def record_event(self, event: CapturedEvent | None = None) -> CapturedEvent:
        """An event of what was issued so far."""
        event = event or CapturedEvent()
        event.record(self)
        return event

    def query(self) -> bool:
        """Whether its work is over."""
        return True

    def is_capturing(self) -> bool:
        """Whether what is issued becomes a CUDA graph: never."""
        return False

    def synchronize(self) -> None:
        """The host waits: what it issues next, to any stream, comes later. Of streams the current one waits."""
        CapturedStream.current.wait_stream(self)
        CapturedStream.host_waits(self.reached)


def synchronize(*_: Any, **__: Any) -> None:
    """`torch.cuda.synchronize`: the host waits for all that was issued."""
    CapturedStream.host_waits(None)


def nobody_waits(work: frozenset[Any] | None) -> None:
    """What is told that the host waits where nobody counts its work."""
    del work


def start() -> None:
    """The default stream, and nothing issued."""
    CapturedStream.made = 0
    CapturedStream.host_waits = nobody_waits
    CapturedStream.default = CapturedStream.current = CapturedStream()


class on:
    """`torch.cuda.stream`: what is issued in the context goes to the stream."""

    def __init__(self, stream: CapturedStream | None) -> None:
        self.stream = stream
        self._before: list[CapturedStream] = []

    def __enter__(self) -> None:
        self._before.append(CapturedStream.current)
        CapturedStream.current = self.stream or CapturedStream.current

    def __exit__(self, *_: object) -> None:
        CapturedStream.current = self._before.pop()


start()

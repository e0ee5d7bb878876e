"""When a call starts and ends.

On the host, a call can start as soon as it is issued, and its Work's future says when it has ended: at completion,
not when somebody waits. gloo's send and receive have no future; their end is where waiting for them returns. On
CUDA, events tell: one on the caller's stream when the call is issued, one in the future's callback, which PyTorch
runs on a stream that follows the collective.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from echograph.ir.comms.record import UNKNOWN
from echograph.profiler.comms.call import Call

REANCHOR_MS = 1000.0


class HostClock:
    """Calls whose completion the host sees."""

    device = "cpu"

    def __init__(self, finished: Callable[[Call], None]) -> None:
        self._finished = finished

    def issue(self, call: Call) -> None:
        """Before the call."""
        call.start = call.queued

    def watch(self, call: Call, work: Any) -> bool:
        """After the call; false where only waiting tells its end."""
        try:
            future = work.get_future()
        except RuntimeError:
            return False
        if future.done():
            # What would call back at once costs as much as all else here.
            call.end = time.perf_counter_ns()
            self._finished(call)
            return True
        # A future that nobody holds would never call back.
        call.work = work
        future.add_done_callback(partial(self._ended, call))
        return True

    def _ended(self, call: Call, _: Any) -> None:
        call.end = time.perf_counter_ns()
        self._finished(call)

    def waits(self, call: Call, *, at_once: bool = False) -> None:
        """The caller starts to wait, now or as soon as the call was issued."""
        call.wait = call.queued if at_once else time.perf_counter_ns()


class EventClock:
    """Calls on a device, timed by events that are read when they have passed.

    Events are asked only from the threads that call collectives: asking from another one could break the capture
    of a CUDA graph.

    Args:
        finished: told of each call whose times are known.
        module: of the device (torch.cuda).
    """

    device = "cuda"

    def __init__(self, finished: Callable[[Call], None], module: Any) -> None:
        self._finished = finished
        self._module = module
        self._running: deque[Call] = deque()
        self._anchors: dict[Any, tuple[Any, int]] = {}
        self._free: dict[str, int] = {}

    def issue(self, call: Call) -> None:
        """Before the call."""
        self.read()
        if not self._module.is_current_stream_capturing():
            call.timer = [self._record(), None, None]

    def watch(self, call: Call, work: Any) -> bool:
        """After the call; one that goes into a CUDA graph has no times."""
        timer = call.timer
        if timer is None:
            self._finished(call)
            return True

        def behind(_: Any) -> None:
            timer[1] = self._record()
            self._running.append(call)

        work.get_future().add_done_callback(behind)
        return True

    def waits(self, call: Call, *, at_once: bool = False) -> None:
        """The caller's stream starts to wait, now or as soon as the call was issued."""
        if call.end != UNKNOWN:
            # The host comes to wait after it saw the end.
            call.wait = call.end
        elif call.timer is not None and not self._module.is_current_stream_capturing():
            call.timer[2] = call.timer[0] if at_once else self._record()

    def read(self) -> None:
        """Finishes the calls whose events have passed, in the order in which they were issued."""
        while self._running and self._running[0].timer[1].query():
            call = self._running.popleft()
            issued, ended, waited = call.timer
            call.start = max(self._time(issued), self._free.get(call.kind.channel, 0))
            call.end = self._free[call.kind.channel] = max(call.start, self._time(ended))
            if waited is not None and waited.query():
                call.wait = self._time(waited)
            call.timer = None
            self._finished(call)

    def _record(self) -> Any:
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def _time(self, event: Any) -> int:
        """An event in nanoseconds of `perf_counter`.

        Events tell time only against each other, in float32 milliseconds: against an old one the digits run out,
        so the event that is compared with moves along.
        """
        device = event.device
        if device not in self._anchors:
            event.synchronize()
            base = self._record()
            base.synchronize()
            self._anchors[device] = (base, time.perf_counter_ns())
        base, at = self._anchors[device]
        after_ms = base.elapsed_time(event)
        moment: int = at + round(after_ms * 1e6)
        if after_ms > REANCHOR_MS:
            self._anchors[device] = (event, moment)
        return moment

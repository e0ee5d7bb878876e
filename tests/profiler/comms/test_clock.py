"""Times from a device's events, with events whose time is set by hand."""

from __future__ import annotations

import struct
import time
from typing import Any

import pytest

from echograph.profiler.comms.call import CallKind, TracedCall
from echograph.profiler.comms.capture import EventClock
from echograph.profiler.comms.groups import TracedGroup

GROUP = TracedGroup(name="0", ranks=(0,), torch_name="0", about="", backend="", rank=0)


def kind(asynchronous: bool = True) -> CallKind:
    fields = {
        "op": "all_reduce",
        "group": "0",
        "channel": "0",
        "bytes": 4,
        "coalesced": False,
        "peer": -1,
        "site": "",
    }
    return CallKind(asynchronous=asynchronous, **fields)


class Device:
    """Stands for torch.cuda: events pass when `now_ms` has come to them; times are float32, as CUDA's are."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.capturing = False

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def Event(self, enable_timing: bool) -> Any:
        assert enable_timing
        return Event(self)


class Event:
    device = "cuda:0"

    def __init__(self, device: Device) -> None:
        self.of = device
        self.at_ms = 0.0

    def record(self) -> None:
        assert not self.of.capturing
        self.at_ms = self.of.now_ms

    def query(self) -> bool:
        return self.of.now_ms >= self.at_ms

    def synchronize(self) -> None:
        self.of.now_ms = max(self.of.now_ms, self.at_ms)

    def elapsed_time(self, other: Event) -> float:
        return float(struct.unpack("f", struct.pack("f", other.at_ms - self.at_ms))[0])


class Work:
    """Its end is queued on the device `later_ms` after now, as PyTorch's callback finds it."""

    def __init__(self, device: Device, later_ms: float) -> None:
        self.of, self.later_ms = device, later_ms

    def get_future(self) -> Work:
        return self

    def add_done_callback(self, callback: Any) -> None:
        self.of.now_ms += self.later_ms
        callback(self)
        self.of.now_ms -= self.later_ms


@pytest.fixture
def timed() -> tuple[Device, EventClock, list[TracedCall]]:
    device, ended = Device(), list[TracedCall]()
    return device, EventClock(ended.append, device), ended


def issue(clock: EventClock, device: Device, takes_ms: float, asynchronous: bool = True) -> TracedCall:
    call = TracedCall(kind(asynchronous), GROUP, 0, ())
    clock.issue(call)
    if not asynchronous:
        clock.waits(call, at_once=True)
    assert clock.watch(call, Work(device, takes_ms))
    return call


def ms(call: TracedCall) -> tuple[float, float]:
    return (call.end - call.start) / 1e6, (call.wait - call.start) / 1e6


def test_a_call_ends_when_its_event_passes(timed: tuple[Device, EventClock, list[TracedCall]]) -> None:
    device, clock, ended = timed
    call = issue(clock, device, 5)
    device.now_ms = 2
    clock.waits(call)
    clock.read()
    assert ended == []
    device.now_ms = 5
    clock.read()
    assert ended == [call]
    assert ms(call) == (pytest.approx(5), pytest.approx(2))


def test_calls_of_a_group_run_one_after_the_other(timed: tuple[Device, EventClock, list[TracedCall]]) -> None:
    device, clock, _ = timed
    first, second = issue(clock, device, 5, False), issue(clock, device, 8)
    device.now_ms = 10
    clock.waits(second)
    clock.read()
    assert ms(first) == (pytest.approx(5), pytest.approx(0))
    assert second.start == first.end
    assert ms(second) == (pytest.approx(3), pytest.approx(5))


def test_who_waits_after_the_end_waits_for_nothing(timed: tuple[Device, EventClock, list[TracedCall]]) -> None:
    device, clock, _ = timed
    call = issue(clock, device, 5)
    device.now_ms = 6
    clock.read()
    clock.waits(call)
    assert call.wait == call.end


def test_times_stay_sharp_through_a_long_run(timed: tuple[Device, EventClock, list[TracedCall]]) -> None:
    device, clock, ended = timed
    began = time.perf_counter_ns()
    for turn in range(3000):
        device.now_ms = turn * 1500.0
        issue(clock, device, 0.25)
        device.now_ms += 1
        clock.read()
    # After an hour and more, float32 milliseconds would be a quarter of a millisecond apart.
    assert {round((call.end - call.start) / 1e3) for call in ended} == {250}
    assert (ended[-1].end - ended[0].end) / 1e6 == pytest.approx(2999 * 1500.0, abs=0.5)
    assert ended[0].start >= began - 10**9


def test_calls_that_go_into_a_graph_have_no_times(timed: tuple[Device, EventClock, list[TracedCall]]) -> None:
    device, clock, ended = timed
    device.capturing = True
    call = issue(clock, device, 5, False)
    assert ended == [call]
    assert (call.start, call.end) == (-1, -1)

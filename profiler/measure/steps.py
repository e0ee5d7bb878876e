"""Times whole training steps end to end."""

from __future__ import annotations

from collections.abc import Callable

from echograph.profiler.measure.device import Device
from echograph.profiler.measure.sampling import Samples
from echograph.progress import Progress, silent


def time_steps(
    step: Callable[[], None], device: Device, steps: int, warm_up: int, say: Progress = silent
) -> Samples:
    """Runs a step `warm_up` + `steps` times; the seconds of the latter, host and device together.

    A step ends when the device is idle, so that it holds all of its work, and none of the one before.
    """
    seconds = []
    for number in range(warm_up + steps):
        say("running steps", number + 1, warm_up + steps)
        device.synchronize()
        began = device.host_clock()
        step()
        device.synchronize()
        seconds.append(device.host_clock() - began)
    return Samples(seconds=tuple(seconds[warm_up:]))

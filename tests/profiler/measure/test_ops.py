"""Measuring invocations: one measurement a part; it can be gone on with, and what fails is named."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the [torch] extra")
pytestmark = pytest.mark.torch

from echograph.errors import InputError, UsageError  # noqa: E402
from echograph.ir.profile import Environment, Invocation, Operand, Part, Profile, Signature, TensorType  # noqa: E402
from echograph.ir.types import DType  # noqa: E402
from echograph.profiler.measure.device import Cuda, MeasuringDevice, Processor, open_device  # noqa: E402
from echograph.profiler.measure.ops import Options, _solved, continued, label, measure, measure_host  # noqa: E402
from echograph.profiler.measure.sampling import time_steps  # noqa: E402

HERE = Environment(device="fake", threads=1)
SHORT = Options(repeats=5, budget_s=1e9)


class Fake(MeasuringDevice):
    """A device on which every operation takes the next of some seconds, and a measurement of nothing 1 s."""

    name = "cpu"
    cache_bytes = 64
    runs_ahead = False

    def __init__(self, seconds: Iterable[float] = ()) -> None:
        self.log: list[str] = []
        self._seconds = iter(seconds)
        self._timing = False

    def start(self) -> None:
        self.log.append("start")

    def stop(self) -> float:
        self.log.append("stop")
        return next(self._seconds, 3.0) if self._timing else 1.0

    def baseline(self) -> float:
        found = super().baseline()
        self._timing = True
        self.log.clear()
        return found

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def environment(self, name: str = "") -> Environment:
        return HERE

    def free_bytes(self) -> int:
        return 10_000

    def peak_bytes(self, run: Callable[[], Any], given: Iterable[torch.Tensor]) -> int:
        return Processor.peak_bytes(self, run, given)  # type: ignore[arg-type]

    def flush(self) -> None:
        self.log.append("flush")

    def use_other(self, nbytes: int) -> None:
        self.log.append(f"{nbytes} B")


def part(operator: str, share: float = 1.0, runs: int = 1, size: int = 4) -> Part:
    kind = TensorType(dtype=DType.FP32, shape=(size,))
    return Part(signature=Signature(operator=operator, inputs=(kind,), outputs=(kind,)), share=share, runs=runs)


def unary(name: str, size: int = 4, *, since: int | None = 0, runs: int = 1) -> Invocation:
    operand = Operand(number=0, dtype="float32", shape=(size,), strides=(1,), since=since)
    return Invocation(operator=name, arguments=(operand,), parts=(part(name, runs=runs, size=size),))


def test_a_measurement_is_the_time_without_that_of_nothing() -> None:
    outcome = measure([unary("aten.neg", runs=7)], Fake(), Profile(environment=HERE), SHORT)
    (found,) = outcome.profile.measurements
    assert found.median_picoseconds == found.mean_picoseconds == 2 * 10**12
    assert (found.samples, found.runs, found.spread, found.peak_bytes) == (5, 7, 0.0, 16)
    assert found.signature == part("aten.neg").signature
    assert found.arguments == "aten.neg.default(float32[4]#0 0 B ago)"


def test_the_cache_is_emptied_only_where_the_step_leaves_it_empty() -> None:
    warm, cold = Fake(), Fake()
    measure([unary("aten.neg")], warm, Profile(environment=HERE), SHORT)
    measure([unary("aten.neg", since=None)], cold, Profile(environment=HERE), SHORT)
    assert warm.log == ["start", "stop"] * 5
    assert cold.log == ["flush", "start", "stop"] * 5


def test_what_was_used_before_is_used_again_in_that_order_with_as_much_between() -> None:
    device = Fake()
    device.cache_bytes = 1024
    since: tuple[int | None, ...] = (32, None, 256)
    given = tuple(
        Operand(number=i, dtype="float32", shape=(4,), strides=(1,), since=s) for i, s in enumerate(since)
    )
    parts = (part("aten.addcmul"),)
    invocation = Invocation(operator="aten.addcmul", arguments=given, parts=parts, since=64)
    measure([invocation], device, Profile(environment=HERE), SHORT)
    # The third operand; the code, by another call, of 3 x 16 bytes; the first, of 16.
    assert device.log == ["flush", f"{256 - 64 - 48} B", f"{64 - 32 - 16} B", "32 B", "start", "stop"] * 5


def test_a_shared_launch_is_measured_once_and_divided() -> None:
    tensors = tuple(Operand(number=i, dtype="float32", shape=(s,), strides=(1,)) for i, s in enumerate((1, 3)))
    parts = (part("aten._foreach_neg_", 0.25, size=1), part("aten._foreach_neg_", 0.75, size=3))
    invocation = Invocation(operator="aten._foreach_neg_", arguments=(tensors,), parts=parts)
    small, large = measure([invocation], Fake(), Profile(environment=HERE), SHORT).profile.measurements
    assert (small.median_picoseconds, large.median_picoseconds) == (5 * 10**11, 15 * 10**11)


def test_what_is_measured_already_is_not_measured_again() -> None:
    invocations = [unary("aten.neg"), unary("aten.exp")]
    first = measure(invocations[:1], Fake(), Profile(environment=HERE), SHORT).profile
    device = Fake([9.0] * 5)
    both = measure(invocations, device, first, SHORT).profile
    assert both.measurements[0] == first.measurements[0]
    assert both.measurements[1].median_picoseconds == 8 * 10**12


def test_no_time_leaves_all_and_says_so() -> None:
    saved: list[Profile] = []
    invocations = [unary("aten.neg"), unary("aten.exp")]
    ticks = iter(range(100))
    outcome = measure(
        invocations, Fake(), Profile(environment=HERE), Options(budget_s=3, repeats=5),
        save=saved.append, clock=lambda: float(next(ticks)) * 2,
    )  # fmt: skip
    assert outcome.left == (label(invocations[1]),)
    assert saved[-1] == outcome.profile and len(outcome.profile.measurements) == 1


def test_what_cannot_run_is_named_with_its_reason() -> None:
    data_dependent = unary("aten.nonzero")
    too_large = unary("aten.neg", 10_000)
    unknown = unary("aten.no_such_operator")
    mistaken = Invocation(operator="aten.mm", arguments=unary("aten.neg").arguments * 2, parts=(part("aten.mm"),))
    outcome = measure(
        [data_dependent, too_large, unknown, mistaken, unary("aten.neg")], Fake(), Profile(environment=HERE), SHORT
    )
    reasons = dict(outcome.refused)
    assert "values of its tensors" in reasons[data_dependent.text]
    assert "free" in reasons[too_large.text]
    assert unknown.text in reasons and mistaken.text in reasons
    assert [m.operator for m in outcome.profile.measurements] == ["aten.neg"]


def test_a_profile_of_another_machine_is_not_gone_on_with() -> None:
    found = Profile(environment=replace(HERE, torch="1.0"))
    with pytest.raises(InputError, match=r"p\.pb: was measured with torch '1\.0', and here it is ''"):
        continued(found, HERE, "p.pb")
    later = replace(HERE, date="2030-01-01", sm_clock_mhz=5, host_op_picoseconds=9)
    assert continued(Profile(environment=later), HERE, "p.pb").environment == later


def test_long_calls_keep_labels_of_their_own() -> None:
    many = [tuple(Operand(number=i, dtype="float32", shape=(n,), strides=(1,)) for i in range(60)) for n in (4, 5)]
    labels = {label(Invocation(operator="aten._foreach_neg_", arguments=(tensors,))) for tensors in many}
    assert len(labels) == 2 and max(map(len, labels)) < 100


def test_two_steps_give_the_two_times_of_the_host() -> None:
    found = _solved([(10, 2), (10, 22)], (10 * 5e-6 + 2 * 3e-6, 10 * 5e-6 + 22 * 3e-6))
    assert found.op_s == pytest.approx(5e-6) and found.view_s == pytest.approx(3e-6)


def test_the_host_is_measured_in_microseconds() -> None:
    found = measure_host(Processor(), rounds=3)
    assert 0 <= found.op_s < 0.1 and 0 <= found.view_s < 0.1 and found.op_s + found.view_s > 0


def test_steps_are_counted_after_the_warm_up_and_end_when_the_device_is_idle() -> None:
    device = Fake()
    ticks = iter(range(100))
    device.host_clock = lambda: float(next(ticks))
    taken = time_steps(lambda: device.log.append("step"), device, 3, 2)
    assert taken.seconds == (1.0,) * 3
    assert device.log == ["synchronize", "step", "synchronize"] * 5


def test_the_processor_says_what_it_is() -> None:
    device = Processor()
    there = device.environment()
    assert there.device.startswith("cpu-") and there.threads == torch.get_num_threads()
    assert there.hardware and there.torch == torch.__version__ and there.memory_bytes >= device.free_bytes() > 0
    assert device.environment("mine").device == "mine"
    assert device.cache_bytes > 2**15
    given = torch.ones(100)
    assert device.peak_bytes(lambda: given + 1, [given]) == 400
    assert device.peak_bytes(lambda: given.add_(1), [given]) == 0


def test_clocks_and_devices_that_are_not_here_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="timed with events"):
        open_device("cuda", "cpu")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with pytest.raises(UsageError, match="OMP_NUM_THREADS=1"):
        open_device("cpu", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="--device cpu"):
        open_device("cuda")


class Event:
    """A CUDA event that counts the records of all: each is a millisecond after the one before."""

    records = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.records += 1
        self.at = Event.records

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Event) -> float:
        return float(end.at - self.at)


def test_cuda_idles_before_each_mark_and_counts_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[int] = []
    properties = type("Properties", (), {"L2_cache_size": 1024, "total_memory": 2**30})()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    device = open_device("cuda")
    assert isinstance(device, Cuda) and device.runs_ahead and device.cache_bytes == 1024
    device.start()
    assert device.stop() == pytest.approx(1e-3) and len(slept) == 1
    there = device.environment()
    assert (there.device, there.threads, there.memory_bytes) == ("nvidia-h100-80gb-hbm3", 0, 2**30)


@pytest.mark.parametrize("tf32", [None, True, False])
def test_operands_are_rounded_as_in_the_step(tf32: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products that may, and convolutions that may not, are other work than PyTorch's default."""
    seen: set[tuple[bool, bool]] = set()

    def settings() -> tuple[bool, bool]:
        return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32

    monkeypatch.setattr(Fake, "start", lambda self: seen.add(settings()))
    before, device = settings(), Fake()
    invocation = replace(unary("aten.neg"), tf32=tf32)
    outcome = measure([invocation], device, Profile(environment=HERE), SHORT)
    assert settings() == before and (tf32 is True, tf32 is not False) in seen
    (found,) = outcome.profile.measurements
    assert found.arguments.removeprefix("aten.neg.default(float32[4]#0 0 B ago)") == (
        "" if tf32 is None else " tf32" if tf32 else " ieee"
    )

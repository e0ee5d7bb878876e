"""Where steps end: scripts of many shapes, none of which knows that it is being counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the [torch] extra")

import torch

from echograph.profiler.record.recorder import StepEnds

pytestmark = pytest.mark.torch


class Log(list[str]):
    """What happened, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = StepEnds(lambda: self.append("end"), lambda: self.append("lost"), lambda _: None)


@pytest.fixture
def log() -> Iterator[Log]:
    found = Log()
    found.ends.install()
    yield found
    found.ends.remove()


def optimizer(*sizes: int) -> Any:
    parameters = [torch.nn.Parameter(torch.ones(size)) for size in sizes or (3,)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return torch.optim.SGD(parameters, lr=0.1)


class Engine:
    """As frameworks have them: gathers gradients for some calls, steps part by part, then has more to do."""

    def __init__(self, log: Log, parts: int, every: int) -> None:
        self.log, self.parts, self.every, self.calls = log, parts, every, 0
        self.optimizer = optimizer(3)

    def step(self) -> None:
        self.calls += 1
        if self.calls % self.every == 0:
            for _ in range(self.parts):
                self._part()
            self.log.append("gathered")

    def _part(self) -> None:
        self.optimizer.step()


def test_each_step_of_an_optimizer_ends_a_step(log: Log) -> None:
    sgd = optimizer()
    for n in range(4):
        sgd.step()
        assert log == ["end"] * (n + 1)


@pytest.mark.parametrize("made", ["before the first step", "after it"])
def test_learning_rate_schedulers_do_not_hide_the_method(log: Log, made: str) -> None:
    sgd = optimizer()
    if made == "after it":
        sgd.step()
    scheduler = torch.optim.lr_scheduler.StepLR(sgd, step_size=1)
    for _ in range(3):
        sgd.step()
        scheduler.step()
    assert log.count("end") == len(log) == (4 if made == "after it" else 3)


def test_an_engine_ends_a_step_when_all_of_it_is_done(log: Log) -> None:
    engine = Engine(log, parts=3, every=2)
    for _ in range(8):
        engine.step()
    # Only the first step is taken to end where its optimizer stepped: nobody knew of the engine yet.
    assert log == ["end", "gathered", *["gathered", "end"] * 3]


def test_an_optimizer_in_an_optimizer_counts_once(log: Log) -> None:
    class Wrapper(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            self.inner.step()
            log.append("inner stepped")

    outer = Wrapper([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    outer.inner = optimizer()
    for _ in range(3):
        outer.step()
    assert log.count("end") == 3


def test_of_several_optimizers_the_first_counts(log: Log) -> None:
    first, second = optimizer(), optimizer()
    for _ in range(3):
        first.step()
        second.step()
    assert log.count("end") == len(log) == 3


def test_a_gradient_scaler_is_a_step_too(log: Log) -> None:
    scaler, sgd = torch.amp.GradScaler("cpu"), optimizer()
    for _ in range(3):
        scaler.scale(torch.ones(1))
        scaler.step(sgd)
        scaler.update()
    assert log.count("end") == len(log) == 3


def test_a_method_that_was_taken_before_is_said_and_not_guessed(log: Log) -> None:
    sgd = optimizer()
    step = sgd.step
    step()
    step()
    assert log == ["end", "lost"]


def test_all_is_as_before_in_the_end(log: Log) -> None:
    from torch.optim import optimizer as module

    engine, sgd = Engine(log, parts=1, every=1), optimizer()
    original = Engine.step
    engine.step()
    sgd.step()
    assert Engine.step is not original
    log.ends.remove()
    assert Engine.step is original
    assert not module._global_optimizer_pre_hooks
    assert not module._global_optimizer_post_hooks
    engine.step()
    assert log.count("end") == 1


def test_what_a_step_raises_is_passed_on(log: Log) -> None:
    class Failing(Engine):
        def _part(self) -> None:
            super()._part()
            if self.calls == 2:
                raise ValueError("mine")

    engine = Failing(log, parts=1, every=1)
    engine.step()
    with pytest.raises(ValueError, match="mine"):
        engine.step()
    engine.step()
    assert log.count("end") == 3

"""What the best plan is the best at: a figure of a prediction, of which less is better, and its lower bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf

from echograph.errors import UnknownNameError, UsageError
from echograph.profiler.costs.estimate import step_joules
from echograph.simulator.goodput import Reliability, goodput
from echograph.simulator.result import Result
from echograph.workflow.scenario import Scenario
from echograph.workflow.system import System


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A figure of a prediction.

    Attributes:
        name: its word.
        unit: of the figure; a column's title.
        of: the figure of a result; less is better.
        by_step: the figure that a step of so many seconds on so many GPUs has at least.
        shown: the figure for people.
        most_step_s: what a step may take, failures included where they are asked for; the figure of a longer one
            is infinite.
        lasting: seconds of a step with what failures take, of its seconds and its GPUs.
    """

    name: str
    unit: str
    of: Callable[[Result], float]
    by_step: Callable[[float, int], float]
    shown: Callable[[float], str] = field(default=lambda value: f"{value:.4g}")
    most_step_s: float = inf
    lasting: Callable[[float, int], float] = field(default=lambda step_s, gpus: step_s)

    def value(self, result: Result) -> float:
        """The figure of a result."""
        return self.of(result) if self._in_time(result.step_s, result.gpus) else inf

    def least(self, step_s: float, gpus: int) -> float:
        """What the figure is not below where a step takes so many seconds at least."""
        return self.by_step(step_s, gpus) if self._in_time(step_s, gpus) else inf

    def _in_time(self, step_s: float, gpus: int) -> bool:
        return self.most_step_s == inf or self.lasting(step_s, gpus) <= self.most_step_s


def _step(system: System, scenario: Scenario) -> Objective:
    return Objective(name="step", unit="s", of=lambda result: result.step_s, by_step=lambda step_s, _: step_s)


def _gpu_seconds(name: str) -> Callable[[System, Scenario], Objective]:
    """Of the same work GPU-seconds tell what it costs, and the higher the utilisation the fewer they are."""

    def make(system: System, scenario: Scenario) -> Objective:
        return Objective(
            name=name,
            unit="GPU s/step",
            of=lambda result: result.step_s * result.gpus,
            by_step=lambda step_s, gpus: step_s * gpus,
        )

    return make


def _energy(system: System, scenario: Scenario) -> Objective:
    power = system.device.power if system.device is not None else None
    if power is None:
        raise UsageError(f"--objective energy: nothing is known of the power of {system.cluster.device}")
    device, static_W = system.device, power.static_W

    def value(result: Result) -> float:
        assert device is not None and result.job is not None
        return step_joules(result.job, device, result.step_s)

    return Objective(
        name="energy",
        unit="J/step",
        of=value,
        by_step=lambda step_s, gpus: static_W * step_s * gpus,
    )


def _fewest(system: System, scenario: Scenario) -> Objective:
    """Of plans on equally many GPUs the fastest."""

    def value(step_s: float, gpus: int) -> float:
        return gpus + step_s / (1 + step_s)

    return Objective(
        name="gpus",
        unit="GPUs",
        of=lambda result: value(result.step_s, result.gpus),
        by_step=value,
        shown=lambda found: f"{int(found):,}",
    )


def _goodput(system: System, scenario: Scenario) -> Objective:
    if scenario.reliability is None:
        raise UsageError(
            "--objective goodput: say how nodes fail: --node-mtbf-hours, --checkpoint-s and --restart-s"
        )
    lasting = with_failures(system, scenario)
    return Objective(
        name="goodput",
        unit="s with failures",
        of=lambda result: lasting(result.step_s, result.gpus),
        by_step=lasting,
    )


def with_failures(system: System, scenario: Scenario) -> Callable[[float, int], float]:
    """What a step of so many seconds on so many GPUs takes with what failures take, where they are asked for."""
    reliability, per_node = scenario.reliability, system.cluster.gpus_per_node
    if reliability is None:
        return lambda step_s, gpus: step_s

    def lasting(step_s: float, gpus: int, of: Reliability = reliability) -> float:
        return goodput(step_s, -(-gpus // per_node), of).step_s if step_s else 0.0

    return lasting


OBJECTIVES: dict[str, Callable[[System, Scenario], Objective]] = {
    "step": _step,
    "tokens-per-s": _step,  # all plans have the same tokens a step
    "cost": _gpu_seconds("cost"),
    "mfu": _gpu_seconds("mfu"),
    "energy": _energy,
    "goodput": _goodput,
    "gpus": _fewest,
}


def objective(name: str, system: System, scenario: Scenario, most_step_s: float = inf) -> Objective:
    """An objective by its word.

    Args:
        name: the word.
        system: where plans run.
        scenario: what is asked beyond that.
        most_step_s: what a step may take at most, failures included where they are asked for: the figure of a
            longer one is infinite.

    Raises:
        UnknownNameError: there is none of that name.
        UsageError: it needs something that was not given.
    """
    if name not in OBJECTIVES:
        raise UnknownNameError("objective", name, OBJECTIVES)
    made = OBJECTIVES[name](system, scenario)
    return replace(made, most_step_s=most_step_s, lasting=with_failures(system, scenario))

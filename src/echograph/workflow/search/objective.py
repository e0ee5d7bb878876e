"""What the best plan is the best at: a figure of a prediction, of which less is better, and its lower bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

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
        value: the figure of a result; less is better.
        least: the figure that a step of so many seconds on so many GPUs has at least.
        shown: the figure for people.
    """

    name: str
    unit: str
    value: Callable[[Result], float]
    least: Callable[[float, int], float]
    shown: Callable[[float], str] = field(default=lambda value: f"{value:.4g}")


def _step(system: System, scenario: Scenario) -> Objective:
    return Objective(name="step", unit="s", value=lambda result: result.step_s, least=lambda step_s, _: step_s)


def _gpu_seconds(name: str) -> Callable[[System, Scenario], Objective]:
    """Of the same work GPU-seconds tell what it costs, and the higher the utilisation the fewer they are."""

    def make(system: System, scenario: Scenario) -> Objective:
        return Objective(
            name=name,
            unit="GPU s/step",
            value=lambda result: result.step_s * result.gpus,
            least=lambda step_s, gpus: step_s * gpus,
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
        value=value,
        least=lambda step_s, gpus: static_W * step_s * gpus,
    )


def _goodput(system: System, scenario: Scenario) -> Objective:
    reliability = scenario.reliability
    if reliability is None:
        raise UsageError(
            "--objective goodput: say how nodes fail: --node-mtbf-hours, --checkpoint-s and --restart-s"
        )
    per_node = system.cluster.gpus_per_node

    def with_failures(step_s: float, gpus: int, of: Reliability = reliability) -> float:
        return goodput(step_s, -(-gpus // per_node), of).step_s if step_s else 0.0

    return Objective(
        name="goodput",
        unit="s with failures",
        value=lambda result: with_failures(result.step_s, result.gpus),
        least=with_failures,
    )


OBJECTIVES: dict[str, Callable[[System, Scenario], Objective]] = {
    "step": _step,
    "tokens-per-s": _step,  # all plans have the same tokens a step
    "cost": _gpu_seconds("cost"),
    "mfu": _gpu_seconds("mfu"),
    "energy": _energy,
    "goodput": _goodput,
}


def objective(name: str, system: System, scenario: Scenario) -> Objective:
    """An objective by its word.

    Raises:
        UnknownNameError: there is none of that name.
        UsageError: it needs something that was not given.
    """
    if name not in OBJECTIVES:
        raise UnknownNameError("objective", name, OBJECTIVES)
    return OBJECTIVES[name](system, scenario)

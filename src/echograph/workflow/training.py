"""What a whole training takes, of the step that was predicted: days, GPU-hours, money, energy and carbon.

Every figure that is assumed stands here with its source, and may be given otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

from echograph.errors import UsageError
from echograph.options import given, option, option_name
from echograph.simulator.result import Result
from echograph.units import format_count, parse_count
from echograph.workflow.system import System

_DAY_S, _HOUR_S, _KWH_J = 86_400.0, 3_600.0, 3.6e6
PUE = 1.56
"""Power of a site over that of its computers: the mean of what operators reported for their largest data centre
(Uptime Institute, Global Data Center Survey 2024). Sites built for training do better: give theirs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """What is asked of a whole training. The text of each field is its help on the command line.

    Raises:
        UsageError: a field is misspelt, or lacks another.
    """

    train_tokens: str = option("", "Tokens (or samples, where they have none) of the training, as 1T or 300B.")
    days: float | None = option(
        None, "Days that the training may take: the fewest GPUs that it needs.", "not asked"
    )
    gpu_hour: float | None = option(None, "Price of one GPU for an hour, in any currency.", "not asked")
    pue: float | None = option(
        None, "Power of the site over that of its computers.", f"{PUE}, Uptime Institute 2024"
    )
    g_per_kwh: float | None = option(None, "Grams of CO2 for a kilowatt-hour of the site.", "not asked")

    def __post_init__(self) -> None:
        if self.train_tokens and not parse_count(self.train_tokens):
            raise UsageError(f"--train-tokens {self.train_tokens[:40]}: give a number, as 1T, 300B or 2e12")
        if not self.train_tokens and (alone := given(self)):
            names = ", ".join(map(option_name, alone))
            raise UsageError(f"{names}: is of a training: give --train-tokens as well")
        for name, least in (("gpu_hour", 0), ("pue", 1), ("g_per_kwh", 0)):
            value = getattr(self, name)
            if value is not None and not least <= value < 1e9:
                raise UsageError(f"{option_name(name)} {value:g}: give {least} or more")
        if self.days is not None and not 0 < self.days < 1e9:
            raise UsageError(f"--days {self.days:g}: give more than 0")

    @property
    def tokens(self) -> int:
        """Tokens of the training; 0 where it is not asked."""
        return parse_count(self.train_tokens) or 0

    def steps(self, tokens: int) -> int:
        """Steps of the training.

        Args:
            tokens: of a step, or its samples, where they have none.
        """
        return -(-self.tokens // tokens)

    def most_step_s(self, tokens: int) -> float:
        """Seconds that a step may take, failures included, for the training to end within its days."""
        return inf if self.days is None else self.days * _DAY_S / self.steps(tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A whole training.

    Attributes:
        tokens: tokens, or samples where they have none.
        steps: how many steps.
        days: of wall-clock time, failures included where they were asked for.
        days_interval: the same at both ends of the step's 90 % interval.
        gpu_hours: hours of all GPUs together.
        price: what these GPU hours cost, in the currency of the price per hour; None where none was given.
        energy_kwh: of the boards and what the site adds, without hosts and switches; None where the device's power
            is not known.
        co2_kg: emissions of that energy; None where no intensity was given.
        pue: power usage effectiveness of the site that the energy was worked out with.
    """

    tokens: int
    steps: int
    days: float
    days_interval: tuple[float, float]
    gpu_hours: float
    price: float | None
    energy_kwh: float | None
    co2_kg: float | None
    pue: float

    def to_json(self) -> dict[str, Any]:
        """The record in results."""
        return {
            "tokens": self.tokens,
            "steps": self.steps,
            "days": self.days,
            "days_interval": list(self.days_interval),
            "gpu_hours": self.gpu_hours,
            "price": self.price,
            "energy_kwh": self.energy_kwh,
            "co2_kg": self.co2_kg,
            "pue": self.pue,
        }

    def __str__(self) -> str:
        """One line for people."""
        low, high = self.days_interval
        said = [f"{self.days:.4g} days ({low:.4g} to {high:.4g})", f"{format_count(self.gpu_hours)} GPU-hours"]
        said += [] if self.price is None else [f"price {self.price:,.0f}"]
        if self.energy_kwh is not None:
            said.append(f"{format_count(self.energy_kwh * 1000, 'Wh')} (boards, PUE {self.pue:g}; no hosts)")
        said += [] if self.co2_kg is None else [f"{self.co2_kg / 1000:,.4g} t CO2"]
        return f"  training      {format_count(self.tokens)} tokens: {', '.join(said)}"


def training(result: Result, system: System, asked: TrainingOptions) -> Training | None:
    """What a whole training takes; None where it is not asked.

    Args:
        result: the prediction of one step.
        system: where it runs.
        asked: of the training.

    Raises:
        UsageError: failures leave no time to train, or nothing is known of the power that is asked about.
    """
    if not asked.tokens:
        return None
    steps = asked.steps(result.tokens or result.samples)
    share = 1.0 if result.goodput is None else result.goodput.share
    if not share:
        raise UsageError("--train-tokens: failures leave no time to train: give other checkpoints or nodes")
    seconds, (low, high) = (steps * result.step_s / share, result.interval_s)
    hours = result.gpus * seconds / _HOUR_S
    joules = step_energy(result, system)
    if joules is None and (about := [name for name in ("pue", "g_per_kwh") if name in given(asked)]):
        names = ", ".join(map(option_name, about))
        raise UsageError(f"{names}: nothing is known of the power of {result.device}: leave it out")
    pue = PUE if asked.pue is None else asked.pue
    energy = None if joules is None else pue * steps / share * joules / _KWH_J
    return Training(
        tokens=asked.tokens,
        steps=steps,
        days=seconds / _DAY_S,
        days_interval=(steps * low / share / _DAY_S, steps * high / share / _DAY_S),
        gpu_hours=hours,
        price=None if asked.gpu_hour is None else asked.gpu_hour * hours,
        energy_kwh=energy,
        co2_kg=None if energy is None or asked.g_per_kwh is None else energy * asked.g_per_kwh / 1000,
        pue=pue,
    )


def step_energy(result: Result, system: System) -> float | None:
    """Joules that the boards draw over a step; None where the device's power is not known."""
    from echograph.profiler.costs.estimate import step_joules

    if system.device is None or system.device.power is None or result.job is None:
        return None
    return step_joules(result.job, system.device, result.step_s)

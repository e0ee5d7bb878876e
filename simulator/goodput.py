"""Goodput: the share of the time that trains, when nodes fail and the job goes back to its last checkpoint.

Failures come at random, independent, with one rate for the job (nodes over the mean time between failures of one).
A segment is `interval` seconds of training and a blocking checkpoint; a failure in it loses what it had done, and
after a restart it begins again; failures may strike during checkpoints and restarts, too. The expected time of a
segment is then (J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", 2006,
equation 13)

    E = (1 / rate) * exp(rate * restart) * (exp(rate * (interval + checkpoint)) - 1)

and the goodput interval / E. Its maximum over the interval x = rate * interval solves
(1 - x) * exp(x) = exp(-rate * checkpoint).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, expm1, inf
from typing import Any

from echograph.errors import UsageError

_LARGEST = 700.0
"""Beyond exp(700) floats end; no job that expects so many failures in a segment ever finishes one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reliability:
    """How often nodes fail, and what that costs.

    Attributes:
        node_mtbf_s: mean time between failures of one node.
        checkpoint_s: time that a checkpoint stops the training.
        restart_s: from a failure until training goes on from the last checkpoint.
        interval_s: training between two checkpoints; None: the best one.
    """

    node_mtbf_s: float
    checkpoint_s: float
    restart_s: float
    interval_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("node_mtbf_s", "checkpoint_s"):
            if not 0 < getattr(self, name) < inf:
                raise UsageError(f"{name.replace('_', ' ')} {getattr(self, name)}: give seconds above 0")
        if not 0 <= self.restart_s < inf:
            raise UsageError(f"restart {self.restart_s} s: give 0 or more")
        if self.interval_s is not None and not 0 < self.interval_s < inf:
            raise UsageError(f"checkpoint interval {self.interval_s} s: give seconds above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """What failures leave of the throughput.

    Attributes:
        share: training time over all time.
        interval_s: training between two checkpoints.
        best_interval_s: the interval of the greatest share.
        job_mtbf_s: mean time between failures of the job.
        step_s: a step's share of all the time: step time over `share`.
    """

    share: float
    interval_s: float
    best_interval_s: float
    job_mtbf_s: float
    step_s: float

    def to_json(self) -> dict[str, Any]:
        """The record in results."""
        return {
            "goodput": self.share,
            "checkpoint_interval_s": self.interval_s,
            "best_checkpoint_interval_s": self.best_interval_s,
            "job_mtbf_s": self.job_mtbf_s,
            "step_time_with_failures_s": self.step_s if self.share else None,
        }


def goodput(step_s: float, nodes: int, reliability: Reliability) -> Goodput:
    """Goodput of a job.

    Args:
        step_s: its step time.
        nodes: how many nodes it runs on; a failure of any stops it.
        reliability: of the nodes.
    """
    rate = nodes / reliability.node_mtbf_s
    best = best_interval(rate, reliability.checkpoint_s)
    interval = reliability.interval_s or best
    share = _share(rate, interval, reliability)
    return Goodput(
        share=share,
        interval_s=interval,
        best_interval_s=best,
        job_mtbf_s=1 / rate,
        step_s=step_s / share if share else inf,
    )


def _share(rate: float, interval: float, reliability: Reliability) -> float:
    exponent = rate * (interval + reliability.checkpoint_s)
    if exponent + rate * reliability.restart_s > _LARGEST:
        return 0.0
    return rate * interval / (exp(rate * reliability.restart_s) * expm1(exponent))


def best_interval(rate: float, checkpoint_s: float) -> float:
    """The interval of the greatest goodput, by bisection of its condition; seconds."""
    target = exp(-min(rate * checkpoint_s, _LARGEST))
    low, high = 0.0, 1.0
    for _ in range(200):
        middle = (low + high) / 2
        if (1 - middle) * exp(middle) > target:
            low = middle
        else:
            high = middle
    return high / rate

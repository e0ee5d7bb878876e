"""What a prediction is asked beyond its plan and its system: other durations, ranks that differ, failures."""

from __future__ import annotations

from dataclasses import dataclass

from echograph.errors import UsageError
from echograph.options import given, option
from echograph.simulator.clusters import DegradedLink, SlowNode, parse_degraded
from echograph.simulator.goodput import Reliability
from echograph.simulator.limits import Scale, parse_scale
from echograph.simulator.ranks import EveryRank

MAX_DRAWS = 10_000
HOUR_S = 3600.0
NETWORKS = ("closed-form", "flows")
_NONE: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What is otherwise in a step than that all runs as it should.

    The text of each field is its help on the command line.

    Raises:
        UsageError: a field is misspelt, or lacks another.
    """

    scale: tuple[str, ...] = option(_NONE, "What if WHAT=FACTOR, as compute=0.9, comm.dp=2, op:aten.mm=0.5.")
    without: tuple[str, ...] = option(_NONE, "What if this took no time, as collective:all_gather.")
    ranks: str = option("roles", "roles: equal ranks once; all: every rank.")
    straggler: tuple[str, ...] = option(_NONE, "A slow GPU or node: RANK=FACTOR or node:N=FACTOR.")
    jitter: float = option(0.0, "Relative deviation of every kernel, on every rank.")
    seed: int = option(0, "Of the jitter.")
    draws: int = option(1, "Simulations with other noise, for percentiles.")
    network: str = option(
        "",
        "closed-form: collectives on their own; flows: every rank, collectives that share links",
        "closed-form, or flows if links are degraded",
    )
    degrade: tuple[str, ...] = option(
        _NONE, "A worse LINK=FACTOR, as 'node 3 nic 5=0.5', 'leaf 0 up=0.8', 'node 3 compute=0.9'."
    )
    node_mtbf_hours: float | None = option(None, "Hours between failures of one node.", "none fails")
    checkpoint_s: float | None = option(None, "Seconds that a checkpoint stops training.", "none")
    restart_s: float | None = option(None, "Seconds from a failure to training again.", "none")
    checkpoint_interval_s: float | None = option(None, "Seconds between checkpoints.", "the best")

    def __post_init__(self) -> None:
        if self.ranks not in ("roles", "all"):
            raise UsageError(f"--ranks {self.ranks[:20]}: choose roles or all")
        if not 1 <= self.draws <= MAX_DRAWS:
            raise UsageError(f"--draws {self.draws}: choose 1 to {MAX_DRAWS:,}")
        for name, what in (("draws", "repeats a noisy step"), ("seed", "is of the noise")):
            if name in given(self) and not self.jitter:
                raise UsageError(f"--{name}: {what}, give --jitter as well")
        # What is misspelt is said when the scenario is made, not when it is simulated.
        _ = self.scales, self.slow, self.degraded, self.reliability

    @property
    def scales(self) -> tuple[Scale, ...]:
        """Kinds of work that take longer or shorter."""
        return (*map(parse_scale, self.scale), *(parse_scale(f"{what}=0") for what in self.without))

    @property
    def slow(self) -> tuple[tuple[str, float], ...]:
        """Ranks, or "node:N", with the factor on their kernels."""
        return tuple(map(_straggler, self.straggler))

    @property
    def degraded(self) -> tuple[DegradedLink | SlowNode, ...]:
        """Links and nodes of the cluster that are worse than their like."""
        return tuple(map(parse_degraded, self.degrade))

    @property
    def reliability(self) -> Reliability | None:
        """How often nodes fail, and what a failure costs; None where that is not asked."""
        costs = (self.checkpoint_s, self.restart_s, self.checkpoint_interval_s)
        if self.node_mtbf_hours is None:
            if costs != (None, None, None):
                raise UsageError(
                    "--checkpoint-s, --restart-s, --checkpoint-interval-s: give --node-mtbf-hours as well"
                )
            return None
        if self.checkpoint_s is None or self.restart_s is None:
            raise UsageError("--node-mtbf-hours: give what a failure costs: --checkpoint-s and --restart-s")
        return Reliability(
            node_mtbf_s=self.node_mtbf_hours * HOUR_S,
            checkpoint_s=self.checkpoint_s,
            restart_s=self.restart_s,
            interval_s=self.checkpoint_interval_s,
        )

    def every_rank(self, gpus_per_node: int) -> EveryRank | None:
        """How ranks differ; None where all of a role are alike."""
        if not (self.ranks == "all" or self.straggler or self.jitter):
            return None
        slow: dict[int, float] = {}
        for where, factor in self.slow:
            if where.startswith("node:"):
                first = int(where[5:]) * gpus_per_node
                slow |= dict.fromkeys(range(first, first + gpus_per_node), factor)
            else:
                slow[int(where)] = factor
        return EveryRank(slow=slow, jitter=self.jitter, seed=self.seed, draws=self.draws)


def _straggler(text: str) -> tuple[str, float]:
    where, _, value = text.rpartition("=")
    number = where.removeprefix("node:")
    try:
        factor = float(value)
    except ValueError:
        factor = 0.0
    if not number.isdecimal() or len(number) > 9 or not factor > 0:
        raise UsageError(f"--straggler {text[:40]}: give RANK=FACTOR or node:N=FACTOR, as 17=1.2")
    return where, factor

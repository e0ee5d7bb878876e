"""What a prediction is asked beyond its plan: other durations, another cluster, ranks that differ, failures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from echograph.errors import UsageError
from echograph.simulator.clusters import DegradedLink, SlowNode, parse_degraded
from echograph.simulator.goodput import Reliability
from echograph.simulator.ranks import EveryRank
from echograph.simulator.what_if import Scale, parse_scale

MAX_DRAWS = 10_000
MAX_TRACED = 64
HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Options of `echosim run` that are not the plan's.

    Attributes:
        scales: kinds of work that take longer or shorter.
        settings: keys of the cluster's file with other values, as text.
        slow: (rank or "node:N") with the factor on its kernels.
        jitter: relative standard deviation of every kernel.
        seed: of the jitter.
        draws: simulations with other noise, for percentiles.
        every_rank: simulate every rank, even if all are alike.
        network: "auto", "closed-form" or "flows".
        degraded: links and nodes of the cluster that are worse than their like.
        trace_ranks: ranks whose timelines are written.
        host_waits: the host waits for what a pipeline stage receives.
        launch_blocking: it waits for every kernel.
        reliability: how often nodes fail.
    """

    scales: tuple[Scale, ...] = ()
    settings: dict[str, str] = field(default_factory=dict)
    slow: tuple[tuple[str, float], ...] = ()
    jitter: float = 0.0
    seed: int = 0
    draws: int = 1
    every_rank: bool = False
    network: str = "auto"
    degraded: tuple[DegradedLink | SlowNode, ...] = ()
    trace_ranks: tuple[int, ...] = ()
    host_waits: bool = False
    launch_blocking: bool = False
    reliability: Reliability | None = None

    def ranks(self, gpus_per_node: int) -> EveryRank | None:
        """How ranks differ; None where all of a role are alike."""
        if not (self.every_rank or self.slow or self.jitter):
            return None
        slow: dict[int, float] = {}
        for where, factor in self.slow:
            if where.startswith("node:"):
                first = int(where[5:]) * gpus_per_node
                slow |= dict.fromkeys(range(first, first + gpus_per_node), factor)
            else:
                slow[int(where)] = factor
        return EveryRank(slow=slow, jitter=self.jitter, seed=self.seed, draws=self.draws)


def make_scenario(
    *,
    scale: Sequence[str],
    without: Sequence[str],
    setting: Sequence[str],
    ranks: str,
    straggler: Sequence[str],
    jitter: float,
    seed: int,
    draws: int,
    network: str | None,
    degrade: Sequence[str],
    trace_ranks: str | None,
    host_waits: bool,
    launch_blocking: bool,
    reliability: tuple[float | None, float | None, float | None, float | None],
) -> Scenario:
    """Options as the command line spells them.

    Raises:
        UsageError: one is misspelt or lacks another.
    """
    if ranks not in ("roles", "all"):
        raise UsageError(f"--ranks {ranks[:20]}: choose roles or all")
    if not 1 <= draws <= MAX_DRAWS:
        raise UsageError(f"--draws {draws}: choose 1 to {MAX_DRAWS:,}")
    if draws > 1 and not jitter:
        raise UsageError("--draws: repeats a noisy step, give --jitter as well")
    return Scenario(
        scales=(*map(parse_scale, scale), *(parse_scale(f"{what}=0") for what in without)),
        settings=dict(map(_setting, setting)),
        slow=tuple(map(_straggler, straggler)),
        jitter=jitter,
        seed=seed,
        draws=draws,
        every_rank=ranks == "all",
        network=network or "auto",
        degraded=tuple(map(parse_degraded, degrade)),
        trace_ranks=_ranks(trace_ranks) if trace_ranks is not None else (),
        host_waits=host_waits,
        launch_blocking=launch_blocking,
        reliability=_reliability(*reliability),
    )


def _ranks(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) <= 9 for part in parts):
        raise UsageError(f"--trace-ranks {text[:40]}: give ranks with commas between them, as 0,17")
    ranks = tuple(dict.fromkeys(map(int, parts)))
    if len(ranks) > MAX_TRACED:
        raise UsageError(f"--trace-ranks: {len(ranks)} ranks: give at most {MAX_TRACED}")
    return ranks


def _setting(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator or not key.startswith("cluster."):
        raise UsageError(f"--set {text[:60]}: give cluster.KEY=VALUE, as cluster.network.nic_GBps=100")
    return key.removeprefix("cluster."), value


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


def _reliability(
    mtbf_hours: float | None, checkpoint_s: float | None, restart_s: float | None, interval_s: float | None
) -> Reliability | None:
    if mtbf_hours is None:
        if (checkpoint_s, restart_s, interval_s) != (None, None, None):
            raise UsageError(
                "--checkpoint-s, --restart-s, --checkpoint-interval-s: give --node-mtbf-hours as well"
            )
        return None
    if checkpoint_s is None or restart_s is None:
        raise UsageError("--node-mtbf-hours: give what a failure costs: --checkpoint-s and --restart-s")
    return Reliability(
        node_mtbf_s=mtbf_hours * HOUR_S, checkpoint_s=checkpoint_s, restart_s=restart_s, interval_s=interval_s
    )

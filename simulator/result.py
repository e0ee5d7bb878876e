"""What a simulation answers: the record that tables, JSON and reports are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from echograph.ir.graph import JobGraph
from echograph.ir.timeline import Timeline
from echograph.simulator.breakdown import Breakdown, Role, Spread
from echograph.simulator.durations import Durations
from echograph.simulator.goodput import Goodput
from echograph.simulator.memory import Memory
from echograph.simulator.ranks import RankPath, RankTimes
from echograph.units import format_bytes, format_count, format_number, format_time, to_s

if TYPE_CHECKING:
    from echograph.simulator.flows import LinkUse


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The prediction of one training step.

    Attributes:
        model: name of the model.
        cluster: name of the cluster.
        device: name of its device.
        gpus: number of ranks.
        plan: the parallel plan, option -> value.
        step_ps: step time, picoseconds.
        interval_ps: 90 % interval of the step time.
        durations_interval_ps: the same, from the errors of its durations alone (`simulator.limits`).
        work: share of the critical path of each kind of work that the model has timed (`simulator.form`).
        samples: samples of one step over all ranks.
        tokens: tokens of one step over all ranks; 0 where samples have none.
        model_flops: what the model asks, forward and backward, of a rank on average: nothing computed again,
            padded or computed by several ranks (`ir.passes.model`); 0 where unknown.
        causal_attention_flops: those of them in attention with a causal mask, masked pairs included.
        peak_flops_per_s: the device's dense peak for the model's type; 0 where unknown.
        breakdown: where the time goes, for the role that ends last.
        ends_last: that role.
        roles: names of all roles.
        write_spread: works out how breakdowns differ between ranks.
        limits: kind of work -> picoseconds on the critical path, the derivative of the step by it.
        memory: of the program that needs most; None where the graph has no tensors.
        sources: share of the busy time by source of the duration.
        collectives: for each group axis, calls and bytes per rank and the algorithms chosen.
        engine: name of the engine.
        network: "closed-form", or "flows" where communications share links.
        degraded: what of the cluster is degraded, in words.
        links: at flow level, the links used most.
        simulated_ranks: programs simulated; equal ranks are simulated once.
        tasks: number of tasks.
        wall_s: seconds that the simulation took.
        write_timeline: writes down what ran when, which a prediction itself does not always need.
        times: what each operation of the job takes and where that comes from, for those who look into the step.
        traced: what the ranks did whose timelines were asked for.
        ranks: the times of every rank, where each was simulated.
        path: which ranks the critical path goes through, where each was simulated.
        draws_ps: step times under several draws of noise.
        goodput: what failures leave of the throughput, where it was asked for.
        job: what was simulated, with its durations, where whoever asked keeps it.
    """

    model: str
    cluster: str
    device: str
    gpus: int
    plan: dict[str, Any]
    step_ps: int
    interval_ps: tuple[int, int]
    durations_interval_ps: tuple[int, int]
    work: dict[str, float]
    samples: int
    tokens: int
    model_flops: int
    causal_attention_flops: int
    peak_flops_per_s: float
    breakdown: Breakdown
    ends_last: Role
    roles: tuple[str, ...]
    limits: dict[str, int]
    memory: Memory | None
    sources: dict[str, float]
    collectives: dict[str, dict[str, Any]]
    engine: str
    simulated_ranks: int
    tasks: int
    wall_s: float
    write_timeline: Callable[[], Timeline] = field(repr=False, compare=False)
    write_spread: Callable[[], Spread] = field(repr=False, compare=False)
    network: str = "closed-form"
    degraded: tuple[str, ...] = ()
    links: tuple[LinkUse, ...] = ()
    times: Durations | None = field(default=None, repr=False, compare=False)
    traced: Timeline | None = field(default=None, repr=False, compare=False)
    ranks: RankTimes | None = field(default=None, repr=False, compare=False)
    path: RankPath | None = None
    draws_ps: tuple[int, ...] = ()
    goodput: Goodput | None = None
    job: JobGraph | None = field(default=None, repr=False, compare=False)

    @property
    def step_s(self) -> float:
        """Step time, seconds."""
        return to_s(self.step_ps)

    @property
    def interval_s(self) -> tuple[float, float]:
        """90 % interval of the step time, seconds."""
        low, high = self.interval_ps
        return to_s(low), to_s(high)

    @property
    def timeline(self) -> Timeline:
        """What ran when, with the job whose operations it names; written when it is asked for first."""
        return replace(self.write_timeline(), graph=self.job)

    @property
    def spread(self) -> Spread:
        """How the parts of the step differ between ranks: of all roles, each as often as it has ranks.

        Where every rank was simulated, it is of one rank of each role, those that work with the last one.
        """
        return self.write_spread()

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation: model FLOPs over what the devices could do in the step; None where unknown.

        Attention is counted in full, the pairs that a causal mask leaves out included.
        """
        return self._utilisation(self.model_flops)

    @property
    def mfu_causal(self) -> float | None:
        """`mfu` with attention that has a causal mask counted by half."""
        return self._utilisation(self.model_flops - self.causal_attention_flops / 2)

    def _utilisation(self, flops: float) -> float | None:
        if not self.model_flops or not self.peak_flops_per_s or not self.step_ps:
            return None
        return flops / (to_s(self.step_ps) * self.peak_flops_per_s)

    @property
    def percentiles_s(self) -> dict[str, float]:
        """Percentiles of the step time over the draws of noise."""
        levels = (50, 95, 99)
        values = np.percentile(np.array(self.draws_ps, np.float64), levels) / 1e12
        return {f"p{level}": float(value) for level, value in zip(levels, values, strict=True)}

    def __str__(self) -> str:
        """The step for people: how long, where it goes, what limits it, what it needs and rests on."""
        return "\n".join(_lines(self))

    def collective_lines(self, *, algorithms: bool = True) -> list[str]:
        """A line each group axis: calls, bytes and time of its collectives, and the algorithms chosen."""
        return [
            f"  collectives   {axis}: {entry['calls']} calls, {format_bytes(entry['bytes_per_rank'])} per rank, "
            f"{entry['busy_s'] * 1e3:.4g} ms busy" + f" ({', '.join(entry['algorithms'])})" * algorithms
            for axis, entry in self.collectives.items()
        ]

    def _repr_html_(self) -> str:
        """The step in a notebook: how long, and where it goes."""
        from echograph.ir.tables import html_table

        parts = [(name, value) for name, value in self.breakdown.flat().items() if value]
        low, high = map(format_time, self.interval_ps)
        head = f"<p>{escape(f'{self.model} on {self.gpus} GPUs of {self.cluster} ({self.device})')}: "
        head += f"{format_time(self.step_ps)} ({low} to {high})</p>"
        rows = [(name, format_time(value), f"{value / (self.step_ps or 1):.1%}") for name, value in parts]
        return head + html_table(("where the step goes", "time", "share"), rows)

    def to_json(self) -> dict[str, Any]:
        """The stable schema of `echosim run --json`."""
        step, spread = to_s(self.step_ps), self.spread
        return {
            "model": self.model,
            "cluster": self.cluster,
            "device": self.device,
            "step_time_s": step,
            "step_time_interval_s": [to_s(v) for v in self.interval_ps],
            "tokens_per_s": self.tokens / step if step else 0.0,
            "samples_per_s": self.samples / step if step else 0.0,
            "mfu": self.mfu,
            "mfu_causal": self.mfu_causal,
            "gpus": self.gpus,
            "plan": self.plan,
            "breakdown_s": self.breakdown.to_json(),
            "breakdown_of": asdict(self.ends_last),
            "breakdown_mean_s": spread.mean.to_json(),
            "breakdown_least_s": spread.least.to_json(),
            "breakdown_most_s": spread.most.to_json(),
            "breakdown_ranks": spread.ranks,
            "limits_s": {name: to_s(value) for name, value in self.limits.items()},
            "memory": None if self.memory is None else self.memory.to_json(),
            "durations": self.sources,
            "collectives": self.collectives,
            "simulation": {
                "engine": self.engine,
                "network": self.network,
                "ranks": self.simulated_ranks,
                "tasks": self.tasks,
                "wall_s": self.wall_s,
            },
            **({} if self.network != "flows" else {"links": [link.to_json() for link in self.links]}),
            **({} if not self.degraded else {"degraded": list(self.degraded)}),
            **({} if self.ranks is None else {"ranks": self.ranks.to_json()}),
            **({} if self.path is None else {"limits_by_rank": [one.to_json() for one in self.path.ranks]}),
            **({} if not self.draws_ps else {"step_time_percentiles_s": self.percentiles_s}),
            **({} if self.goodput is None else {"failures": self.goodput.to_json()}),
        }


BAR, MOST_RANKS, LEAST_SHARE = 30, 3, 0.03
"""Characters of the longest bar, ranks of the critical path that are listed, and the least share of it that is."""
_NAME = 16


def _lines(result: Result) -> Iterator[str]:
    low, high = map(format_time, result.interval_ps)
    yield f"{result.model} on {result.gpus} GPUs of {result.cluster} ({result.device})"
    yield f"  step time     {format_time(result.step_ps)}   (90 % interval {low} to {high})"
    yield from _rates(result)
    if result.draws_ps:
        shown = ", ".join(f"{name.upper()} {value * 1e3:.4g} ms" for name, value in result.percentiles_s.items())
        yield f"  with noise    {shown} ({len(result.draws_ps)} draws)"
    if (found := result.goodput) is not None:
        every = f"every {format_number(found.interval_s)} s (best {format_number(found.best_interval_s)} s)"
        fails = f"one every {format_number(found.job_mtbf_s / 3600)} h, a checkpoint {every}"
        yield f"  with failures {found.share:.1%} of the time trains: {fails}"
    yield from _breakdown_lines(result)
    yield f"  limited by    {_limits(result.limits)} (of the critical path)"
    if result.path is not None:
        yield from _path_lines(result, result.path)
    yield from result.collective_lines()
    if result.network == "flows":
        # The busiest links, those that are used alike once.
        yield f"  network       flows over links{'; used most:' if result.links else ', which nobody uses'}"
        for link in result.links:
            others = f" (and {link.alike - 1} more)" if link.alike > 1 else ""
            yield f"                {link.name:<24} {link.utilisation:>6.1%}{others}"
    if result.degraded:
        yield f"  degraded      {', '.join(result.degraded)}: every rank simulated"
    if result.memory is not None:
        yield from _memory_lines(result.memory)
    shares = ", ".join(f"{share:.0%} {name}" for name, share in result.sources.items() if share > 0)
    yield f"  durations     {shares} (shares of the busy time)"
    ran = f"{result.tasks} tasks of {result.simulated_ranks} distinct rank(s), engine {result.engine}"
    yield f"  simulation    {ran}, {result.wall_s:.2g} s"


def _rates(result: Result) -> Iterator[str]:
    step = to_s(result.step_ps)
    samples, tokens = (count / step if step else 0.0 for count in (result.samples, result.tokens))
    also = f", {format_count(tokens)} tokens/s" if result.tokens else ""
    yield f"  throughput    {format_count(samples)} samples/s{also}"
    if result.mfu is not None:
        flops = "model FLOPs, none recomputed or padded"
        if result.causal_attention_flops and result.mfu_causal is not None:
            flops += f"; {result.mfu_causal:.1%} with causal attention by half"
        yield f"  utilisation   {result.mfu:.1%} of the device's peak ({flops})"


def _breakdown_lines(result: Result) -> Iterator[str]:
    """The parts of the step of the role that ends last; where there are others, beside what these have."""
    own, spread, step = result.breakdown.flat(), result.spread, result.step_ps or 1
    mean, least, most = (part.flat() for part in (spread.mean, spread.least, spread.most))
    several = spread.ranks > 1 and len(result.roles) > 1
    last = f": {result.ends_last.name} (rank {result.ends_last.rank}), which ends last"
    yield "  where the step goes" + f"{last}; mean of {spread.ranks} ranks (least to most)" * several
    shown = {name: value for name, value in own.items() if value or name == "compute" or (several and most[name])}
    wide = max(_NAME, *map(len, shown))
    for name, value in shown.items():
        bar = "#" * round(BAR * value / step)
        if several:
            others = f"{mean[name] / step:>6.1%} ({least[name] / step:.1%} to {most[name] / step:.1%})"
            bar = f"{others:<27}  {bar}".rstrip()
        yield f"    {name:<{wide}} {format_time(value):>10} {value / step:>7.1%}  {bar}".rstrip()


def _limits(limits: Mapping[str, int]) -> str:
    """What would have to become faster, the most telling first."""
    total = sum(limits.values()) or 1
    shares = [(name, value / total) for name, value in limits.items()]
    return ", ".join(f"{name} {share:.0%}" for name, share in shares if share >= LEAST_SHARE)


def _path_lines(result: Result, path: RankPath) -> Iterator[str]:
    """The ranks through which the critical path goes, and what they do meanwhile."""
    for number, one in enumerate(path.ranks[:MOST_RANKS]):
        share = one.total_ps / result.step_ps if result.step_ps else 0.0
        if share < LEAST_SHARE:
            break
        slower = "" if one.slower == 1 else f", {one.slower:g} times as slow,"
        role = f" ({one.role})" if one.role and len(result.roles) > 1 else ""
        head = "  on the path   " if not number else " " * 16
        yield f"{head}rank {one.rank}{role}{slower} for {share:.0%}: {_limits(one.limits)}"


def _memory_lines(memory: Memory) -> Iterator[str]:
    held = "" if memory.reserved_bytes is None else f", {format_bytes(memory.reserved_bytes)} reserved"
    verdict = "fits" if memory.fits else "DOES NOT FIT"
    yield (
        f"  memory        {format_bytes(memory.peak_bytes)} allocated at the peak{held}, "
        f"{format_bytes(memory.device_bytes)} of {format_bytes(memory.capacity_bytes)} in all: {verdict}"
    )
    if not memory.fits:
        yield from (f"                {line}" for line in memory.lines())

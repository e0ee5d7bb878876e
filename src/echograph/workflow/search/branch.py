"""Branch and bound over plans: the ones with the lowest bounds first, until no bound is below what was found.

The answer is that of predicting every plan, since a plan is left out only where it cannot be among the best: its
bound (`bounds`) is above the last of them, or it does not fit in memory.
"""

from __future__ import annotations

import heapq
import re
import time
from bisect import insort
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from echograph.errors import EchoError, PlanError, UsageError
from echograph.ir.columns import NONE
from echograph.ir.graph import JobGraph, StepGraph
from echograph.ir.tables import text_table
from echograph.notes import tell
from echograph.options import option_name
from echograph.progress import Progress, silent
from echograph.simulator.result import Result
from echograph.units import format_bytes, format_count, format_time
from echograph.workflow.plan import Plan
from echograph.workflow.predictor import Predictor
from echograph.workflow.scenario import Scenario
from echograph.workflow.search.bounds import Bounds, PlanBound, less, of_step
from echograph.workflow.search.objective import Objective
from echograph.workflow.search.objective import objective as objective_named
from echograph.workflow.search.space import PlanWords, Space, space
from echograph.workflow.search.step_cost import StepCost
from echograph.workflow.search.writers import PlanSizes
from echograph.workflow.system import System
from echograph.workflow.workers import HERE, WorkerOptions, Workers, workers

if TYPE_CHECKING:
    from echograph.simulator.memory import Memory

_PLAIN = Scenario()
_NONE: Mapping[str, tuple[Any, ...]] = {}
TOP = 10
MOST_REASONS = 3
OTHERS = 4
"""So many steps of a rank are bounded for each plan that is predicted ahead and cannot be the first, at least."""
WHOLE = 4
"""Of so many plans that are predicted ahead, one is predicted with its memory, at least."""
AT_ONCE = 1024
"""So many plans that differ least from the best are looked through for those whose step of a rank is known."""
_IN_ORDER = ("recompute", "tp", "sequence_parallel", "cp", "ep")
"""Of a plan, behind its micro-batch: what the passes of a step depend on, in their order (`plan.passes`)."""
ONE_SAMPLE = (
    "micro-batches of one sample alone are searched: the graph was captured with one, which does not show what "
    "grows with samples; compile it with --batch-size 2 to have others"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan that was predicted.

    Attributes:
        number: its place among all plans of the space.
        plan: the plan.
        value: of the objective; less is better.
        step_s: seconds of a step.
        interval_s: its 90 % interval.
        tokens_per_s: of all GPUs.
        samples_per_s: of all GPUs.
        mfu: model FLOPs utilisation; None where it is not known.
        gpus: how many.
        peak_bytes: the most that is allocated on a device; 0 where the graph has no tensors.
        device_bytes: with what the framework holds beside.
        capacity_bytes: of a device.
        fits: whether it runs.
        record: the plan with its defaults filled in, as results have it.
    """

    number: int
    plan: Plan
    value: float
    step_s: float
    interval_s: tuple[float, float]
    tokens_per_s: float
    samples_per_s: float
    mfu: float | None
    gpus: int
    peak_bytes: int
    device_bytes: int
    capacity_bytes: int
    fits: bool
    record: dict[str, Any]

    @property
    def rank(self) -> tuple[float, int]:
        """Candidates are sorted by this: equal ones in the order of the space."""
        return self.value, self.number

    def to_json(self) -> dict[str, Any]:
        """The record in results of a search."""
        return {
            "plan": self.record,
            "options": options(self.plan),
            "step_time_s": self.step_s,
            "step_time_interval_s": list(self.interval_s),
            "tokens_per_s": self.tokens_per_s,
            "samples_per_s": self.samples_per_s,
            "mfu": self.mfu,
            "objective": self.value,
            "peak_bytes": self.peak_bytes,
            "device_bytes": self.device_bytes,
            "capacity_bytes": self.capacity_bytes,
            "fits": self.fits,
        }


@dataclass(frozen=True, slots=True)
class TooLarge:
    """A plan that needs more memory than it may.

    Attributes:
        least_bytes: what its fullest device needs at least.
    """

    least_bytes: int


def options(plan: PlanWords | Plan) -> dict[str, Any]:
    """The words of a plan file that say a plan."""
    given = (plan if isinstance(plan, Plan) else Plan(**plan)).given
    return {option_name(name)[2:]: value for name, value in given.items()}


def in_words(plan: PlanWords | Plan, leave: Collection[str] = ("cluster", "global-batch")) -> str:
    """The options of a plan, as a command line has them."""
    said = ((name, value) for name, value in options(plan).items() if name not in leave)
    return " ".join(f"--{name}" if value is True else f"--{name} {value}" for name, value in said)


@dataclass(slots=True, kw_only=True)
class Losers:
    """Why the plans lose that are not among the best.

    Attributes:
        divides: choices that were left out while plans were made, by what does not divide.
        refused: plans that do not fit the graph, by what was said of them.
        too_large_by_bound: plans that need more memory than there is by their bound alone.
        too_large: plans that were predicted and do not fit.
        least_missing_bytes: what the one of these that is nearest to fitting lacks.
        nearest: that plan.
        slower_by_bound: plans that were not predicted, since they cannot be among the best.
        slower: plans that were predicted and fit, and are not among the best.
        too_slow: plans whose step is longer than it may be, as predicted or by its bound alone.
        not_reached: plans that nothing is known of, where the search was ended before.
    """

    divides: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    too_large_by_bound: int = 0
    too_large: int = 0
    least_missing_bytes: int = 0
    nearest: PlanWords | Plan | None = None
    slower_by_bound: int = 0
    slower: int = 0
    too_slow: int = 0
    not_reached: int = 0

    def to_json(self) -> dict[str, Any]:
        """The record in results of a search."""
        return {
            "does_not_divide": dict(self.divides),
            "refused": dict(self.refused),
            "does_not_fit_by_bound": self.too_large_by_bound,
            "does_not_fit": self.too_large,
            "least_missing_bytes": self.least_missing_bytes,
            "nearest_to_fitting": None if self.nearest is None else options(self.nearest),
            "slower_by_bound": self.slower_by_bound,
            "slower": self.slower,
            "too_slow": self.too_slow,
            "not_reached": self.not_reached,
        }

    def reasons(self) -> Iterator[tuple[int, str]]:
        """How many plans lose, and why, for people."""
        nearest = "" if self.nearest is None else f" ({in_words(self.nearest)})"
        lacks = format_bytes(self.least_missing_bytes)
        known = (
            (self.slower, "slower, predicted"),
            (self.too_slow, "take too long"),
            (self.slower_by_bound, "slower by their bound: what it counts takes longer already"),
            (
                self.too_large_by_bound + self.too_large,
                f"do not fit in memory: the nearest lacks {lacks}{nearest}",
            ),
        )
        yield from ((count, reason) for count, reason in known if count)
        for what, counts in (("", self.refused), ("choices left out: ", self.divides)):
            common = counts.most_common(MOST_REASONS)
            yield from ((count, what + reason) for reason, count in common)
            if len(counts) > MOST_REASONS:
                rest = sum(counts.values()) - sum(count for _, count in common)
                yield rest, f"{what}for {len(counts) - MOST_REASONS} other reasons"
        if self.not_reached:
            yield self.not_reached, "not looked at any more"


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The answer of a search.

    Attributes:
        model: name of the model.
        cluster: name of the cluster.
        device: name of its device.
        objective: what the best are the best at.
        best: the best plans, best first.
        front: plans that no other predicted one beats in time, memory and GPUs at once, fastest first.
        considered: plans of the space.
        simulated: plans that were predicted.
        losers: why the others lose.
        ended: "" where the search was ended by itself, so that the best are proven; else "time" or "interrupt".
        least: of the objective, what no plan that is not predicted is below, by the bounds that are known.
        wall_s: seconds that it took.
        node: GPUs of a node.
        layers: of the model.
        dtype: of its forward pass.
        master_weights: whether its optimizer keeps fp32 copies of 16-bit parameters.
    """

    model: str
    cluster: str
    device: str
    objective: Objective
    best: tuple[Candidate, ...]
    front: tuple[Candidate, ...]
    considered: int
    simulated: int
    losers: Losers
    ended: str
    least: float
    wall_s: float
    node: int
    layers: int
    dtype: str
    master_weights: bool

    @property
    def alike(self) -> int:
        """How many of the best, from the first on, may be as good as the first within the steps' intervals."""
        if not self.best:
            return 0
        high = self._figure(self.best[0], 1)
        found = [at for at, one in enumerate(self.best) if self._figure(one, 0) > high]
        return found[0] if found else len(self.best)

    @property
    def proof(self) -> str:
        """Whether others may be better, and by how much, in words."""
        if not self.ended:
            return "proven: no other plan of the space is better"
        why = {"time": "the time was over", "interrupt": "interrupted"}[self.ended]
        if not self.best or self.gap is None:
            return f"{why}: others may be better"
        return (
            f"{why}: others may be better, by {self.gap:.1%} at most"
            if self.gap
            else f"{why}: the first is proven"
        )

    @property
    def gap(self) -> float | None:
        """By what share of the first plan's value another may be better at most; None where that is not known."""
        if not self.ended:
            return 0.0
        if not self.best or self.least <= 0:
            return None
        return max(0.0, 1 - self.least / self.best[0].value)

    def _figure(self, one: Candidate, end: int) -> float:
        """What the plan is held against others by, at an end of its step's interval."""
        return self.objective.by_step(one.interval_s[end], one.gpus)

    def sizes(self, one: Candidate) -> PlanSizes:
        """What a plan leaves open, for those who write it down."""
        data, micro = one.record["dp"], one.record["micro_batch"]
        return PlanSizes(
            gpus=one.gpus,
            node=self.node,
            data_ranks=data,
            micro_batch=micro,
            micro_batches=one.record["global_batch"] // (data * micro),
            layers=self.layers,
            dtype=one.record.get("precision", self.dtype),
            master_weights=self.master_weights,
        )

    def __str__(self) -> str:
        """The best for people, what no other beats, and why the rest lose."""
        return "\n".join(_lines(self))

    def to_json(self) -> dict[str, Any]:
        """The record of `echosim plan --json`."""
        numbers = {one.number for one in self.front}
        return {
            "model": self.model,
            "cluster": self.cluster,
            "device": self.device,
            "objective": self.objective.name,
            "considered": self.considered,
            "simulated": self.simulated,
            "proven": not self.ended,
            "ended_by": self.ended or None,
            "gap": self.gap,
            "wall_s": self.wall_s,
            "best": [one.to_json() for one in self.best],
            "alike": self.alike,
            "pareto": [at for at, one in enumerate(self.best) if one.number in numbers],
            "pareto_plans": [one.to_json() for one in self.front],
            "losers": self.losers.to_json(),
        }


Asked = Literal["bound", "step", "whole"]
"""What is wanted of a plan: what the step of one rank costs, the time of a step, or a candidate."""
PlanPoint = tuple[int, Plan, Asked]
"""A plan with its number, and what is wanted of it."""
PlanAnswer = Candidate | TooLarge | float | StepCost | str
"""What was wanted, time in seconds; or why the plan is none."""


@dataclass(frozen=True, slots=True)
class Question:
    """What a worker needs to bound and to predict plans; calling it makes the worker.

    Attributes:
        boards: GPUs that each plan has at least.
    """

    graph: StepGraph
    system: System
    scenario: Scenario
    objective: str
    most_step_s: float
    boards: int

    def __call__(self) -> Callable[[PlanPoint], PlanAnswer]:
        """What answers points."""
        predictor = Predictor(self.graph, self.system, self.scenario)
        bounds = Bounds(self.graph, self.system, self.scenario, predictor.steps, self.boards)
        aim = objective_named(self.objective, self.system, self.scenario, self.most_step_s)

        def answer(point: PlanPoint) -> PlanAnswer:
            number, plan, asked = point
            if asked == "bound":
                try:
                    return bounds.step(plan)
                except EchoError as error:
                    return str(error)
            try:
                if asked == "whole":
                    return predicted(predictor, aim, number, plan)
                return predictor.predict(plan, memory=False, interval=False).step_s
            except (PlanError, UsageError) as error:
                return str(error)

        return answer


def predicted(
    predictor: Predictor, aim: Objective, number: int, plan: Plan, most_bytes: float = inf
) -> Candidate | TooLarge:
    """A plan with its memory and its interval, unless a device needs more than it has, or than it may.

    Memory comes first: most plans that are asked for need too much, and their clocks are as much work again.

    Args:
        predictor: of the plan's graph.
        aim: what the best are the best at.
        number: of the plan.
        plan: the plan.
        most_bytes: what a device may need, where that is less than it has.

    Raises:
        EchoError: the plan does not fit the graph.
    """
    memory = predictor.memory(plan, min(most_bytes, predictor.system.cluster.memory_bytes))
    if memory is not None and not (memory.fits and memory.device_bytes <= most_bytes):
        return TooLarge(memory.device_bytes)
    return _candidate(number, plan, predictor.predict(plan, memory=False), memory, aim)


def _candidate(number: int, plan: Plan, result: Result, memory: Memory | None, aim: Objective) -> Candidate:
    step_s = result.step_s
    return Candidate(
        number=number,
        plan=plan,
        value=aim.value(result),
        step_s=step_s,
        interval_s=result.interval_s,
        tokens_per_s=result.tokens / step_s if step_s else 0.0,
        samples_per_s=result.samples / step_s if step_s else 0.0,
        mfu=result.mfu,
        gpus=result.gpus,
        peak_bytes=0 if memory is None else memory.peak_bytes,
        device_bytes=0 if memory is None else memory.device_bytes,
        capacity_bytes=0 if memory is None else memory.capacity_bytes,
        fits=memory is None or memory.fits,
        record=result.plan,
    )


def _scattered(number: int) -> int:
    """A number with its bits reversed: in the order of these, neighbours are far apart."""
    return int(f"{number:064b}"[::-1], 2)


_Loose = tuple[float, tuple[Any, ...], int, Plan]
"""A plan with a coarse bound: that, its turn among equal ones, its number, and it."""
_TOGETHER = (("tp", "sequence_parallel"), ("pp", "vpp", "stage_layers", "schedule"), ("zero", "hsdp_replicas"))
"""Axes whose values go with each other: a plan that differs in all of these differs in one thing."""


class _Differences:
    """In how much plans differ.

    Args:
        names: of the axes of the space, two at least.
        plans: those that are asked for.
    """

    def __init__(self, names: Sequence[str], plans: Sequence[_Loose]) -> None:
        self._plans = tuple(plans)
        self._values = attrgetter(*names)
        alone = (name for name in names if not any(name in its for its in _TOGETHER))
        things = [*_TOGETHER, *((name,) for name in alone)]
        self._columns = [[names.index(name) for name in its if name in names] for its in things]
        self._known: list[dict[Any, int]] = [{} for _ in names]
        self._least = np.array([entry[0] for entry in plans])
        codes = np.array([self._codes(entry[3]) for entry in plans], np.int16)
        self._rows = codes.reshape(len(plans), len(names))

    def _codes(self, plan: Plan) -> list[int]:
        values = zip(self._known, self._values(plan), strict=True)
        return [known.setdefault(value, len(known)) for known, value in values]

    def nearest(self, plan: Plan) -> Iterator[_Loose]:
        """All of them, those first that differ in fewest things, and of these the ones with the lowest bound."""
        other = self._rows != np.array(self._codes(plan), np.int16)
        apart = sum(other[:, columns].any(axis=1).astype(np.int64) for columns in self._columns)
        return (self._plans[at] for at in np.lexsort((self._least, apart)).tolist())


class _Search:
    """A search under way.

    Attributes:
        loose: plans with a coarse bound: that, their turn among equal ones, number, and plan. A heap.
        left: plans with a tight bound, or whose step is known: that, which of them, number, and plan. A heap.
        waiting: plans, with their numbers, by the step of a rank of which it is not known yet what it costs.
        nearer: numbers of plans that are bounded by a step that does less than theirs; in `loose`, too.
        ahead: whether plans are predicted before all bounds are known, so that there are some when it ends.
        fits_bytes: the largest need, by its bound, of a plan that was predicted ahead and fits.
        too_large_bytes: the smallest of one that does not.
        diving: the number of the plan that is being predicted ahead; -1 for none.
        learned: how many steps of a rank are known.
        dives: how often something of a plan was predicted ahead; no oftener than steps are learned, which take as
            long.
        asked: bounds of plans that an answer is waited for, by number.
        bounded: whether all plans have a coarse bound.
        reached: numbers of plans that were taken out of turn, in `loose` still; only with `ahead`.
        nearby: plans that are still to be taken out of turn, those first that differ little from `around`.
        around: the best plan when that was asked for.
        aside: whether the last step of a rank that was asked for is one of these.
    """

    def __init__(
        self,
        among: Space,
        bounds: Bounds,
        aim: Objective,
        capacity: int,
        top: int,
        progress: Progress,
        ahead: bool,
    ) -> None:
        self.among, self.bounds, self.aim = among, bounds, aim
        self.capacity, self.top, self.progress = capacity, top, progress
        self.losers = Losers()
        self.best: list[Candidate] = []
        self.fitting: list[Candidate] = []
        self.steps: dict[int, float] = {}
        self.needs: dict[int, float] = {}
        self.simulated = self.considered = 0
        self.loose: list[_Loose] = []
        self.left: list[tuple[float, int, int, Plan]] = []
        self.waiting: dict[Hashable, list[tuple[int, Plan]]] = {}
        self.nearer: set[int] = set()
        self.ahead, self.fits_bytes, self.too_large_bytes = ahead, 0.0, float(capacity)
        self.diving, self.learned, self.dives = NONE, 0, 0
        self.asked: dict[int, float] = {}
        self.bounded = True
        self.reached: set[int] = set()
        self.differences: _Differences | None = None
        self.nearby: Iterator[_Loose] = iter(())
        self.around: Plan | None = None
        self.aside = False

    def begin(self, until: float = inf) -> None:
        """Bounds all plans coarsely, or as many as there is time for, spread over the space."""
        choices: Iterable[tuple[int, PlanWords]] = enumerate(self.among.choices())
        if until < inf:
            choices = sorted(choices, key=lambda one: _scattered(one[0]))
        for count, (number, chosen) in enumerate(choices):
            self.considered += 1
            if count % 4096 == 0:
                self.progress("bounding plans", count)
            if not self.bounded or (count % 256 == 0 and time.monotonic() > until):
                self.bounded = False
                self.losers.not_reached += 1
                continue
            try:
                plan = self.among.plan(chosen)
                bound = self.bounds.first(plan, chosen["gpus"])
            except EchoError as error:
                self.losers.refused[_kind_of(str(error))] += 1
                continue
            least = self._least(bound, chosen["gpus"])
            if self._may_fit(bound, plan) and self._in_time(least):
                self.loose.append((least, self._turn(number, plan), number, plan))
        heapq.heapify(self.loose)
        if self.ahead:
            self.differences = _Differences([axis.name for axis in self.among.axes], self.loose)
        self.losers.divides = Counter(self.among.refused)

    def _turn(self, number: int, plan: Plan) -> tuple[Any, ...]:
        """Which of equal bounds comes first.

        Neighbours have most in common. So to have some plan early, turns go through the whole space first, by the
        bits reversed; else plans follow each other whose steps begin with the same passes.
        """
        if self.ahead:
            return (_scattered(number),)
        return (plan.micro_batch or 0, *(getattr(plan, name) for name in _IN_ORDER), number)

    @property
    def last(self) -> float:
        """The value that a plan must not be above to be among the best."""
        return self.best[self.top - 1].value if len(self.best) >= self.top else inf

    def _least(self, bound: PlanBound, gpus: int) -> float:
        return self.aim.least(bound.step_ps / 1e12, gpus)

    def _in_time(self, least: float) -> bool:
        self.losers.too_slow += least == inf
        return least < inf

    def _may_fit(self, bound: PlanBound, plan: PlanWords | Plan) -> bool:
        if bound.memory_bytes <= self.capacity:
            return True
        self.losers.too_large_by_bound += 1
        self._missing(round(bound.memory_bytes), plan)
        return False

    def _bound(self, number: int, plan: Plan, by: Plan) -> None:
        """Bounds a plan by its own step, or first by one that does less, which others have as well."""
        if of_step(by) == of_step(plan):
            self._tighten(number, plan)
            return
        self.nearer.add(number)
        self.asked.pop(number, None)
        gpus = plan.gpus or 1
        try:
            least = self.aim.least(self.bounds.by_less(plan, gpus) / 1e12, gpus)
        except EchoError:
            least = 0.0  # what is wrong with the plan its own step says
        if self._in_time(least):
            heapq.heappush(self.loose, (least, self._turn(number, plan), number, plan))

    def _tighten(self, number: int, plan: Plan) -> None:
        """Bounds a plan tightly, and keeps it where that does not decide."""
        self.asked.pop(number, None)
        gpus = plan.gpus or 1
        try:
            bound = self.bounds.second(plan, gpus)
        except EchoError as error:
            self.losers.refused[_kind_of(str(error))] += 1
            return
        least = self._least(bound, gpus)
        if self._may_fit(bound, plan) and self._in_time(least):
            self.needs[number] = bound.memory_bytes
            heapq.heappush(self.left, (least, 1, number, plan))

    def _missing(self, needed: int, plan: PlanWords | Plan) -> None:
        losers, missing = self.losers, needed - self.capacity
        if losers.nearest is None or missing < losers.least_missing_bytes:
            losers.least_missing_bytes, losers.nearest = missing, plan

    def run(self, at: Workers, until: float) -> str:
        """Predicts plans until the best are known; what ended it, "" for that."""
        while True:
            while at.free and (point := self._next()) is not None:
                at.give(point)
                if time.monotonic() > until:
                    return "time"
            if not at.busy:
                return ""
            left_s = until - time.monotonic()
            if left_s <= 0:
                return "time"
            for (number, plan, asked), found in at.take(None if left_s == inf else left_s):
                if asked == "bound":
                    assert isinstance(found, StepCost | str)
                    self._learn(plan, found)
                else:
                    self._take(number, plan, found)
            self.progress("predicting plans", self.simulated, self.simulated + at.busy + self._open())

    def _next(self) -> PlanPoint | None:
        """What is asked next; None where no plan can be among the best, or others have to be known before.

        The plan with the lowest bound; one that waits for what its step costs is none of them meanwhile.
        """
        if self.ahead and (point := self._out_of_turn()) is not None:
            return point
        while True:
            loose, tight = (heap[0][0] if heap else inf for heap in (self.loose, self.left))
            if not (self.loose or self.left) or min(loose, tight) > self.last:
                return None
            if self.left and tight <= loose:
                _, _, number, plan = heapq.heappop(self.left)
                self.asked[number] = tight
                return number, plan, "whole" if number in self.steps else "step"
            _, _, number, plan = heapq.heappop(self.loose)
            if number in self.reached:
                self.reached.remove(number)
            elif (point := self._to_bound(number, plan, loose)) is not None:
                return point

    def _to_bound(self, number: int, plan: Plan, least: float) -> PlanPoint | None:
        """Bounds a plan by the step of a rank; where that is not known, what is asked, if it is not yet."""
        # One bound after another is the shorter proof; a plan that is predicted ahead needs its own at once.
        by = plan if self.ahead or number in self.nearer else less(plan)
        if self.bounds.knows(by):
            self._bound(number, plan, by)
            return None
        self.asked[number] = least
        its = self.waiting.setdefault(of_step(by), [])
        its.append((number, plan))
        return (number, by, "bound") if len(its) == 1 else None

    def _out_of_turn(self) -> PlanPoint | None:
        """A plan that may be the fastest, to predict; or, every other time, one like the best to bound."""
        may = self.diving == NONE and (self.dives < self.learned or not self.loose)
        if may and (point := self._dive()) is not None:
            self.dives += 1
            return point
        self.aside = not self.aside
        return self._beside_best() if self.aside else None

    def _beside_best(self) -> PlanPoint | None:
        """The next step of a rank that a plan has which differs little from the best that is known."""
        best = self.best[0].plan if self.best else min(self.left)[3] if self.left else None
        if best is None or self.differences is None:
            return None
        if best != self.around:
            near = [*self.differences.nearest(best)]
            # What costs nothing comes first.
            near[:AT_ONCE] = sorted(near[:AT_ONCE], key=lambda entry: not self.bounds.knows(entry[3]))
            self.around, self.nearby = best, iter(near)
        for least, _, number, plan in self.nearby:
            if number in self.reached or number in self.asked or number in self.needs or least >= self.fastest:
                continue
            self.reached.add(number)
            if (point := self._to_bound(number, plan, least)) is not None:
                return point
        return None

    def _dive(self) -> PlanPoint | None:
        """The plan that may be the fastest of those that are likely to fit: its step, or once that is known, all.

        Where none can be faster than the best, one that may be among them. Every fourth is one whose step is
        known, since what fits rules out others: where none of these is likely to fit, the one that needs least.

        Bounds of memory are far below what plans need, and the fastest plans are the fullest. So how much one may
        need by its bound is found by bisection, between those that were predicted ahead.
        """
        among = [entry for entry in self.left if entry[0] < self.last]
        least = self.fits_bytes or min((self.needs[number] for _, _, number, _ in among), default=inf)
        most = (least + self.too_large_bytes) / 2
        likely = [entry for entry in among if self.needs[entry[2]] <= most]
        entry = min(likely, default=None)
        if self.dives % WHOLE == 1:
            known = [entry for entry in among if entry[2] in self.steps and entry[0] < self.fastest]
            surest = min(known, key=lambda entry: self.needs[entry[2]], default=entry)
            entry = min((entry for entry in likely if entry[2] in self.steps), default=surest)
        if entry is None or (entry[0] >= self.fastest and OTHERS * self.dives >= self.learned):
            return None
        self.left.remove(entry)
        heapq.heapify(self.left)
        self.asked[entry[2]], _, self.diving, plan = entry
        return self.diving, plan, "whole" if self.diving in self.steps else "step"

    @property
    def fastest(self) -> float:
        """The value of the best so far."""
        return self.best[0].value if self.best else inf

    def _dived(self, number: int, fits: bool) -> None:
        """Notes whether the plan that was predicted ahead fits."""
        if number != self.diving:
            return
        self.diving = NONE
        if fits:
            self.fits_bytes = max(self.fits_bytes, self.needs[number])
        else:
            self.too_large_bytes = min(self.too_large_bytes, self.needs[number])

    def _learn(self, plan: Plan, found: StepCost | str) -> None:
        """Bounds the plans that wait for what the step of a rank costs."""
        self.bounds.learn(plan, PlanError(found) if isinstance(found, str) else found)
        self.learned += 1
        for number, one in self.waiting.pop(of_step(plan)):
            self._bound(number, one, plan)

    def _open(self) -> int:
        heaps = self.loose, self.left
        return sum(
            sum(entry[0] <= self.last for entry in heap) if len(heap) < 4096 else len(heap) for heap in heaps
        )

    def _take(self, number: int, plan: Plan, found: PlanAnswer) -> None:
        self.asked.pop(number, None)
        if isinstance(found, str):
            self.losers.refused[_kind_of(found)] += 1
            self.simulated -= number in self.steps
            self.diving = NONE if number == self.diving else self.diving
            return
        if isinstance(found, float):
            # Its memory is worked out once no other plan can be better.
            self.simulated += 1
            least = self.aim.least(found, plan.gpus or 1)
            self.diving = NONE if number == self.diving else self.diving
            if self._in_time(least):
                self.steps[number] = found
                heapq.heappush(self.left, (least, 2, number, plan))
            return
        assert isinstance(found, Candidate | TooLarge)
        self.simulated += number not in self.steps
        self._dived(number, isinstance(found, Candidate))
        if isinstance(found, TooLarge):
            self.losers.too_large += 1
            self._missing(found.least_bytes, plan)
            return
        self.fitting.append(found)
        insort(self.best, found, key=attrgetter("rank"))
        self.losers.slower += len(self.best) > self.top
        del self.best[self.top :]

    def so_far(self, predictor: Predictor) -> None:
        """Of a search that was ended: the memory of plans faster than the best, until one of them fits."""
        steps = sorted(entry for entry in self.left if entry[2] in self.steps)
        for entry in steps:
            least, _, number, plan = entry
            if least >= self.fastest:
                return
            self.left.remove(entry)
            self._take(number, plan, predicted(predictor, self.aim, number, plan))

    def front(self, predictor: Predictor, until: float) -> tuple[Candidate, ...]:
        """The plans that no other predicted one beats, fastest first.

        A slower plan's memory is worked out only where it may be less than that of all faster ones.
        """
        front: list[Candidate] = []
        every: list[tuple[float, int, Plan, Candidate | None]] = [
            (self.steps[number], number, plan, None) for _, _, number, plan in self.left if number in self.steps
        ]
        every += [(one.step_s, one.number, one.plan, one) for one in self.fitting]
        for at, (_, number, plan, known) in enumerate(sorted(every, key=lambda entry: entry[:2])):
            least = self.needs[number] if known is None else known.device_bytes
            most = min((one.device_bytes - 1 for one in front if one.gpus <= (plan.gpus or 1)), default=inf)
            if least > most:
                continue
            if known is None:
                if time.monotonic() > until:
                    break
                self.progress("memory of slower plans", at, len(every))
                found = predicted(predictor, self.aim, number, plan, most)
                if isinstance(found, TooLarge):
                    continue
                known = found
            if not any(_beats(one, known) for one in front):
                front = [one for one in front if not _beats(known, one)] + [known]
        return tuple(front)

    @property
    def least(self) -> float:
        """What no plan is below whose answer is not known: the lowest bound; 0 while some have none."""
        bounds = [*self.asked.values(), *(entry[0] for entry in (*self.loose[:1], *self.left))]
        return min(bounds, default=inf) if self.bounded else 0.0

    def end(self, ended: str, begun: int) -> None:
        """Counts what was not predicted."""
        self.loose = [entry for entry in self.loose if entry[2] not in self.reached]
        slower = sum(entry[2] in self.steps for entry in self.left)
        beyond = sum(entry[0] > self.last and entry[2] not in self.steps for entry in self.left)
        beyond += sum(entry[0] > self.last for entry in self.loose)
        self.losers.slower += slower
        self.losers.slower_by_bound = beyond
        self.losers.not_reached += len(self.left) + len(self.loose) - slower - beyond + begun


def _beats(one: Candidate, other: Candidate) -> bool:
    """Whether a plan is no worse in time, memory and GPUs, and better in one; equal ones: whether it is first."""
    mine, its = ((c.step_s, c.device_bytes, c.gpus) for c in (one, other))
    return all(a <= b for a, b in zip(mine, its, strict=True)) and (mine != its or one.number < other.number)


_DIGITS = re.compile(r"\d[\d,.]*")


def _kind_of(text: str) -> str:
    """What is said of a plan without its numbers, so that equal reasons count together."""
    return _DIGITS.sub("N", text)[:200]


def search(
    graph: StepGraph | JobGraph,
    plan: Plan,
    system: System | None = None,
    scenario: Scenario = _PLAIN,
    *,
    over: Mapping[str, Sequence[Any]] = _NONE,
    objective: str = "step",
    max_memory_bytes: int | None = None,
    most_step_s: float = inf,
    top: int = TOP,
    front: bool = True,
    time_s: float = inf,
    where: WorkerOptions = HERE,
    journal_path: Path | None = None,
    progress: Progress = silent,
) -> SearchResult:
    """The best plans for a step on a system.

    Args:
        graph: the step.
        plan: what all plans have in common: `gpus` and `global_batch` at least. What else differs from a plan's
            defaults is fixed; a default is fixed by an axis of one value, as `over={"tp": (1,)}`.
        system: where; None: the cluster that the plan names.
        scenario: what is asked beyond that, as in `simulate`.
        over: fields of `Plan`, each with the values to try: of the axes of a search instead of what it proposes
            (`space.AXES`), and others, which it leaves as they are unless they stand here.
        objective: what the best are the best at (`objective.OBJECTIVES`).
        max_memory_bytes: what a device may hold; None: all it has.
        most_step_s: what a step may take, failures included where they are asked for.
        top: how many of the best.
        front: whether those are wanted that no other plan beats, too, which takes the memory of slower ones.
        time_s: seconds after which it ends with the best so far.
        where: plans are predicted.
        journal_path: where answers are kept as they come, and looked for; None: nowhere.
        progress: told how far it is.

    Returns:
        The best plans, those that no other beats in time, memory and GPUs, and why the others lose. Ended by the
        time or an interrupt, it says so, and the best are those of the plans that were predicted.

    Raises:
        UsageError: sizes are missing, or what is asked for means nothing here.
        UnknownNameError: no such objective.
        PlanError: there is no plan, or none that fits in memory.
    """
    began = time.monotonic()
    if not isinstance(graph, StepGraph):
        raise UsageError("the graph is a job, which has its plan: give the step graph that it was made of")
    if top < 1:
        raise UsageError(f"--top {top}: give 1 or more")
    if not time_s >= 0:
        raise UsageError(f"--time {time_s:g}: give 0 seconds or more")
    system = system or System(plan.cluster)
    if max_memory_bytes is not None:
        system = system.with_memory(max_memory_bytes)
    aim = objective_named(objective, system, scenario, most_step_s)
    among = space(graph, system.cluster, plan, {name: tuple(values) for name, values in over.items()})
    if among.facts.batch == 1 and "micro_batch" not in among.asked:
        tell([ONE_SAMPLE])
    boards, capacity = min(among.facts.gpus), system.cluster.memory_bytes
    bounds = Bounds(graph, system, scenario, boards=boards)
    state = _Search(among, bounds, aim, capacity, top, progress, ahead=time_s < inf)
    make, begun = Question(graph, system, scenario, objective, most_step_s, boards), 0
    # Some of the time is for plans, also where all of it would not do to bound every one.
    state.begin(began + time_s / 2)
    with ExitStack() as stack:
        at = stack.enter_context(workers(make, where))
        if journal_path is not None:
            from echograph.workflow.search.kept import kept_answers

            at = stack.enter_context(kept_answers(at, make, journal_path))
        try:
            ended = state.run(at, began + time_s)
        except KeyboardInterrupt:
            ended = "interrupt"
        begun = at.busy - len(state.waiting) + sum(map(len, state.waiting.values()))
    ended = ended or ("" if state.bounded else "time")
    predictor = Predictor(graph, system, scenario)
    if ended:
        state.so_far(predictor)
    state.end(ended, begun)
    if not state.best and not ended:
        raise _nothing(state, system, most_step_s)
    unbeaten = state.front(predictor, began + time_s) if front and state.best else ()
    return SearchResult(
        model=graph.workload.model or graph.name,
        cluster=system.cluster.name,
        device=system.cluster.device,
        objective=aim,
        best=tuple(state.best),
        front=unbeaten,
        considered=state.considered,
        simulated=state.simulated,
        losers=state.losers,
        ended=ended,
        least=state.least,
        wall_s=time.monotonic() - began,
        node=system.cluster.gpus_per_node,
        layers=among.facts.layers,
        dtype=graph.workload.dtype.text,
        master_weights=graph.workload.master_weights,
    )


def _nothing(state: _Search, system: System, most_step_s: float) -> PlanError:
    """Why there is no plan."""
    losers = state.losers
    if losers.too_slow:
        most = format_time(round(most_step_s * 1e12))
        return PlanError(
            f"none of {state.considered:,} plans is fast enough: a step may take {most}, and that of "
            f"{losers.too_slow:,} takes longer: give more --gpus, as --over gpus=512..8192:x2, or more time"
        )
    if losers.nearest is not None:
        words = in_words(losers.nearest)
        return PlanError(
            f"none of {state.considered:,} plans fits in the {format_bytes(system.cluster.memory_bytes)} of "
            f"{system.cluster.device}: the nearest lacks {format_bytes(losers.least_missing_bytes)} ({words}): "
            "give more --gpus, or a cluster with more memory"
        )
    reasons = (losers.refused or losers.divides).most_common(1)
    why = f": {reasons[0][0]}" if reasons else ""
    return PlanError(f"no plan is left of {state.considered:,}{why}")


def _lines(found: SearchResult) -> Iterator[str]:
    gpus = sorted({one.gpus for one in (*found.best, *found.front)})
    many = f"{' or '.join(map(str, gpus))} GPUs of " if gpus else ""
    yield f"{found.model} on {many}{found.cluster} ({found.device})"
    yield f"  searched      {found.considered:,} plans, {found.simulated:,} predicted ({found.proof})"
    if found.best:
        yield ""
        yield text_table(*table(found, found.best))
        if found.alike > 1:
            yield f"  the first {found.alike} cannot be told apart: their 90 % intervals overlap with the first's"
    if found.front:
        yield ""
        yield f"  no other of the {found.simulated:,} predicted is as fast, as small and on as few GPUs as these:"
        yield text_table(*table(found, found.front))
    yield ""
    yield "  the others"
    yield from (f"    {count:>9,} {reason}" for count, reason in found.losers.reasons())


def table(found: SearchResult, shown: Sequence[Candidate]) -> tuple[list[str], list[list[str]]]:
    """Titles and cells of plans that a search found, as texts; the plan is the last column."""
    several = len({one.gpus for one in (*found.best, *found.front)}) > 1
    leave = ("cluster", "global-batch") if several else ("cluster", "global-batch", "gpus")
    figure = [] if found.objective.name in ("step", "tokens-per-s") else [found.objective.unit]
    rate = "tokens/s" if any(one.tokens_per_s for one in shown) else "samples/s"
    titles = ["", "step", "90 % interval", rate, "MFU", "allocated", "in all", *figure, "plan"]
    rows = []
    for at, one in enumerate(shown, 1):
        step, low, high = (format_time(round(value * 1e12)) for value in (one.step_s, *one.interval_s))
        rows.append(
            [
                str(at),
                step,
                f"{low} to {high}",
                format_count(one.tokens_per_s or one.samples_per_s),
                "-" if one.mfu is None else f"{one.mfu:.1%}",
                format_bytes(one.peak_bytes),
                format_bytes(one.device_bytes),
                *([found.objective.shown(one.value)] if figure else []),
                in_words(one.plan, leave) or "data-parallel",
            ]
        )
    return titles, rows

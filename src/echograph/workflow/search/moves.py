"""A plan made better move by move, each told with what it gained: how a tuner works, where a search is too wide.

The moves are those of dPRO (Hu et al., "dPRO: A Generic Performance Diagnosis and Optimization Toolkit for
Expediting Distributed DNN Training", MLSys 2022), as far as a plan or a pass has the word: sizes of buckets,
fusion, recomputation by layers, gradient accumulation, precision, and the order of communication (gradients and
parameters beside the passes or after them, neighbours of the mesh). Cutting one tensor into several messages is
none: buckets close behind whole tensors. Each is judged by a prediction of the whole step, with its memory.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import exp, inf
from typing import Any

from echograph.errors import EchoError, PlanError, UnknownNameError, UsageError
from echograph.ir.graph import JobGraph, StepGraph
from echograph.ir.passes.base import Pass, pass_text, run
from echograph.ir.passes.data_parallel import DataParallel
from echograph.ir.passes.fuse import Fuse
from echograph.ir.tables import text_table
from echograph.options import option_name
from echograph.progress import Progress, silent
from echograph.units import MIB, format_time
from echograph.workflow.plan import Plan, passes
from echograph.workflow.predict import simulate
from echograph.workflow.scenario import Scenario
from echograph.workflow.system import System

_PLAIN = Scenario()
_BUCKET = 25 * MIB
"""Where sizes of buckets begin: PyTorch's (`bucket_cap_mb`)."""
_BUCKETS = (1 * MIB, 1024 * MIB)
"""The smallest and the largest that are tried."""
_COOLING, _WARM = 0.9, 0.02
"""Annealing begins where a step longer by 2 % is taken once in e times, and cools by a tenth a trial (assumed)."""


@dataclass(frozen=True, slots=True)
class TunedPlan:
    """A plan, and what of its passes no plan has a word for.

    Attributes:
        plan: how the step is spread.
        bucket_bytes: at which a bucket of gradients closes; None: as the pass has it.
        fuse: elementwise operations are fused, of the whole step.
    """

    plan: Plan
    bucket_bytes: int | None = None
    fuse: bool = False

    def passes(self, graph: StepGraph, system: System) -> tuple[Pass, ...]:
        """What it makes of a step.

        Raises:
            UsageError: as `workflow.plan.passes`, or there are no buckets.
        """
        found: list[Pass] = []
        for one in passes(self.plan, graph.workload, system.cluster):
            if isinstance(one, DataParallel) and self.bucket_bytes is not None:
                one = replace(one, bucket_bytes=self.bucket_bytes)
            if self.fuse and not any(isinstance(before, Fuse) for before in found) and makes_job(one):
                found.append(Fuse())
            found.append(one)
        return tuple(found)


def makes_job(one: Pass) -> bool:
    """Whether a pass makes the job of all ranks of a step."""
    return one.name in ("pipeline", "data_parallel", "fully_shard")


def moves(at: TunedPlan, graph: StepGraph) -> Iterator[tuple[str, TunedPlan]]:
    """What may be changed of a setting, one thing at a time: in words, and the setting with it."""
    plan = at.plan
    for name, values in _words(plan, graph).items():
        for value in values:
            if value != getattr(plan, name):
                yield f"{option_name(name)} {str(value).lower()}", _changed(at, name, value)
    if plan.zero < 3:
        size = at.bucket_bytes or _BUCKET
        for other in (size // 2, size * 2):
            if _BUCKETS[0] <= other <= _BUCKETS[1]:
                yield f"buckets of {other / MIB:g} MiB", replace(at, bucket_bytes=other)
    if not plan.stack:  # which says itself what is fused
        yield ("no fusion" if at.fuse else "fusion"), replace(at, fuse=not at.fuse)


def _changed(at: TunedPlan, name: str, value: Any) -> TunedPlan:
    # A plan that cannot be is found out where it is predicted.
    try:
        return replace(at, plan=replace(at.plan, **{name: value}))
    except EchoError:
        return at


def _words(plan: Plan, graph: StepGraph) -> dict[str, Sequence[Any]]:
    """Words of the plan, each with the values to try."""
    micro, every = (
        plan.micro_batch or graph.workload.batch_size,
        int(plan.recompute) if plan.recompute.isdigit() else 1,
    )
    found: dict[str, Sequence[Any]] = {
        "micro_batch": (max(1, micro // 2), micro * 2),
        "recompute": ("none", "selective", "full", str(every * 2), *([str(every // 2)] if every > 3 else [])),
        "precision": ("", "fp8"),
        "overlap_grad_reduce": (True, False),
        "mesh_order": (Plan().mesh_order, "tp-cp-ep-pp-dp"),
    }
    if plan.zero in (1, 2):
        found["overlap_param_gather"] = (True, False)
    if plan.zero == 3:
        found["reshard_after_forward"] = (True, False)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenMove:
    """A move that was taken.

    Attributes:
        what: it changes.
        before_s: seconds of the step before it.
        after_s: with it; more only where annealing went uphill.
    """

    what: str
    before_s: float
    after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Improved:
    """A plan that moves made better.

    Attributes:
        setting: the best.
        passes: the same as a list of passes, for `--passes`.
        first_s: seconds of the step that it began with.
        step_s: seconds of the best.
        taken: the moves from the one to the other.
        predicted: settings that were predicted.
    """

    setting: TunedPlan
    passes: str
    first_s: float
    step_s: float
    taken: tuple[TakenMove, ...]
    predicted: int

    def to_json(self) -> dict[str, Any]:
        """The record of `echosim plan --moves --json`."""
        return {
            "passes": self.passes,
            "first_step_time_s": self.first_s,
            "step_time_s": self.step_s,
            "predicted": self.predicted,
            "moves": [{"move": m.what, "before_s": m.before_s, "after_s": m.after_s} for m in self.taken],
        }

    def __str__(self) -> str:
        """A row a move for people."""
        rows = [
            [str(n), move.what, *(format_time(round(s * 1e12)) for s in (move.before_s, move.after_s)),
             f"{move.after_s / move.before_s - 1:+.1%}"]
            for n, move in enumerate(self.taken, 1)
        ]  # fmt: skip
        first, last = (format_time(round(s * 1e12)) for s in (self.first_s, self.step_s))
        said = f"  {first} to {last} ({self.step_s / self.first_s - 1:+.1%}), {self.predicted} settings predicted"
        table = text_table(["", "move", "before", "after", "gain"], rows) if rows else "  no move makes it better"
        return f"{said}\n\n{table}\n\n  --passes '{self.passes}'"


class _Judge:
    """Predicts settings, each once."""

    def __init__(
        self, graph: StepGraph, system: System, scenario: Scenario, most: int, progress: Progress
    ) -> None:
        self.graph, self.system, self.scenario, self.most, self.progress = graph, system, scenario, most, progress
        self.known: dict[str, float] = {}

    @property
    def spent(self) -> bool:
        return len(self.known) >= self.most

    def text(self, setting: TunedPlan) -> str:
        return " ".join(map(pass_text, setting.passes(self.graph, self.system)))

    def step_s(self, setting: TunedPlan) -> float:
        """Seconds of the step; infinite where there is no such plan, or it does not fit."""
        try:
            listed = setting.passes(self.graph, self.system)
            key = " ".join(map(pass_text, listed))
            if key not in self.known:
                self.progress("predicting moves", len(self.known), self.most)
                self.known[key] = inf  # where a pass refuses
                job = run(self.graph, listed, to=JobGraph, verify=False)
                result = simulate(job, self.system, self.scenario, plan=setting.plan)
                if result.memory is None or result.memory.fits:
                    self.known[key] = result.step_s
            return self.known[key]
        except EchoError:
            return inf


_Steps = list[tuple[TunedPlan, str, float]]


def _greedy(judge: _Judge, path: _Steps, seed: int) -> _Steps:
    """Takes the best of all moves as long as one is better."""
    while True:
        setting, _, now = path[-1]
        found = [(now, "", setting)]
        for what, other in moves(setting, judge.graph):
            if judge.spent:
                break
            found.append((judge.step_s(other), what, other))
        step_s, what, best = min(found, key=lambda entry: entry[0])
        if step_s >= now:
            return path
        path = [*path, (best, what, step_s)]


def _annealing(judge: _Judge, path: _Steps, seed: int) -> _Steps:
    """Takes moves at random, worse ones the less the longer it goes on (Kirkpatrick et al., Science 1983)."""
    chance, warm, best = random.Random(seed), _WARM, path
    for _ in range(judge.most * 4):  # of which many are known already
        if judge.spent:
            break
        setting, _, now = path[-1]
        what, other = chance.choice(list(moves(setting, judge.graph)))
        step_s = judge.step_s(other)
        if step_s < now or (step_s < inf and chance.random() < exp((1 - step_s / now) / warm)):
            path = [*path, (other, what, step_s)]
            best = min(best, path, key=lambda one: one[-1][2])
        warm *= _COOLING
    return best


METHODS: dict[str, Callable[[_Judge, _Steps, int], _Steps]] = {"greedy": _greedy, "annealing": _annealing}


def improve(
    graph: StepGraph | JobGraph,
    plan: Plan,
    system: System | None = None,
    scenario: Scenario = _PLAIN,
    *,
    method: str = "greedy",
    most: int = 100,
    seed: int = 0,
    progress: Progress = silent,
) -> Improved:
    """Makes a plan better by moves.

    Args:
        graph: the step.
        plan: to begin with.
        system: where; None: the cluster that the plan names.
        scenario: what is asked beyond that.
        method: "greedy" or "annealing".
        most: settings that are predicted.
        seed: of annealing.
        progress: told how far it is.

    Raises:
        UnknownNameError: no such method.
        UsageError: the graph is a job, or the plan a list of passes.
        PlanError: the plan to begin with is none, or does not fit.
    """
    if method not in METHODS:
        raise UnknownNameError("method", method, METHODS)
    if not isinstance(graph, StepGraph):
        raise UsageError("the graph is a job, which has its plan: give the step graph that it was made of")
    if plan.passes or plan.global_batch is None:
        raise UsageError("--moves: begin with a plan and its --global-batch, not with --passes")
    system = system or System(plan.cluster)
    judge, first = _Judge(graph, system, scenario, most, progress), TunedPlan(plan)
    first.passes(graph, system)  # says what is wrong with it
    begun = judge.step_s(first)
    if begun == inf:
        raise PlanError("--moves: the plan to begin with does not fit the model or the memory: give another one")
    path = METHODS[method](judge, [(first, "", begun)], seed)
    steps = [
        TakenMove(what=what, before_s=before, after_s=after) for (_, _, before), (_, what, after) in pairwise(path)
    ]
    best, _, step_s = path[-1]
    return Improved(
        setting=best, passes=judge.text(best), first_s=begun, step_s=step_s, taken=tuple(steps),
        predicted=len(judge.known),
    )  # fmt: skip

"""What `echosim run` answers: a prediction, and what is asked of the same step beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from echograph.errors import UsageError
from echograph.ir.graph import JobGraph, StepGraph
from echograph.options import option
from echograph.progress import Progress, silent
from echograph.simulator.memory import TENSORS
from echograph.simulator.result import Result
from echograph.workflow.feasible import (
    FEW,
    MOST_TRIED,
    feasible_plans,
    refuse_if_it_does_not_fit,
    shortage,
)
from echograph.workflow.plan import Plan, cluster_notes
from echograph.workflow.predict import predict
from echograph.workflow.scenario import Scenario
from echograph.workflow.system import System, runtime_of
from echograph.workflow.training import Training, TrainingOptions, training

if TYPE_CHECKING:
    from echograph.workflow.search.branch import Candidate
    from echograph.workflow.search.sizing import Largest


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionOptions:
    """How a step is predicted, and what is asked besides. The text of each field is its help on the command line.

    Raises:
        UsageError: a field lacks another, or has a value that it cannot have.
    """

    model_communication: bool = option(
        False, "Communication takes what the cluster's model says, not what an imported graph holds of it."
    )
    strict_memory: bool = option(
        False, "A plan that does not fit in memory is an error that names the nearest which do."
    )
    what_fits: bool = option(False, "The largest micro-batch and the deepest model that fit.")
    model: str = option("", "With --what-fits: what the graph was compiled of, for its sequences.", letter="m")
    engine: str = option("auto", "auto, segments, static or events.")
    tensors: int = option(0, "List the largest tensors at the peak of memory.", "none")

    def __post_init__(self) -> None:
        if self.model and not self.what_fits:
            raise UsageError("--model: says what the longest sequence is of, give --what-fits as well")
        if not 0 <= self.tensors <= TENSORS:
            raise UsageError(f"--tensors {self.tensors}: give 0 to {TENSORS}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpusNeeded:
    """The fewest GPUs for a training to end in time, and what the training takes on them."""

    days: float
    step: Candidate
    training: Training | None

    def to_json(self) -> dict[str, Any]:
        """The record in results."""
        return self.step.to_json() | ({} if self.training is None else {"training": self.training.to_json()})

    def __str__(self) -> str:
        """Two lines for people."""
        days = f"{self.days:g} days"
        return f"  in {days:<11}{self.step.gpus:,} GPUs at least, which take\n{self.training}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A prediction, and what was asked beside it.

    Attributes:
        result: the prediction of the step.
        job: what ran.
        notes: what it leaves out or takes for something, and options that have no effect; a line each.
        near: where the plan does not fit in memory, what to change so that it does.
        training: a whole training; None where it was not asked.
        needed: the fewest GPUs for it; None where no days were given.
        largest: the largest sizes that fit; () where they were not asked.
        tensors: how many of the largest tensors are listed.
    """

    result: Result
    job: JobGraph
    notes: tuple[str, ...]
    near: tuple[str, ...]
    training: Training | None
    needed: GpusNeeded | None
    largest: tuple[Largest, ...]
    tensors: int

    def to_json(self) -> dict[str, Any]:
        """The record of the prediction with everything that was asked."""
        record = self.result.to_json()
        record |= {} if self.training is None else {"training": self.training.to_json()}
        record |= {} if self.needed is None else {"gpus_needed": self.needed.to_json()}
        return record | ({"largest": [one.to_json() for one in self.largest]} if self.largest else {})

    @property
    def alarm(self) -> str:
        """That the plan does not fit, and what would; "" where it does."""
        memory = self.result.memory
        return "" if memory is None or memory.fits else f"DOES NOT FIT: needs {shortage(self.result, self.near)}"

    def __str__(self) -> str:
        parts: list[object] = [self.result]
        if self.tensors and self.result.memory is not None:
            parts += self.result.memory.listed(self.tensors)
        parts += [one for one in (self.training, self.needed) if one is not None]
        return "\n".join(map(str, [*parts, *self.largest]))


def prediction(
    graph: StepGraph | JobGraph,
    plan: Plan,
    system: System,
    scenario: Scenario,
    asked: PredictionOptions,
    of_training: TrainingOptions,
    *,
    trace_ranks: Sequence[int] = (),
    propose: bool = True,
    progress: Progress = silent,
) -> Prediction:
    """Predicts a step, and answers what else is asked of it.

    Args:
        graph: a step graph, spread by the plan, or a job graph, run as it is.
        plan: how it is spread.
        system: where.
        scenario: what is asked beyond that, as in `simulate`.
        asked: how, and what besides.
        of_training: what is asked of a whole training.
        trace_ranks: ranks whose timelines are wanted, too.
        propose: whether a few plans that fit are looked for where this one does not.
        progress: told how far it is.

    Raises:
        UsageError: what is asked needs the step graph.
        PlanError: the plan does not fit in memory, and has to.
        EchoError: as `predict`.
    """
    progress("simulating")
    notes: list[str] = []
    result, job = predict(
        graph, plan, system, scenario, engine=asked.engine, trace_ranks=trace_ranks,
        model_communication=asked.model_communication, note=notes.append,
    )  # fmt: skip
    most = MOST_TRIED if asked.strict_memory else FEW if propose else 0
    runtime = runtime_of((plan.stack if plan is not None else "") or job.workload.stack, system.architecture)
    near = feasible_plans(graph, plan, system.cluster, result.memory, progress, most, runtime)
    if asked.strict_memory:
        refuse_if_it_does_not_fit(result, near)
    return Prediction(
        result=result,
        job=job,
        notes=(*notes, *cluster_notes(system.cluster, job.world_size)),
        near=tuple(near),
        training=training(result, system, of_training),
        needed=_needed(graph, plan, system, scenario, of_training, progress),
        largest=_largest_of(graph, plan, system, asked, progress),
        tensors=asked.tensors,
    )


def _needed(
    graph: StepGraph | JobGraph,
    plan: Plan,
    system: System,
    scenario: Scenario,
    asked: TrainingOptions,
    progress: Progress,
) -> GpusNeeded | None:
    if asked.days is None:
        return None
    from echograph.workflow.search.sizing import gpus_needed, of_plan

    step = gpus_needed(graph, plan, system, scenario, asked, progress)
    _, whole = of_plan(graph, step.plan, system, scenario, asked)
    return GpusNeeded(days=asked.days, step=step, training=whole)


def _largest_of(
    graph: StepGraph | JobGraph, plan: Plan, system: System, asked: PredictionOptions, progress: Progress
) -> tuple[Largest, ...]:
    if not asked.what_fits:
        return ()
    from echograph.workflow.search.sizing import longer, what_fits

    if not isinstance(graph, StepGraph):
        raise UsageError("--what-fits: the graph is a job: give the step graph that it was made of")
    return what_fits(graph, plan, system, longer(graph, asked.model) if asked.model else None, progress)

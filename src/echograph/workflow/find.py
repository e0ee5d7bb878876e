"""What `echosim plan` answers: the best plans of a space, those of several clusters, or one plan made better."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echograph.errors import UsageError
from echograph.ir.graph import JobGraph, StepGraph
from echograph.options import given, option, option_name
from echograph.progress import Progress, silent
from echograph.units import parse_bytes
from echograph.workflow.plan import Plan, idle_options, without_effect
from echograph.workflow.scenario import Scenario
from echograph.workflow.system import IDLE_HOST_WAITS, System, SystemOptions
from echograph.workflow.training import Training, TrainingOptions
from echograph.workflow.workers import HERE, WorkerOptions

if TYPE_CHECKING:
    from echograph.workflow.search import SearchResult
    from echograph.workflow.search.moves import Improved
    from echograph.workflow.search.sizing import ClusterComparison

_Axis = tuple[str, tuple[Any, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """What is looked for. The text of each field is its help on the command line.

    Raises:
        UsageError: fields that exclude each other.
    """

    fix: tuple[str, ...] = option((), "Only plans with this, as tp=8.")
    over: tuple[str, ...] = option(
        (), "Values to try, as tp=4,8 or gpus=256..1024:x2; also of words left as they are otherwise."
    )
    objective: str = option(
        "", "step, tokens-per-s, cost, mfu, energy, goodput or gpus.", "step; gpus with --days"
    )
    compare_clusters: str = option("", "The best plan of each of these, as dgx-h100,dgx-b200.")
    moves: str = option("", "Make the plan of the options better by moves: greedy or annealing.")
    max_memory: str = option("", "What a device may hold, as 72GiB.", "all it has")
    time: float | None = option(
        None, "Seconds after which it answers with the best so far.", "as long as it takes"
    )
    top: int | None = option(None, "How many of the best.", "10", least=1)
    journal: Path | None = option(None, "Keep predicted plans in this file, and go on from those that it has.")

    def __post_init__(self) -> None:
        others = [option_name(name) for name in given(self) if name != "moves"]
        if self.moves and others:
            raise UsageError(
                f"{', '.join(others)}: not with --moves, which begins with the plan of the options: leave it out"
            )
        if self.compare_clusters and self.top is not None:
            raise UsageError("--top: not with --compare-clusters, which tells the best of each: leave it out")

    def axes(self, plan: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
        """The axes whose values are given, those of a plan's words included.

        Raises:
            UsageError: an axis stands twice, or one that is fixed has several values.
            UnknownNameError: no plan has such a word.
        """
        from echograph.workflow.search.space import parse_axis

        fixed = _axes(
            [*((name, (value,)) for name, value in plan.items()), *(parse_axis("--fix", t) for t in self.fix)]
        )
        for name, values in fixed.items():
            if len(values) > 1:
                raise UsageError(
                    f"--fix {name.replace('_', '-')}: has {len(values)} values: give one, or use --over"
                )
        return _axes([*fixed.items(), *(parse_axis("--over", text) for text in self.over)])

    @property
    def max_memory_bytes(self) -> int | None:
        """What a device may hold; None: all that it has.

        Raises:
            UsageError: it is no size.
        """
        found = parse_bytes(self.max_memory) if self.max_memory else None
        if self.max_memory and found is None:
            raise UsageError(f"--max-memory {self.max_memory[:40]}: give a size with its unit, as 72GiB or 80GB")
        return found


def _axes(axes: Iterable[_Axis]) -> dict[str, tuple[Any, ...]]:
    """Axes by their names.

    Raises:
        UsageError: one stands twice.
    """
    found: dict[str, tuple[Any, ...]] = {}
    for name, values in axes:
        if name in found:
            raise UsageError(f"{option_name(name)}: is given twice: give all of its values at once, by --over")
        found[name] = values
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class PlansFound:
    """The best plans, and what a training takes by the first.

    Attributes:
        found: what the search found.
        training: by the first of the best; None where it was not asked, or nothing was found.
        notes: options that have no effect in any of the best; a line each.
    """

    found: SearchResult
    training: Training | None
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The record for programs."""
        return self.found.to_json() | ({} if self.training is None else {"training": self.training.to_json()})

    def __str__(self) -> str:
        of_first = [] if self.training is None else ["", "  of the first", str(self.training)]
        return "\n".join([str(self.found), *of_first])


def find_plans(
    graph: StepGraph | JobGraph,
    plan: Mapping[str, Any],
    options: SystemOptions,
    scenario: Scenario,
    of_training: TrainingOptions,
    asked: SearchOptions,
    *,
    where: WorkerOptions = HERE,
    progress: Progress = silent,
) -> PlansFound | ClusterComparison | Improved:
    """Looks for the best plans.

    Args:
        graph: the step.
        plan: the words of a plan that are given; all plans have them in common.
        options: of the system.
        scenario: what is asked beyond that.
        of_training: what is asked of a whole training.
        asked: what is looked for.
        where: plans are predicted.
        progress: told how far it is.

    Raises:
        UsageError: what is asked excludes each other, or means nothing here.
        EchoError: as `search`, `compare_clusters` and `improve`.
    """
    from echograph.workflow.search import search
    from echograph.workflow.search.sizing import compare_clusters, most_step_s

    if asked.moves:
        from echograph.workflow.search.moves import improve

        if others := [*given(of_training), *given(where)]:
            raise UsageError(f"{', '.join(map(option_name, others))}: is of a search: not with --moves")
        first = Plan(**plan)
        return improve(
            graph, first, options.system(first.cluster), scenario, method=asked.moves, progress=progress
        )
    common = ("cluster", "global_batch")
    base = Plan(**{name: value for name, value in plan.items() if name in common})
    how: dict[str, Any] = {
        "over": asked.axes({name: value for name, value in plan.items() if name not in common}),
        "objective": asked.objective or ("step" if of_training.days is None else "gpus"),
        "where": where,
        "max_memory_bytes": asked.max_memory_bytes,
        "time_s": inf if asked.time is None else asked.time,
        "most_step_s": most_step_s(graph, base.global_batch, of_training),
        "progress": progress,
        "journal_path": asked.journal,
    }
    if asked.compare_clusters:
        if "cluster" in plan:
            raise UsageError("--cluster: not with --compare-clusters, which names them: leave it out")
        names = [name.strip() for name in asked.compare_clusters.split(",")]
        return compare_clusters(graph, base, names, options, scenario, of_training, **how)
    system = options.system(base.cluster)
    if asked.top is not None:
        how["top"] = asked.top
    found = search(graph, base, system, scenario, **how)
    notes = idle_options((without_effect(one.plan, system.cluster) for one in found.best), plan)
    if "host_waits" in system.asked and found.best and all(one.plan.pp == 1 for one in found.best):
        notes += (IDLE_HOST_WAITS,)
    return PlansFound(
        found=found,
        training=_training_of(found, graph, system, scenario, of_training),
        notes=notes,
    )


def _training_of(
    found: SearchResult,
    graph: StepGraph | JobGraph,
    system: System,
    scenario: Scenario,
    asked: TrainingOptions,
) -> Training | None:
    if not (found.best and asked.tokens):
        return None
    from echograph.workflow.search.sizing import of_plan

    return of_plan(graph, found.best[0].plan, system, scenario, asked)[1]

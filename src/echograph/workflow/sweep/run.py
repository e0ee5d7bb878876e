"""A sweep: the points of a grid that nobody has predicted yet, and a row for each of all."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echograph.errors import EchoError, PlanError, UsageError
from echograph.ir.graph import Graph, JobGraph, StepGraph
from echograph.ir.tables import text_table
from echograph.progress import Progress, silent
from echograph.simulator.clusters import Cluster, load_cluster
from echograph.units import format_bytes, format_count, format_time
from echograph.workflow.plan import Plan, idle_options, without_effect
from echograph.workflow.predictor import Predictor
from echograph.workflow.scenario import Scenario
from echograph.workflow.sweep.grid import GridAxis, SweepPoint, WrongPoint, grid_points
from echograph.workflow.sweep.store import ERROR, flat, journal, read_journal
from echograph.workflow.system import IDLE_HOST_WAITS, System, SystemOptions
from echograph.workflow.workers import HERE, WorkerOptions, Workers, workers


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The answer of a sweep.

    Attributes:
        model: name of the model.
        axes: of the grid.
        rows: one a point, in the order of the grid: the values of the axes, then every scalar of the result, or
            `error` where there is none.
        predicted: points that were predicted for it.
        known: points that were known before.
        ended: "" where every point has a row; else "interrupt".
        notes: options that have no effect at any point; a line each.
    """

    model: str
    axes: tuple[GridAxis, ...]
    rows: tuple[dict[str, Any], ...]
    predicted: int
    known: int
    ended: str
    notes: tuple[str, ...]

    @property
    def answered(self) -> list[dict[str, Any]]:
        """The rows that have a result."""
        return [row for row in self.rows if not row.get(ERROR)]

    def require_answers(self) -> None:
        """Refuses a sweep in which no point has a result.

        Raises:
            PlanError: none has, and why the first has not.
        """
        if self.rows and not self.answered:
            raise PlanError(f"none of {len(self.rows):,} points can be predicted: {self.rows[0][ERROR]}")

    def __str__(self) -> str:
        """The rows for people: the axes, and the figures that say most."""
        titles = [axis.name for axis in self.axes] + ["step", "90 % interval", "tokens/s", "MFU", "in all"]
        points = f"{len(self.rows)} point{'' if len(self.rows) == 1 else 's'}"
        return f"{self.model}: {points}\n" + text_table(titles, map(self._shown, self.rows))

    def _shown(self, row: Mapping[str, Any]) -> list[str]:
        at = [str(row[axis.name]) for axis in self.axes]
        if row.get(ERROR):
            return [*at, "-", "-", "-", "-", str(row[ERROR])]
        bounds = (row[f"step_time_interval_s.{end}"] for end in ("low", "high"))
        low, high = (format_time(round(bound * 1e12)) for bound in bounds)
        memory = row.get("memory.device_bytes")
        fits = "" if row.get("memory.fits", True) else " DOES NOT FIT"
        return [
            *at,
            format_time(round(row["step_time_s"] * 1e12)),
            f"{low} to {high}",
            format_count(row["tokens_per_s"] or row["samples_per_s"]),
            "-" if row["mfu"] is None else f"{row['mfu']:.1%}",
            "-" if memory is None else f"{format_bytes(memory)}{fits}",
        ]

    def to_json(self) -> dict[str, Any]:
        """The record of `echosim sweep --json`."""
        return {
            "model": self.model,
            "axes": {axis.name: list(axis.values) for axis in self.axes},
            "predicted": self.predicted,
            "known": self.known,
            "ended_by": self.ended or None,
            "rows": list(self.rows),
        }


@dataclass(frozen=True, slots=True)
class GridQuestion:
    """What a worker needs to predict points; calling it makes the worker."""

    graph: StepGraph

    def __call__(self) -> Callable[[tuple[str, SweepPoint]], dict[str, Any]]:
        """What predicts a point: the record of its result, or what is wrong with it."""
        systems: dict[Any, Predictor] = {}

        def answer(asked: tuple[str, SweepPoint]) -> dict[str, Any]:
            _, point = asked
            key = point.plan.cluster, point.options, point.scenario
            try:
                if key not in systems:
                    systems.clear()  # points of one system come one after the other
                    system = point.options.system(point.plan.cluster)
                    systems[key] = Predictor(self.graph, system, point.scenario)
                record = systems[key].predict(point.plan).to_json()
                del record["simulation"]["wall_s"]  # the same points have the same rows
                return record
            except EchoError as error:
                return {ERROR: str(error)}

        return answer


class _Systems:
    """What tells systems apart, by what they resolve to rather than by their names."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, SystemOptions], str] = {}

    def digest(self, cluster: str, options: SystemOptions) -> str:
        key = cluster, options
        if key not in self.known:
            self.known[key] = system_digest(options.system(cluster))
        return self.known[key]


def system_digest(system: System) -> str:
    """What tells a system from others: a digest of what it resolves to."""
    said = repr((system.cluster, system.device, system.host))
    return hashlib.sha256(said.encode()).hexdigest()


def graph_digest(graph: Graph) -> str:
    """What tells a graph from others: a digest of its file."""
    from echograph.ir import serde

    digest = hashlib.sha256()
    for piece in serde.encode(graph):
        digest.update(piece)
    return digest.hexdigest()


def sweep(
    graph: StepGraph | JobGraph,
    axes: Sequence[GridAxis],
    plan: Plan | None = None,
    options: SystemOptions | None = None,
    scenario: Scenario | None = None,
    *,
    journal_path: Path | None = None,
    where: WorkerOptions = HERE,
    progress: Progress = silent,
) -> Sweep:
    """Predicts every point of a grid.

    Args:
        graph: the step.
        axes: what varies.
        plan: what all points have in common, and so on.
        options: of the system.
        scenario: what is asked beyond that.
        journal_path: where finished points are kept, and looked for; None: nowhere.
        where: points are worked on.
        progress: told how far it is.

    Returns:
        A row a point. Interrupted, it says so, and has the rows of what was finished.

    Raises:
        UsageError: the grid is no grid.
        DataError: the journal holds something else.
    """
    if not isinstance(graph, StepGraph):
        raise UsageError("the graph is a job, which has its plan: give the step graph that it was made of")
    if not axes:
        raise UsageError("--over: say what varies, as --over gpus=8..1024:x2")
    asked = list(
        _asked(grid_points(plan or Plan(), options or SystemOptions(), scenario or Scenario(), axes), graph)
    )
    predictable = [one.point for one in asked if one.point is not None]
    notes = idle_options(_without_effect(predictable), (plan or Plan()).given)
    if predictable and all(point.options.host_waits and point.plan.pp == 1 for point in predictable):
        notes += (IDLE_HOST_WAITS,)
    answers = read_journal(journal_path) if journal_path is not None else {}
    known = sum(one.key in answers for one in asked)
    answers |= {one.key: {ERROR: one.wrong} for one in asked if one.wrong}
    todo = list({one.key: one for one in asked if one.key not in answers}.values())
    done, ended = 0, ""
    with journal(journal_path) as kept, workers(GridQuestion(graph), where, len(todo)) as at:
        try:
            for key, record in _answers(at, todo):
                kept.add(key, record)
                answers[key] = record
                done += 1
                progress("predicting points", done, len(todo))
        except KeyboardInterrupt:
            ended = "interrupt"
    return Sweep(
        model=graph.workload.model or graph.name,
        axes=tuple(axes),
        rows=tuple(_row(one, answers[one.key]) for one in asked if one.key in answers),
        predicted=done,
        known=known,
        ended=ended,
        notes=notes,
    )


def _without_effect(asked: Iterable[SweepPoint]) -> Iterator[tuple[str, ...]]:
    """The options of a plan that change nothing, of each point that has an answer."""
    clusters: dict[str, Cluster] = {}
    for point in asked:
        name = point.plan.cluster
        with suppress(EchoError):  # whose row says why
            clusters[name] = clusters.get(name) or load_cluster(name)
            yield without_effect(point.plan, clusters[name])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A point of the grid with its key; or its place, and what is wrong with it."""

    at: Mapping[str, Any]
    key: str
    point: SweepPoint | None = None
    wrong: str = ""


def _asked(grid: Iterable[SweepPoint | WrongPoint], graph: StepGraph) -> Iterator[_Asked]:
    systems, of_graph = _Systems(), graph_digest(graph)
    for point in grid:
        try:
            if isinstance(point, WrongPoint):
                raise UsageError(point.why)
            key = point.key(of_graph, systems.digest(point.plan.cluster, point.options))
            yield _Asked(at=point.at, key=key, point=point)
        except EchoError as error:
            yield _Asked(at=point.at, key=f"wrong {dict(point.at)}", wrong=str(error))


def _answers(at: Workers, todo: Iterable[_Asked]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Points as they are answered, each with its key."""
    left = iter(todo)
    while True:
        while at.free and (one := next(left, None)) is not None:
            at.give((one.key, one.point))
        if not at.busy:
            return
        for (key, _), record in at.take():
            yield key, record


def _row(one: _Asked, record: Mapping[str, Any]) -> dict[str, Any]:
    """A row: the axes first."""
    return {**one.at, ERROR: record.get(ERROR), **flat({k: v for k, v in record.items() if k != ERROR})}

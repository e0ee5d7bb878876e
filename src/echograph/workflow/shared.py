"""What passes leave of one step, and make of it: plans share what they have in common."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TypeVar

from echograph.errors import PlanError
from echograph.ir.graph import JobGraph, StepGraph
from echograph.ir.passes.base import Pass, pass_text, run
from echograph.ir.passes.data_parallel import DataParallel, ReplicasAlike
from echograph.ir.passes.fully_shard import FullyShard
from echograph.ir.passes.mesh import MeshOrder
from echograph.ir.passes.pipeline import Pipeline, StagesAlike
from echograph.ir.passes.pipeline.alike import DISTINCT, NotAlike, PassOrder, Sample, whole
from echograph.ir.passes.pipeline.schedules import order
from echograph.ir.passes.rewrite import UPDATE, PassLabel
from echograph.ir.structure import structure

MOST_STEPS = 256
"""Steps that are kept, some hundred kilobytes each."""


class SharedSteps:
    """The steps that passes make of one; of many, those are kept that were asked for last.

    Args:
        graph: the step before all passes.
    """

    def __init__(self, graph: StepGraph) -> None:
        self.graph = graph
        self._known: dict[tuple[str, ...], StepGraph] = {}

    def after(self, passes: Sequence[Pass]) -> StepGraph:
        """The step that passes leave, each of which leaves a step.

        Raises:
            PlanError: one of them does not fit.
        """
        texts, step = tuple(map(pass_text, passes)), self.graph
        for count, one in enumerate(passes, 1):
            made = self._known.pop(texts[:count], None)
            step = run(step, (one,), to=StepGraph, verify=False) if made is None else made
            self._known[texts[:count]] = step
            if len(self._known) > MOST_STEPS:
                del self._known[next(iter(self._known))]
        return step


@lru_cache(64)
def _order(schedule: str, stages: int, micro_batches: int, chunks: int) -> PassOrder:
    passes = [order(schedule, stage, stages, micro_batches, chunks) for stage in range(stages)]
    return PassOrder.of(passes, UPDATE)


@lru_cache(64)
def _alone(micro_batches: int) -> PassOrder:
    """The order without a pipeline, where what is called forward is a whole pass."""
    passes: list[PassLabel] = [("forward", micro_batch, 0) for micro_batch in range(micro_batches)]
    return PassOrder.of([passes], UPDATE)


class SharedJobs:
    """The jobs that passes make of steps. Of a pipeline, stages that do the same are lowered once."""

    def __init__(self) -> None:
        self._stages: dict[tuple[StepGraph, str], StagesAlike] = {}
        self._structures: dict[Hashable, StagesAlike] = {}
        self._first: dict[Hashable, StepGraph] = {}
        self._replicas: dict[Hashable, tuple[ReplicasAlike, ...]] = {}

    def job(self, step: StepGraph, passes: Sequence[Pass]) -> JobGraph:
        """The job that passes make of a step: put together from the stages that differ, where it can be.

        Args:
            step: the step.
            passes: the first of them makes a job of it.

        Raises:
            PlanError: one of them does not fit, or they leave a step.
        """
        if not isinstance(passes[0], Pipeline):
            return run(step, passes, to=JobGraph, verify=False)
        try:
            job = whole(self.sample(step, passes[:2]))
        except (NotAlike, PlanError):  # why a plan does not fit, the passes say of all stages
            return run(step, passes, to=JobGraph, verify=False)
        done = (*step.passes, *map(pass_text, passes[:2]))
        job = replace(job, name=step.name, producer=step.producer, unknown=step.unknown, passes=done)
        return run(job, passes[2:], to=JobGraph, verify=False)

    def sample(self, step: StepGraph, rest: Sequence[Pass]) -> Sample:
        """The passes of a job that differ, and their order.

        Raises:
            NotAlike: its passes are not known to be alike.
            PlanError: the plan does not fit the model.
        """
        first, *others = rest
        names = None
        if isinstance(first, Pipeline) and others and isinstance(data := others.pop(0), DataParallel | FullyShard):
            alike = self._alike(step, first)
            if alike.sized is None:
                job, labels = data.labelled(alike.job, alike.labels)
            else:
                job, labels = self._replicated(alike.job, alike.labels, _like(step, first), data)
            names = alike.names
            places = {program.coordinates["pp"]: number for number, program in enumerate(job.programs)}
            count, chunks = first.micro_batches, first.chunks
            order_of = _order(first.schedule, first.stages, count, chunks)
            stand_for = [places[stage] for stage in alike.stand_for]
        elif isinstance(first, DataParallel | FullyShard):
            count, chunks, stand_for = first.micro_batches, 1, [0]
            few = replace(first, micro_batches=min(count, DISTINCT))
            job, labels = self._replicated(step, None, structure(step), few)
            order_of = _alone(count)
        else:
            raise NotAlike("the job is not of a pipeline or of data parallelism alone")
        for one in others:
            if not isinstance(one, MeshOrder):
                raise NotAlike(f"pass {one.name} wants the whole job")
            job = one.ordered(job)
        return Sample(
            job=job,
            labels=labels,
            stand_for=stand_for,
            order=order_of,
            micro_batches=count,
            chunks=chunks,
            update=UPDATE,
            names=names,
        )

    def _alike(self, step: StepGraph, pipeline: Pipeline) -> StagesAlike:
        """The stages of a pipeline that differ: the same ones for any number of micro-batches beyond a few.

        Raises:
            NotAlike: forward and backward passes run in pairs, or chunks turn back.
            PlanError: the plan does not fit the model.
        """
        if pipeline.overlap_experts:
            raise NotAlike("forward and backward passes run in pairs")
        if pipeline.where.turns:
            raise NotAlike("chunks turn back at the last stage")
        pipeline.check(step)
        like = _like(step, pipeline)
        key = step, like[1]
        if (known := self._stages.get(key)) is not None:
            return known
        before = self._structures.get(like)
        if before is not None:
            return _keep(self._stages, key, before.of_step(step), MOST_STAGES)
        # What was told of the first step of its structure, for other pipelines, is not told again of this one.
        first = _keep(self._first, like[0], self._first.get(like[0], step), MOST_STAGES)
        found = pipeline.alike(first)
        if found.sized is not None:
            _keep(self._structures, like, found)
            found = found if first is step else found.of_step(step)
        elif first is not step:
            found = pipeline.alike(step)
        return _keep(self._stages, key, found, MOST_STAGES)

    def _replicated(
        self, graph: StepGraph | JobGraph, labels: Sequence[Sequence[PassLabel]] | None, like: Hashable,
        data: DataParallel | FullyShard,
    ) -> tuple[JobGraph, list[list[PassLabel]]]:  # fmt: skip
        """A graph over data-parallel ranks, and what its calls are of: once for all sizes that decide alike.

        Args:
            graph: a step, or the stages of a pipeline.
            labels: of the stages, what their calls are of.
            like: what the graph is but for its sizes.
            data: the pass.
        """
        key = like, pass_text(data.few())
        before = self._replicas.get(key, ())
        for known in before:
            if (job := known.of_graph(graph, data)) is not None:
                return job, known.labels
        found = data.alike(graph, labels)
        _keep(self._replicas, key, (*before, found))
        return found.job, found.labels


def _like(step: StepGraph, pipeline: Pipeline) -> tuple[Hashable, str]:
    """What the stages of a pipeline depend on but for their sizes."""
    count = min(pipeline.micro_batches, DISTINCT)
    return structure(step), pass_text(replace(pipeline, micro_batches=count))


MOST_KEPT = 512
"""What passes made of structures that a predictor keeps: some hundred kilobytes each, and as many milliseconds."""
MOST_STAGES = 64
"""Stages of steps that it keeps, each of which takes a millisecond to make again."""
_Key = TypeVar("_Key")
Kept = TypeVar("Kept")


def _keep(known: dict[_Key, Kept], key: _Key, value: Kept, most: int = MOST_KEPT) -> Kept:
    """Keeps a graph, in place of the one that was kept first where there are many."""
    if key not in known and len(known) >= most:
        del known[next(iter(known))]
    known[key] = value
    return value

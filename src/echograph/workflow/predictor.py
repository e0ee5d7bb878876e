"""Predictions of one graph under many plans, which share what the plans have in common.

What is equal is computed once. Plans that begin with the same passes share the step that these leave. Of a
pipeline, stages that do the same on other layers and micro-batches between the first and the last are lowered,
costed and cut once, and the step is put together from them (`simulator.engine.composed`). Collectives of one kind,
size and placement are timed once for all plans. What of a job cannot be put together so is simulated whole.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

from echograph.errors import EchoError
from echograph.ir.graph import JobGraph, StepGraph
from echograph.ir.passes.base import Pass, split_at_job
from echograph.ir.passes.model import MICRO_BATCH_AXES
from echograph.ir.passes.pipeline.alike import NotAlike
from echograph.profiler.costs.estimate import KnownCosts
from echograph.simulator.durations import NetworkModel, message_ps
from echograph.simulator.engine import composed
from echograph.simulator.result import Result
from echograph.simulator.simulate import timed
from echograph.workflow import plan as plans
from echograph.workflow.plan import Plan
from echograph.workflow.predict import memory_of, on_system, predict, simulate
from echograph.workflow.scenario import Scenario
from echograph.workflow.shared import SharedJobs, SharedSteps
from echograph.workflow.system import System

if TYPE_CHECKING:
    from echograph.simulator.memory import Memory


class StepResult(Result):
    """A prediction of which the step is known, and everything else is worked out when it is asked for."""

    __slots__ = ("_whole",)

    def __init__(self, whole: Callable[[], Result] | None = None, **known: Any) -> None:
        object.__setattr__(self, "_whole", whole)
        for name, value in known.items():
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name not in {field.name for field in fields(Result)}:
            raise AttributeError(name)
        if self._whole is None:
            raise AttributeError(name)
        whole = self._whole()
        for field in fields(Result):
            object.__setattr__(self, field.name, getattr(whole, field.name))
        return getattr(whole, name)


class Predictor:
    """Predicts a step graph on a system, plan after plan; each answer is that of `predict` to the picosecond.

    Args:
        graph: one step on one device.
        system: where it runs.
        scenario: what is asked beyond that.

    Attributes:
        steps: what passes leave of the graph.
        jobs: what passes make of that.
    """

    def __init__(self, graph: StepGraph, system: System, scenario: Scenario | None = None) -> None:
        self.graph = graph
        self.system = system
        self.scenario = scenario or Scenario()
        self.steps = SharedSteps(graph)
        self.jobs = SharedJobs()
        self._network = NetworkModel(system.cluster)
        self._costs = KnownCosts()
        self._layouts: composed.KnownLayouts = {}
        self._last: tuple[Plan, JobGraph] | None = None

    def predict(self, plan: Plan, *, memory: bool = True, interval: bool = True) -> Result:
        """Predicts one step under a plan.

        Args:
            plan: how the step is spread; its cluster is the system's.
            memory: whether to work out memory.
            interval: whether to work out how sure the prediction is. Without both the step alone is worked out at
                once, the rest of the result when it is asked for.

        Raises:
            EchoError: as `predict`.
        """
        if memory or interval or self.scenario != Scenario() or not isinstance(self.graph, StepGraph):
            return self._whole(plan, memory)
        try:
            with _uncollected():
                return self._step(plan)
        except (NotAlike, EchoError):
            return self._whole(plan, memory)

    def _whole(self, plan: Plan, memory: bool) -> Result:
        """The prediction of the whole job, but for the passes that it shares with plans before."""
        if plan.passes or not isinstance(self.graph, StepGraph):
            return predict(self.graph, plan, self.system, self.scenario, memory=memory)[0]
        return simulate(self.job(plan), self.system, self.scenario, plan=plan, memory=memory)

    def job(self, plan: Plan) -> JobGraph:
        """The job of a plan that lists no passes, of a step; that of the last one is kept.

        Raises:
            EchoError: as `predict`.
        """
        if self._last is None or self._last[0] != plan:
            step, rest = self._shared(plan)
            self._last = plan, self.jobs.job(step, rest)
        return self._last[1]

    def memory(self, plan: Plan, most_bytes: float) -> Memory | None:
        """Memory of a plan that lists no passes, with the bytes of the whole prediction; as `memory_of`.

        Raises:
            EchoError: as `predict`.
        """
        return memory_of(self.job(plan), self.system, plan, most_bytes=most_bytes)

    def _shared(self, plan: Plan) -> tuple[StepGraph, tuple[Pass, ...]]:
        """The step that the passes of a plan leave before they make a job of it, and those that do."""
        before, rest = split_at_job(plans.passes(plan, self.graph.workload, self.system.cluster))
        return self.steps.after(before), rest

    def _step(self, plan: Plan) -> Result:
        """The step alone, put together from passes that differ.

        Raises:
            NotAlike: it cannot be.
            EchoError: as `predict`.
        """
        if plan.passes or self.system.profile is not None or self.system.cluster.slow_nodes:
            raise NotAlike("the whole job is simulated")
        step, rest = self._shared(plan)
        sample = self.jobs.sample(step, rest)
        stack = plan.stack or sample.job.workload.stack
        job, host, sms = on_system(sample.job, stack, self.system, self._costs, self._network)
        if host.threads or host.blocking:
            raise NotAlike("the host works on threads, or waits for every launch")
        cluster = self.system.cluster
        roles = timed(job, cluster, host, sms=sms, network=self._network)
        job, times = roles.job, roles.times

        sent: dict[tuple[int, ...], int] = {}
        columns = job.ops.group, job.ops.peer, job.ops.nbytes
        about = cache(lambda row: tuple(int(column[row]) for column in columns))
        places = [replace(job.programs[0], coordinates={"pp": stage}) for stage in range(len(sample.stand_for))]

        def message(row: int, stage: int) -> int:
            if row not in times.algorithm:
                return int(times.picoseconds[row])
            key = stage, *about(row)
            if key not in sent:
                sent[key] = message_ps(job, self._network, row, places[stage])
            return sent[key]

        whole = replace(sample, job=job)
        picoseconds = composed.step_ps(whole, times.picoseconds, roles.issue, message, self._layouts)
        return self._result(plan, job, stack, picoseconds, sample.micro_batches)

    def _result(self, plan: Plan, job: JobGraph, stack: str, step_ps: int, micro_batches: int) -> Result:
        replicas = prod(axis.size for axis in job.mesh if axis.name in MICRO_BATCH_AXES)
        samples = job.workload.batch_size * replicas * micro_batches
        cluster = self.system.cluster
        return StepResult(
            cache(lambda: self._whole(plan, memory=False)),
            model=job.workload.model or job.name,
            cluster=cluster.name,
            device=cluster.device,
            gpus=job.world_size,
            plan={**plans.record(job, replace(plan, stack=stack), cluster), "global_batch": samples},
            step_ps=step_ps,
            samples=samples,
            tokens=samples * job.workload.sequence_length,
            memory=None,
            job=None,
        )


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without looking for cycles, which goes through all that is kept each time that a pass made many objects.

    What was made counts as old then, so it is looked through when all objects are, and not before.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()

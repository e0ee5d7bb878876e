"""What an engine is given: the roles of a job with their durations, each role to be simulated once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from echograph.errors import DeadlockError
from echograph.ir.columns import Int64
from echograph.ir.graph import JobGraph
from echograph.simulator.durations import Durations
from echograph.simulator.engine.schedule import Starts
from echograph.simulator.host import Host
from echograph.simulator.interval import Factors, scenarios
from echograph.simulator.steps import Step, of_tasks
from echograph.simulator.tasks import TaskGraph, expand


@dataclass(frozen=True, kw_only=True, eq=False)
class Roles:
    """The roles of a job.

    Attributes:
        job: an annotated job graph.
        times: how long its operations take on the device.
        issue: int64 [ops], picoseconds that the host takes to issue each, or for `Host` work to do it.
        host: the host.
    """

    job: JobGraph
    times: Durations
    issue: Int64
    host: Host

    @cached_property
    def tasks(self) -> TaskGraph:
        """The roles written out, operation by operation."""
        return expand(self.job, self.times.picoseconds, self.issue, threads=self.host.threads)

    @cached_property
    def factor(self) -> Factors:
        """float64 [ops + 1, scenarios]: factors on durations, the host last, in the scenarios of the interval."""
        return scenarios(self.job, self.times, self.host)

    def run(self, engine: Callable[[TaskGraph], Starts]) -> Step:
        """The step whose tasks an engine starts one by one.

        Raises:
            DeadlockError: tasks wait for each other for ever; says which programs wait, and at what.
        """
        try:
            starts = engine(self.tasks)
        except DeadlockError as error:
            raise DeadlockError(self._who_waits(error.tasks), error.tasks) from None
        return of_tasks(self.job, self.tasks, starts)

    def _who_waits(self, stuck: tuple[int, ...]) -> str:
        """Which programs stand still, and at which communication each of them waits for others."""
        job, waits = self.job, []
        for task in stuck:
            if self.tasks.join[task] >= 0:
                program, op = int(self.tasks.program[task]), int(self.tasks.op[task])
                name = job.programs[program].role or f"program {program}"
                waits.append(f"{name} at operation {op} ({job.strings[job.ops.name[op]]})")
        return f"deadlock: {', '.join(waits[:4]) or 'tasks'} wait for each other; {len(stuck)} streams stand still"

"""Work on many points, in this process, in several, or on a Ray cluster: which of them does not show in results.

Each worker is made once and keeps what its points share. Points are handed out as workers become free, so whoever
asks can decide what comes next by what has come back.
"""

from __future__ import annotations

import gc
import signal
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from echograph.errors import SimulationError, UnknownNameError, UsageError
from echograph.options import option

if TYPE_CHECKING:
    from concurrent.futures import Future, ProcessPoolExecutor

Point = TypeVar("Point")
Answer = TypeVar("Answer")
Make = Callable[[], Callable[[Any], Any]]
"""Makes a worker: what answers points, one after the other."""


class Workers(Protocol):
    """Workers that answer points."""

    @property
    def free(self) -> bool:
        """Whether one more point would be begun at once."""
        ...

    @property
    def busy(self) -> int:
        """Points that are not answered yet."""
        ...

    def give(self, point: Any) -> None:
        """Begins a point."""
        ...

    def take(self, timeout_s: float | None = None) -> list[tuple[Any, Any]]:
        """Waits for points that are answered: each with its answer; none where the time is over before."""
        ...


class _Here(Generic[Point, Answer]):
    """This process."""

    def __init__(self, make: Make) -> None:
        self.answer, self.points = make(), deque[Any]()

    @property
    def free(self) -> bool:
        return not self.points

    @property
    def busy(self) -> int:
        return len(self.points)

    def give(self, point: Any) -> None:
        self.points.append(point)

    def take(self, timeout_s: float | None = None) -> list[tuple[Any, Any]]:
        point = self.points.popleft()
        return [(point, self.answer(point))]


_answer: Callable[[Any], Any] | None = None


def _begin(make: Make) -> None:
    """In a process of its own: an interrupt is for the one that asked."""
    global _answer
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _answer = make()
    # What a worker begins with, modules above all, stays as long as it does: no cycles are looked for in it again.
    gc.collect()
    gc.freeze()


def _answered(point: Any) -> Any:
    assert _answer is not None
    return _answer(point)


class _Processes:
    """Processes of this machine."""

    def __init__(self, pool: ProcessPoolExecutor, count: int) -> None:
        self.pool, self.count = pool, count
        self.points: dict[Future[Any], Any] = {}

    @property
    def free(self) -> bool:
        return len(self.points) < self.count

    @property
    def busy(self) -> int:
        return len(self.points)

    def give(self, point: Any) -> None:
        from concurrent.futures.process import BrokenProcessPool

        try:
            self.points[self.pool.submit(_answered, point)] = point
        except BrokenProcessPool:
            raise _lost() from None

    def take(self, timeout_s: float | None = None) -> list[tuple[Any, Any]]:
        from concurrent.futures import FIRST_COMPLETED, wait
        from concurrent.futures.process import BrokenProcessPool

        done, _ = wait(self.points, timeout_s, FIRST_COMPLETED)
        try:
            return [(self.points.pop(future), future.result()) for future in done]
        except BrokenProcessPool:
            raise _lost() from None


def _lost() -> SimulationError:
    return SimulationError("a process was killed, most likely for its memory: give fewer --jobs")


ENGINES = ("local", "ray")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Where points are worked on. The text of each field is its help on the command line.

    Raises:
        UnknownNameError: no such engine.
        UsageError: an address without a cluster.
    """

    jobs: int = option(0, "Processes.", "1; with --engine ray one for each of the cluster's processors")
    engine: str = option("local", "local: this machine; ray: a Ray cluster (needs the extra [ray]).")
    address: str = option("", "Address of the Ray cluster, as auto or ray://head:10001.", "one started here")

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise UnknownNameError("engine", self.engine, ENGINES)
        if self.address and self.engine != "ray":
            raise UsageError("--address: is of a Ray cluster: give --engine ray as well")
        if self.jobs < 0:
            raise UsageError(f"--jobs {self.jobs}: give 1 or more")


HERE = WorkerOptions()


@contextmanager
def workers(make: Make, options: WorkerOptions = HERE, most: int = 1_000_000) -> Iterator[Workers]:
    """Workers that are there until the context ends.

    Args:
        make: makes each of them.
        options: where.
        most: points that there are, which no more workers than that are made for.
    """
    jobs = min(options.jobs, most)
    if options.engine == "ray" and most:
        from echograph.workflow.ray_workers import ray_workers

        with ray_workers(make, jobs, options.address) as at:
            yield at
        return
    if jobs <= 1:
        yield _Here(make)
        return
    from concurrent.futures import ProcessPoolExecutor

    pool = ProcessPoolExecutor(jobs, initializer=_begin, initargs=(make,))
    at = _Processes(pool, jobs)
    try:
        yield at
    finally:
        # Nobody waits for what is under way still, after an error, an interrupt, or when the time is over.
        for process in list((pool._processes or {}).values()) if at.busy else ():
            process.terminate()
        pool.shutdown(wait=not at.busy, cancel_futures=True)

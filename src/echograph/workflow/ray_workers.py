"""Workers on a Ray cluster: actors, each made once, on as many machines as there are.

Ray starts an actor that is lost anew, and gives it again the point that it was at; nothing else is run twice.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from echograph.errors import MissingExtraError, SimulationError, UsageError
from echograph.workflow.workers import Make, Workers

TRIES = 3
"""How often a point is begun again whose worker is lost; one that takes every worker with it ends."""

CONNECT_S = 10.0
"""How long a cluster has to take a connection."""


class _Actor:
    """What runs on the cluster."""

    def __init__(self, make: Make) -> None:
        self.answer = make()

    def answered(self, point: Any) -> Any:
        return self.answer(point)


class _Actors:
    """Actors of a cluster, each with at most one point."""

    def __init__(self, ray: Any, actors: list[Any]) -> None:
        self.ray, self.idle = ray, actors
        self.points: dict[Any, tuple[Any, Any]] = {}

    @property
    def free(self) -> bool:
        return bool(self.idle)

    @property
    def busy(self) -> int:
        return len(self.points)

    def give(self, point: Any) -> None:
        actor = self.idle.pop()
        self.points[actor.answered.remote(point)] = actor, point

    def take(self, timeout_s: float | None = None) -> list[tuple[Any, Any]]:
        done, _ = self.ray.wait(list(self.points), num_returns=1, timeout=timeout_s)
        answers = []
        for reference in done:
            actor, point = self.points.pop(reference)
            try:
                answers.append((point, self.ray.get(reference)))
            except self.ray.exceptions.RayTaskError as error:
                raise error.as_instanceof_cause() from None
            except self.ray.exceptions.RayError as error:
                said = str(error).strip().splitlines()[0][:160]
                raise SimulationError(
                    f"Ray: the cluster is lost, or a point was begun {TRIES + 1} times and never ended ({said}): "
                    "with --output (a sweep) or --journal (a search) the same command goes on where it was"
                ) from None
            self.idle.append(actor)
        return answers


def _reach(address: str) -> None:
    """Whether something listens at HOST:PORT or ray://HOST:PORT; Ray itself would ask for many minutes.

    Raises:
        OSError: nothing does.
    """
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()


@contextmanager
def ray_workers(make: Make, jobs: int = 0, address: str = "") -> Iterator[Workers]:
    """Workers of a Ray cluster, until the context ends.

    Args:
        make: makes each of them; it is sent to the cluster once.
        jobs: how many; 0: one for each of the cluster's processors.
        address: of the cluster, "auto" for the one of this machine; "": one is started here for as long.

    Raises:
        MissingExtraError: Ray is not installed.
        UsageError: no cluster answers at the address.
    """
    try:
        import ray
    except ImportError:
        raise MissingExtraError("ray", "ray", "--engine ray") from None
    begun = not ray.is_initialized()
    if begun:
        try:
            _reach(address)
            ray.init(address=address or None, log_to_driver=False, logging_level="ERROR")
        except (OSError, ValueError, RuntimeError) as error:
            said = (str(error).strip() or type(error).__name__).splitlines()[0][:160]
            raise UsageError(
                f"--address {address}: no Ray cluster answers ({said}): start one with ray start --head, "
                "or leave the address out"
            ) from None
    try:
        count = jobs or max(1, int(ray.cluster_resources().get("CPU", 1)))
        sent = ray.put(make)
        options = {"num_cpus": 1, "max_restarts": -1, "max_task_retries": TRIES}
        made = ray.remote(**options)(_Actor)
        actors = [made.remote(sent) for _ in range(count)]
        try:
            yield _Actors(ray, list(actors))
        finally:
            for actor in actors:
                ray.kill(actor)
    finally:
        if begun:
            ray.shutdown()

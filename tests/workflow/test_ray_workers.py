"""A Ray cluster answers as this process does, and a point whose worker is killed is answered all the same."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from echograph.errors import MissingExtraError, SimulationError, UnknownNameError, UsageError
from echograph.workflow.workers import WorkerOptions, Workers, workers

RAY = WorkerOptions(engine="ray", jobs=2)


def answers(at: Workers, points: list[int]) -> dict[int, Any]:
    found: dict[int, Any] = {}
    left = iter(points)
    while True:
        while at.free and (point := next(left, None)) is not None:
            at.give(point)
        if not at.busy:
            return found
        found |= dict(at.take())


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of several processes on this machine."""
    ray = pytest.importorskip("ray", reason="needs the [ray] extra")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield ray
    ray.shutdown()


@pytest.mark.slow
def test_a_lost_point_is_run_again_and_no_other(cluster: Any, tmp_path: Path) -> None:
    log, killed = tmp_path / "log", tmp_path / "killed"

    def make() -> Callable[[int], int]:
        def answer(point: int) -> int:
            with log.open("a") as file:
                file.write(f"{point}\n")
            if point == 5 and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return point * point

        return answer

    with workers(make, RAY) as at:
        assert answers(at, list(range(12))) == {point: point * point for point in range(12)}
    begun = Counter(map(int, log.read_text().split()))
    assert killed.exists() and begun == Counter(range(12)) + Counter([5])


@pytest.mark.slow
def test_a_point_that_takes_every_worker_with_it_ends(cluster: Any) -> None:
    def make() -> Callable[[int], int]:
        def answer(point: int) -> int:
            if point == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return point

        return answer

    with workers(make, RAY) as at, pytest.raises(SimulationError, match="begun 4 times"):
        answers(at, [0, 1, 2])


@pytest.mark.slow
def test_search_and_sweep_answer_as_here(cluster: Any, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the [torch] extra")
    import echograph as eg
    from echograph.workflow.sweep import sweep
    from echograph.workflow.sweep.grid import parse_grid_axis

    step = eg.compile("distilbert-base-uncased", batch_size=2, seq_len=128)
    over = {"tp": (1, 2), "pp": (1,), "cp": (1,), "micro_batch": (2,), "recompute": ("none",)}
    here, there = (
        eg.search(step, eg.Plan(gpus=8, global_batch=32), over=over, where=where).to_json()
        for where in (WorkerOptions(), RAY)
    )
    assert here["best"] == there["best"] and here["pareto_plans"] == there["pareto_plans"]
    axes = [parse_grid_axis("--over", text) for text in ("gpus=8,16", "cluster=dgx-h100,dgx-a100")]
    journal = tmp_path / "points.jsonl"
    rows = sweep(step, axes, where=RAY, journal_path=journal)
    assert rows.rows == sweep(step, axes).rows
    assert sweep(step, axes, where=RAY, journal_path=journal).predicted == 0  # all of it was on the disk


@pytest.mark.slow
def test_an_address_where_nobody_answers_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason="needs the [ray] extra")
    ray.shutdown()
    with (
        pytest.raises(UsageError, match="no Ray cluster answers"),
        workers(lambda: lambda point: point, WorkerOptions(engine="ray", address="auto")),
    ):
        pass


@pytest.mark.parametrize("address", ["127.0.0.1:{}", "ray://127.0.0.1:{}"])
def test_an_address_that_takes_no_connection_is_said_at_once(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    ray = SimpleNamespace(is_initialized=lambda: False, init=lambda **_: pytest.fail("Ray is asked all the same"))
    monkeypatch.setitem(sys.modules, "ray", ray)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]  # nobody listens there once it is closed
    at = WorkerOptions(engine="ray", address=address.format(port))
    with (
        pytest.raises(UsageError, match=r"no Ray cluster answers .*refused"),
        workers(lambda: lambda point: point, at),
    ):
        pass


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        pytest.raises(MissingExtraError, match=r"pip install 'echograph\[ray\]'"),
        workers(lambda: lambda point: point, RAY),
    ):
        pass


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(UnknownNameError, match="ray"):
        WorkerOptions(engine="rai")
    with pytest.raises(UsageError, match="--engine ray"):
        WorkerOptions(address="auto")
    with pytest.raises(UsageError, match="--jobs"):
        WorkerOptions(jobs=-1)

"""A step waits for the slowest of its GPUs, in what the clock paces."""

from __future__ import annotations

from typing import Any

import pytest
from layered import product_step

from echograph.ir.passes.data_parallel import DataParallel
from echograph.ir.types import Source
from echograph.simulator.clusters import Cluster, load_cluster
from echograph.simulator.durations import durations, slowest_of

SECOND_PS = 10**12


def seconds(gpus: int, source: Source, cluster: Cluster) -> dict[str, float]:
    """Of a product and of an activation, each of which a typical GPU does in a second."""
    job = DataParallel(replicas=gpus)(product_step(SECOND_PS, source))
    took = durations(job, cluster).picoseconds / SECOND_PS
    return {op.name: float(took[row]) for row, op in enumerate(job.ops)}


def dgx(**settings: Any) -> Cluster:
    return load_cluster("dgx-h100", {f"node.{name}": str(value) for name, value in settings.items()})


@pytest.mark.parametrize(("gpus", "deviations"), [(1, 0.0), (8, 1.42), (1024, 3.24)])
def test_the_slowest_of_many_is_so_many_deviations_away(gpus: int, deviations: float) -> None:
    """Expected largest of n normal deviates: tables of order statistics (Harter 1961) have 1.4236 of 8."""
    assert slowest_of(gpus, 0.1) == pytest.approx(1 + 0.1 * deviations, abs=2e-3)


def test_products_wait_for_the_slowest_and_memory_does_not() -> None:
    took = seconds(8, Source.FITTED, dgx(gpu_spread=0.1))
    assert took == {"aten.mm": pytest.approx(slowest_of(8, 0.1)), "aten.relu": 1.0}


def test_boards_differ_unless_a_file_says_that_they_are_alike() -> None:
    assert seconds(8, Source.FITTED, dgx())["aten.mm"] > 1.0
    assert seconds(1024, Source.FITTED, dgx(gpu_spread=0)) == {"aten.mm": 1.0, "aten.relu": 1.0}


def test_measured_durations_are_what_they_are() -> None:
    assert seconds(8, Source.MEASURED, dgx()) == {"aten.mm": 1.0, "aten.relu": 1.0}

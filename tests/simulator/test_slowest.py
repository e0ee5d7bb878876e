"""A step waits for the slowest of its GPUs, in what the clock paces."""

from __future__ import annotations

import pytest
from layered import product_step

from echograph import System
from echograph.ir.passes.data_parallel import DataParallel
from echograph.profiler.costs.power import slowest_of


def seconds(gpus: int, **settings: str) -> dict[str, float]:
    """Of a product and of an activation, in a job on so many GPUs."""
    system = System("dgx-h100", settings={f"node.{name}": value for name, value in settings.items()})
    job = system.annotate(DataParallel(replicas=gpus)(product_step()))
    took, _, _ = job.ops.duration_on("h100-sxm")
    return {op.name: float(took[row]) for row, op in enumerate(job.ops)}


@pytest.mark.parametrize(("gpus", "deviations"), [(1, 0.0), (8, 1.42), (1024, 3.24)])
def test_the_slowest_of_many_is_so_many_deviations_away(gpus: int, deviations: float) -> None:
    """Expected largest of n normal deviates: tables of order statistics (Harter 1961) have 1.4236 of 8."""
    assert slowest_of(gpus, 0.1) == pytest.approx(1 + 0.1 * deviations, abs=2e-3)


def test_products_wait_for_the_slowest_and_memory_does_not() -> None:
    alone, many = seconds(1, gpu_spread="0.1"), seconds(8, gpu_spread="0.1")
    assert many["aten.mm"] == pytest.approx(alone["aten.mm"] * slowest_of(8, 0.1), rel=1e-6)
    assert many["aten.relu"] == alone["aten.relu"]


def test_boards_differ_unless_a_file_says_that_they_are_alike() -> None:
    alone = seconds(1)
    assert seconds(8)["aten.mm"] > alone["aten.mm"]
    assert seconds(1024, gpu_spread="0") == alone


def test_durations_that_are_there_stay() -> None:
    """A graph that was annotated for a size is not made slower once more."""
    system = System("dgx-h100")
    job = system.annotate(DataParallel(replicas=8)(product_step()))
    again = system.annotate(job)
    assert (again.ops.duration_on("h100-sxm")[0] == job.ops.duration_on("h100-sxm")[0]).all()

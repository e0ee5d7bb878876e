"""`ResizeAxes`: a data-parallel job for other ranks is the one that lowering for so many would have made."""

from __future__ import annotations

import pytest
from layered import layered_step

from echograph.errors import PlanError
from echograph.ir.passes.data_parallel import DataParallel
from echograph.ir.passes.fold import Fold
from echograph.ir.passes.mesh import ResizeAxes
from echograph.ir.text import to_text


def test_a_resized_job_is_that_of_so_many_ranks() -> None:
    step = Fold()(layered_step(3))
    for replicas in (2, 3, 64):
        wanted = DataParallel(replicas=replicas, micro_batches=2)(step)
        job = ResizeAxes(sizes={"dp": replicas, "tp": 5})(DataParallel(replicas=8, micro_batches=2)(step))
        assert list(to_text(job)) == list(to_text(wanted))
        assert job.world_size == replicas


def test_what_depends_on_the_size_is_refused() -> None:
    job = DataParallel(replicas=8, micro_batches=2, zero=1)(Fold()(layered_step(3)))
    assert ResizeAxes(sizes={"dp": 8})(job) is job
    with pytest.raises(PlanError, match="axis dp: programs or tensors of the job depend on its size"):
        ResizeAxes(sizes={"dp": 4})(job)

"""SMs that reductions take from kernels beside them."""

from __future__ import annotations

import numpy as np
import pytest

from echograph.ir import types as t
from echograph.ir.builder import GraphBuilder
from echograph.ir.graph import Axis, JobGraph
from echograph.simulator.contention import beside_collectives

TP = {"tp": 0.25}


def job(*kernels: str, kind: t.CollectiveKind = t.CollectiveKind.REDUCE_SCATTER) -> JobGraph:
    """A collective, kernels of one tensor each beside it, and one that reads what it makes ("waits")."""
    builder = GraphBuilder(name="job", streams=("compute",))
    builder.mesh = (Axis(name="tp", size=2),)
    group, stream = builder.group("tp", axes=("tp",)), builder.stream("comm.tp")

    def tensor(name: str) -> int:
        return builder.tensor(name, (4, 4), t.DType.BF16, t.TensorRole.ACTIVATION)

    source, made = tensor("source"), tensor("made")
    builder.compute("first", phase=t.Phase.BACKWARD, outputs=(source,), bytes_written=32)
    builder.collective(
        "tp.reduce", kind, group=group, bytes_per_rank=32, dtype=t.DType.BF16, phase=t.Phase.BACKWARD,
        inputs=(source,), outputs=(made,), stream=stream,
    )  # fmt: skip
    for name in kernels:
        inputs = (made,) if name == "waits" else (source,)
        builder.compute(name, phase=t.Phase.BACKWARD, inputs=inputs, outputs=(tensor(name),), bytes_read=32)
    builder.program([(0, 0, builder.op_count(), 0, 0)], role="replica")
    builder.instance(0)
    return builder.build(JobGraph)


@pytest.mark.parametrize(
    ("alone", "beside"),
    [
        # The collective of 60 is over within the first kernel: 45 of its work are done meanwhile, and take 60.
        ([5, 60, 100, 40], [5, 60, 115, 40]),
        # All of the first kernel runs beside it, and a part of the second.
        ([5, 60, 30, 100], [5, 60, 40, 105]),
        # It lasts longer than both.
        ([5, 900, 30, 60], [5, 900, 40, 80]),
    ],
)
def test_kernels_beside_a_reduction_have_the_other_multiprocessors(alone: list[int], beside: list[int]) -> None:
    longer = beside_collectives(job("one", "two"), np.array(alone, np.int64), TP)
    assert longer.tolist() == beside


def test_what_waits_for_it_and_what_follows_does_not_run_beside_it() -> None:
    alone = np.array([5, 900, 30, 60, 60], np.int64)
    assert beside_collectives(job("one", "waits", "two"), alone, TP).tolist() == [5, 900, 40, 60, 60]


def test_gathers_and_other_groups_take_none() -> None:
    alone = np.array([5, 900, 30], np.int64)
    assert beside_collectives(job("one"), alone, {"dp": 0.25}).tolist() == alone.tolist()
    gather = job("one", kind=t.CollectiveKind.ALL_GATHER)
    assert beside_collectives(gather, alone, TP).tolist() == alone.tolist()


@pytest.mark.parametrize("share", [0.01, 0.12, 0.5])
@pytest.mark.parametrize("collective", [10, 1_000, 10_000])
def test_a_pair_takes_no_less_than_the_longer_and_no_more_than_both(share: float, collective: int) -> None:
    """The kernel starts with the collective: beside it, it is longer by what it lost, at most s of the time."""
    alone = np.array([0, collective, 2_000], np.int64)
    _, _, kernel = beside_collectives(job("one"), alone, {"tp": share}).tolist()
    assert 2_000 <= kernel <= 2_000 / (1 - share) + 1
    assert max(kernel, collective) <= 2_000 + collective
    assert kernel - 2_000 <= share * collective + 1

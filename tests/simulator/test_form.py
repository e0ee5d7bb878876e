"""How sure the form of the model is: the interval in closed form, and what part of a step each kind of work is."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from echograph.ir.builder import GraphBuilder
from echograph.ir.graph import Axis, JobGraph
from echograph.ir.types import Attention, CollectiveKind, DType, Duration, Gemm, Phase, Source
from echograph.simulator.clusters import load_cluster
from echograph.simulator.form import FEWEST, KINDS, Form, load_form, standard_errors
from echograph.simulator.host import IssueTimes
from echograph.simulator.result import Result
from echograph.simulator.simulate import simulate

CLUSTER = load_cluster("dgx-h100")
IDLE = IssueTimes(op_ps=0, launch_ps=0)
FORM = Form(
    label="",
    source="",
    date="",
    steps=0,
    families=0,
    spread={"matrix products": 0.1, "attention": 0.2},
    quantile={50: 0.7, 90: 2.0},
)
ATTENTION = Attention(heads=1, kv_heads=1, head_dim=16)


def run(*kernels: tuple[Any, int, Source], form: Form | None = FORM, unsaid: float = 0.0) -> Result:
    """Kernels one after the other: attributes, picoseconds, and where these come from."""
    builder = GraphBuilder()
    for attributes, picoseconds, source in kernels:
        took = Duration(device=CLUSTER.device, picoseconds=picoseconds, source=source, spread=0.0)
        builder.compute("kernel", phase=Phase.FORWARD, flops=1, attributes=attributes, durations=(took,))
    builder.program([(0, 0, len(kernels), 0, 0)])
    return simulate(builder.build(JobGraph), CLUSTER, IDLE, form=form, unsaid=unsaid)


def test_kinds_of_work_are_systematic_and_independent_of_each_other() -> None:
    parts = [(Gemm(), 3_000_000, Source.FITTED)] * 2 + [(ATTENTION, 4_000_000, Source.FITTED)]
    found = run(*parts, unsaid=0.05)
    assert found.work == pytest.approx({"matrix products": 0.6, "attention": 0.4})
    wide = math.exp(2 * math.sqrt(0.06**2 + 0.08**2 + 0.05**2))
    assert found.interval_ps == (round(10_000_000 / wide), round(10_000_000 * wide))
    assert found.durations_interval_ps == (found.step_ps, found.step_ps)


def test_no_predicted_time_moves() -> None:
    parts = [(Gemm(), 3_000_000, Source.FITTED), (ATTENTION, 4_000_000, Source.ANALYTICAL)]
    plain, sure = run(*parts), run(*parts, form=None)
    assert (plain.step_ps, plain.breakdown, plain.limits) == (sure.step_ps, sure.breakdown, sure.limits)
    assert sure.interval_ps == sure.durations_interval_ps


def test_what_was_measured_is_as_it_is() -> None:
    found = run(
        (Gemm(), 6_000_000, Source.FITTED),
        (Gemm(), 2_000_000, Source.MEASURED),
        (None, 2_000_000, Source.IMPORTED),
    )
    assert found.work == pytest.approx({"matrix products": 0.6})


def exchange(ranks: int, kind: CollectiveKind = CollectiveKind.ALL_REDUCE) -> Result:
    """A kernel on one stream, and beside it a longer collective on another."""
    builder = GraphBuilder(streams=("compute", "communication"))
    builder.mesh = (Axis(name="dp", size=ranks),)
    took = Duration(device=CLUSTER.device, picoseconds=50_000_000, source=Source.FITTED, spread=0.0)
    builder.compute("kernel", phase=Phase.FORWARD, flops=1, attributes=Gemm(), durations=(took,))
    builder.collective(
        "collective", kind, group=builder.group("dp", axes=("dp",)), bytes_per_rank=10**8,
        dtype=DType.BF16, stream=1,
    )  # fmt: skip
    builder.program([(0, 0, 2, 0, 0)])
    return simulate(builder.build(JobGraph), CLUSTER, IDLE, form=FORM, memory=False)


def test_communication_is_told_apart_by_how_far_it_goes_and_whether_work_hides_it() -> None:
    within, between, to_all = exchange(8), exchange(16), exchange(16, CollectiveKind.ALL_TO_ALL)
    assert set(within.work) == {"communication within nodes", "hidden communication"}
    assert set(between.work) == {"communication between nodes", "hidden communication"}
    assert set(to_all.work) == {"all-to-all exchange", "hidden communication"}
    assert within.work["hidden communication"] == pytest.approx(50_000_000 / within.step_ps)


def test_standard_errors_of_a_step_that_may_take_no_time_are_finite() -> None:
    assert standard_errors(100.0, (90.0, 120.0)) == pytest.approx((-math.log(0.9) / 1.645, math.log(1.2) / 1.645))
    assert standard_errors(100.0, (0.0, 100.0))[0] == pytest.approx(-math.log(FEWEST) / 1.645)
    assert standard_errors(0.0, (0.0, 0.0)) == (0.0, 0.0)


def test_the_spreads_that_ship_say_what_they_are() -> None:
    form = load_form()
    assert "spread" in form.label and form.source and form.date
    assert set(form.spread) == set(KINDS)
    assert all(0 < value < 2 for value in form.spread.values())
    assert form.quantile[50] < form.quantile[80] < form.quantile[90]
    assert msgspec.json.decode(msgspec.json.encode(form), type=Form) == form

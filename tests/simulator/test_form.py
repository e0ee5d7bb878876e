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
from echograph.simulator.form import FEWEST, Form, load_form, normal_width, standard_errors
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
    widths={50: (0.0, 0.05), 90: (0.1, 0.2)},
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


def test_each_side_has_a_width_of_its_own() -> None:
    parts = [(Gemm(), 3_000_000, Source.FITTED)] * 2 + [(ATTENTION, 4_000_000, Source.FITTED)]
    found = run(*parts, unsaid=0.05)
    assert found.work == pytest.approx({"matrix products": 0.6, "attention": 0.4})
    shorter, longer = (math.exp(math.hypot(1.6449 * 0.05, width)) for width in (0.1, 0.2))
    assert found.interval_ps == pytest.approx((10_000_000 / shorter, 10_000_000 * longer), rel=1e-5)
    assert found.durations_interval_ps == (found.step_ps, found.step_ps)


def test_errors_of_durations_count_at_the_level_that_is_asked_for() -> None:
    low, high = FORM.interval(100.0, (90.0, 120.0), {"matrix products": 1.0}, level=50)
    ratio = normal_width(50) / 1.645
    assert low == pytest.approx(100 * 0.9**ratio)
    assert high == pytest.approx(100 * math.exp(math.hypot(ratio * math.log(1.2), 0.05)))


def run_with_spread(source: Source) -> Result:
    builder = GraphBuilder()
    for attributes in (Gemm(), ATTENTION):
        took = Duration(device=CLUSTER.device, picoseconds=5_000_000, source=source, spread=0.1)
        builder.compute("kernel", phase=Phase.FORWARD, flops=1, attributes=attributes, durations=(took,))
    builder.program([(0, 0, 2, 0, 0)])
    return simulate(builder.build(JobGraph), CLUSTER, IDLE)


def test_kernels_of_a_device_without_a_table_are_wrong_together() -> None:
    apart, together = (
        run_with_spread(source).durations_interval_ps[1] for source in (Source.FITTED, Source.ANALYTICAL)
    )
    assert apart == pytest.approx(10_000_000 * (1 + 1.645 * math.hypot(0.05, 0.05)), rel=1e-6)
    assert together == pytest.approx(10_000_000 * (1 + 1.645 * 0.1), rel=1e-6)


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
    assert found.interval_ps[1] == pytest.approx(10_000_000 * math.exp(0.6 * 0.2), rel=1e-6)


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


def test_the_widths_that_ship_say_what_they_are() -> None:
    form = load_form()
    assert "widths" in form.label and form.source and form.date
    assert list(form.widths) == [50, 80, 90]
    # Errors of durations alone may hold half of the steps.
    assert all(0 <= shorter < 1 and 0 <= longer < 1 for shorter, longer in form.widths.values())
    assert form.widths[50][1] < form.widths[80][1] < form.widths[90][1]
    assert msgspec.json.decode(msgspec.json.encode(form), type=Form) == form

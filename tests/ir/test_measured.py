"""A profile joins a graph by signature: each operation at most one duration, each measurement used or named."""

from __future__ import annotations

import numpy as np
import pytest
from conformance_graphs import GRAPHS

from echograph.ir.builder import GraphBuilder
from echograph.ir.graph import StepGraph
from echograph.ir.passes.annotate import Annotate, by_signature, join
from echograph.ir.passes.data_parallel import DataParallel
from echograph.ir.profile import Environment, Measurement, Profile, TensorType, signatures
from echograph.ir.types import DType, Duration, Gemm, MultiTensor, Source, TensorRole

FP32 = DType.FP32
PS = 10**6


def step() -> StepGraph:
    """A product run twice, a view, a sum that nobody measured, and a shared launch over two tensors."""
    builder = GraphBuilder(name="small")
    x = builder.tensor("x", (8, 8), FP32, TensorRole.INPUT)
    y = builder.tensor("y", (8, 8), FP32, TensorRole.ACTIVATION)
    z = builder.tensor("z", (8, 8), FP32, TensorRole.ACTIVATION)
    v = builder.tensor("v", (64,), FP32, TensorRole.ACTIVATION, alias_of=z)
    s = builder.tensor("s", (), FP32, TensorRole.ACTIVATION)
    work = {"flops": 1024, "bytes_read": 512, "bytes_written": 256}
    builder.compute("aten.mm", inputs=(x, x), outputs=(y,), attributes=Gemm(), **work)
    builder.compute("aten.mm", inputs=(y, x), outputs=(z,), attributes=Gemm(), **work)
    builder.compute("aten.view", inputs=(z,), outputs=(v,))
    builder.compute("aten.sum", inputs=(v,), outputs=(s,), bytes_read=256, bytes_written=4)
    for leads in (True, False):
        w = builder.tensor("w", (4,), FP32, TensorRole.PARAMETER)
        after = builder.tensor("w", (4,), FP32, TensorRole.PARAMETER, alias_of=w)
        builder.compute(
            "aten._foreach_add_",
            inputs=(w,),
            outputs=(after,),
            bytes_read=16,
            bytes_written=16,
            attributes=MultiTensor(parts=2, leads=leads),
        )
    return builder.build(StepGraph)


def kind(*shape: int) -> TensorType:
    return TensorType(dtype=FP32, shape=shape)


def product(microseconds: int, *, runs: int = 1, arguments: str = "", **other: object) -> Measurement:
    values: dict[str, object] = {"attributes": Gemm(), "operator": "aten.mm", "samples": 10, **other}
    return Measurement(
        inputs=(kind(8, 8), kind(8, 8)), outputs=(kind(8, 8),), mean_picoseconds=0, runs=runs,
        median_picoseconds=microseconds * PS, arguments=arguments, **values,  # type: ignore[arg-type]
    )  # fmt: skip


SHARED = Measurement(
    operator="aten._foreach_add_", inputs=(kind(4),), outputs=(kind(4),), attributes=MultiTensor(parts=2),
    median_picoseconds=PS, samples=5,
)  # fmt: skip


def profile(*measurements: Measurement) -> Profile:
    return Profile(environment=Environment(device="here"), measurements=measurements)


def test_every_operation_is_measured_free_or_missing() -> None:
    graph = step()
    annotate, coverage = join(graph, profile(product(3), SHARED))
    assert (coverage.measured, coverage.free, coverage.missing, coverage.other) == (4, 1, 1, 0)
    assert coverage.missing_operators == (("aten.sum", 1),)
    assert coverage.unmatched == ()
    assert coverage.busy_ps == 2 * 3 * PS + 2 * PS
    durations = [op.durations for op in annotate(graph).ops]
    assert [[(d.device, d.picoseconds, d.source) for d in found] for found in durations] == [
        [("here", 3 * PS, Source.MEASURED)], [("here", 3 * PS, Source.MEASURED)], [], [],
        [("here", PS, Source.MEASURED)], [("here", PS, Source.MEASURED)],
    ]  # fmt: skip


def test_time_that_64_bits_do_not_hold_is_counted() -> None:
    long = 2**63 // PS
    annotate, coverage = join(step(), profile(product(long)))
    assert coverage.busy_ps == 2 * long * PS > 2**63
    assert annotate(step()).ops[0].durations[0].picoseconds == long * PS


@pytest.mark.parametrize(
    "other",
    [
        {"operator": "aten.bmm"},
        {"attributes": Gemm(transpose_b=True)},
        {"attributes": None},
    ],
)
def test_a_measurement_of_something_else_is_named_and_put_nowhere(other: dict[str, object]) -> None:
    phantom = product(9, **other)
    annotate, coverage = join(step(), profile(phantom))
    assert coverage.unmatched == (phantom,)
    assert coverage.measured == 0 and not (annotate.picoseconds >= 0).any()


def test_names_do_not_matter_but_shapes_and_types_do() -> None:
    half = TensorType(dtype=DType.BF16, shape=(8, 8))
    other = Measurement(
        operator="aten.mm", inputs=(half, half), outputs=(half,), attributes=Gemm(), median_picoseconds=1
    )
    assert join(step(), profile(other))[1].unmatched == (other,)


def test_calls_that_a_graph_cannot_tell_apart_count_as_often_as_they_run() -> None:
    invocations = (
        product(1, runs=3, arguments="contiguous", spread=0.0),
        product(5, runs=1, arguments="strided", spread=0.1),
    )
    (value,) = by_signature(profile(*invocations)).values()
    assert value.picoseconds == 2 * PS and value.samples == 20
    # Three exact ones of 1 us and one of 5 us +- 10 %: 8 +- 0.5 us together.
    assert value.spread == pytest.approx(0.5 / 8)


def test_durations_go_under_the_name_that_is_asked_for_and_keep_what_is_known() -> None:
    graph = step()
    once = join(graph, profile(product(3)), "h100-sxm")[0](graph)
    again = join(once, profile(product(7), SHARED), "h100-sxm")[0](once)
    assert [d.picoseconds for op in again.ops for d in op.durations] == [3 * PS, 3 * PS, PS, PS]
    assert {d.device for op in again.ops for d in op.durations} == {"h100-sxm"}


@pytest.mark.parametrize("name", ["two_layers", "kinds"])
def test_operations_are_counted_as_often_as_they_run(name: str) -> None:
    graph = GRAPHS[name]()
    counted = np.zeros(len(graph.ops), np.int64)
    for program in graph.programs:
        for _, begin, end, _, _ in program.calls.tolist():
            counted[begin:end] += 1
    assert graph.run_counts().tolist() == counted.tolist()
    assert graph.run_counts().sum() == graph.unfolded_ops


def test_a_job_is_joined_like_its_step() -> None:
    job = DataParallel(replicas=1)(step())
    _, coverage = join(job, profile(product(3), SHARED))
    assert (coverage.measured, coverage.free, coverage.missing) == (4, 1, 1)


def test_only_operations_that_work_have_a_signature() -> None:
    found = list(signatures(step()))
    assert [s is None for s in found] == [False, False, True, False, False, False]
    assert found[0] == found[1] == product(1).signature
    assert found[4] == found[5] == SHARED.signature


def test_new_durations_come_after_those_of_other_devices() -> None:
    """And not to operations that have one of this device already, or are to have none."""
    builder = GraphBuilder()
    others = [Duration(device=name, picoseconds=at, source=Source.MEASURED) for at, name in enumerate("ab", 1)]
    here = Duration(device="here", picoseconds=9, source=Source.MEASURED, samples=3, spread=0.5)
    for durations in ((), others, (), (here,), others[:1]):
        builder.compute("aten.mul", flops=1, durations=tuple(durations))
    graph = builder.build(StepGraph)
    annotate = Annotate(
        device="here",
        picoseconds=np.array([100, 101, -1, 103, 0]),
        source=np.array([Source.FITTED, Source.ANALYTICAL, 0, 0, Source.FITTED], np.uint8),
        spread=np.array([0.25, 0.5, 0, 0, 0.75], np.float32),
        samples=np.arange(5),
    )
    made = annotate(graph)
    assert [[(d.device, d.picoseconds) for d in op.durations] for op in made.ops] == [
        [("here", 100)], [("a", 1), ("b", 2), ("here", 101)], [], [("here", 9)], [("a", 1), ("here", 0)],
    ]  # fmt: skip
    new = [made.ops[row].durations[-1] for row in (0, 1, 4)]
    assert [(d.source, d.spread, d.samples) for d in new] == [
        (Source.FITTED, 0.25, 0), (Source.ANALYTICAL, 0.5, 1), (Source.FITTED, 0.75, 4),
    ]  # fmt: skip
    assert annotate(made) is made

"""Zero-bubble pipelines: what is split off backward, and the bubble and memory that the paper promises."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layered import layered_step

from echograph.ir.builder import GraphBuilder
from echograph.ir.graph import JobGraph, StepGraph
from echograph.ir.passes.fold import Fold
from echograph.ir.passes.pipeline import Pipeline
from echograph.ir.passes.pipeline.schedules import order
from echograph.ir.schedule import Schedule
from echograph.ir.types import DType, OpKind, Phase, TensorRole
from echograph.simulator.engine.static import run
from echograph.simulator.tasks import expand

LAYERS = 12


def makespan(job: JobGraph, forward: int, backward: int, weight: int) -> int:
    """Time of a step whose layers take this for F, B and W, and all else nothing."""
    ops = job.ops
    layer = np.array([".linear" in job.strings[m] for m in ops.module]) & (ops.kind == OpKind.COMPUTE)
    makes_gradient = np.zeros(len(ops), np.bool_)
    makes_gradient[ops.outputs.rows[job.tensors.role[ops.outputs.values] == TensorRole.GRADIENT]] = True
    time = np.where(layer & (ops.phase == Phase.FORWARD), forward // 2, 0)
    time = np.where(layer & (ops.phase == Phase.BACKWARD), np.where(makes_gradient, weight, backward) // 2, time)
    host = np.zeros(len(ops), np.int64)
    tasks = expand(job, time.astype(np.int64), host)
    start = run(tasks)
    return int((start + tasks.duration).max())


def zero_bubble(stages: int, micro_batches: int) -> JobGraph:
    return Pipeline(stages=stages, micro_batches=micro_batches, schedule="zb-h1")(Fold()(layered_step(LAYERS)))


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("micro_batches", [1, 2, 5, 12, 13])
def test_the_bubble_of_equal_passes_is_a_third_of_1f1b(stages: int, micro_batches: int) -> None:
    """Table 2 of Qi et al.: (p - 1)(F + B - W); fewer micro-batches than stages have fewer W to fill it with."""
    of_a_stage = LAYERS // stages * 1000
    bubble = (stages - 1) * 2 * of_a_stage - (min(micro_batches, stages) - 1) * of_a_stage
    job = zero_bubble(stages, micro_batches)
    assert makespan(job, 1000, 1000, 1000) == 3 * micro_batches * of_a_stage + bubble
    one = Pipeline(stages=stages, micro_batches=micro_batches)(Fold()(layered_step(LAYERS)))
    assert makespan(one, 1000, 1000, 1000) == 3 * (micro_batches + stages - 1) * of_a_stage


@pytest.mark.parametrize(
    "times", [(1000, 1000, 400), (1000, 2000, 1000), (1200, 1000, 600), (600, 1000, 2000), (2000, 600, 1000)]
)
def test_the_bubble_of_unequal_passes(times: tuple[int, int, int]) -> None:
    forward, backward, weight = times
    bubble = max(forward + backward - weight, forward, backward)
    for stages, micro_batches in ((2, 3), (4, 4), (4, 9), (6, 12)):
        of_a_stage = LAYERS // stages
        expected = (micro_batches * sum(times) + (stages - 1) * bubble) * of_a_stage
        assert makespan(zero_bubble(stages, micro_batches), *times) == expected


def in_flight(passes: list[tuple[str, int, int]]) -> int:
    """The most micro-batches that are forward and not yet done with backward, gradients of weights included."""
    alive = most = 0
    last = "weight" if any(kind == "weight" for kind, _, _ in passes) else "backward"
    for kind, _, _ in passes:
        alive += (kind == "forward") - (kind == last)
        most = max(most, alive)
    return most


@pytest.mark.parametrize("micro_batches", [1, 3, 4, 16])
def test_no_stage_keeps_more_micro_batches_than_the_first_of_1f1b(micro_batches: int) -> None:
    most = in_flight(order("1f1b", 0, 4, micro_batches))
    assert {in_flight(order("zb-h1", stage, 4, micro_batches)) for stage in range(4)} == {most}


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_saved_activation_lives_until_the_pass_that_reads_it_last(schedule: str) -> None:
    job = Pipeline(stages=4, micro_batches=16, schedule=schedule)(Fold()(layered_step(LAYERS)))
    number = next(n for n, b in enumerate(job.blocks) if len(b.instances) == LAYERS)
    rows = job.blocks[number].ops
    first = next(r for r in rows if job.ops.phase[r] == Phase.FORWARD)
    last = max(r for r in rows if job.ops.phase[r] == Phase.BACKWARD)
    every = np.arange(16)
    for stage, program in enumerate(job.programs):
        calls = program.calls
        layer = int(calls[calls[:, 0] == number][0, 3])
        at = Schedule(job, program)
        begin, end = (at.position(np.full(16, layer), every, np.full(16, row)) for row in (first, last))
        alive = max(int(((begin <= now) & (now <= end)).sum()) for now in begin.tolist())
        assert alive == (4 if schedule == "zb-h1" else 4 - stage)


def step_of(ops: list[tuple[str, tuple[str, ...], tuple[str, ...]]], aliases: dict[str, str]) -> StepGraph:
    """Four layers with `ops` for backward: (name, reads, makes); "<" is the gradient that comes in."""
    b = GraphBuilder()
    rows: dict[str, int] = {}

    def tensor(name: str) -> int:
        if name not in rows:
            role = TensorRole.GRADIENT if name.endswith(".grad") else TensorRole.ACTIVATION
            role = TensorRole.PARAMETER if name.endswith("weight") else role
            alias = tensor(aliases[name]) if name in aliases else None
            rows[name] = b.tensor(name, (4, 4), DType.FP32, role, alias_of=alias)
        return rows[name]

    forward = {}
    x = tensor("x")
    for layer in range(4):
        y = tensor(f"y{layer}")
        forward[layer] = b.compute(
            "aten.mm", module=f"h.{layer}", phase=Phase.FORWARD, inputs=(x, tensor(f"h.{layer}.weight")),
            outputs=(y,), flops=1,
        )  # fmt: skip
        x = y
    incoming = tensor("loss")
    b.compute("aten.loss", phase=Phase.BACKWARD, inputs=(x,), outputs=(incoming,), flops=1)
    for layer in reversed(range(4)):
        names = {"<": incoming}
        for name, reads, makes in ops:
            made = [tensor(f"{layer}.{m}") for m in makes]
            b.compute(
                name, module=f"h.{layer}", phase=Phase.BACKWARD, flops=1, bytes_written=1,
                inputs=[names[r] if r in names else tensor(f"{layer}.{r}") for r in reads], outputs=made,
                forward_op=forward[layer],
            )  # fmt: skip
        incoming = tensor(f"{layer}.out")
    return b.build(StepGraph)


def passes_of_stage(job: JobGraph, stage: int, micro_batch: int) -> list[str]:
    """Names of the backward operations in the order in which a stage runs them."""
    return [
        job.strings[job.ops.name[row]]
        for _, begin, end, _, m in job.programs[stage].calls.tolist()
        if m == micro_batch
        for row in range(begin, end)
        if job.ops.phase[row] == Phase.BACKWARD
    ]


def test_what_only_a_weight_needs_runs_after_what_is_sent() -> None:
    ops = [
        ("weight", ("<",), ("w.grad",)),
        ("bias", ("<",), ("b.grad",)),
        ("both", ("<",), ("mid", "norm.grad")),
        ("transpose", ("<",), ("t",)),
        ("late", ("t",), ("t.grad",)),
        ("input", ("mid",), ("out",)),
    ]
    job = Pipeline(stages=2, schedule="zb-h1")(step_of(ops, {}))
    names = passes_of_stage(job, 1, 0)
    cut = names.index("pp.send_backward")
    assert names[:cut] == ["aten.loss", *["both", "input"] * 2]
    assert names[cut + 1 :] == ["weight", "bias", "transpose", "late"] * 2


def test_memory_is_not_overwritten_before_a_weight_has_read_it() -> None:
    ops = [
        ("weight", ("acc",), ("w.grad",)),
        ("overwrite", ("acc", "<"), ("acc2",)),
        ("input", ("acc2",), ("out",)),
    ]
    aliases = {f"{layer}.acc2": f"{layer}.acc" for layer in range(4)}
    job = Pipeline(stages=2, schedule="zb-h1")(step_of([("make", ("<",), ("acc",)), *ops], aliases))
    names = passes_of_stage(job, 1, 0)
    cut = names.index("pp.send_backward")
    assert names[:cut] == ["aten.loss", *["make", "weight", "overwrite", "input"] * 2]
    assert names[cut + 1 :] == []


@settings(deadline=None, max_examples=40)
@given(
    stages=st.sampled_from([1, 2, 3, 4, 6]),
    micro_batches=st.integers(1, 9),
    forward=st.integers(1, 9),
    backward=st.integers(1, 9),
    weight=st.integers(1, 9),
)
def test_the_step_is_never_longer_than_with_1f1b(
    stages: int, micro_batches: int, forward: int, backward: int, weight: int
) -> None:
    times = (2 * forward, 2 * backward, 2 * weight)
    one = Pipeline(stages=stages, micro_batches=micro_batches)(Fold()(layered_step(LAYERS)))
    assert makespan(zero_bubble(stages, micro_batches), *times) <= makespan(one, *times)

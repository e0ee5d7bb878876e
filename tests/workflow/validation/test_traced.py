"""A trace beside its prediction: what stands for what, what a trace shows of a job, and both bases."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from echograph.errors import PlanError, UsageError
from echograph.profiler.analyses.step_calls import (
    COMMUNICATION,
    OPTIMIZER,
    StepCall,
    family,
    launched_elements,
    traced_steps,
    traced_training,
)
from echograph.profiler.traces import TraceSet, read_trace, read_traces
from echograph.workflow.plan import Plan
from echograph.workflow.validation.traced import (
    COMPILED,
    LOWERED,
    compare_operators,
    matched_calls,
    validate_trace,
)

A100 = [{"id": 0, "name": "NVIDIA A100-SXM4-80GB", "totalGlobalMem": 85_000_000_000}]
TRACES = Path(os.environ.get("ECHOGRAPH_DATA", Path(__file__).parents[4] / "shared" / "data")) / "traces"
US = 1_000_000


def call(operator: str, phase: str = "forward", size: int = 0, us: int = 10, number: int = 0) -> StepCall:
    return StepCall(operator=operator, phase=phase, size=size, duration=us * US, start=0, number=number)


@pytest.mark.parametrize(
    ("traced", "captured"),
    [
        ("aten::cudnn_batch_norm", "aten.native_batch_norm"),
        ("aten::miopen_batch_norm_backward", "aten.native_batch_norm_backward"),
        ("aten::clamp_min_", "aten.relu"),
        ("aten::add_", "aten.add"),
        ("aten::convolution", "aten.convolution"),
        ("aten::_scaled_dot_product_efficient_attention", "aten._scaled_dot_product_flash_attention"),
        ("aten::copy_", "aten._to_copy"),
        ("aten::mm", "aten.mm"),
    ],
)
def test_profilers_and_graphs_have_one_word_for_an_operator(traced: str, captured: str) -> None:
    assert family(traced) == family(captured)


def test_what_differs_has_another_word() -> None:
    assert (
        len({*map(family, ("aten::mm", "aten::bmm", "aten::add", "aten::mul", "aten::threshold_backward"))}) == 5
    )
    assert family("aten::convolution") != family("aten::convolution_backward")


def test_calls_stand_for_calls_of_the_same_operator_phase_and_size() -> None:
    predicted = [call("mm", size=8, us=7), call("mm", size=8, us=7), call("relu", size=4, us=1)]
    measured = [call("mm", size=8, us=10), call("mm", size=16, us=30), call("mm", "backward", size=8, us=5)]
    rows = {(row.operator, row.phase): row for row in compare_operators([measured], predicted)}
    forward, backward, relu = rows["mm", "forward"], rows["mm", "backward"], rows["relu", "forward"]
    assert (forward.calls, forward.predicted_calls, forward.matched) == (2, 2, 1)
    assert forward.measured_s == pytest.approx(40e-6)
    assert forward.matched_s == pytest.approx(10e-6)
    assert forward.predicted_s == pytest.approx(14e-6)
    assert forward.difference_s == pytest.approx(26e-6)
    assert (backward.matched, backward.predicted_s) == (0, 0)
    assert (relu.calls, relu.predicted_s) == (0, pytest.approx(1e-6))


def test_of_a_trace_without_shapes_order_alone_tells() -> None:
    rows = compare_operators(
        [[call("mm", us=1), call("mm", us=2), call("mm", us=4)]], [call("mm", size=8), call("mm", size=9)]
    )
    assert (rows[0].matched, rows[0].matched_s) == (2, pytest.approx(3e-6))


def test_steps_are_averaged_and_the_optimizer_is_one() -> None:
    steps = [[call("optimizer", OPTIMIZER, us=us), call("optimizer", OPTIMIZER, us=us)] for us in (10, 20)]
    (row,) = compare_operators(steps, [call("optimizer", OPTIMIZER, us=1)] * 100)
    assert (row.calls, row.predicted_calls, row.matched) == (2, 100, 2)
    assert (row.measured_s, row.predicted_s) == (pytest.approx(30e-6), pytest.approx(100e-6))


def test_pairs_are_of_operators_that_both_ran_equally_often() -> None:
    measured = [call("mm", size=8, number=1), call("relu", size=4, number=2), call("relu", size=4, number=3)]
    measured.append(call("all_reduce", COMMUNICATION, number=4))
    predicted = [call("mm", size=8, number=11), call("relu", size=4, number=12)]
    assert [(m.number, p.number) for m, p in matched_calls(measured, predicted)] == [(1, 11)]


# -- what a trace shows ------------------------------------------------------------------------------------------


def event(cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args}


def kernel(
    name: str, call_ts: float, ts: float, dur: float, number: int, stream: int = 7, **args: Any
) -> Iterator[Any]:
    yield event("cuda_runtime", "cudaLaunchKernel", call_ts, 1, correlation=number)
    args |= {"stream": stream, "correlation": number}
    yield event("kernel", name, ts, dur, tid=stream, **args) | {"pid": 0}


_NCCL = {"Collective name": "allreduce", "In msg nelems": 4096, "Out msg nelems": 4096, "dtype": "Float"}
_GROUP = {"Process Group Name": "0", "Process Group Ranks": "[0, 1]", "Group size": 2}
_ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, ...>"


def training_step(at: float, number: int, *, shapes: bool = True) -> list[Any]:
    """A product, a gradient bucket and its sum, an update; each 10 us but for the sum, which takes 40."""
    dims = {"Input Dims": [[64, 32], [32, 16]], "Input type": ["float", "float"]} if shapes else {}
    ids = number * 10
    return [
        event("user_annotation", f"ProfilerStep#{number}", at, 90),
        event("cpu_op", "aten::mm", at + 1, 5, **dims),
        *kernel("sgemm", at + 2, at + 10, 10, ids + 1),
        event("cpu_op", "torch::distributed::reducer::mul_out", at + 10, 8),
        event("cpu_op", "aten::mul", at + 11, 6),
        *kernel(_ELEMENTWISE, at + 12, at + 20, 10, ids + 2, grid=[8, 1, 1], block=[128, 1, 1]),
        event("cpu_op", "record_param_comms", at + 20, 5, **_NCCL, **_GROUP),
        *kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", at + 21, at + 25, 40, ids + 3, stream=9),
        event("cpu_op", "Optimizer.step#SGD.step", at + 30, 30) | {"cat": "user_annotation"},
        event("cpu_op", "aten::_foreach_add_", at + 31, 5),
        *kernel("multi_tensor_apply", at + 32, at + 70, 10, ids + 4),
    ]


def traced(folder: Path, events: list[Any], name: str = "rank0.json", **header: Any) -> Path:
    folder.mkdir(exist_ok=True)
    job = {"rank": 0, "world_size": 2, "backend": "nccl"}
    document = {"distributedInfo": job, "deviceProperties": A100, **header, "traceEvents": events}
    (folder / name).write_text(json.dumps(document))
    return folder


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return traced(tmp_path / "job", [*training_step(0, 1), *training_step(100, 2)])


def test_steps_of_a_trace_and_where_their_time_goes(job: Path) -> None:
    trace = read_trace(job / "rank0.json")
    first, second = traced_steps(trace)
    assert [(c.operator, c.phase, c.size) for c in first.calls] == [
        ("mm", "forward", 2048), ("ddp.copy_to_bucket", "backward", 0), ("optimizer", "optimizer", 0),
        ("all_reduce", "communication", 16384),
    ]  # fmt: skip
    # From its first work to that of the next one: at 10 and at 110.
    assert (first.name, first.time.step) == ("ProfilerStep#1", 100 * US)
    time = first.time
    # The sum runs from 25 to 65, of which 5 are beside the bucket's copy.
    assert (time.compute, time.communication, time.hidden, time.idle) == (30 * US, 40 * US, 5 * US, 35 * US)
    assert second.time.step == 80 * US  # to where the host ends it


def test_what_a_trace_says_of_how_it_trains(job: Path) -> None:
    trace = read_trace(job / "rank0.json")
    shows = traced_training(trace, traced_steps(trace))
    assert (shows.ranks, shows.gradients, shows.dtype, shows.optimizer) == (2, 4096, "fp32", "sgd")
    assert (shows.recomputes, shows.others) == (False, ())


def test_grids_tell_how_many_elements_a_kernel_was_launched_for(job: Path) -> None:
    trace = read_trace(job / "rank0.json")
    (step, _) = traced_steps(trace)
    found = {c.operator: n for c, n in launched_elements(trace, step.calls).items()}
    assert found == {"ddp.copy_to_bucket": 8 * 128 * 4}


# -- both bases --------------------------------------------------------------------------------------------------


def test_without_a_model_the_trace_itself_is_the_base(job: Path) -> None:
    found = validate_trace(read_traces(job, last_step=True), plan=Plan(cluster="dgx-a100"), source="job")
    assert (found.base, found.model, found.device) == (LOWERED, "", "a100-sxm-80")
    rows = {row.operator: row for row in found.operators}
    assert rows["mm"].matched == 1
    assert 0 < rows["mm"].predicted_s != rows["mm"].measured_s
    # No shapes, so what it took stands, and nothing is claimed of it.
    assert rows["ddp.copy_to_bucket"].matched == 0
    assert rows["all_reduce"].matched == 0  # one of two ranks was traced
    assert any("not traced" in note for note in found.notes)
    assert found.matched_share() == pytest.approx(10 / 70)
    assert found.matched_share(communication=False) == pytest.approx(10 / 30)
    assert found.to_json()["operators"][0]["difference_s"] == found.operators[0].difference_s


def test_a_trace_that_shows_neither_model_nor_shapes_is_asked_for_one(tmp_path: Path) -> None:
    bare = traced(tmp_path / "bare", training_step(0, 1, shapes=False))
    with pytest.raises(UsageError, match="give --model"):
        validate_trace(read_traces(bare, last_step=True))


def test_a_trace_without_work_is_refused(tmp_path: Path) -> None:
    idle = traced(tmp_path / "idle", [event("user_annotation", "ProfilerStep#1", 0, 10)])
    with pytest.raises(UsageError, match="nothing ran on a device"):
        validate_trace(read_traces(idle, last_step=True))


NET = """
import torch


def build():
    net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16))
    return net, (torch.randn(8, 32),), lambda out: out.square().mean()
"""


def linear(at: float, number: int, samples: int, shapes: tuple[int, int]) -> list[Any]:
    given, made = shapes
    dims = {"Input Dims": [[made], [samples, given], [given, made]], "Input type": ["float"] * 3}
    return [event("cpu_op", "aten::addmm", at, 5, **dims), *kernel("sgemm", at + 1, at + 2, 10, number)]


@pytest.mark.torch
def test_a_given_model_is_compiled_with_as_many_samples_as_the_trace_has(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "net.py").write_text(NET)
    dims = {"Input Dims": [[24, 64]], "Input type": ["float"]}
    events = [
        event("user_annotation", "ProfilerStep#1", 0, 100),
        *linear(1, 1, 24, (32, 64)),
        event("cpu_op", "aten::clamp_min_", 20, 5, **dims),
        *kernel(_ELEMENTWISE, 21, 22, 4, 2),
        *linear(40, 3, 24, (64, 16)),
        event("cpu_op", "aten::sinh", 60, 5, **dims),
        *kernel("sinh", 61, 62, 3, 4),
    ]
    job = traced(tmp_path / "job", events, distributedInfo={"rank": 0, "world_size": 1})
    spec = {"dtype": "fp32", "optimizer": "sgd"}
    found = validate_trace(read_traces(job, last_step=True), model=f"{tmp_path / 'net.py'}:build", spec=spec)
    assert (found.base, found.plan["micro_batch"]) == (COMPILED, 24)
    rows = {(row.operator, row.phase): row for row in found.operators}
    assert rows["addmm", "forward"].matched == rows["addmm", "forward"].predicted_calls == 2
    assert rows["relu", "forward"].matched == 1
    assert rows["sinh", "forward"].matched == 0
    assert rows["mm", "backward"].calls == 0 < rows["mm", "backward"].predicted_calls
    assert found.matched_share() == pytest.approx(24 / 27)
    other = TraceSet({3: dataclasses.replace(read_trace(job / "rank0.json"), rank=3)})
    with pytest.raises(PlanError, match="give --gpus"):
        validate_trace(other, model=f"{tmp_path / 'net.py'}:build", spec=spec, plan=Plan(gpus=1))


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize(
    ("name", "model", "samples"),
    [
        ("a100-nccl-args", "resnet-50", 32),
        ("v100-float-timestamps", "resnet-50", 32),
        ("mi300x-resnet", "resnet-18", 10),
    ],
)
def test_public_training_traces_are_matched(name: str, model: str, samples: int) -> None:
    if not TRACES.is_dir():
        pytest.skip("no published traces here")
    pytest.importorskip("transformers", reason="needs the [torch] extra")
    found = validate_trace(read_traces(TRACES / name))
    assert (found.base, found.model, found.plan["micro_batch"]) == (COMPILED, model, samples)
    assert found.matched_share() >= 0.9
    assert found.matched_share(communication=False) >= 0.9


def test_a_public_job_of_eight_ranks_without_a_model() -> None:
    if not TRACES.is_dir():
        pytest.skip("no published traces here")
    found = validate_trace(read_traces(TRACES / "dlrm-v100-8-ranks"))
    assert found.base == LOWERED
    assert found.matched_share() >= 0.9

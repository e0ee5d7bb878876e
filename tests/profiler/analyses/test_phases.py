"""The parts of a step, by hand."""

from __future__ import annotations

from pathlib import Path

from small_traces import Event, job, launched, operator, step

from echograph.profiler.analyses import ANALYSES

KERNEL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def annotation(name: str, ts: float, dur: float) -> Event:
    return operator(name, ts, dur) | {"cat": "user_annotation"}


def of_autograd(pair: list[Event]) -> list[Event]:
    """A call and its kernel, the call made by the second thread."""
    return [pair[0] | {"tid": 2}, pair[1]]


def test_parts_of_a_step(tmp_path: Path) -> None:
    backward = {"Sequence number": 4, "Fwd thread id": 1}
    events = [
        annotation("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 90),
        step(1, 100, 900),
        annotation("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 105, 40),
        operator("aten::stack", 110, 20),
        operator("aten::mm", 150, 50, **{"Sequence number": 4}),
        *launched("gemm", 160, 200, 60, 1),
        operator("autograd::engine::evaluate_function: MmBackward0", 300, 200, tid=2, **backward),
        operator("aten::mm", 310, 30, tid=2, **{"Sequence number": 9, "Fwd thread id": 0}),
        *of_autograd(launched("gemm", 315, 330, 50, 2)),
        operator("MmBackward0", 400, 50, tid=2, **backward),
        *of_autograd(launched("gemm", 405, 420, 70, 3)),
        *of_autograd(launched("gemm", 410, 450, 60, 4, stream=8)),
        *of_autograd(launched(KERNEL, 430, 500, 100, 5, stream=20)),
        annotation("Optimizer.step#AdamW.step", 700, 100),
        operator("aten::_fused_adamw_", 720, 30),
        *launched("adamw", 730, 760, 15, 6),
    ]  # fmt: skip
    rows = ANALYSES["phases"](job(tmp_path, events)).records()
    assert [tuple(row.values()) for row in rows] == [
        (0, None, "data loading", 90, 0, 0, 0),
        (0, 1, "data loading", 40, 0, 0, 0),
        (0, 1, "forward", 50, 60, 0, 1),
        (0, 1, "backward", 200, 90, 100, 3),
        (0, 1, "recompute", 30, 50, 0, 1),
        (0, 1, "optimizer", 100, 15, 0, 1),
    ]

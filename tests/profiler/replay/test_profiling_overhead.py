"""What recording cost is taken out of a replay, and ranks then wait less for each other; by hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from small_traces import Event, job, launched, operator, step, write

from echograph.ir.comms.record import FORMAT, MAJOR, MINOR, CallSignature, GroupLine, HeaderLine, encode
from echograph.ir.types import OpKind
from echograph.profiler.record.folder import Hooks, Metadata, StepTimes, write_hooks, write_metadata
from echograph.profiler.record.overhead import Overhead
from echograph.profiler.replay import Observed, lower
from echograph.profiler.traces import TraceSet, read_traces
from echograph.simulator.limits import parse_scale
from echograph.workflow.formats.kineto import load as load_kineto
from echograph.workflow.replay import replay, step_medians, steps

US = 1e-6
OVERHEAD = Overhead(
    operator_s=2 * US, nested_s=1 * US, node_s=4 * US, module_s=3 * US, collective_s=3 * US, issue_s=1 * US
)


def taken_us(traces: TraceSet, seen: Mapping[int, Observed], *changes: str) -> list[float]:
    """How long each rank's trace takes, by the simulator."""
    graph = lower(traces, seen=seen).graph
    result = replay(graph, scales=[parse_scale(text) for text in changes])
    return [one.replayed_s / US for one in steps(result) if one.name == "trace"]


def without(*events: Event, folder: Path, hooks: Hooks | None = None) -> float:
    seen = {0: Observed(overhead=OVERHEAD, hooks=hooks or Hooks())}
    return taken_us(job(folder, list(events)), seen)[0]


def test_operators_cost_what_their_kind_does(tmp_path: Path) -> None:
    one = operator("aten::linear", 0, 10), operator("aten::addmm", 2, 4)
    assert without(*one, folder=tmp_path) == pytest.approx(10 - 2 - 1)


def test_what_is_too_short_for_its_cost_leaves_the_rest_to_what_follows(tmp_path: Path) -> None:
    events = operator("aten::add", 0, 1), operator("aten::mul", 4, 10)
    # One of it itself, one of the gap behind; then two of the other.
    assert without(*events, folder=tmp_path / "gap") == pytest.approx(14 - 2 - 2)
    # Nothing follows that could pay: no time is below zero.
    assert without(operator("aten::add", 0, 1), folder=tmp_path / "end") == pytest.approx(0)


def test_hooks_cost_when_they_ran(tmp_path: Path) -> None:
    path = write(tmp_path / "rank0.json", [operator("aten::add", 0, 10)], baseTimeNanoseconds=7_000)
    traces = read_traces(path, last_step=True)
    inside, before = (Hooks(entered_ns=[time]) for time in (7_000 + 4_000, 6_000))
    assert taken_us(traces, {0: Observed(overhead=OVERHEAD, hooks=inside)}) == pytest.approx([10 - 2 - 3])
    assert taken_us(traces, {0: Observed(overhead=OVERHEAD, hooks=before)}) == pytest.approx([10 - 2])


def test_a_device_s_times_stay_as_they_were(tmp_path: Path) -> None:
    """The kernel is launched two earlier, and takes what it took."""
    events = operator("aten::mm", 0, 10), *launched("gemm", 6, 10, 20, 1)
    assert without(*events, folder=tmp_path) == pytest.approx(30 - 2)


def reducing(*operators: float) -> list[Event]:
    """A rank that runs operators of 10 us, one behind the other, then an all-reduce that ends at 60."""
    last = 10.0 * len(operators)
    return [
        *(operator("aten::mm", 10.0 * at, 10) for at in range(len(operators))),
        operator("c10d::allreduce_", last, 2),
        operator("gloo:all_reduce", last + 4, 56 - last, tid=9) | {"cat": "user_annotation"},
        operator("aten::add", 62, 4),
    ]


def test_ranks_wait_less_for_one_that_was_held_up_by_recording(tmp_path: Path) -> None:
    traces = job(tmp_path, reducing(*range(1)), reducing(*range(5)))
    assert taken_us(traces, {}) == pytest.approx([66, 66])
    seen = {rank: Observed(overhead=OVERHEAD) for rank in (0, 1)}
    # The second comes after 5 times 8, its transfer begins 4 - 1 later and takes 6; a gap of 2, then 4 - 2.
    assert taken_us(traces, seen) == pytest.approx([40 + 3 + 6 + 2 + 2] * 2)


def messages(folder: Path) -> TraceSet:
    """Rank 1 takes 40 us until it receives what rank 0 sends after 10."""
    for rank, (kind, begin) in enumerate((("send", 10), ("recv", 40))):
        events = [
            operator("aten::mm", 0, begin),
            operator(f"c10d::{kind}{'_' * rank}", begin, 2),
            operator(f"gloo:{kind}", begin + 1, 49 - begin, tid=9) | {"cat": "user_annotation"},
            operator("aten::add", 52, 4),
        ]
        write(folder / str(rank) / "trace.json", events, rank=rank, baseTimeNanoseconds=0)
        lines = (
            HeaderLine(
                format=FORMAT, version=(MAJOR, MINOR), rank=rank, world=2, host="h", pid=1, began_ns=0, torch="2"
            ),
            GroupLine(name="0,1", ranks=(0, 1), torch_name="0", about="", backend="gloo"),
            CallSignature(
                id=0, op=kind, group="0,1", channel="0,1:0>1/0", bytes=64, input_bytes=64, output_bytes=64,
                shapes=[[16]], dtype="float32", asynchronous=True, api=kind, site="", peer=1 - rank,
            ),
        )  # fmt: skip
        row = b"[0,0,%d,0,1000,0]\n" % (begin * 1000 + 500)
        (folder / str(rank) / "comms.jsonl").write_bytes(b"".join(map(encode, lines)) + row)
    return read_traces(folder, last_step=True)


def test_a_receiver_and_a_sender_wait_for_each_other(tmp_path: Path) -> None:
    traces = messages(tmp_path)
    lowered = lower(traces)
    assert not lowered.notes
    kinds = lowered.graph.ops.kind.tolist()
    assert kinds.count(OpKind.SEND) == kinds.count(OpKind.RECV) == 1
    assert taken_us(traces, {}) == pytest.approx([56, 56])
    # Received from 20 on, 10 until it is there, 2 and 4 as before: the sender's own 5 do not matter.
    assert taken_us(traces, {}, "op:aten.mm=0.5") == pytest.approx([36, 36])
    seen = {rank: Observed(overhead=OVERHEAD) for rank in (0, 1)}
    assert taken_us(traces, seen) == pytest.approx([38 + (10 - 1) + 2 + 2] * 2)


def recording(folder: Path, overhead: Overhead | None) -> Path:
    """A recording of one rank: a step of 30 us recorded, 24 and 28 free."""
    events = [step(2, 0, 30), operator("aten::mm", 0, 15), operator("aten::mm", 15, 15)]
    path = folder / "0"
    write(path / "trace.json.gz", events, baseTimeNanoseconds=1_000)
    steps_ = [StepTimes(number=n, seconds=s, state=t) for n, s, t in ((1, 24 * US, "free"), (2, 1.0, "recorded"))]
    steps_.append(StepTimes(number=3, seconds=28 * US, state="free"))
    about = Metadata(rank=0, world_size=1, start_step=2, end_step=3, steps=steps_, overhead=overhead)
    write_metadata(path, about)
    write_hooks(path, Hooks(entered_ns=[2_000]))
    return folder


def test_an_import_says_recorded_without_and_free(tmp_path: Path) -> None:
    folder = recording(tmp_path, OVERHEAD)
    found = load_kineto(folder)
    (note,) = found.notes
    # Two operators and a module.
    assert "0.03 ms recorded, takes 0.023 ms without" in note and "took 0.026 ms free" in note
    result = replay(found.graph)
    assert step_medians(steps(result)) == pytest.approx((30 * US, 23 * US, 26 * US))
    kept = load_kineto(folder, keep_overhead=True)
    assert kept.notes == ("durations are as recorded: --keep-overhead",)
    result = replay(kept.graph)
    assert step_medians(steps(result)) == pytest.approx((30 * US, 30 * US, 26 * US))


def test_nothing_is_taken_out_where_no_one_measured_what_to(tmp_path: Path) -> None:
    found = load_kineto(recording(tmp_path, None))
    assert found.notes == ("durations are as recorded: what recording costs was not measured",)
    result = replay(found.graph)
    (one,) = (s for s in steps(result) if "#" in s.name)
    assert one.replayed_s == pytest.approx(30 * US) and one.free_error == pytest.approx(30 / 26 - 1)

"""Who launched what, within which call and step: answers by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_traces import Event, call, launched, operator, step, trace, work

from echograph.profiler.traces.relations import call_stacks, launch_of_rows, launches, profiler_steps, step_of_rows
from echograph.profiler.traces.trace import NONE, Trace


def by_name(found: Trace, values: list[int]) -> dict[str, str | None]:
    """Rows' names to the names of the rows that `values` point to."""
    return {found.text(row): found.text(to) if to != NONE else None for row, to in enumerate(values)}


def test_work_is_paired_with_its_call(tmp_path: Path) -> None:
    found = trace(tmp_path, [work("lost", 0, 1, 5), *launched("k", 1, 3, 2, 6), call(9, 1, 7), work("none", 9, 1)])
    pairs = launches(found)
    assert [(found.text(a), found.text(b)) for a, b in zip(*pairs, strict=True)] == [("cudaLaunchKernel", "k")]
    assert launch_of_rows(found).tolist() == [NONE, NONE, 1, NONE, NONE]


def test_a_call_that_names_a_stream_is_the_hosts(tmp_path: Path) -> None:
    # As ROCm's copies do, by the stream's address.
    copy = call(1, 5, 9, "hipMemcpyWithStream")
    copy["args"]["stream"] = "0x0"
    found = trace(tmp_path, [operator("aten::copy_", 0, 8), copy, work("Memcpy HtoD", 7, 3, 9, stream=0)])
    assert launch_of_rows(found).tolist() == [NONE, NONE, 1]
    assert by_name(found, call_stacks(found).parent.tolist())["hipMemcpyWithStream"] == "aten::copy_"


def test_a_graph_launches_all_its_kernels(tmp_path: Path) -> None:
    kernels = [work(f"k{i}", 10 + i, 1, 42) for i in range(5)]
    pairs = launches(trace(tmp_path, [call(1, 3, 42, "cudaGraphLaunch"), *kernels]))
    assert pairs.calls.tolist() == [0] * 5
    assert pairs.works.tolist() == [1, 2, 3, 4, 5]


def test_work_on_stream_0_is_launched_as_any_other(tmp_path: Path) -> None:
    found = trace(tmp_path, [call(1, 1, 3, "hipLaunchKernel"), work("k", 4, 1, 3, stream=0)])
    assert launch_of_rows(found).tolist() == [NONE, 0]


def test_a_triton_operator_with_a_stream_is_no_work(tmp_path: Path) -> None:
    found = trace(
        tmp_path, [operator("triton_fused", 1, 5, stream=0), call(2, 1, 3, "cuLaunchKernel"), work("k", 4, 1, 3)]
    )
    assert found.on_device.tolist() == [False, False, True]
    assert launch_of_rows(found).tolist() == [NONE, NONE, 1]


def test_stacks_by_thread_and_containment(tmp_path: Path) -> None:
    events = [
        operator("outer", 0, 100),
        operator("inner", 0, 50),
        operator("leaf", 10, 5),
        operator("beside", 50, 50),
        operator("other thread", 20, 10, tid=2),
        operator("after", 100, 5),
        operator("crossing", 103, 9),
        *launched("k", 12, 300, 5, 1),
    ]
    found = trace(tmp_path, events)
    stacks = call_stacks(found)
    assert by_name(found, stacks.parent.tolist()) == {
        "outer": None,
        "inner": "outer",
        "leaf": "inner",
        "beside": "outer",
        "other thread": None,
        "after": None,
        "crossing": None,
        "cudaLaunchKernel": "leaf",
        "k": "cudaLaunchKernel",
    }
    assert stacks.depth.tolist() == [0, 1, 2, 1, 0, 0, 0, 3, 4]
    assert {found.text(row) for row in stacks.within(1)} == {"inner", "leaf", "cudaLaunchKernel"}


def test_an_event_without_duration_at_the_end_of_another(tmp_path: Path) -> None:
    events = [operator("view", 0, 1), operator("as_strided", 1, 0), call(5, 1, 1, "cudaA"), call(6, 0, 2, "cudaB")]
    found = trace(tmp_path, events)
    parents = by_name(found, call_stacks(found).parent.tolist())
    assert parents == {"view": None, "as_strided": "view", "cudaA": None, "cudaB": None}


@given(spans=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30), st.integers(1, 2)), max_size=25))
def test_a_parent_contains_its_child_and_is_the_last_that_does(
    tmp_path_factory: pytest.TempPathFactory, spans: list[tuple[int, int, int]]
) -> None:
    events: list[Event] = [operator(f"e{i}", ts, dur, tid=tid) for i, (ts, dur, tid) in enumerate(spans)]
    found = trace(tmp_path_factory.mktemp("stacks"), events)
    stacks = call_stacks(found)
    assert sorted(stacks.order.tolist()) == list(range(len(spans)))
    for row, (ts, dur, tid) in enumerate(spans):
        parent = int(stacks.parent[row])
        ancestors = []
        while parent != NONE:
            ancestors.append(parent)
            assert spans[parent][2] == tid
            assert spans[parent][0] <= ts
            assert ts + dur <= spans[parent][0] + spans[parent][1]
            parent = int(stacks.parent[parent])
        assert stacks.depth[row] == len(ancestors)
        assert all(row in stacks.within(ancestor) for ancestor in ancestors)


def test_rows_belong_to_the_step_of_their_launch(tmp_path: Path) -> None:
    events = [
        step(0, 0, 10),
        step(1, 10, 10),
        operator("before", -5, 2),
        operator("in", 10, 1),
        operator("gap", 25, 1),
    ]
    found = trace(tmp_path, [*events, *launched("late", 8, 15, 1, 1), *launched("lost", 30, 31, 1, 2)])
    steps = step_of_rows(found)
    assert {
        found.text(row): int(steps[row]) for row in range(len(found)) if found.text(row) != "cudaLaunchKernel"
    } == {
        "ProfilerStep#0": 0,
        "ProfilerStep#1": 1,
        "before": NONE,
        "in": 1,
        "gap": NONE,
        "late": 0,
        "lost": NONE,
    }
    assert profiler_steps(found).number.tolist() == [0, 1]


def test_traces_without_steps_have_none(tmp_path: Path) -> None:
    found = trace(tmp_path, [operator("a", 1, 1)])
    assert step_of_rows(found).tolist() == [NONE]
    assert len(profiler_steps(found).number) == 0

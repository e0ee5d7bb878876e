"""What changed between two traces."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hta_reference import answer, traces
from small_traces import Event, call, job, launched, operator, step

from echograph.errors import UsageError
from echograph.profiler.analyses import ANALYSES
from echograph.profiler.analyses.diff import short_name

GEMM = "void gemm<float, 4>(float*, int)"


def first() -> list[Event]:
    return [
        step(3, 0, 100),
        operator("aten::mm", 10, 20),
        *launched(GEMM, 15, 120, 30, 1),
        operator("aten::a", 40, 5),
    ]


def second() -> list[Event]:
    slower = [operator("aten::mm", 10, 25), *launched(GEMM, 15, 120, 40, 1), operator("aten::mm", 60, 5)]
    return [step(8, 0, 110), *slower, *launched("void gemm<half, 8>(half*, int)", 65, 300, 7, 2)]


def by_name(table: Any) -> dict[str, list[Any]]:
    return {row["name"]: list(row.values())[1:] for row in table.records()}


def test_two_jobs(tmp_path: Path) -> None:
    table = ANALYSES["trace-diff"](job(tmp_path / "a", first()), test=job(tmp_path / "b", second()))
    assert by_name(table) == {
        GEMM: [1, 30, 1, 40, 0, 10, "=", "unchanged"],
        "aten::mm": [1, 20, 2, 30, 1, 10, "+", "increased"],
        "ProfilerStep": [1, 100, 1, 110, 0, 10, "=", "unchanged"],
        "void gemm<half, 8>(half*, int)": [0, 0, 1, 7, 1, 7, "+", "added"],
        "aten::a": [1, 5, 0, 0, -1, -5, "-", "deleted"],
        "cudaLaunchKernel": [1, 1, 2, 2, 1, 1, "+", "increased"],
    }
    differences = [abs(row["diff_duration"]) for row in table.records()]
    assert differences == sorted(differences, reverse=True)


def test_the_same_the_other_way_round_has_the_opposite_signs(tmp_path: Path) -> None:
    one, other = job(tmp_path / "a", first()), job(tmp_path / "b", second())
    forth, back = (
        by_name(ANALYSES["trace-diff"](one, test=other)),
        by_name(ANALYSES["trace-diff"](other, test=one)),
    )
    opposite = {"added": "deleted", "deleted": "added", "increased": "decreased", "unchanged": "unchanged"}
    for name, (c, cd, t, td, dc, dd, _, change) in forth.items():
        assert back[name][:6] == [t, td, c, cd, -dc, -dd]
        assert back[name][7] == opposite[change]


def test_options(tmp_path: Path) -> None:
    one, other = job(tmp_path / "a", first()), job(tmp_path / "b", second())

    def found(**options: Any) -> dict[str, list[Any]]:
        return by_name(ANALYSES["trace-diff"](one, test=other, **options))

    assert set(found(device="gpu")) == {GEMM, "void gemm<half, 8>(half*, int)"}
    assert found(device="gpu", short_names=True) == {"gemm": [1, 30, 2, 47, 1, 17, "+", "increased"]}
    assert GEMM not in found(device="cpu")
    assert set(found(change="deleted")) == {"aten::a"}
    assert list(found(sort="counts", top=2)) == ["aten::a", "aten::mm"]


def test_steps_and_ranks_of_one_job(tmp_path: Path) -> None:
    # Work counts for the step that launched it, though it runs in the next.
    events = [step(1, 0, 50), step(2, 50, 50), *launched("a", 40, 60, 10, 1), *launched("b", 55, 75, 10, 2)]
    traces = job(tmp_path, events, [step(1, 0, 50), *launched("a", 40, 60, 13, 1)])
    steps = by_name(ANALYSES["trace-diff"](traces, test_step=2, device="gpu"))
    assert steps == {"a": [1, 10, 0, 0, -1, -10, "-", "deleted"], "b": [0, 0, 1, 10, 1, 10, "+", "added"]}
    ranks = by_name(ANALYSES["trace-diff"](traces, test_rank=1, device="gpu"))
    assert ranks == {"a": [1, 10, 1, 13, 0, 3, "=", "unchanged"]}


def test_without_steps_whole_traces_are_compared_and_it_is_said(tmp_path: Path) -> None:
    one, other = (
        job(tmp_path / "a", [operator("x", 0, 5)]),
        job(tmp_path / "b", [operator("x", 0, 7), call(8, 1, 1)]),
    )
    table = ANALYSES["trace-diff"](one, test=other)
    assert by_name(table)["x"] == [1, 5, 1, 7, 0, 2, "=", "unchanged"]
    assert sum("no profiler step: the whole trace is compared" in note for note in table.notes) == 2


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({}, "control and test are the same"),
        ({"test_step": 3}, "control and test are the same"),
        ({"test_step": 9}, r"test_step: no step 9 in .*; there is 3"),
        ({"control_rank": 4}, "control_rank: no trace of rank 4; there is 0"),
        ({"device": "npu"}, "device: 'npu' is none of all, cpu, gpu"),
        ({"sort": "name"}, "sort: 'name' is none of duration, counts"),
        ({"change": "more"}, "change: 'more' is none of added, deleted"),
        ({"top": -1}, "top: -1 is below 0"),
    ],
)
def test_a_wrong_question_gets_one_line(tmp_path: Path, options: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError, match=line):
        ANALYSES["trace-diff"](job(tmp_path, first()), **options)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("aten::mm", "aten::mm"),
        ("void at::native::(anonymous namespace)::Cat<float, int>(at::Tuple<2>, int)", "at::native::Cat"),
        ("Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD (Pinned -> Device)"),
        ("void k<(char)60, &f<3>::g>(int)", "k"),
        ("a < b", "a < b"),
        ("(1)", "(1)"),
    ],
)
def test_short_names(name: str, short: str) -> None:
    assert short_name(name) == short


@pytest.mark.parametrize("device", ["all", "cpu", "gpu"])
def test_steps_as_hta_has_them(measured_data: Path, device: str) -> None:
    # HTA compares what its rows of two iterations say; these are its rows. As of the host, it also counts what the
    # profiler repeats of annotations on the device: 5 calls of `nccl:all_reduce` are 10 there.
    counts: dict[int, Counter[str]] = {4: Counter(), 5: Counter()}
    durations: dict[int, Counter[str]] = {4: Counter(), 5: Counter()}
    for row in answer(measured_data, "a100-nccl-args", "trace_df.rank0.csv") or []:
        on_gpu = row["stream"] != -1
        if row["iteration"] not in counts or row["s_cat"] == "gpu_user_annotation":
            continue
        if device == "all" or on_gpu == (device == "gpu"):
            name = "ProfilerStep" if row["s_name"].startswith("ProfilerStep#") else row["s_name"]
            counts[row["iteration"]][name] += 1
            durations[row["iteration"]][name] += int(row["dur"])
    table = ANALYSES["trace-diff"](
        traces(measured_data, "a100-nccl-args"), control_step=4, test_step=5, device=device
    )
    assert len(counts[4]) > 20
    assert {row["name"] for row in table.records()} == counts[4].keys() | counts[5].keys()
    for row in table.records():
        name = row["name"]
        assert (row["control_counts"], row["test_counts"]) == (counts[4][name], counts[5][name]), name
        assert (row["control_total_duration"], row["test_total_duration"]) == (
            durations[4][name],
            durations[5][name],
        )
        assert row["diff_duration"] == durations[5][name] - durations[4][name]

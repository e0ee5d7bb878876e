"""Two runs side by side: means of a step and rank, what differs most first, all computed by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_traces import job, launched, step

from echograph.errors import UnavailableError, UnknownNameError
from echograph.profiler.analyses import ANALYSES
from echograph.profiler.analyses.against import COMPARED, side_by_side
from echograph.profiler.traces import TraceSet

STEPS = "run has 2 over 1 ranks, against has 2 over 2 ranks"
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


@pytest.fixture
def runs(tmp_path: Path) -> tuple[TraceSet, TraceSet]:
    """Two steps of one rank, and one step of two."""
    run = [step(1, 0, 100), step(2, 100, 140)]
    for start in (0, 100):
        run += launched("gemm", start + 5, start + 10, 30, start + 1)
        run += launched("gelu", start + 6, start + 40, 5, start + 2)
        run += launched(NCCL, start + 7, start + 30, 30, start + 3, stream=20)
    other = [step(7, 0, 80), *launched("gemm", 5, 10, 20, 1), *launched("norm", 6, 30, 7, 2)]
    return job(tmp_path / "run", run), job(tmp_path / "other", other, other)


def test_means_of_a_step_and_rank(runs: tuple[TraceSet, TraceSet]) -> None:
    kernels = side_by_side("kernels", *runs)
    assert kernels.records() == [
        {
            "name": NCCL, "kernel_type": "COMMUNICATION", "count": 1, "against_count": 0, "time(us)": 30.0,
            "against(us)": 0.0, "difference(us)": 30.0, "ratio": None, "change": "new",
        },
        {
            "name": "gemm", "kernel_type": "COMPUTATION", "count": 1, "against_count": 1, "time(us)": 30.0,
            "against(us)": 20.0, "difference(us)": 10.0, "ratio": 1.5, "change": "longer",
        },
        {
            "name": "norm", "kernel_type": "COMPUTATION", "count": 0, "against_count": 1, "time(us)": 0.0,
            "against(us)": 7.0, "difference(us)": -7.0, "ratio": 0.0, "change": "gone",
        },
        {
            "name": "gelu", "kernel_type": "COMPUTATION", "count": 1, "against_count": 0, "time(us)": 5.0,
            "against(us)": 0.0, "difference(us)": 5.0, "ratio": None, "change": "new",
        },
    ]  # fmt: skip
    assert kernels.notes[0] == f"times are means of a step and rank: {STEPS}"
    (row,) = side_by_side("steps", *runs).records()
    assert (row["time(us)"], row["against(us)"]) == (120.0, 80.0)


def test_several_times_of_a_row_are_parts(runs: tuple[TraceSet, TraceSet]) -> None:
    rows = {row["part"]: row for row in side_by_side("rank-times", *runs).records()}
    # A step: 10 to 60, communication from 30; computation to 45. Between the steps nothing runs for 50.
    found = {part: (row["time(us)"], row["against(us)"]) for part, row in rows.items()}
    assert found == {
        "computation": (20.0, 27.0),
        "overlapped": (15.0, 0.0),
        "communication": (15.0, 0.0),
        "memory": (0.0, 0.0),
        "idle": (25.0, 0.0),
    }
    assert rows["memory"]["change"] == "same"


def test_what_each_rank_spends_adds_up(runs: tuple[TraceSet, TraceSet]) -> None:
    (row,) = ANALYSES["rank-times"](runs[0]).records()
    assert row == {
        "rank": 0, "computation(us)": 40.0, "overlapped(us)": 30.0, "communication(us)": 30.0, "memory(us)": 0.0,
        "idle(us)": 50.0, "whole(us)": 150.0,
    }  # fmt: skip


def test_marks_of_steps_are_one_name_and_a_collective_counts_on_each_rank(tmp_path: Path) -> None:
    args = {"Collective name": "allreduce", "Process Group Name": "0", "Process Group Ranks": "[0, 1]"}
    args |= {"In msg nelems": 8, "Out msg nelems": 8, "dtype": "Float", "Group size": 2}
    one = [step(1, 0, 90), *launched(NCCL, 5, 10, 30, 1, **args)]
    two = [step(2, 0, 90), *launched(NCCL, 5, 15, 25, 1, **args)]
    met, alone = job(tmp_path / "two", one, two), job(tmp_path / "one", two)
    (row,) = side_by_side("communication", met, alone).records()
    assert (row["count"], row["against_count"], row["time(us)"], row["against(us)"]) == (1, 1, 25.0, 25.0)
    (row,) = side_by_side("annotations", met, alone).records()
    assert (row["name"], row["change"]) == ("ProfilerStep", "same")


def test_runs_without_steps_and_work_outside_of_them(tmp_path: Path, runs: tuple[TraceSet, TraceSet]) -> None:
    plain = job(tmp_path / "plain", launched("gemm", 5, 10, 20, 1))
    answer = side_by_side("kernels", runs[0], plain)
    assert answer.notes[0] == "no profiler steps are marked in against: times are a rank's, of the whole trace"
    assert answer.records()[-1]["name"] == "gelu"
    assert {row["name"]: row["time(us)"] for row in answer.records()}["gemm"] == 60.0
    before = job(
        tmp_path / "before", [step(1, 100, 50), *launched("a", 1, 2, 10, 1), *launched("a", 110, 120, 10, 2)]
    )
    assert (
        "run: 50% of the devices' work is outside all steps, and counts, too"
        in side_by_side("kernels", before, runs[1]).notes
    )


def test_what_has_no_two_sides_is_refused(runs: tuple[TraceSet, TraceSet]) -> None:
    with pytest.raises(UnavailableError, match="queue-length has no two runs side by side; available: steps"):
        side_by_side("queue-length", *runs)
    with pytest.raises(UnknownNameError, match="did you mean 'kernels'"):
        side_by_side("kernel", *runs)


def test_every_analysis_side_by_side_with_itself_differs_in_nothing(runs: tuple[TraceSet, TraceSet]) -> None:
    for name in COMPARED:
        for row in side_by_side(name, runs[0], runs[0]).records():
            assert (row["difference(us)"], row["change"]) == (0.0, "same"), name

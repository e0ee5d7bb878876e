"""Several traces as one: names, filters and clocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from profiled_jobs import PARTITIONS, PARTS, STEPS, byteprofile, complete, dpro_nccl, write

from echograph.errors import DataError
from echograph.profiler.byteprofile.combine import aligned, as_trace, combined_events, communications, sources_of
from echograph.profiler.byteprofile.reader import find_job

# Of a step on one GPU.
COMPUTATION = 5
COMMUNICATION = 3 * len(PARTS) + 2


def combined(*paths: Path, only: tuple[str, ...] = (), keep: bool = False) -> list[dict[str, Any]]:
    sources = sources_of([find_job(path) for path in paths])
    text = "".join(as_trace(combined_events(aligned(sources, keep=keep), only)))
    events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    return events


def test_files_of_one_worker_get_their_ranks(worker: Path) -> None:
    found = combined(worker)
    assert len(found) == STEPS * (
        2 * (COMPUTATION + COMMUNICATION) - 3
    )  # rank 0 has one part less of 3 partitions
    prefixes = {(event["name"].split(".")[0], event["pid"].rsplit(".", 1)[0][:9]) for event in found}
    assert prefixes == {("rank0", "wk0.rank0"), ("rank1", "wk0.rank1")}
    first = next(event for event in found if event["name"] == "rank1.Comm.wa.PUSH")
    assert first["pid"] == "wk0.rank1.Comm.wa"
    assert first["args"] == {"name": "Comm.wa"}


@pytest.mark.parametrize("clock", [5000, -250, 0.125])
def test_clocks_are_aligned_at_the_end_of_the_first_pull(tmp_path: Path, clock: float) -> None:
    byteprofile(tmp_path / "w0")
    # The second worker's pushes are 30 late, so what its clock says is 30 more than it is ahead.
    byteprofile(tmp_path / "w1", clock=clock, later=30, worker=1)
    paths = tmp_path / "w0", tmp_path / "w1"
    found = aligned(sources_of([find_job(path) for path in paths]))
    assert found.shift == {0: 0, 1: round((clock + 30) * 10**6)}
    assert found.by == "rank1.Comm.wb.PULL.8"
    pulls = {
        (event["pid"][:3], event["ts"] + event["dur"])
        for event in combined(*paths)
        if event["name"] == "rank1.Comm.wb.PULL" and event["tid"] == "8" and event["ts"] < 1000
    }
    assert pulls == {("wk0", 250 + 10 + 5 + 40 + 50), ("wk1", 250 + 10 + 5 + 40 + 50)}
    kept = {event["ts"] for event in combined(*paths, keep=True) if event["pid"][:3] == "wk1"}
    assert min(kept) == clock


def test_files_are_workers_of_their_own(worker: Path) -> None:
    files = [find_job(worker / str(rank)).gpus[0].files[0] for rank in (1, 1)]
    workers = {event["pid"][:9] for event in combined(*files)}
    assert workers == {"wk0.rank1", "wk1.rank1"}


def test_a_filter_keeps_computation_and_what_is_named(worker: Path) -> None:
    found = combined(worker, only=("Comm.wa",))
    assert {event["name"].split(".", 1)[1] for event in found if "Comm" in event["name"]} == {
        "Comm.wa", *(f"Comm.wa.{part}" for part in PARTS), "Comm.wa.COORDINATE_PUSH",
    }  # fmt: skip
    assert sum("Comm" not in event["name"] for event in found) == STEPS * 2 * COMPUTATION
    (two,) = {event["name"] for event in combined(worker, only=("Comm.wb.PULL",)) if "Comm" in event["name"]}
    assert two == "rank1.Comm.wb.PULL"
    assert sum("PULL" in event["name"] for event in combined(worker, only=("Comm.wb.PULL",))) == STEPS * len(
        PARTITIONS["wb"]
    )
    assert communications(sources_of([find_job(worker)])) >= {"Comm.wa", "Comm.wb.PULL"}


def test_all_reduces_align_clocks_where_there_are_no_pulls(tmp_path: Path) -> None:
    trial = dpro_nccl(tmp_path / "trial", clock=777)
    found = aligned(sources_of([find_job(trial)]))
    assert (found.shift, found.by) == ({0: 0, 1: 777 * 10**6}, "rank0.Comm.0+1.NCCL_ALLREDUCE")
    starts = {event["ts"] for event in combined(trial) if event["name"].endswith("->FW.a")}
    assert starts == {0, 1000}
    assert {event["name"] for event in combined(trial) if "SEND" in event["name"]} == {
        f"host{h}.rank{r}->Comm.0+1.SEND~>0_1_6_0" for h in range(2) for r in range(2)
    }


def test_what_has_nothing_in_common_is_refused(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{i}.json", [complete("FW.a", 0, 1, "operator")]) for i in range(2)]
    with pytest.raises(DataError, match="keep the clocks as they are with --no-align"):
        combined(*paths)
    assert len(combined(*paths, keep=True)) == 2

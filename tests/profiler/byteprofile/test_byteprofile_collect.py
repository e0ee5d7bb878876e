"""Final traces made anew, and the times of iterations."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from profiled_jobs import EDGES, communication, complete, computation, dpro_nccl, sources, write

from echograph.errors import DataError, InputError
from echograph.profiler.byteprofile.combine import collect, final_name, iteration_table, iterations, node_name
from echograph.profiler.byteprofile.reader import events_of, find_job

MS = 1e-3


def plain(events: Any) -> list[tuple[object, ...]]:
    return sorted((e["name"], e["ts"], e["dur"], e["cat"], "Comm" in e["name"] and e["tid"]) for e in events)


def test_the_final_trace_is_what_byteprofile_would_have_written(tmp_path: Path) -> None:
    (gpu,) = find_job(sources(tmp_path / "1")).gpus
    found = collect(gpu)
    expected = [e for step in range(2) for e in (*computation(step), *communication(step, root=True))]
    loads = [complete("I/O_0", at, 25, "I/O") for at in (-30, 970)]
    assert plain(found.events) == plain([*expected, *loads])
    assert not found.notes
    for event in found.events:
        whole = event["args"]["name"]
        inputs = [value for key, value in event["args"].items() if key.startswith("input")]
        # The update's edge to the next step is left out.
        assert set(inputs) == {before for before, after in EDGES if after == whole and before != "STEP"}
    assert {event["pid"] for event in found.events if event["cat"] == "operator"} == {3}
    assert final_name(gpu, found) == "bps_trace_local_rank1_2step.json"


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        ("conv0_fwd", "FW.conv0"),
        ("conv0", "FW.conv0"),
        ("conv0_fwd_backward", "BW.conv0"),
        ("conv0_backward", "BW.conv0"),
        ("[op]{name=net0_dense1_fwd;attr=2}", "FW.net0_dense1"),
        ("_backward_Activation", "BW.Activation"),
    ],
)
def test_names_of_mxnet(raw: str, name: str) -> None:
    assert node_name(raw) == name


def test_only_operators_are_made_anew_where_it_is_asked_for(tmp_path: Path) -> None:
    folder = sources(tmp_path / "0")
    stale = [complete("FW.a", 0, 999, "operator"), complete("Comm.wa", 5, 6, "Comm", "total")]
    write(folder / "bps_trace_local_rank0_2step.json", {"traceEvents": stale})
    (gpu,) = find_job(folder).gpus
    found = collect(gpu, operators_only=True)
    expected = [event for step in range(2) for event in computation(step)]
    assert plain(found.events) == plain([*expected, stale[1]])


def test_what_is_not_there_is_noted(tmp_path: Path) -> None:
    folder = sources(tmp_path / "0")
    (folder / "io.json").unlink()
    found = collect(find_job(folder).gpus[0])
    assert [Path(note.partition(": ")[0]).name for note in found.notes] == ["io.json"]
    (folder / "gradient_name_list.txt").write_text("wa\n")
    with pytest.raises(DataError, match=r"gradient 1 is not in gradient_name_list\.txt, which has 1"):
        collect(find_job(folder).gpus[0])


def test_files_of_dpro_are_joined(tmp_path: Path) -> None:
    (gpu,) = find_job(dpro_nccl(tmp_path / "trial") / "host0" / "1").gpus
    found = collect(gpu)
    assert len(found.events) == 2 * (6 + 5) + 2
    assert final_name(gpu, found) == "bps_trace_local_rank1_2step.json"


def test_iteration_times(tmp_path: Path, worker: Path) -> None:
    found = iteration_table(find_job(worker)).records()
    # 100 + 50 + 60 + 80 and 20 more in the second step; from 0 to 1000, and from 1000 to the end of STEP at 1730.
    assert found == [
        {
            "gpu": f"rank{rank}",
            "steps": 2,
            "fw_bw_ms": pytest.approx(300 * MS),
            "iteration_ms": pytest.approx(865 * MS),
        }
        for rank in range(2)
    ]
    shown = iterations(find_job(worker / "0").events())
    assert [(one.start / 1e6, one.computed, one.duration) for one in shown] == [
        (0, 290 * 10**6, 1000 * 10**6),
        (1000, 310 * 10**6, 730 * 10**6),
    ]


def test_iterations_of_a_pytorch_trace_are_the_profilers_steps(tmp_path: Path) -> None:
    marks = [complete(f"ProfilerStep#{n}", 100 * n, 40 + n, "user_annotation") for n in (3, 4)]
    path = write(tmp_path / "t.json", {"schemaVersion": 1, "traceEvents": marks})
    (row,) = iteration_table(find_job(path)).records()
    assert (row["steps"], row["fw_bw_ms"], row["iteration_ms"]) == (2, None, pytest.approx(43.5 * MS))


def test_a_trace_without_a_step_is_refused(tmp_path: Path) -> None:
    for name in ("FW.a", "BW.a", "STEP"):
        with pytest.raises(DataError, match="has no step"):
            iterations(events_of(write(tmp_path / "t.json", [complete(name, 0, 1, "operator")])))


def test_what_a_trace_is_made_of_must_be_there(tmp_path: Path) -> None:
    folder = sources(tmp_path / "0")
    (gpu,) = find_job(folder).gpus
    with pytest.raises(InputError, match="has no final trace: make it with echoprof collect"):
        gpu.events()
    with pytest.raises(InputError, match="no final trace to keep the rest of"):
        collect(gpu, operators_only=True)
    shutil.copy(folder / "comm.json", folder / "temp.json")
    with pytest.raises(DataError, match="none of its operators is in the dependency graph"):
        collect(gpu)
    (folder / "dag.gml").unlink()
    with pytest.raises(InputError, match=r"dag\.gml: no such file"):
        collect(gpu)

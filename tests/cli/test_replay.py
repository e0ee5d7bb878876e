"""Traces through the commands: imported, replayed, changed, shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def event(name: str, ts: float, dur: float, cat: str = "cpu_op", tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 10, "tid": tid, "ts": ts, "dur": dur, "args": args}


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """Two steps of two ranks: compute 100 us, reduce 4 MB in 300 us on a thread of gloo, update 50 us."""
    folder = tmp_path / "traces"
    said: dict[str, Any] = {"Input Dims": [[1_000_000]], "Input type": ["float"]}
    for rank in range(2):
        events = []
        for number in range(2):
            at = 1000.0 * number
            events += [
                event(f"ProfilerStep#{number}", at, 1000, "user_annotation"),
                event("aten::mm", at, 100),
                event("c10d::allreduce_", at + 100, 10),
                event("gloo:all_reduce", at + 110, 300, "user_annotation", 2, **said),
                event("aten::add_", at + 420, 50),
            ]
        job = {"distributedInfo": {"backend": "gloo", "rank": rank, "world_size": 2}}
        path = folder / str(rank) / "trace.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(job | {"traceEvents": events}))
    return folder


def test_a_recording_is_imported_and_replayed(cli: Callable[..., Any], traces: Path, tmp_path: Path) -> None:
    path, page = tmp_path / "job.pb", tmp_path / "trace.json"
    summary = cli("echoc", "import", "kineto", traces, "-o", path, "--json").json()
    assert (summary["level"], summary["ranks"], summary["name"]) == ("job", 2, "traces")
    found = cli("echosim", "replay", path, "--json", "--trace", page, "-o", tmp_path / "result.json").json()
    assert found == json.loads((tmp_path / "result.json").read_text())
    assert found["largest_error"] == 0
    assert found["replayed_step_s"] == found["measured_step_s"] == pytest.approx(1e-3)
    parts = found["breakdown_s"]
    whole = sum(parts["exposed_communication"].values()) + parts["compute"] + parts["host"]
    assert whole + parts["wait"] + parts["bubble"] == pytest.approx(found["trace_s"])
    assert parts["exposed_communication"] == {"world": pytest.approx(600e-6)}
    names = {e["name"] for e in json.loads(page.read_text())["traceEvents"]}
    assert {"aten.mm", "ncclDevKernel_AllReduce(all_reduce)"} <= names
    assert "ProfilerStep#1" in cli("echosim", "replay", path).out


def test_what_if(cli: Callable[..., Any], traces: Path, tmp_path: Path) -> None:
    path = tmp_path / "job.pb"
    cli("echoc", "import", "kineto", traces, "-o", path)
    asked = (["--without", "comm"], ["--scale", "compute=2"], ["--gpus", "4", "--cluster", "dgx-a100"])
    free, slow, four = (cli("echosim", "replay", path, "--json", *options).json() for options in asked)
    assert free["replayed_step_s"] == pytest.approx(700e-6, abs=1e-6)
    assert slow["replayed_step_s"] == pytest.approx(1150e-6, abs=1e-6)
    assert (four["gpus"], four["largest_error"]) == (4, None)
    assert 700e-6 < four["replayed_step_s"] < 800e-6
    assert "world" in four["collectives"]
    # The same by the command that predicts; its step is the whole trace.
    for options in ([], ["--gpus", "4", "--cluster", "dgx-a100"]):
        run = cli("echosim", "run", path, "--json", *options).json()
        again = cli("echosim", "replay", path, "--json", *options).json()
        assert run["step_time_s"] == again["trace_s"]
        assert run["breakdown_s"] == again["breakdown_s"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gpus", "4"], "say whose network, with --cluster"),
        (["--scale", "nonsense=2"], "nonsense: unknown"),
        (["--trace", "{job}"], "is the job itself"),
    ],
)
def test_wrong_options_of_replay(
    cli: Callable[..., Any], traces: Path, tmp_path: Path, options: list[str], said: str
) -> None:
    path = tmp_path / "job.pb"
    cli("echoc", "import", "kineto", traces, "-o", path)
    found = cli("echosim", "replay", path, *(text.format(job=path) for text in options))
    assert found.status in (1, 2)
    assert said in found.err and found.err.count("\n") == 1


def test_what_a_traced_job_does_not_take(cli: Callable[..., Any], traces: Path, tmp_path: Path) -> None:
    path = tmp_path / "job.pb"
    cli("echoc", "import", "kineto", traces, "-o", path)
    for options, said in ((["--tp", "2"], "leave tp out"), (["--jitter", "0.1"], "jitter: not of a traced job")):
        found = cli("echosim", "run", path, *options)
        assert found.status != 0 and said in found.err


def test_a_graph_without_measured_steps_is_refused(cli: Callable[..., Any], graph: Path) -> None:
    found = cli("echosim", "replay", graph)
    assert found.status != 0 and "holds no measured step" in found.err


def test_an_unknown_format_lists_kineto(cli: Callable[..., Any], traces: Path, tmp_path: Path) -> None:
    found = cli("echoc", "import", "kinetto", traces, "-o", tmp_path / "job.pb")
    assert found.status != 0 and "kineto" in found.err

"""What nodes of a recorded step took: a recording made by hand in closed form, and a live one by conservation."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("networkx", reason="needs the [report] extra")

from networkx import DiGraph, read_gml, write_gml

from echograph.profiler.byteprofile.dag import run_dag
from echograph.profiler.byteprofile.dependencies import coupled, dependencies
from echograph.profiler.byteprofile.reader import find_job
from echograph.profiler.record.dependencies import add_durations
from echograph.units import PS_PER_US

EVALUATES = "autograd::engine::evaluate_function: "
OFFSETS = (1000, 2000)
STEP_US = 1000
HEADER = {"line": "header", "format": "echograph collective trace", "version": [1, 0], "rank": 0, "world": 2}
GROUP = {"line": "group", "name": "all", "ranks": [0, 1], "torch_name": "0", "about": "", "backend": "gloo"}
CALL = {
    "line": "what", "id": 0, "op": "all_reduce", "group": "all", "channel": "all", "bytes": 8, "input_bytes": 8,
    "output_bytes": 8, "shapes": [[2]], "dtype": "float32", "asynchronous": True, "site": "",
}  # fmt: skip


def event(name: str, ts: int, dur: int, tid: int = 1, cat: str = "cpu_op", **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": tid, "args": args}


def numbered(name: str, ts: int, dur: int, number: int, thread: int = 0, **rest: Any) -> dict[str, Any]:
    numbers: dict[str, Any] = {"Sequence number": number, "Fwd thread id": thread}
    return event(name, ts, dur, **numbers, **rest)


def step(number: int, offset: int) -> list[dict[str, Any]]:
    """Two operators; the second step's take twice as long as the first's."""
    at, times = number * STEP_US, number + 1
    return [
        event(f"ProfilerStep#{number}", at, STEP_US, cat="user_annotation"),
        # 30 of which 10 are the inner one's, which made a node of its own; the innermost has no number.
        numbered("aten::linear", at + 10, 30 * times, offset + 1),
        numbered("aten::addmm", at + 15, 10 * times, offset),
        event("aten::empty", at + 16, 2 * times),
        # Numbers of another thread are others.
        numbered("aten::mul", at + 10, 500, offset, tid=7),
        numbered(f"{EVALUATES}SumBackward0", at + 200, 40 * times, offset + 1, 1),
        numbered("SumBackward0", at + 205, 5 * times, offset + 1, 1),
        numbered(f"{EVALUATES}AddmmBackward0", at + 300, 50 * times, offset, 1),
        event(f"{EVALUATES}torch::autograd::AccumulateGrad", at + 450, 20 * times),
        event("aten::add_", at + 451, 3 * times),
        event("Optimizer.step#outermost", at + 600, 100 * times, cat="user_annotation"),
        event("Optimizer.step#SGD.step", at + 601, 90 * times, cat="user_annotation"),
        event("aten::add_", at + 605, 50 * times),
    ]


def recording(folder: Path, more: Sequence[dict[str, Any]] = (), *, comm_us: tuple[int, ...] = (400, 600)) -> Path:
    """One rank: FW.Addmm -> FW.Sum -> BW.Sum -> BW.Addmm -> STEP, and a reduction beside BW.Addmm."""
    rank = folder / "0"
    rank.mkdir(parents=True)
    graph: Any = DiGraph()
    for phase in ("FW", "BW"):
        graph.add_node(f"{phase}.a.Addmm", op=phase, order=40)
        graph.add_node(f"{phase}.Sum_1", op=phase, order=41)
    graph.add_node("STEP", op="STEP")
    graph.add_node("Comm.0", op="Comm", channel="all", sequence=0)
    for path in (
        ("I/O", "FW.a.Addmm", "FW.Sum_1", "OUTPUT0", "BW.Sum_1", "BW.a.Addmm", "STEP"),
        ("BW.Sum_1", "Comm.0", "STEP"),
    ):
        graph.add_edges_from(pairwise(path))
    for node, data in graph.nodes(data=True):
        data.setdefault("op", node.rstrip("0"))
    write_gml(graph, rank / "dag.gml")
    events = [*(e for number, offset in enumerate(OFFSETS) for e in step(number, offset)), *more]
    with gzip.open(rank / "trace.json.gz", "wt") as stream:
        json.dump({"traceEvents": events}, stream)
    rows = [[0, place, 10**9 * (place + 1), 5000, 5000 + us * 1000, -1] for place, us in enumerate(comm_us)]
    lines = [HEADER, GROUP, CALL, *rows, {"line": "end", "calls": len(rows)}]
    (rank / "comms.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return rank


def averages(rank: Path) -> dict[str, float]:
    return dict(read_gml(rank / "dag.gml").nodes(data="avg"))


def test_each_node_has_the_mean_of_its_own_time(tmp_path: Path) -> None:
    rank = recording(tmp_path)
    assert add_durations(rank) == ""
    assert averages(rank) == {
        "FW.a.Addmm": 15, "FW.Sum_1": 30, "BW.Sum_1": 60, "BW.a.Addmm": 105, "STEP": 150, "Comm.0": 500,
        "I/O": None, "OUTPUT0": None,
    }  # fmt: skip
    # Once more changes nothing.
    before = (rank / "dag.gml").read_text()
    assert add_durations(rank) == ""
    assert (rank / "dag.gml").read_text() == before


def test_the_replay_takes_the_longest_path(tmp_path: Path) -> None:
    add_durations(recording(tmp_path))
    job = find_job(tmp_path)
    gpus = dependencies(job)
    found = coupled(job, gpus, [gpu.dag for gpu in gpus])
    assert run_dag(found).step == (15 + 30 + 60 + 500 + 150) * PS_PER_US


def test_kernels_count_instead_of_the_host(tmp_path: Path) -> None:
    launching = numbered("aten::addmm", 60, 5, OFFSETS[0], **{"External id": 9})
    call = event("cudaLaunchKernel", 61, 2, cat="cuda_runtime", correlation=3, **{"External id": 9})
    kernel = event("gemm", 100, 70, tid=20, cat="kernel", correlation=3, stream=20, device=0, **{"External id": 9})
    rank = recording(tmp_path, [launching, call, kernel])
    assert add_durations(rank) == ""
    # The second step has no kernel.
    assert averages(rank)["FW.a.Addmm"] == (70 + 20) / 2


def test_what_is_not_found_is_counted(tmp_path: Path) -> None:
    made = numbered("aten::exp", STEP_US + 900, 7, OFFSETS[1] + 2)
    rank = recording(tmp_path, [made], comm_us=(400, 600, 500))
    graph = read_gml(rank / "dag.gml")
    graph.add_node("FW.gone.Mul", op="FW", order=47)
    # Of another kind than what ran in its place.
    graph.add_node("BW.b.Mul", op="BW", order=39)
    # It was made once, and nothing asked for its backward: that is none that is missing.
    graph.add_node("FW.Exp", op="FW", order=42)
    graph.add_node("BW.Exp", op="BW", order=42)
    write_gml(graph, rank / "dag.gml")
    line = add_durations(rank)
    assert line == "dag.gml: 3 of 10 nodes have no time (avg), 'Comm.0' first: not in the trace"
    known = averages(rank)
    assert known["FW.gone.Mul"] is known["BW.b.Mul"] is known["Comm.0"] is None
    assert (known["BW.a.Addmm"], known["FW.Exp"], known["BW.Exp"]) == (105, 7, None)


@pytest.mark.torch
def test_no_time_is_lost_or_counted_twice(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs the [torch] extra")
    import echograph

    model = torch.nn.Sequential(
        torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)
    )
    adam = torch.optim.Adam(model.parameters())
    with echograph.record(tmp_path, start_step=3, end_step=6) as recorder:
        for _ in range(7):
            model(torch.randn(4, 8)).softmax(-1).square().mean().backward()
            adam.step()
            adam.zero_grad()
    assert not json.loads((tmp_path / "0" / "metadata.json").read_text())["problems"]
    assert recorder.folder is not None
    graph = read_gml(recorder.folder / "dag.gml")
    sums = {
        phase: sum(data["avg"] for _, data in graph.nodes(data=True) if data["op"] == phase)
        for phase in ("FW", "BW", "STEP")
    }
    with gzip.open(recorder.folder / "trace.json.gz") as stream:
        found = [e for e in json.load(stream)["traceEvents"] if e.get("ph") == "X"]
    backward = sum(e["dur"] for e in found if e["name"].startswith(EVALUATES))
    update = sum(e["dur"] for e in found if e["name"] == "Optimizer.step#outermost")
    spans = sorted(
        (e["ts"], e["ts"] + e["dur"])
        for e in found
        if e.get("args", {}).get("Sequence number", -1) >= 0 and not e["args"]["Fwd thread id"]
    )
    forward, until = 0.0, 0.0
    for start, end in spans:
        forward += max(0.0, end - max(start, until))
        until = max(until, end)
    assert sums["BW"] * 3 == pytest.approx(backward)
    assert sums["STEP"] * 3 == pytest.approx(update)
    # Operators that make no node (of the input, of no gradient) may have the number of one outside the graph.
    assert sums["FW"] * 3 == pytest.approx(forward, rel=1e-3)


@pytest.mark.torch
def test_what_fails_does_not_stop_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="needs the [torch] extra")
    import echograph
    from echograph.profiler.record import dependencies

    def fails(folder: Path) -> str:
        raise ZeroDivisionError("mine")

    monkeypatch.setattr(dependencies, "add_durations", fails)
    weight = torch.nn.Parameter(torch.ones(2))
    sgd = torch.optim.SGD([weight], lr=0.5)
    with echograph.record(tmp_path, start_step=1, end_step=2):
        for _ in range(3):
            weight.sum().backward()
            sgd.step()
            sgd.zero_grad()
    assert weight.tolist() == [-0.5, -0.5]
    said = json.loads((tmp_path / "0" / "metadata.json").read_text())
    assert said["complete"] and said["problems"] == ["ZeroDivisionError: mine"]

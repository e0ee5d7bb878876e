"""Nodes of an execution trace belong to the events that they were recorded with."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from small_traces import job, operator, work

from echograph.errors import DataError, InputError, UsageError
from echograph.profiler.analyses import ANALYSES
from echograph.profiler.traces import read_traces
from echograph.profiler.traces.events import details


def write(path: Path, *nodes: dict[str, Any]) -> str:
    path.write_text(json.dumps({"schema": "1.1.1-chakra.0.0.4", "nodes": nodes}))
    return str(path)


def node(number: int, name: str, rf_id: int) -> dict[str, Any]:
    attrs = [{"name": "rf_id", "type": "uint64", "value": rf_id}]
    attrs.append({"name": "op_schema", "type": "string", "value": f"{name}(Tensor self)"})
    inputs = {"values": [1], "shapes": [[3, 4]], "types": ["Tensor(float)"], "strides": [[4, 1]]}
    return {"id": number, "name": name, "ctrl_deps": 1, "inputs": inputs, "outputs": inputs, "attrs": attrs}


EVENTS = [
    operator("aten::mm", 0, 9, **{"External id": 7}),
    operator("aten::add", 10, 9, **{"External id": 8}),
    operator("aten::sub", 20, 9, **{"External id": 9}),
    work("gemm", 5, 2, 1, **{"External id": 7}),
]


def test_events_get_the_node_of_their_number(tmp_path: Path) -> None:
    file = write(tmp_path / "et.json", node(20, "aten::mm", 7), node(21, "aten::mul", 8), node(22, "thread", 0))
    table = ANALYSES["execution-trace"](job(tmp_path / "t", EVENTS), file=file)
    assert [(r["name"], r["cat"], r["et_node"], r["et_node_name"]) for r in table.records()] == [
        ("aten::mm", "cpu_op", 20, "aten::mm"),
        ("gemm", "kernel", 20, "aten::mm"),
    ]
    (first, _) = table.records()
    assert (first["op_schema"], first["input_shapes"], first["output_types"]) == (
        "aten::mm(Tensor self)",
        "[[3, 4]]",
        '["Tensor(float)"]',
    )
    # Node 8 has another name: that is of another run, and the operator of it has none.
    assert table.notes == ("rank 0: 2 of 3 operators have no node of their name",)


def test_a_gzipped_file_says_the_same(tmp_path: Path) -> None:
    plain = write(tmp_path / "et.json", node(20, "aten::mm", 7))
    (tmp_path / "et.json.gz").write_bytes(gzip.compress(Path(plain).read_bytes()))
    traces = job(tmp_path / "t", EVENTS)
    known, found = (
        ANALYSES["execution-trace"](traces, file=str(tmp_path / f"et.{e}")) for e in ("json", "json.gz")
    )
    assert found.records() == known.records() and len(known) == 2


def test_older_files_have_it_beside_the_name(tmp_path: Path) -> None:
    old = {"id": 5, "name": "aten::mm", "rf_id": 7, "op_schema": "s", "inputs": [1], "outputs": []}
    old |= {"input_shapes": [[2]], "input_types": ["T"], "output_shapes": [], "output_types": []}
    table = ANALYSES["execution-trace"](job(tmp_path, EVENTS), file=write(tmp_path / "et", old))
    assert table.records()[0]["input_shapes"] == "[[2]]"
    assert table.records()[0]["op_schema"] == "s"


@pytest.mark.torch
def test_shapes_are_those_of_the_profile(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    observer = torch.profiler.ExecutionTraceObserver().register_callback(str(tmp_path / "et.json"))
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU())
    # What was profiled before sets the external ids of events apart from the numbers of calls.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        model(torch.randn(3, 8))
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True, execution_trace_observer=observer
    ) as profiler:
        model(torch.randn(3, 8)).sum().backward()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    traces = read_traces(tmp_path / "trace.json", last_step=True)
    table = ANALYSES["execution-trace"](traces, file=str(tmp_path / "et.json"))
    by_index = {row["index"]: row for row in table.records()}
    (trace,) = traces.values()
    operators = trace.of_category({"cpu_op"})
    said = details(trace, operators)
    assert len(said) > 20
    compared = 0
    for index, event in zip(trace.index[operators].tolist(), said, strict=True):
        shapes = json.loads(by_index[index]["input_shapes"])
        types = json.loads(by_index[index]["input_types"])
        dims = event["args"].get("Input Dims", [])
        for shape, kind, dim in zip(shapes, types, dims, strict=False):
            if kind.startswith("Tensor("):
                assert shape == dim
                compared += 1
    assert compared > 20


def test_what_cannot_be_answered_is_one_line(tmp_path: Path) -> None:
    traces = job(tmp_path / "t", EVENTS)
    for said, error, line in (
        ("", UsageError, "name the file"),
        (str(tmp_path / "none"), InputError, "No such file"),
        (write(tmp_path / "other", node(1, "aten::mul", 7)), DataError, "of another run or rank"),
    ):
        with pytest.raises(error, match=line):
            ANALYSES["execution-trace"](traces, file=said)
    (tmp_path / "broken").write_text('{"nodes": [{"name": "x"}]}')
    with pytest.raises(DataError, match="no execution trace of PyTorch"):
        ANALYSES["execution-trace"](traces, file=str(tmp_path / "broken"))
    with pytest.raises(UsageError, match="add --ranks 0"):
        ANALYSES["execution-trace"](job(tmp_path / "two", EVENTS, EVENTS), file="x")

"""A recording of one process: its files, its steps, and PyTorch as it was."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the [torch] extra")

import torch
import torch.distributed as dist
from torch import nn

import echograph
from echograph.errors import InputError, UsageError
from echograph.ir.comms.record import NativeSource
from echograph.profiler.comms.readers import find_sources
from echograph.profiler.record.folder import read_hooks, read_recording

pytestmark = pytest.mark.torch


@pytest.fixture
def four() -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=4)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def train(steps: int, *, fail_at: int = -1, reduce: bool = False) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        if step == fail_at:
            raise ValueError("mine")
        if reduce:
            dist.all_reduce(torch.cat([p.grad.flatten() for p in model.parameters()]))
        sgd.step()
        sgd.zero_grad()


def events(folder: Path) -> list[dict[str, Any]]:
    with gzip.open(folder / "trace.json.gz") as stream:
        found: list[dict[str, Any]] = json.load(stream)["traceEvents"]
    return found


def test_the_window_and_nothing_else_is_recorded(tmp_path: Path, four: None) -> None:
    from torch.nn.modules import module
    from torch.optim import optimizer

    with echograph.record(tmp_path, start_step=3, end_step=5) as recorder:
        train(8, reduce=True)
        assert recorder.folder == tmp_path / "2"
        # As scripts do before they end; what is written then is still of this rank.
        dist.destroy_process_group()
    assert {file.name for file in (tmp_path / "2").iterdir()} == {
        "trace.json.gz", "comms.jsonl", "dag.gml", "gradient_name_list.txt", "hooks.json", "metadata.json",
    }  # fmt: skip
    marks = [e["name"] for e in events(tmp_path / "2") if e["name"].startswith("ProfilerStep")]
    assert sorted(marks) == ["ProfilerStep#3", "ProfilerStep#4"]
    source = NativeSource(tmp_path / "2" / "comms.jsonl")
    source.open()
    rows = [row for batch in source.rows() for row in batch.tolist()]
    # 36 weights and biases, once a step.
    assert [source.signatures[row[0]].bytes for row in rows] == [4 * 36] * 2
    # The report and the import of collectives read a recording as it is.
    assert [source.rank for source in find_sources(tmp_path)[0]] == [2]
    (rank,) = read_recording(tmp_path)
    said = rank.metadata
    assert (said.rank, said.world_size, said.backend, said.complete, said.problems) == (2, 4, "fake", True, [])
    states = ["free", "observed", "recorded", "recorded", "after", "free", "free"]
    assert [(step.number, step.state) for step in said.steps] == list(enumerate(states, start=1))
    assert all(step.seconds > 0 and step.processor_s > 0 for step in said.steps)
    assert said.overhead is not None and said.overhead.collective_s is not None
    # Two steps of a model of three modules.
    entered = read_hooks(tmp_path / "2").entered_ns
    assert len(entered) == 2 * 3
    with gzip.open(tmp_path / "2" / "trace.json.gz") as stream:
        base = json.load(stream)["baseTimeNanoseconds"]
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in events(tmp_path / "2") if "ProfilerStep" in e["name"]]
    # The clocks of the trace and of the hooks are read apart, and agree to a little.
    inside = [any(a * 1e3 - 1e6 < time - base < b * 1e3 + 1e6 for a, b in spans) for time in entered]
    assert all(inside)
    assert (tmp_path / "2" / "gradient_name_list.txt").read_text().split() == ["0.weight", "0.bias", "1.weight"]
    assert 'label "Comm.0+1+2"' in (tmp_path / "2" / "dag.gml").read_text()
    hooks = (
        module._global_forward_hooks, module._global_forward_pre_hooks,
        optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks,
    )  # fmt: skip
    assert not any(hooks)


def test_the_first_step_that_is_seen_can_be_recorded(tmp_path: Path) -> None:
    with echograph.record(tmp_path, start_step=1, end_step=2, shapes=False):
        train(3)
    (rank,) = read_recording(tmp_path)
    assert rank.metadata.complete and not rank.metadata.problems
    assert [step.state for step in rank.metadata.steps] == ["recorded", "after"]
    assert [e["name"] for e in events(rank.path) if "ProfilerStep" in e["name"]] == ["ProfilerStep#1"]
    assert not any("Input Dims" in e.get("args", {}) for e in events(rank.path))
    assert "FW.0.Addmm" in (rank.path / "dag.gml").read_text()
    assert not (rank.path / "comms.jsonl").exists()


def test_times_of_the_trace_and_of_collectives_are_of_one_clock(tmp_path: Path, four: None) -> None:
    with echograph.record(tmp_path, start_step=2, end_step=4):
        train(5, reduce=True)
    with gzip.open(tmp_path / "2" / "trace.json.gz") as stream:
        trace = json.load(stream)
    calls = [e for e in trace["traceEvents"] if e["name"] == "c10d::allreduce_"]
    began = sorted(trace["baseTimeNanoseconds"] + e["ts"] * 1e3 for e in calls)
    source = NativeSource(tmp_path / "2" / "comms.jsonl")
    source.open()
    queued = [row[2] for batch in source.rows() for row in batch.tolist()]
    # The profiler sees the operator before the tracer does; a busy machine may come between them.
    assert len(queued) == len(began) == 2
    assert all(0 <= late - early < 0.2e9 for early, late in zip(began, queued, strict=True))


def test_a_script_that_fails_leaves_what_was_seen(tmp_path: Path, four: None) -> None:
    with pytest.raises(ValueError, match="mine"), echograph.record(tmp_path, start_step=2, end_step=9):
        train(20, fail_at=5, reduce=True)
    (rank,) = read_recording(tmp_path)
    assert not rank.metadata.complete
    assert [step.state for step in rank.metadata.steps] == ["observed", "recorded", "recorded", "recorded"]
    marks = [e["name"] for e in events(rank.path) if "ProfilerStep" in e["name"]]
    assert marks == [f"ProfilerStep#{n}" for n in (2, 3, 4, 5)]
    assert (rank.path / "comms.jsonl").stat().st_size > 0


def test_another_profiler_costs_the_trace_and_nothing_else(
    tmp_path: Path, four: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with torch.profiler.profile(), echograph.record(tmp_path, start_step=2, end_step=3):
        train(5, reduce=True)
    (rank,) = read_recording(tmp_path)
    assert rank.metadata.complete
    assert len(rank.metadata.problems) == 1 and "profiler" in rank.metadata.problems[0].lower()
    assert "echograph: recording: " in capsys.readouterr().err
    assert not (rank.path / "trace.json.gz").exists()
    assert (rank.path / "comms.jsonl").exists() and (rank.path / "dag.gml").exists()


def test_a_folder_that_cannot_be_made_does_not_stop_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    with echograph.record(tmp_path / "file", start_step=2, end_step=3) as recorder:
        train(5)
        assert recorder.steps == 5
    assert "echograph: recording: " in capsys.readouterr().err


def test_steps_that_the_script_tells_are_the_ones_that_count(tmp_path: Path) -> None:
    with echograph.record(tmp_path, start_step=1, end_step=3) as recorder:
        for _ in range(5):
            nn.Linear(4, 4)(torch.ones(2, 4)).sum().backward()
            recorder.step()
            # From the first on, an optimizer's do not.
            train(2)
        assert recorder.steps == 5
    (rank,) = read_recording(tmp_path)
    assert [step.number for step in rank.metadata.steps] == [1, 2, 3, 4]


def test_what_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="give 1 or more"):
        echograph.record(tmp_path, start_step=0)
    with echograph.record(tmp_path), pytest.raises(UsageError, match="being recorded already"):
        echograph.record(tmp_path)
    recorder = echograph.record(tmp_path, enabled=False)
    assert not recorder.running
    recorder.stop()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("place", "value"),
    [("issue_s", -1e-9), ("operator_s", -(2.0**63)), ("module_s", 1e300), ("seconds", 2**32), ("seconds", -1)],
)
def test_seconds_that_nothing_takes_are_named(tmp_path: Path, place: str, value: float) -> None:
    overhead = {"operator_s": 0, "nested_s": 0, "node_s": 0, "module_s": 0, "issue_s": 0}
    step: dict[str, object] = {"number": 1, "seconds": 0.1, "state": "free"}
    (step if place in step else overhead)[place] = value
    about = {"rank": 0, "world_size": 1, "start_step": 1, "end_step": 2, "steps": [step], "overhead": overhead}
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "metadata.json").write_text(json.dumps(about))
    with pytest.raises(InputError, match=rf"no metadata of a recording: Expected `float` [<>]= .*{place}"):
        read_recording(tmp_path)


def test_what_is_no_recording_says_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no recording"):
        read_recording(tmp_path)
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "metadata.json").write_text('{"rank": "x"}')
    with pytest.raises(InputError, match=r"0/metadata\.json: no metadata of a recording"):
        read_recording(tmp_path)
    (tmp_path / "0" / "metadata.json").write_text(
        '{"rank": 0, "world_size": 1, "start_step": 1, "end_step": 2, "version": [2, 0]}'
    )
    with pytest.raises(InputError, match="this reads echograph recording 1"):
        read_recording(tmp_path)

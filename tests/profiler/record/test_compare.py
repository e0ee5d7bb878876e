"""A recording held against graphs that have what it has, and something else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the [torch] extra")

import torch
import torch.distributed as dist
from recorded_jobs import tool
from torch import nn

import echograph
from echograph.errors import UsageError
from echograph.ir import serde
from echograph.ir.builder import GraphBuilder
from echograph.ir.graph import Axis, JobGraph, StepGraph
from echograph.ir.types import CollectiveKind, DType, Phase
from echograph.profiler.record.compare import ComparisonRow, _Walk, compare_recording

pytestmark = pytest.mark.torch

REDUCED = 4 * (16 + 4 + 16)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Rank 2 of four: two layers forward and backward, their gradients reduced, a step of SGD."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    folder = tmp_path_factory.mktemp("recording")
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=4)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with echograph.record(folder, start_step=2, end_step=5):
        for _ in range(6):
            model(torch.ones(2, 4)).sum().backward()
            dist.all_reduce(torch.cat([p.grad.flatten() for p in model.parameters()]))
            sgd.step()
    dist.destroy_process_group()
    yield folder


def job(calls: int = 1, ranks: int = 4, nbytes: int = REDUCED, phase: Phase = Phase.BACKWARD) -> JobGraph:
    """What `recording` does, counted by hand: a product forward and one backward for each operand that learns."""
    builder = GraphBuilder(name="job")
    builder.mesh = (Axis(name="dp", size=ranks),)
    group = builder.group("dp", axes=("dp",))
    products = [("aten.addmm", Phase.FORWARD), ("aten.mm", Phase.FORWARD), *[("aten.mm", Phase.BACKWARD)] * 3]
    for name, part in products:
        builder.compute(name, phase=part, flops=8)
    builder.compute("aten.view", phase=Phase.FORWARD)
    for _ in range(calls):
        builder.collective(
            "all_reduce", CollectiveKind.ALL_REDUCE, group=group, bytes_per_rank=nbytes, dtype=DType.FP32,
            phase=phase, asynchronous=False,
        )  # fmt: skip
    builder.program([(0, 0, builder.op_count(), 0, 0)], role="all")
    return builder.build(JobGraph)


@pytest.mark.parametrize("phase", [Phase.BACKWARD, Phase.OPTIMIZER])
def test_what_is_the_same_is_said_to_be(recording: Path, phase: Phase) -> None:
    # Called between backward and optimizer, where the recording knows no phase.
    compared = compare_recording(job(phase=phase), recording)
    assert compared.same_collectives and compared.order == {2: -1}
    name = f"all_reduce of {REDUCED} bytes, 4 ranks"
    assert [row for row in compared.rows if row.what == "collective"] == [
        ComparisonRow(rank=2, what="collective", phase=phase.name.lower(), name=name, captured=1, recorded=1.0)
    ]
    operators = {(row.phase, row.name): (row.captured, row.recorded) for row in compared.rows if row.captured}
    assert operators["forward", "aten.addmm"] == operators["forward", "aten.mm"] == (1, 1.0)
    assert operators["backward", "aten.mm"] == (3, 3.0)
    # Views do nothing, and are not counted.
    assert ("forward", "aten.view") not in operators


@pytest.mark.parametrize(("calls", "place"), [(0, -1), (2, -1), (1, 0)])
def test_collectives_that_differ_are_rows(recording: Path, calls: int, place: int) -> None:
    other = job(calls, nbytes=REDUCED + 4 * (place == 0))
    compared = compare_recording(other, recording)
    assert not compared.same_collectives
    differ = [(row.captured, row.recorded) for row in compared.rows if row.what == "collective"]
    assert sorted(differ) == ([(0, 1.0), (1, 0.0)] if place == 0 else [(calls, 1.0)])
    # The recording goes on with the next step's calls, so that fewer and more are no other order by themselves.
    assert compared.order == {2: place}


def test_operators_are_counted_from_the_outside_in() -> None:
    walk = _Walk({"aten.mm", "aten.add"})
    spans = [
        (0, 90, 1, "aten::linear"), (10, 60, 1, "aten::mm"), (20, 30, 1, "aten::mm"), (30, 40, 1, "aten::copy_"),
        (100, 150, 1, "autograd::engine::evaluate_function: MmBackward0"), (110, 120, 1, "aten::mm"),
        (120, 130, 1, "aten::fill_"), (121, 122, 1, "aten::zero_"),
        (200, 290, 1, "Optimizer.step#SGD.step"), (210, 220, 1, "aten::add"), (220, 250, 1, "aten::sqrt"),
    ]  # fmt: skip
    walk.thread(spans)
    counted = {("forward", "aten.mm"): 1, ("backward", "aten.mm"): 1, ("optimizer", "aten.add"): 1}
    assert {key[1:]: count for key, count in walk.counts.items()} == counted
    assert {key[1:]: count for key, count in walk.alone.items()} == {
        ("backward", "aten.fill_"): 1, ("optimizer", "aten.sqrt"): 1,
    }  # fmt: skip
    assert {key[2]: took for key, took in walk.times.items()} == {"aten.fill_": 10, "aten.sqrt": 30}


def test_the_command_prints_the_differences(recording: Path, tmp_path: Path) -> None:
    serde.save(job(2), tmp_path / "job.pb")
    said = tool("echoprof", "record", "compare", tmp_path / "job.pb", recording).stdout.splitlines()
    assert said[0] == "collectives: 2 captured, 1 recorded a step; 1 rows differ"
    assert any(line.split()[-2:] == ["2", "1"] and "all_reduce" in line for line in said)


def test_graphs_that_cannot_be_compared_say_so(recording: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="of 8 ranks, the recording of 4"):
        compare_recording(job(ranks=8), recording)
    builder = GraphBuilder(name="step")
    builder.compute("aten.mm", phase=Phase.FORWARD)
    builder.program([(0, 0, 1, 0, 0)])
    serde.save(builder.build(StepGraph), tmp_path / "step.pb")
    done = tool("echoprof", "record", "compare", tmp_path / "step.pb", recording, check=False)
    assert done.returncode == 2 and "a step graph has no ranks" in done.stderr

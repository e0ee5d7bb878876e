"""A trace that PyTorch's profiler writes here and now, beside what the profiler itself says of it."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch", reason="PyTorch's profiler needs the [torch] extra")

from echograph.profiler.analyses import ANALYSES  # noqa: E402
from echograph.profiler.traces import Trace, TraceSet, read_trace  # noqa: E402
from echograph.profiler.traces.events import details  # noqa: E402
from echograph.profiler.traces.relations import (  # noqa: E402
    call_stacks,
    complete_steps,
    step_of_rows,
)
from echograph.profiler.traces.trace import NONE, OPERATORS  # noqa: E402


@pytest.mark.parametrize("ending", [".json", ".json.gz"])
def test_rows_stacks_and_steps_are_those_of_the_profiler(tmp_path: Path, ending: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        record_shapes=True,
        schedule=torch.profiler.schedule(wait=0, warmup=0, active=9),
    ) as profile:
        for _ in range(3):
            with torch.profiler.record_function("## forward ##"):
                loss = model(torch.ones(2, 8)).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            profile.step()
    path = tmp_path / f"rank0{ending}"
    profile.export_chrome_trace(str(path))
    trace = read_trace(path)
    assert (trace.rank, trace.notes) == (0, ())

    # The profiler takes an operator that only calls itself for one event.
    parent = call_stacks(trace).parent
    children = Counter(parent.tolist())
    aten = np.array([text.startswith("aten::") for text in trace.strings])[trace.name]
    rows = [
        row
        for row in np.flatnonzero(trace.of_category(OPERATORS) & aten).tolist()
        if _text(trace, int(parent[row])) != trace.text(row) or children[int(parent[row])] > 1
    ]
    known = [event for event in profile.events() if event.name.startswith("aten::")]
    ours = Counter((trace.text(row), _text(trace, int(parent[row]))) for row in rows)
    assert ours == Counter((event.name, event.cpu_parent.name if event.cpu_parent else None) for event in known)
    assert sum(ours.values()) > 100

    linear = np.flatnonzero(trace.named({"aten::addmm"}))
    assert [event["args"]["Input Dims"] for event in details(trace, linear[:2])] == [
        [[16], [2, 8], [8, 16], [], []],
        [[4], [2, 16], [16, 4], [], []],
    ]

    steps = [row["step"] for row in ANALYSES["steps"](TraceSet({0: trace})).records()]
    assert steps[:3] == [0, 1, 2]
    assert Counter(step_of_rows(trace)[linear].tolist()) == {0: 2, 1: 2, 2: 2}
    kept = complete_steps(trace)
    assert int(kept.named({"aten::addmm"}).sum()) == (6 if len(steps) == 4 else 4)
    (row,) = [
        r
        for r in ANALYSES["annotations"](TraceSet({0: trace}), side="host").records()
        if r["name"] == "## forward ##"
    ]
    assert row["count"] == 3


def _text(trace: Trace, row: int) -> str | None:
    """The name of a row as the profiler's summary has it."""
    return re.sub(r"ProfilerStep#\d+", "ProfilerStep*", trace.text(row)) if row != NONE else None

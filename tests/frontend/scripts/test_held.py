"""What a script holds lives, though nothing reads it: outputs through the backward pass, most of all."""

from __future__ import annotations

from pathlib import Path

import pytest

from echograph.frontend.scripts.capture import capture_script
from echograph.frontend.scripts.run import Script
from echograph.frontend.scripts.torch_adapter import TorchAdapter
from echograph.frontend.scripts.world import World
from echograph.ir.graph import JobGraph
from echograph.simulator.memory import Runtime, memory

TOKENS, VOCABULARY, MICRO_BATCHES = 512, 4096, 2
LOGITS = TOKENS * VOCABULARY * 4
STEP = f"""import torch
from torch.nn.functional import cross_entropy

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, {VOCABULARY})).cuda()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)


def loss_of(x, y):
    return cross_entropy(model(x), y)


for _ in range(2):
    for _ in range({MICRO_BATCHES}):
        x, y = torch.randn({TOKENS}, 64, device="cuda"), torch.zeros({TOKENS}, dtype=torch.long, device="cuda")
        {{forward}}
        {{backward}}
    optimizer.step()
    optimizer.zero_grad()
"""


def captured(tmp_path: Path, forward: str, backward: str = "loss.backward()") -> JobGraph:
    path = tmp_path / "train.py"
    path.write_text(STEP.format(forward=forward, backward=backward))
    return capture_script(Script(path=path), World(size=1), TorchAdapter()).graph


def peak(job: JobGraph) -> int:
    found = memory(job, 0, 80 * 2**30, Runtime(cublas_workspace_bytes=()))
    assert found is not None
    return found.peak_bytes


def released(job: JobGraph) -> list[tuple[int, list[int]]]:
    """Of each release, its micro-batch and the elements of what it reads."""
    rows = [op.id for op in job.ops if op.name == "release"]
    batch = [next(c[4] for c in job.programs[0].calls.tolist() if c[1] <= row < c[2]) for row in rows]
    numel = job.tensors.numel
    return [(b, [int(numel[i]) for i in job.ops.inputs.row(r)]) for b, r in zip(batch, rows, strict=True)]


def test_logits_that_a_script_has_a_name_for_live_through_the_backward_pass(tmp_path: Path) -> None:
    held = captured(tmp_path, "logits = model(x); loss = cross_entropy(logits, y)")
    dropped = captured(tmp_path, "loss = loss_of(x, y)")
    assert peak(held) == peak(dropped) + LOGITS
    assert not released(dropped)
    assert released(held) == [(number, [TOKENS * VOCABULARY]) for number in range(MICRO_BATCHES)]


@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        ("logits = model(x); loss = cross_entropy(logits, y); del logits", "loss.backward()"),
        ("logits = model(x); logits = cross_entropy(logits, y)", "logits.backward()"),
        ("loss = cross_entropy(model(x), y)", "loss.backward()"),
    ],
)
def test_what_a_script_lets_go_of_is_freed(tmp_path: Path, forward: str, backward: str) -> None:
    assert not released(captured(tmp_path, forward, backward))


def test_what_is_held_is_told_from_what_it_is_a_view_of(tmp_path: Path) -> None:
    whole = captured(tmp_path, "shown = model(x)[:2]; loss = cross_entropy(shown, y[:2])")
    # Two rows of the logits keep all of them.
    assert released(whole) == [(number, [TOKENS * VOCABULARY]) for number in range(MICRO_BATCHES)]


def test_a_release_takes_no_time(tmp_path: Path) -> None:
    job = captured(tmp_path, "logits = model(x); loss = cross_entropy(logits, y)")
    rows = [op.id for op in job.ops if op.name == "release"]
    assert rows and job.ops.is_view[rows].all() and not job.ops.outputs.lengths[rows].any()

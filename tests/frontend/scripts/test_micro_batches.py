"""Micro-batches of schedules that tell nobody of them: hand-written pipelines, accumulation, several losses."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from echograph.errors import CaptureError
from echograph.frontend.pytorch.annotate import OPTIMIZER, PHASE
from echograph.frontend.scripts.capture import capture_script
from echograph.frontend.scripts.recorder import MICRO_BATCH
from echograph.frontend.scripts.run import Script, run_script
from echograph.frontend.scripts.torch_adapter import TorchAdapter
from echograph.frontend.scripts.world import World
from echograph.ir.graph import JobGraph

PIPELINE = """import sys
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

dist.init_process_group("nccl")
stage, stages, count, schedule = dist.get_rank(), dist.get_world_size(), 4, sys.argv[1]
body = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.GELU()).cuda()
head = torch.nn.Linear(8, 4).cuda()
optimizer = torch.optim.AdamW([*body.parameters(), *head.parameters()])


def forward():
    x = torch.empty(2, 8, device="cuda")
    if stage:
        dist.recv(x, stage - 1)
        x.requires_grad_()
    else:
        x = torch.randn(2, 8, device="cuda", requires_grad="recomputed" in sys.argv)
    with torch.autocast("cuda", torch.bfloat16):
        if "recomputed" in sys.argv:
            y = checkpoint(body, x, use_reentrant="reentrant" in sys.argv)
        else:
            y = body(x)
        y = y.float()
    if stage < stages - 1:
        dist.send(y.detach(), stage + 1)
    else:
        y = head(y).square().mean()
    return x, y


def backward(x, y):
    grad = None
    if stage < stages - 1:
        grad = torch.empty_like(y)
        dist.recv(grad, stage + 1)
    if schedule == "split" and stage:  # inputs first, weights later
        (given,) = torch.autograd.grad(y, x, grad, retain_graph=True)
        dist.send(given, stage - 1)
        torch.autograd.backward(y, grad, inputs=list(body.parameters()))
        return
    torch.autograd.backward(y, grad)
    if stage:
        dist.send(x.grad, stage - 1)


def one_cast():
    # A cast that autocast keeps serves several micro-batches.
    with torch.autocast("cuda", torch.bfloat16):
        done = [forward() for _ in range(count)]
    for pair in done:
        backward(*pair)


for _ in range(2):
    waiting = []
    if schedule == "afab":
        one_cast()
    else:
        for i in range(count + stages - stage - 1):
            if i < count:
                waiting.append(forward())
            if i >= stages - stage - 1:
                backward(*waiting.pop(0))
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    "arguments", [("1f1b",), ("afab",), ("split",), ("1f1b", "recomputed"), ("1f1b", "recomputed", "reentrant")]
)
def test_each_stage_of_a_hand_written_pipeline_counts_its_micro_batches(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    script = tmp_path / "pipeline.py"
    script.write_text(PIPELINE)
    for rank in range(3):
        run = run_script(Script(path=script, arguments=arguments), World(rank=rank, size=3), TorchAdapter())
        of: dict[int, Counter[tuple[str, str]]] = {}
        for node in run.recorder.graph.nodes:
            if node.op == "call_function" and node.meta[PHASE] != OPTIMIZER:
                kind = str(node.target)
                if not kind.startswith(("aten.add", "aten.detach", "aten._to_copy", "aten.empty", "c10d.")):
                    of.setdefault(node.meta[MICRO_BATCH], Counter())[node.meta[PHASE], kind] += 1
        assert sorted(of) == [0, 1, 2, 3], (rank, of)
        assert all(each == of[1] for each in of.values()), (rank, of)
    job = capture_script(Script(path=script, arguments=arguments), World(size=3), TorchAdapter()).graph
    assert isinstance(job, JobGraph)
    assert {len({*program.calls[:, 4]} - {-1}) for program in job.programs} == {4}


LOSSES = """import torch
torch.manual_seed(0)
trunk, one, two = (torch.nn.Linear(8, 8).cuda() for _ in range(3))
optimizer = torch.optim.SGD([*trunk.parameters(), *one.parameters(), *two.parameters()], 0.1)
for _ in range(2):
    for _ in range(3):
        hidden = trunk(torch.randn(2, 8, device="cuda"))
        losses = one(hidden).sum(), two(hidden).sum()
        losses[0].backward(retain_graph=True)
        losses[1].backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_two_losses_of_a_forward_pass_are_of_one_micro_batch(tmp_path: Path) -> None:
    script = tmp_path / "losses.py"
    script.write_text(LOSSES)
    run = run_script(Script(path=script), World(), TorchAdapter())
    calls = [n for n in run.recorder.graph.nodes if n.op == "call_function" and n.meta[PHASE] != OPTIMIZER]
    products = Counter(
        n.meta[MICRO_BATCH] for n in calls if str(n.target) in ("aten.addmm.default", "aten.mm.default")
    )
    assert sorted(products) == [0, 1, 2]
    assert len(set(products.values())) == 1


ASKED_AGAIN = """import torch, torch.distributed as dist
{names}
dist.init_process_group("nccl")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def any_of_the_ranks(value):
    flag = torch.tensor([value], dtype=torch.int32, device="cuda")
    dist.all_reduce(flag)
    return flag.item() > 0

for step in range(3):
    again = True
    while again:
        loss = model(torch.ones(4, 8).cuda()).sum()
        loss.backward()
        again = {ask}
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("names", "ask"),
    [
        ("", "any_of_the_ranks(False)"),
        (
            "from megatron.core.rerun_state_machine import RerunStateMachine",
            "RerunStateMachine._reduce_any(None, False)",
        ),
    ],
)
def test_a_step_that_ranks_agree_not_to_run_again_has_one_micro_batch(
    tmp_path: Path, names: str, ask: str
) -> None:
    """Megatron asks all ranks after each pass whether one of them wants it once more.

    A flag that a collective wrote and nobody knows would be read as 1 there, and the pass would be run twice.
    """
    if names:
        pytest.importorskip("megatron.core")
    script = tmp_path / "again.py"
    script.write_text(ASKED_AGAIN.format(names=names, ask=ask))
    job = capture_script(Script(path=script), World(size=4), TorchAdapter()).graph
    assert isinstance(job, JobGraph)
    assert {len({*program.calls[:, 4]} - {-1}) for program in job.programs} == {1}
    if not names:
        script.write_text(ASKED_AGAIN.format(names="", ask="any_of_the_ranks(bool(loss.isnan().cpu() + loss))"))
        with pytest.raises(CaptureError, match="--decide"):
            capture_script(Script(path=script), World(size=4), TorchAdapter())


ASIDE = """import torch
model = torch.nn.Linear(8, 1).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    x = torch.randn(4, 8, device="cuda", requires_grad=True)
    (force,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    for attack in range(2):
        (moved,) = torch.autograd.grad(model(x).sum(), x)
        x = (x + moved).detach().requires_grad_()
    ({loss}).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("loss", ["model(x).sum()", "model(x).sum() + force.square().sum()"])
def test_what_differentiates_no_parameters_is_no_micro_batch(tmp_path: Path, loss: str) -> None:
    """Forces, attacks, an evaluation of them: parts of the one that follows."""
    path = tmp_path / "train.py"
    path.write_text(ASIDE.format(loss=loss))
    run = run_script(Script(path=path), World(size=1), TorchAdapter())
    assert {n.meta.get(MICRO_BATCH, 0) for n in run.recorder.graph.nodes if n.op == "call_function"} == {0}

"""What cannot be captured ends in one line that names file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from echograph.errors import CaptureError, InputError, UsageError
from echograph.frontend.scripts.capture import capture_script
from echograph.frontend.scripts.run import Script, ScriptRun, run_script
from echograph.frontend.scripts.torch_adapter import TorchAdapter
from echograph.frontend.scripts.world import World

BEGIN = """import sys
import torch
import torch.distributed as dist
dist.init_process_group()
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    loss = model(torch.ones(4, 8)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def run(folder: Path, text: str, *, size: int = 2, step: int = 2) -> ScriptRun:
    path = folder / "train.py"
    path.write_text(text)
    return run_script(Script(path=path, step=step), World(size=size), TorchAdapter())


REFUSED = {
    "raises": ("    raise ValueError('no such data set')\n", "train.py:12: ValueError: no such data set"),
    "asserts": ("    assert step > 5\n", "train.py:12: AssertionError: assert step > 5"),
    "branches on a tensor": (
        "    if loss > 3:\n        loss = loss * 2\n",
        "train.py:12: whether a tensor is true decides",
    ),
    "compares what it read": (
        "    if loss.item() > 3:\n        loss = loss * 2\n",
        "train.py:12: a comparison with a tensor's value decides",
    ),
    "shape by values": ("    x = torch.empty(4).nonzero()\n", "train.py:12: how many elements 'nonzero' finds"),
    "wants more ranks": (
        "    dist.new_group([0, 5])\n",
        "train.py:12: ",
    ),
    "other collective": ("    dist.recv(torch.ones(2))\n", "train.py:12: "),
    "ends early": ("    break\n", "train.py ended after 1 training step, before step 2: give --step 1"),
    "exits": ("    sys.exit(3)\n", "train.py ended with exit status 3 after 1 training step"),
}

PARSED = (
    """import argparse
parser = argparse.ArgumentParser()
parser.add_argument("data")
parser.add_argument("--lr", type=float)
args = parser.parse_args()
"""
    + BEGIN
)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ((), "train.py: the following arguments are required: data: its arguments stand behind --"),
        (("x", "--rl", "3"), "train.py: unrecognized arguments: --rl 3: its arguments stand behind --"),
        (("x", "--lr", "y"), "train.py: argument --lr: invalid float value: 'y': its arguments stand behind --"),
    ],
)
def test_a_command_line_that_the_script_refuses(tmp_path: Path, given: tuple[str, ...], line: str) -> None:
    (tmp_path / "train.py").write_text(PARSED)
    with pytest.raises(CaptureError) as caught:
        run_script(Script(path=tmp_path / "train.py", arguments=given), World(size=2), TorchAdapter())
    assert line in str(caught.value) and caught.value.exit_code == 2


@pytest.mark.parametrize("name", REFUSED)
def test_one_line(tmp_path: Path, name: str) -> None:
    added, line = REFUSED[name]
    with pytest.raises(CaptureError) as caught:
        run(tmp_path, BEGIN + added)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == (3 if name == "exits" else 1)


def test_other_world_size(tmp_path: Path) -> None:
    text = BEGIN.replace("init_process_group()", "init_process_group('nccl', rank=0, world_size=4)")
    with pytest.raises(CaptureError, match="give --world-size 4"):
        run(tmp_path, text)


def test_no_such_script(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        run_script(Script(path=tmp_path / "none.py"), World(), TorchAdapter())


def test_syntax_error(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"train.py:1: SyntaxError"):
        run(tmp_path, "for\n")


def test_no_such_rank(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="ranks 0 to 1"):
        capture_script(Script(path=tmp_path / "a.py"), World(size=2), TorchAdapter(), ranks=(2,))


def test_a_loss_may_be_logged(tmp_path: Path) -> None:
    added = "    total = 0.0\n    total += loss.item() / 2\n    print(f'{total:.2f} {loss:.2f} {float(loss)}')\n"
    recorder = run(tmp_path, BEGIN + added).recorder
    assert [note.partition(" reads")[0] for note in recorder.notes] == ["train.py:13", "train.py:14"]


def test_the_gpu_that_is_asked_for_is_there(tmp_path: Path) -> None:
    added = """    device = torch.device("cuda", 1)
    x = torch.zeros(2, device="cuda") + torch.zeros(2).cuda() + torch.zeros(2).to(0, non_blocking=True)
    x = x + torch.zeros(2).to(device, torch.float32)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.autocast("cuda", dtype=torch.bfloat16):
        assert (torch.zeros(2, 2, device=0) @ torch.zeros(2, 2, device=device)).dtype == torch.bfloat16
    torch.cuda.synchronize()
    torch.save(model.state_dict(), "never.pt")
    assert torch.cuda.device_count() == 2
"""
    assert run(tmp_path, BEGIN + added).recorder.recorded
    assert not (tmp_path / "never.pt").exists()


@pytest.mark.parametrize("kind", ["torch.amp.GradScaler('cuda')", "torch.cuda.amp.GradScaler()"])
def test_gradients_are_scaled(tmp_path: Path, kind: str) -> None:
    text = BEGIN.replace("for step", f"scaler = {kind}\nfor step").replace(
        "    loss.backward()\n    optimizer.step()\n",
        "    scaler.scale(loss).backward()\n    scaler.step(optimizer)\n    scaler.update()\n",
    )
    names = [str(node.target) for node in run(tmp_path, text).recorder.graph.nodes]
    assert "aten._amp_foreach_non_finite_check_and_unscale_.default" in names
    assert any("_amp_update_scale_" in name for name in names)

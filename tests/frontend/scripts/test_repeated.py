"""A script that samples before it trains: what its modules make again is not worked out again."""

from __future__ import annotations

from pathlib import Path

import pytest

from echograph.frontend.scripts.run import Script, run_script
from echograph.frontend.scripts.torch_adapter import TorchAdapter
from echograph.frontend.scripts.world import World

SAMPLING = """import torch
ran = []

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.seen, self.kept = torch.nn.Linear(8, 8), 0, []
    def forward(self, x, t, scale=1.0):
        ran.append(t)
        {more}
        return (self.layer(x) * scale + t[:, None], {{"mean": x.mean(-1)}})

model = Model().cuda().eval()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def sample():
    x = torch.randn(4, 8, device="cuda")
    for step in range(50):
        out, others = model(x, x.new_ones([4], dtype=torch.long) * step, scale=step / 50)
        x = x - out
        assert x.is_cuda and others["mean"].shape == (4,)
    return x

with torch.no_grad():
    assert sample().shape == (4, 8)
assert len(ran) == {times}, len(ran)
{then}
for step in range(2):
    out, _ = model(torch.ones(4, 8, device="cuda"), torch.ones(4, device="cuda"))
    out.sum().backward()
    optimizer.step()
    if step == 0:
        with torch.no_grad():
            sample()
"""


def products(folder: Path, more: str, times: int, then: str = "") -> int:
    """How many products the step has, of the samples that are drawn in it and of the training."""
    path = folder / "train.py"
    path.write_text(SAMPLING.format(more=more, times=times, then=then))
    recorder = run_script(Script(path=path), World(), TorchAdapter()).recorder
    assert any("train.py:19: the step runs modules 50 times without gradients" in note for note in recorder.notes)
    assert any("Model is run 2 times without gradients" in note for note in recorder.notes) == (times == 2)
    return sum(str(node.target) == "aten.addmm.default" for node in recorder.graph.nodes)


def test_what_is_made_as_before_is_not_made_again(tmp_path: Path) -> None:
    assert products(tmp_path, "pass", 2) == 51


@pytest.mark.parametrize(
    "more",
    [
        "self.seen += 1", "self.kept.append(x)", "self.last = x + 1", "self.layer.extra = object()",
    ],
)  # fmt: skip
def test_a_module_that_holds_something_new_after_each_call_is_run(tmp_path: Path, more: str) -> None:
    assert products(tmp_path, more, 50) == 51


@pytest.mark.parametrize("given", ["x, {'mean': t}", "x[:], {'mean': x[0, :4]}"])
def test_a_module_that_gives_back_what_it_was_given_is_run(tmp_path: Path, given: str) -> None:
    assert products(tmp_path, f"if not torch.is_grad_enabled(): return {given}", 50) == 1


def test_what_has_gradients_is_run(tmp_path: Path) -> None:
    then = "ran.clear(); [model(torch.ones(2, 8, device='cuda'), torch.ones(2, device='cuda')) for _ in range(9)]"
    assert products(tmp_path, "pass", 2, f"{then}\nassert len(ran) == 9") == 51

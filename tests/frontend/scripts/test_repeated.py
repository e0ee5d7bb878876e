"""A script that samples before it trains: what its modules make again is not worked out again."""

from __future__ import annotations

from pathlib import Path

import pytest

from echograph.frontend.scripts.capture import capture_script
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
    assert any("Model is run a few times without gradients" in note for note in recorder.notes) == (times == 2)
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


GROWING = """import torch
lengths = []

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.layer = torch.nn.Embedding(50, 8), torch.nn.Linear(8, 50)
    def forward(self, ids, start):
        lengths.append(ids.shape[1])
        h = self.words(ids)
        {more}
        return self.layer(h), {{"seen": h, "next": start + 1}}

model = Model().cuda()
ids = torch.zeros(2, 5, dtype=torch.long, device="cuda")
with torch.no_grad():
    for word in range(100):
        out, kept = model(ids, word)
        assert kept["next"] == word + 1 and kept["seen"].is_cuda
        if lengths[-1] == ids.shape[1] or lengths[-1] >= 28:
            assert out.shape == (2, {size}, 50) and kept["seen"].shape == (2, {size}, 8), (word, out.shape)
        ids = torch.cat([ids, out[:, -1:].argmax(-1)], 1)
assert {ran}, lengths
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    model(ids, 0)[0].sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("more", "size", "ran"),
    [
        ("pass", "word + 5", "lengths == [5, 6, 7, 10, 16, 28, 52, 100]"),
        ("h = h[:, -20:]", "min(word + 5, 20)", "lengths[:6] == [5, 6, 7, 10, 16, 28]"),
        ("h = h.repeat(1, ids.shape[1], 1)", "(word + 5) ** 2", "len(lengths) == 100"),
    ],
)  # fmt: skip
def test_what_is_made_of_one_more_is_known_by_few(tmp_path: Path, more: str, size: str, ran: str) -> None:
    path = tmp_path / "train.py"
    path.write_text(GROWING.format(more=more, size=size, ran=ran))
    recorder = run_script(Script(path=path), World(), TorchAdapter()).recorder
    assert recorder.recorded and recorder.samples == 2


ACTING = """import torch
ran = []

class Policy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 4)
    def forward(self, x):
        ran.append(1)
        return self.layer(x)

model, acting = Policy().cuda(), Policy().cuda().requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(50):
    acting(torch.ones(2, 8, device="cuda"))
assert len(ran) == 2, len(ran)
for step in range(2):
    model(torch.ones(4, 8, device="cuda")).sum().backward()
    optimizer.step()
"""


def test_sizes_that_take_turns_are_each_known(tmp_path: Path) -> None:
    text = ACTING.replace("range(50)", "range(60)").replace("torch.ones(2, 8", "torch.ones((2, 3, 7)[_ % 3], 8")
    path = tmp_path / "train.py"
    path.write_text(text.replace("len(ran) == 2", "len(ran) == 6"))
    assert run_script(Script(path=path), World(), TorchAdapter()).recorder.recorded


def test_what_has_no_gradients_needs_no_word_of_the_script(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(ACTING)
    assert run_script(Script(path=path), World(), TorchAdapter()).recorder.recorded


MOVED = """import torch
model, teacher = torch.nn.Linear(8, 8).cuda(), torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
stream, event = torch.cuda.Stream(), torch.cuda.Event()
for step in range(6):
    if step in {samples}:
        event.record(stream)
        with torch.no_grad(), torch.cuda.stream(stream):
            for _ in range(20):
                teacher(torch.ones(2, 8, device="cuda"))
        torch.cuda.current_stream().wait_stream(stream)
        event.wait()
    for _ in range(2):
        model(torch.ones(4, 8, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("samples", "moves", "products", "steps"),
    [("[1]", True, 2, 3), ("[1, 2]", True, 22, 3), ("[0, 1]", True, 22, 2), ("[1]", False, 22, 2)],
)
def test_a_step_that_evaluates_as_none_before_it_is_not_recorded(
    tmp_path: Path, samples: str, moves: bool, products: int, steps: int
) -> None:
    path = tmp_path / "train.py"
    path.write_text(MOVED.format(samples=samples))
    job = capture_script(Script(path=path, moves=moves), World(), TorchAdapter()).graph
    assert job.workload.batch_size == 4 and job.workload.parameters == 72
    run = run_script(Script(path=path, moves=moves), World(), TorchAdapter())
    found = [node for node in run.recorder.graph.nodes if str(node.target) == "aten.addmm.default"]
    assert len(found) == products and run.recorder.steps == steps
    assert any("train.py:10: step 2 runs modules" in note for note in run.recorder.notes) == (steps == 3)


@pytest.mark.parametrize(("mode", "products", "steps"), [("eval", 2, 3), ("train", 22, 2)])
def test_an_evaluation_with_gradients_on_is_one(tmp_path: Path, mode: str, products: int, steps: int) -> None:
    path = tmp_path / "train.py"
    text = MOVED.format(samples="[1]").replace("torch.no_grad()", "torch.enable_grad()")
    path.write_text(text.replace("stream, event =", f"teacher.{mode}()\nstream, event ="))
    run = run_script(Script(path=path, moves=True), World(), TorchAdapter())
    found = [node for node in run.recorder.graph.nodes if str(node.target) == "aten.addmm.default"]
    assert len(found) == products and run.recorder.steps == steps


TURNS = """import torch
made, judged = torch.nn.Linear(8, 8).cuda(), torch.nn.Linear(8, 1).cuda()
first = torch.optim.{kind}(judged.parameters(), lr=0.1)
second = torch.optim.{kind}(made.parameters(), lr=0.1)
for step in range(4):
    first.zero_grad()
    judged(made(torch.ones(4, 8, device="cuda")).detach()).sum().backward()
    first.step()
    second.zero_grad()
    judged(made(torch.ones(4, 8, device="cuda"))).sum().backward()
    second.step()
"""


@pytest.mark.parametrize(
    ("kind", "moves", "steps", "held"), [("Adam", True, 3, 162), ("Adam", False, 2, 18), ("SGD", True, 2, 0)]
)
def test_a_step_in_which_an_optimizer_makes_its_state_is_not_recorded(
    tmp_path: Path, kind: str, moves: bool, steps: int, held: int
) -> None:
    """A step ends with the optimizer that stepped first: the other's first one is in the second."""
    path = tmp_path / "train.py"
    path.write_text(TURNS.format(kind=kind))
    run = run_script(Script(path=path, moves=moves), World(), TorchAdapter())
    nodes = [node for node in run.recorder.graph.nodes if node.meta.get("role") == "optimizer_state"]
    assert sum(node.meta["val"].numel() for node in nodes if node.meta["val"].dim()) == held
    assert run.recorder.steps == steps
    assert any("train.py:11: step 2 is the first of an optimizer" in n for n in run.recorder.notes) == (steps == 3)

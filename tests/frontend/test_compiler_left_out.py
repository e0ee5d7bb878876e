"""PyTorch's compiler is imported where a capture needs it, whole, and is gone afterwards where it does not."""

from __future__ import annotations

import subprocess
import sys

import pytest

BEGIN = """
import sys, torch
from echograph.frontend.pytorch.capture import fake_mode
assert "torch._dynamo" not in sys.modules
def whole():
    return "torch._dynamo.eval_frame" in sys.modules
def step(mode):
    model = torch.nn.Linear(4, 4)
    model.register_buffer("real", torch.zeros(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
PROGRAMS = {
    "a step needs none of it": """
with fake_mode() as mode:
    step(mode)
    assert not whole()
    assert torch._dynamo.config.cache_size_limit > 0 and not whole()
    assert torch._dynamo.utils.get_optimize_ddp_mode() == "ddp_optimizer" and not whole()
    assert not hasattr(torch._dynamo, "__wrapped__") and not whole()
assert not [name for name in sys.modules if name.startswith("torch._dynamo")]
""",
    "twice": """
for _ in range(2):
    with fake_mode() as mode:
        step(mode)
assert not whole()
""",
    "a name": """
with fake_mode() as mode:
    step(mode)
    place = torch._dynamo
    assert callable(torch._dynamo.explain) and whole()
    import torch._dynamo.utils
    assert torch._dynamo is place and torch._dynamo.utils is sys.modules["torch._dynamo.utils"]
    step(mode)
assert sys.modules["torch._dynamo"] is place
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item() == 2
""",
    "a part": """
with fake_mode() as mode:
    from torch._dynamo.eval_frame import OptimizedModule
    part = sys.modules["torch._dynamo.eval_frame"]
    assert OptimizedModule is torch._dynamo.OptimizedModule is part.OptimizedModule
    assert part.__spec__.origin.endswith("eval_frame.py") and part.__spec__.loader is part.__loader__
""",
    "a source": """
with fake_mode() as mode:
    from torch._dynamo.source import ConstantSource, LocalSource
    assert whole() and sys.modules["torch._dynamo.source"].LocalSource is LocalSource
    from torch._dynamo.source import ConstantSource
    assert ConstantSource is sys.modules["torch._dynamo.source"].ConstantSource
""",
    "a choice": """
with fake_mode() as mode:
    torch._dynamo.config.optimize_ddp = False
    assert torch._dynamo.utils.get_optimize_ddp_mode() == "no_optimization" and whole()
""",
    "what is not to be compiled stays so": """
with fake_mode() as mode:
    step(mode)
calls = []
@torch.compile(backend=lambda graph, inputs: calls.append(graph) or graph.forward)
def run(optimizer):
    optimizer.zero_grad()
    return torch.ones(1) + 1
run(torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1))
assert whole() and calls
""",
    "patched functions are not what it keeps": """
from echograph.frontend.scripts.adapter import replaced, unpatched
before = torch.cuda.set_device
def nothing(*_, **__): ...
with fake_mode(unpatched), replaced(torch.cuda, "set_device", nothing), replaced(torch.cuda, "init", nothing):
    torch._dynamo.explain
    assert whole() and torch.cuda.set_device is torch.cuda.init is nothing
assert torch.cuda.set_device is before
""",
}


# Each imports the compiler; the others do it in other ways.
FAST = ("a step needs none of it", "a part")


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=() if what in FAST else pytest.mark.slow) for what in PROGRAMS]
)
def test_the_compiler_is_there_where_it_is_asked_for(what: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + PROGRAMS[what]], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr

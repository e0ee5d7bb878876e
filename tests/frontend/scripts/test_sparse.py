"""Sparse tensors of a script: where they lie, what they hold, and their products with dense matrices."""

from __future__ import annotations

from pathlib import Path

import pytest

from echograph.errors import CaptureError
from echograph.frontend.scripts.run import Script, ScriptRun, run_script
from echograph.frontend.scripts.torch_adapter import TorchAdapter
from echograph.frontend.scripts.world import World

_TRAIN = """
import torch

places = torch.randint(0, 50, (2, 300))
graph = torch.sparse_coo_tensor(places, torch.ones(300), (50, 40)).coalesce().to("cuda")
eye = torch.sparse.FloatTensor(torch.LongTensor([[0, 1, 2]] * 2), torch.ones(3), torch.Size([50, 50]))

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = torch.nn.Embedding(40, 16)
        self.register_buffer("eye", eye)

    def forward(self, graph):
        {forward}

model = Model().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(graph).sum().backward()
    optimizer.step()
"""


def _run(folder: Path, forward: str) -> ScriptRun:
    (folder / "train.py").write_text(_TRAIN.format(forward=forward.replace("; ", "\n        ")))
    return run_script(Script(path=folder / "train.py"), World(size=1), TorchAdapter())


def _products(run: ScriptRun) -> list[tuple[int, ...]]:
    nodes = (node for node in run.recorder.graph.nodes if str(node.target) == "coo.mm.default")
    return [tuple(node.meta["val"].shape) for node in nodes]


@pytest.mark.parametrize(
    "forward",
    [
        "return torch.sparse.mm(graph, self.rows.weight)",
        "return graph @ self.rows.weight",
        "return (self.rows.weight.t() @ graph.t()).t()",
        "return torch.spmm(graph.float() * 2, self.rows.weight)",
    ],
)
def test_a_product_is_one_operator_each_way(tmp_path: Path, forward: str) -> None:
    assert _products(_run(tmp_path, forward)) == [(50, 16), (40, 16)]


def test_a_buffer_goes_with_its_module(tmp_path: Path) -> None:
    asked = "assert self.eye.is_cuda and self.eye.is_sparse and isinstance(self.eye, torch.sparse.FloatTensor)"
    sizes = "assert self.eye.shape == (50, 50) and graph._nnz() == 300 and graph.indices().shape == (2, 300)"
    run = _run(tmp_path, f"{asked}; {sizes}; return torch.mm(self.eye, torch.mm(graph, self.rows.weight))")
    assert _products(run) == [(50, 16), (50, 16), (50, 16), (40, 16)]


def test_values_have_a_gradient_of_their_own(tmp_path: Path) -> None:
    """As attention over edges has."""
    line = "held = self.rows.weight[:, 0].repeat(8)[:300]"
    made = "made = torch.sparse_coo_tensor(graph.indices(), held, (50, 40))"
    run = _run(tmp_path, f"{line}; {made}; return torch.sparse.mm(made, self.rows.weight)")
    targets = [str(node.target) for node in run.recorder.graph.nodes]
    assert targets.count("coo.mm.default") == 2 and targets.count("coo.sampled_mm.default") == 1


def test_what_is_not_known_of_one_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"train\.py:15: 'cumsum' of a sparse tensor is not captured"):
        _run(tmp_path, "return graph.cumsum(0)")

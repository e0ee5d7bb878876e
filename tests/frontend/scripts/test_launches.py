"""What operators launch beside their kernels, against what PyTorch itself does where a processor shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile

from echograph.frontend.scripts.capture import capture_script
from echograph.frontend.scripts.launches import Launch, beside
from echograph.frontend.scripts.recorder import REGION
from echograph.frontend.scripts.run import Script
from echograph.frontend.scripts.torch_adapter import TorchAdapter
from echograph.frontend.scripts.world import World
from echograph.ir.passes.fuse import COMPILED, FUSED, KernelRegion

Run = Callable[[Tensor], Tensor]

MADE: dict[str, Run] = {
    "clone": lambda x: x.clone(),
    "copied to lie in order": lambda x: x.t().contiguous(),
    "cast": lambda x: x.to(torch.bfloat16),
    "zeros": lambda x: torch.zeros(8, 8),
    "zeros like it": torch.zeros_like,
    "numbers": lambda x: torch.full((4,), 2.0),
    "masked": lambda x: x.masked_fill(torch.ones(8).bool(), 0.0),
    "put by index": lambda x: x.index_put((torch.tensor([1, 2]),), x[:2]),
    "repeated": lambda x: x.repeat(2, 2),
    "padded": lambda x: torch.nn.functional.pad(x, (1, 1)),
    "reserved": torch.empty_like,
    "sum": lambda x: x + x,
    "product": lambda x: x @ x.t(),
    "reduced": lambda x: x.sum(0),
    "joined": lambda x: torch.cat([x, x]),
    "softmax": lambda x: x.softmax(-1),
    "changed in place": lambda x: x.mul_(x),
}


@pytest.fixture
def in_order() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def called(run: Callable[..., Tensor], *others: Tensor) -> Node:
    """The last call of a function of a matrix, and of other tensors."""
    graph = make_fx(run, tracing_mode="fake")(torch.randn(16, 8), *others).graph
    calls: list[Node] = [node for node in graph.nodes if node.op == "call_function"]
    return calls[-1]


def fills(run: Run) -> int:
    given = torch.randn(16, 8)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        run(given)
    return sum(event.name == "aten::fill_" for event in seen.events())


def launched(node: Node, in_order: bool = True, fills: bool = True) -> list[str]:
    return [launch.operator for launch in beside(node, in_order, fills)]


@pytest.mark.parametrize("name", MADE)
@pytest.mark.usefixtures("in_order")
def test_memory_is_filled_where_pytorch_fills_it(name: str) -> None:
    run = MADE[name]
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        without = fills(run)
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    known = "aten.fill_" in launched(called(run))
    assert known == (fills(run) > without)


def test_what_is_filled_is_as_large_as_what_is_made() -> None:
    assert list(beside(called(torch.clone), True, True)) == [Launch("aten.fill_", 0, 16 * 8 * 4)]
    assert launched(called(torch.clone), fills=False) == []


@pytest.mark.usefixtures("in_order")
def test_each_result_is_filled_by_itself() -> None:
    def normed(x: Tensor) -> Tensor:
        return torch.native_layer_norm(x, (8,), None, None, 1e-5)[0]

    made = called(normed).all_input_nodes[0]
    filled = [launch.bytes_written for launch in beside(made, True, True)]
    assert filled == [16 * 8 * 4, 16 * 4, 16 * 4], "what is normed, means and deviations"
    assert len(filled) == fills(normed)
    made.meta[REGION] = KernelRegion(maker=FUSED, number=1)
    assert len(list(beside(made, True, True))) == 4, "and a workspace of Transformer Engine's"


def test_additions_by_index_are_sorted_where_they_have_an_order() -> None:
    node = called(
        lambda x, index, added: x.index_add_(0, index, added), torch.arange(4096) % 16, torch.ones(4096, 8)
    )
    found = launched(node)
    assert found.count("aten.sort") == 3, "digits counted, added up, and one pass over 4 bits"
    assert {"aten.aminmax", "aten.remainder", "aten.arange"} <= set(found)
    assert launched(node, in_order=False) == []
    added = called(lambda x, index: x.index_add(0, index, x), torch.arange(16))
    assert launched(added, in_order=False) == ["aten.copy_"], "into memory that PyTorch makes past `torch.empty`"


def test_what_is_put_by_an_index_of_one_dimension_is_sorted_where_it_has_an_order() -> None:
    """Places are made of the index and the other coordinate first (TensorAdvancedIndexing.cpp)."""
    index = torch.arange(16).unsqueeze(1).repeat(1, 8)
    node = called(lambda x, index, put: x.scatter_(0, index, put), index, torch.ones(16, 8))
    found = list(beside(node, True, True))
    assert found[:4] == [
        Launch("aten.fill_", 0, 2 * 16 * 8 * 8), Launch("aten.arange", 0, 8), Launch("aten.copy_", 8, 16 * 8 * 8),
        Launch("aten.copy_", 16 * 8 * 8, 16 * 8 * 8),
    ]  # fmt: skip
    assert [launch.operator for launch in found].count("aten.sort") == 1
    assert launched(node, in_order=False) == []
    alone = launched(called(lambda x, index: x.flatten().scatter_(0, index, x.flatten()), torch.arange(128)))
    assert "aten.mul" in alone and "aten.copy_" not in alone, "places are the index itself"


def test_gradients_of_an_index_are_sorted_always_and_not_checked() -> None:
    node = called(
        lambda x, index, added: x.index_put((index,), added, accumulate=True), torch.arange(32) % 16,
        torch.ones(32, 8),
    )  # fmt: skip
    found = launched(node, in_order=False)
    assert found.count("aten.sort") == 1
    assert "aten.aminmax" not in found
    assert found[0] == "aten.copy_", "what is returned is another tensor"


def test_what_a_mask_chooses_is_not_sorted() -> None:
    node = called(lambda x, mask, number: x.index_put((mask,), number), torch.ones(16).bool(), torch.tensor(0.0))
    assert "aten.sort" not in launched(node)


@pytest.mark.parametrize(
    ("run", "kernels"),
    [
        (torch.count_nonzero, ["aten.sum"]),
        (lambda x: torch.count_nonzero(x > 0), []),
        (lambda x: x.topk(2)[0], ["aten.sort"]),
        (lambda x: x.masked_fill(x > 0, 0.0), ["aten.copy_"]),
        (lambda x: x + 1, []),
    ],
)
def test_operators_of_several_kernels(run: Run, kernels: list[str]) -> None:
    node = called(run)
    asked = node.all_input_nodes[0] if "getitem" in str(node.target) else node
    assert launched(asked, in_order=False, fills=False) == kernels


def test_of_what_stands_for_one_kernel_only_what_leaves_it_is_made() -> None:
    graph = make_fx(lambda x: x.exp().tanh(), tracing_mode="fake")(torch.randn(4)).graph
    first, last = [node for node in graph.nodes if node.op == "call_function"]
    for maker, expected in ((FUSED, ["aten.fill_"]), (COMPILED, [])):
        region = KernelRegion(maker=maker, number=1)
        for node in (first, last):
            node.meta[REGION] = region
        assert launched(first) == []
        assert launched(last) == expected


MASKED = """import torch
weights = torch.nn.Parameter(torch.zeros(8{device}))
optimizer = torch.optim.SGD([weights], lr=0.1)
for _ in range(4):
    weights.masked_fill(torch.ones(8{device}).bool(), 0.0).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("gpus", [True, False])
def test_a_processor_launches_nothing_beside(tmp_path: Path, gpus: bool) -> None:
    path = tmp_path / "train.py"
    path.write_text(MASKED.format(device=", device='cuda'" if gpus else ""))
    graph = capture_script(Script(path=path), World(size=1, gpus=gpus), TorchAdapter()).graph
    names = [graph.strings[name] for name in graph.ops.name]
    assert "aten.masked_fill" in names
    assert ("aten.copy_" in names) is gpus

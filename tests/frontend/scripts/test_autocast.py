"""Autocast in a captured script is CUDA's, whose operators are not the CPU's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from echograph.frontend.scripts import autocast
from echograph.frontend.scripts.capture import capture_script
from echograph.frontend.scripts.run import Script
from echograph.frontend.scripts.torch_adapter import TorchAdapter
from echograph.frontend.scripts.world import World
from echograph.ir.graph import JobGraph
from echograph.ir.types import DType, Gemm
from echograph.simulator.memory import memory

WIDE, NARROW = torch.float32, torch.bfloat16


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU is said to be there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_: True)
    with autocast.as_on_cuda():
        yield


def test_every_operator_of_cudas_autocast_is_known() -> None:
    """Of this version of PyTorch: what is in no list has operands of fp32, as the header has it."""
    listed = autocast._IN_16_BITS | autocast._SUMMED_IN_FP32 | autocast._IN_THE_WIDEST | autocast._REFUSED
    registered = autocast._registered("AutocastCUDA")
    assert listed <= registered
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    in_fp32 = header.read_text().split("#define AT_FORALL_FP32(_)")[1].split("#define")[0]
    words = [line.strip(" \\\n").removeprefix("_(").removesuffix(")") for line in in_fp32.splitlines()]
    named = {".".join(part.strip() for part in word.split(",")) for word in words if word}
    assert registered - listed == named


# Of PyTorch's documentation, "CUDA Op-Specific Behavior": an operator of each sort, and those of usual models.
OPERATORS: dict[str, tuple[Callable[[Tensor], Tensor], torch.dtype]] = {
    "linear": (lambda x: F.linear(x.float(), x.float()), NARROW),
    "conv": (lambda x: F.conv1d(x.float()[None], x.float()[:, :, None]), NARROW),
    "attention": (
        lambda x: F.scaled_dot_product_attention(x[None, None].float(), x[None, None], x[None, None]),
        NARROW,
    ),
    "prelu": (lambda x: F.prelu(x.float(), torch.ones(1)), NARROW),
    "layer_norm": (lambda x: F.layer_norm(x, (4,)), WIDE),
    "rms_norm": (lambda x: F.rms_norm(x, (4,)), WIDE),
    "group_norm": (lambda x: F.group_norm(x, 2), WIDE),
    "pow": (lambda x: torch.pow(x, 3.0), WIDE),
    "rsqrt": (lambda x: x.rsqrt(), WIDE),
    "mse_loss": (lambda x: F.mse_loss(x, x), WIDE),
    "softmax": (lambda x: x.softmax(-1), WIDE),
    "softmax of a type": (lambda x: x.softmax(-1, NARROW), NARROW),
    "cross_entropy": (lambda x: F.cross_entropy(x, torch.zeros(4, dtype=torch.long)), WIDE),
    "sum": (lambda x: x.sum(0, keepdim=True), WIDE),
    "norm": (lambda x: x.norm(2, 1), WIDE),
    "norm of all": (lambda x: torch.ops.aten.norm.Scalar(x), WIDE),
    "sum of integers": (lambda x: x.long().sum(), torch.int64),
    "addcmul": (lambda x: torch.addcmul(x.float(), x, x), WIDE),
    "addcmul of 16 bits": (lambda x: torch.addcmul(x, x, x), NARROW),
    "norm of 64 bits": (lambda x: F.layer_norm(x.double(), (4,)), torch.float64),
    # What is in no list of CUDA's, and in those of the CPU.
    "gelu": (F.gelu, NARROW),
    "interpolate": (lambda x: F.pad(x[None], (1, 1), "replicate"), NARROW),
}


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("name", OPERATORS)
def test_types_of_results(name: str) -> None:
    operator, expected = OPERATORS[name]
    given = torch.rand(4, 4, dtype=NARROW)
    with torch.autocast("cuda", dtype=NARROW):
        assert operator(given).dtype == expected
        with torch.autocast("cuda", enabled=False):
            assert F.layer_norm(given, (4,)).dtype == NARROW
    assert F.layer_norm(given, (4,)).dtype == NARROW


@pytest.mark.usefixtures("cuda")
def test_losses_that_a_gpu_refuses() -> None:
    with torch.autocast("cuda"), pytest.raises(RuntimeError, match="take binary_cross_entropy_with_logits"):
        F.binary_cross_entropy(torch.rand(4), torch.rand(4))


@pytest.mark.usefixtures("cuda")
def test_gradients_go_through_casts() -> None:
    layer = torch.nn.Linear(4, 4)
    with torch.autocast("cuda", dtype=NARROW):
        F.layer_norm(layer(torch.rand(4, 4)), (4,)).pow(2).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == WIDE


@pytest.mark.usefixtures("cuda")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_is_asked_and_set_is_cudas() -> None:
    assert not torch.is_autocast_enabled("cuda")
    with torch.autocast("cuda", dtype=NARROW):
        assert torch.is_autocast_enabled()
        assert torch.get_autocast_gpu_dtype() == NARROW
    torch.set_autocast_enabled(True)  # type: ignore[call-overload]  # the older way, of "cuda"
    torch.set_autocast_gpu_dtype(torch.float16)
    assert F.linear(torch.rand(4, 4), torch.rand(4, 4)).dtype == torch.float16
    torch.set_autocast_enabled("cuda", False)
    assert F.linear(torch.rand(4, 4), torch.rand(4, 4)).dtype == WIDE


def test_a_capture_leaves_the_cpus_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with autocast.as_on_cuda():
        torch.autocast("cuda", torch.float16).__enter__()
    assert not torch.is_autocast_enabled("cuda")
    assert not torch.is_autocast_enabled("cpu")
    with torch.autocast("cpu", NARROW):
        assert F.layer_norm(torch.rand(4, 4, dtype=NARROW), (4,)).dtype == NARROW
        assert F.binary_cross_entropy(torch.rand(4), torch.rand(4)).dtype == WIDE


SCRIPT = """import torch
embed, head = torch.nn.Embedding(1000, 64).cuda(), torch.nn.Linear(64, 1000).cuda()
optimizer = torch.optim.SGD([*embed.parameters(), *head.parameters()], lr=0.1)
for step in range(3):
    classes = torch.zeros(4096, dtype=torch.long, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = torch.nn.functional.cross_entropy(head(embed(classes)), classes)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_losss_copy_in_fp32_lives_until_its_gradient(tmp_path: Path) -> None:
    """Log-probabilities in 16 bits and in 32, a gradient in 32: as at the peak of BERT's step on an H200."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    graph = capture_script(Script(path=path), World(size=1), TorchAdapter()).graph
    logits = 4096 * 1000
    found = memory(graph, 0, 0, reserve=False)
    assert found is not None
    assert found.peak_bytes - found.at_rest_bytes == pytest.approx(logits * (2 + 4 + 4), rel=0.05)


@pytest.mark.parametrize(
    ("said", "rounded"),
    [
        ("", {False}),
        ("torch.backends.cuda.matmul.allow_tf32 = True", {True}),
        ("torch.set_float32_matmul_precision('high')", {True}),
        ("torch.backends.cuda.matmul.fp32_precision = 'tf32'", {True}),
        ("torch.backends.fp32_precision = 'tf32'", {True}),
        ("torch.backends.cudnn.allow_tf32 = True", {False}),
    ],
)
def test_a_script_may_let_products_of_fp32_be_rounded(said: str, rounded: set[bool], tmp_path: Path) -> None:
    """Forward and backward, on every rank; those of 16 bits are not."""
    graph = captured(ROUNDED.format(said=said), tmp_path, ranks=2)
    products = [op for op in map(graph.ops.__getitem__, range(len(graph.ops))) if "mm" in op.name]
    types = {graph.tensors[op.inputs[-1]].dtype for op in products}
    assert types == {DType.FP32, DType.BF16}
    for dtype, expected in ((DType.FP32, rounded), (DType.BF16, {False})):
        of_type = [op.attributes for op in products if graph.tensors[op.inputs[-1]].dtype is dtype]
        assert {one.tf32 for one in of_type if isinstance(one, Gemm)} == expected and len(of_type) >= 2


@pytest.mark.parametrize(
    ("said", "ieee"),
    [
        ("", {False}),
        ("torch.backends.cuda.matmul.allow_tf32 = False", {False}),
        ("torch.backends.cudnn.allow_tf32 = False", {True}),
        ("torch.backends.cudnn.conv.fp32_precision = 'ieee'", {True}),
    ],
)
def test_a_script_may_forbid_that_convolutions_round(said: str, ieee: set[bool], tmp_path: Path) -> None:
    graph = captured(ROUNDED.format(said=said).replace("Linear(64, 64)", "Conv1d(32, 32, 1)"), tmp_path, ranks=1)
    found = [op for op in map(graph.ops.__getitem__, range(len(graph.ops))) if "convolution" in op.name]
    wide = [op for op in found if graph.tensors[op.inputs[-1]].dtype is DType.FP32]
    assert {op.attributes.ieee for op in wide} == ieee
    assert not any(op.attributes.ieee for op in found if op not in wide)


def captured(text: str, folder: Path, ranks: int) -> JobGraph:
    """The graph of a script, after which PyTorch's settings are what they were."""
    path, before = folder / "train.py", fp32_precisions()
    path.write_text(text)
    graph = capture_script(Script(path=path), World(size=ranks), TorchAdapter()).graph
    assert fp32_precisions() == before
    return graph


def fp32_precisions() -> tuple[object, ...]:
    """What PyTorch's older and newer words say; they raise where they contradict each other."""
    older = torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32
    kinds = (("generic", "all"), ("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn"))
    newer = [torch._C._get_fp32_precision_getter(*kind) for kind in kinds]
    return *older, torch.backends.cudnn.allow_tf32, *newer


ROUNDED = """import torch
{said}
model, head = torch.nn.Linear(64, 64).cuda(), torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
for step in range(3):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        x = model(torch.ones(32, 64, device="cuda"))
    head(x.float()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

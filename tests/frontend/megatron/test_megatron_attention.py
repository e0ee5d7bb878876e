"""Stand-ins for Transformer Engine's attention and Apex's softmax: what they compute, and what captures have."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the [torch] extra")
if find_spec("megatron") is None:
    pytest.skip("needs the [megatron] extra", allow_module_level=True)

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from echograph.errors import CaptureError
from echograph.frontend.megatron import apex, attention, packing
from echograph.frontend.megatron.adapter import MegatronAdapter
from echograph.frontend.scripts.capture import capture_script
from echograph.frontend.scripts.run import Script
from echograph.frontend.scripts.streams import CapturedStream
from echograph.frontend.scripts.world import World
from echograph.ir.graph import JobGraph
from echograph.ir.types import Compute, Send, TensorRole

pytestmark = pytest.mark.torch

SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "megatron-gpt" / "pretrain.py"
VARIABLES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


def attended(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    """[batch, heads, sequence, channels], by the definition."""
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], dim=1) for t in (key, value))
    scores = query @ key.mT / query.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), float("-inf"))
    return scores.softmax(-1) @ value


# -- where sequences begin --------------------------------------------------------------------------------------


class Calls(TorchDispatchMode):
    """Notes the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("kind", "masks", "found"), [("padding", 1, 2), ("padding", 2, 2), ("causal", 1, 0)])
def test_each_call_finds_out_where_padded_sequences_begin(kind: str, masks: int, found: int) -> None:
    """Of queries and of keys, which may have the same mask."""
    of_keys = torch.zeros(2, 1, 1, 8, dtype=torch.bool)
    given = torch.randn(8, 2, 4, 16)
    with Calls() as calls:
        attention.DotProductAttention(attention_dropout=0.0)(
            given, given, given, of_keys if masks == 1 else (of_keys, of_keys), attn_mask_type=kind
        )
    assert calls.names.count("cumsum") == calls.names.count("logical_not") == found


@pytest.mark.parametrize("kind", ["self", "cross"])
def test_flash_attention_packs_what_is_padded(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Where cuDNN's kernel is ruled out; all sequences are full, so the result is that of no padding."""
    query = torch.randn(8, 2, 4, 16, requires_grad=True)
    others = torch.randn(8 if kind == "self" else 12, 2, 4, 16)
    mask = torch.zeros(2, 1, 1, 8, dtype=torch.bool), torch.zeros(2, 1, 1, len(others), dtype=torch.bool)
    results, gathered = [], []
    for fused in ("1", "0"):
        monkeypatch.setenv("NVTE_FUSED_ATTN", fused)
        attend = attention.DotProductAttention(
            attention_dropout=0.0, attention_type=kind, attn_mask_type="padding"
        )
        with Calls() as calls:
            made = attend(query, others, others, mask, attn_mask_type="padding")
            (gradient,) = torch.autograd.grad(made.square().sum(), query)
        results.append((made, gradient))
        gathered.append((calls.names.count("gather"), calls.names.count("scatter_")))
    torch.testing.assert_close(results[0], results[1])
    # Queries, keys and values are packed, and the result's gradient; the result and gradients are unpacked.
    assert gathered == [(0, 0), (4, 2 if kind == "cross" else 4)]


def test_the_host_reads_how_long_each_sequence_is_before_it_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[Any] = []
    monkeypatch.setattr(CapturedStream, "host_waits", waits.append, raising=False)
    index = packing.indices(3, 4, torch.device("cpu"))
    assert len(waits) == 3
    assert index.flatten().tolist() == list(range(12))


# -- Apex's softmax -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_a_softmax_with_scale_and_mask_has_its_gradient(causal: bool, masked: bool) -> None:
    scores = torch.randn(2, 3, 8, 8, requires_grad=True)
    mask = torch.zeros(2, 1, 8, 8, dtype=torch.bool)
    mask[..., 5:] = masked
    apex.masked_softmax(scores, mask, causal, 0.5).square().sum().backward()
    again = scores.detach().clone().requires_grad_()
    behind = torch.ones(8, 8, dtype=torch.bool).triu(1) if causal else torch.zeros(8, 8, dtype=torch.bool)
    (again * 0.5).masked_fill(mask | behind, -10000.0).softmax(-1).square().sum().backward()
    torch.testing.assert_close(scores.grad, again.grad)


@pytest.mark.parametrize(("keys", "rows"), [(16, 16), (32, 8), (100, 8), (128, 8), (256, 4), (4096, 4)])
def test_rows_of_a_block_are_those_of_a_warp_or_two(keys: int, rows: int) -> None:
    """128 threads are four warps of 32, or more where a row is shorter than a warp; short rows go in twos."""
    assert apex.batch_per_block(keys, keys, 1, 1) == rows


# -- Transformer Engine's attention ---------------------------------------------------------------------------


def unfused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(VARIABLES, "001", strict=True):
        monkeypatch.setenv(name, value)


def test_unfused_attention_is_that_of_its_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    unfused(monkeypatch)
    layer = attention.DotProductAttention(attention_dropout=0.0)
    query, key, value = (torch.randn(8, 2, heads, 16) for heads in (4, 2, 2))
    out = layer(query, key, value, attn_mask_type="causal")
    expected = attended(*(t.permute(1, 2, 0, 3) for t in (query, key, value)), causal=True)
    torch.testing.assert_close(out, expected.permute(2, 0, 1, 3).reshape(8, 2, -1))


@pytest.mark.parametrize(
    ("causal", "padded", "launched"),
    [(True, False, 10), (False, False, 14), (True, True, 15), (False, True, 19)],
)
def test_masks_of_unfused_attention_are_made_anew_in_each_call(causal: bool, padded: bool, launched: int) -> None:
    mask = torch.zeros(3, 1, 1, 8, dtype=torch.bool)
    mask[1, ..., 5:] = True
    with Calls() as calls:
        found = attention._whole_mask(8, 8, mask if padded else None, causal, padded, torch.device("cpu"))
    expected = torch.ones(8, 8, dtype=torch.bool).triu(1) if causal else torch.zeros(8, 8, dtype=torch.bool)
    if padded:
        expected = expected | mask | mask.transpose(-1, -2)
    assert torch.equal(found, expected.expand(found.shape))
    views = ("view", "expand", "squeeze", "unsqueeze", "slice", "select")
    assert sum(name not in views for name in calls.names) == launched
    assert calls.names.count("arange") == 2


def test_what_is_padded_is_not_attended_to(monkeypatch: pytest.MonkeyPatch) -> None:
    unfused(monkeypatch)
    layer = attention.DotProductAttention(attention_dropout=0.0)
    query, key, value = (torch.randn(8, 1, 2, 16) for _ in range(3))
    padded = torch.zeros(1, 1, 1, 8, dtype=torch.bool)
    padded[..., 6:] = True
    out = layer(query, key, value, padded, attn_mask_type="padding")
    kept = layer(query[:6], key[:6], value[:6], attn_mask_type="no_mask")
    torch.testing.assert_close(out[:6], kept)
    assert not out[6:].any()


@pytest.mark.parametrize(("queries", "kept"), [(1, 1), (2, 3)])
def test_parts_of_a_product_are_copied_where_their_layout_is_unknown(queries: int, kept: int) -> None:
    """[q, k, v] of each head are one memory; grouped queries are a copy, and k and v then have no layout."""
    product = torch.randn(8, 1, 2, (queries + 2) * 16)
    query, key, value = product.split([queries * 16, 16, 16], dim=-1)
    query = query.reshape(8, 1, 2 * queries, 16)
    layer = attention.DotProductAttention(attention_dropout=0.0)
    given: list[tuple[Tensor, ...]] = []
    attend = layer._kernel
    layer._kernel = lambda *args: given.append(args[:3]) or attend(*args)  # type: ignore[func-returns-value, method-assign]
    layer(query, key, value, attn_mask_type="causal")
    memories = {tensor.untyped_storage()._cdata for tensor in given[0]}
    assert len(memories) == kept
    assert (product.untyped_storage()._cdata in memories) == (kept == 1)


def test_no_kernel_at_all_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "0")
    with pytest.raises(CaptureError, match="--attention-backend") as raised:
        attention.DotProductAttention(attention_dropout=0.0)
    assert "\n" not in str(raised.value)


# -- keys and values passed around ----------------------------------------------------------------------------


class Ring:
    """Ranks as threads: what one passes on, its neighbour takes."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.boxes: dict[tuple[int, bool], queue.Queue[Tensor]] = {
            (rank, back): queue.Queue() for rank in range(size) for back in (False, True)
        }

    def pass_on(self, held: Tensor, group: Any, back: bool = False) -> tuple[Tensor, list[Any]]:
        rank = group.rank()
        to = (rank - 1 if back else rank + 1) % self.size
        self.boxes[to, back].put(held.clone())
        return self.boxes[rank, back].get(timeout=60), [SimpleNamespace(wait=lambda: None)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_a_ring_attends_as_one_rank_does(
    monkeypatch: pytest.MonkeyPatch, ranks: int, causal: bool, kv_heads: int
) -> None:
    """Each rank has the n-th part and the n-th from the end: outputs and gradients are those of the whole."""
    ring = Ring(ranks)
    monkeypatch.setattr(attention, "_pass_on", ring.pass_on)
    part = 4
    whole = [torch.randn(2, heads, 2 * ranks * part, 8) for heads in (4, kv_heads, kv_heads)]
    above = torch.randn(2, 4, 2 * ranks * part, 8)
    found: dict[int, list[Tensor]] = {}

    def mine(tensor: Tensor, rank: int) -> Tensor:
        parts = tensor.detach().split(part, dim=2)
        return torch.cat((parts[rank], parts[-1 - rank]), dim=2)

    def run(rank: int) -> None:
        group = SimpleNamespace(rank=lambda: rank, size=lambda: ranks)
        given = [mine(tensor, rank).requires_grad_() for tensor in whole]
        of = attention._Around(group=group, causal=causal, dropout=0.0, scale=8**-0.5)
        # Backward by hand: of several threads, autograd runs all in one.
        ctx: Any = SimpleNamespace()
        ctx.save_for_backward = lambda *tensors: setattr(ctx, "saved_tensors", tensors)
        with torch.no_grad():
            out = attention._Ring.forward(ctx, *given, of)
            found[rank] = [out, *attention._Ring.backward(ctx, mine(above, rank))[:3]]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    given = [tensor.requires_grad_() for tensor in whole]
    out = attended(*given, causal=causal)
    out.backward(above)
    for rank in range(ranks):
        for ours, theirs in zip(found[rank], (out, *(t.grad for t in given)), strict=True):
            assert theirs is not None
            torch.testing.assert_close(ours, mine(theirs, rank), rtol=1e-4, atol=1e-5)


# -- captures -------------------------------------------------------------------------------------------------


def captured(size: int, options: str) -> JobGraph:
    model = "--num-layers 2 --hidden-size 64 --seq-length 64 --padded-vocab-size 256 --bf16"
    script = Script(path=SCRIPT, arguments=f"{model} --disable-gloo-process-groups {options}".split())
    return capture_script(script, World(size=size), MegatronAdapter()).graph  # type: ignore[return-value]


def names(job: JobGraph) -> Counter[str]:
    return Counter(op.name for op in job.ops if isinstance(op, Compute))


@pytest.mark.slow
def test_a_backend_chooses_kernels() -> None:
    backends = "", "--attention-backend flash", "--attention-backend unfused"
    any_one, one, several = (
        names(captured(2, f"--transformer-impl transformer_engine {backend}")) for backend in backends
    )
    assert any_one["aten._scaled_dot_product_flash_attention"] == 2, "which one, the stack chooses by the device"
    assert one["flash2.attention"] == one["flash2.attention_backward"] == 2
    assert not one["aten._softmax"]
    assert several["aten._softmax"] == several["aten._softmax_backward_data"] == 2
    assert not any("flash" in name for name in several)


@pytest.mark.slow
def test_a_ring_sends_keys_and_values_and_their_gradients() -> None:
    """In each layer, keys and values once forward and once backward, the sums of their gradients once."""
    job = captured(2, "--transformer-impl transformer_engine --context-parallel-size 2")
    assert [(axis.name, axis.size) for axis in job.mesh if axis.size > 1] == [("cp", 2)]
    held = 2 * 32 * 64 * 2  # keys and values of half of 64 tokens, 64 channels, bf16
    for begin, end in ((p.calls[0][1], p.calls[-1][2]) for p in (q for q in job.programs)):
        sent = Counter((op.phase.name, op.nbytes) for op in job.ops[begin:end] if isinstance(op, Send))
        assert sent == {("FORWARD", held): 2, ("BACKWARD", held): 4}
    parameters = job.workload.parameters
    assert parameters == captured(1, "--transformer-impl transformer_engine").workload.parameters


@pytest.mark.slow
def test_what_stages_send_lives_no_longer_than_its_micro_batch() -> None:
    """Of interleaved stages too, whose messages go out between passes of other micro-batches."""
    options = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --num-layers 4"
    job = captured(2, f"{options} --global-batch-size 8")
    sent = {tensor for op in job.ops if isinstance(op, Send) for tensor in op.inputs}
    assert sent
    assert {job.tensors[tensor].role for tensor in sent} <= {TensorRole.ACTIVATION, TensorRole.GRADIENT}

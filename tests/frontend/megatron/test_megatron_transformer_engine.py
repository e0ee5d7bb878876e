"""Stand-ins for Transformer Engine's layers, equal loads of experts, and the mesh of both."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="needs the [torch] extra")
if find_spec("megatron") is None:
    pytest.skip("needs the [megatron] extra", allow_module_level=True)

import torch
from torch.nn import functional

from echograph.errors import CaptureError
from echograph.frontend.megatron import transformer_engine as te
from echograph.frontend.megatron.adapter import MegatronAdapter, axes_with_experts, within_context
from echograph.frontend.megatron.apex import accumulate
from echograph.frontend.megatron.shims import loads
from echograph.frontend.megatron.stub_modules import standing_in
from echograph.frontend.scripts.capture import axes_of, capture_script
from echograph.frontend.scripts.run import Script
from echograph.frontend.scripts.world import World
from echograph.ir import types as t
from echograph.ir.graph import JobGraph

pytestmark = pytest.mark.torch

SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "megatron-gpt" / "pretrain.py"
HIDDEN, LENGTH = 64, 64
MODEL = (
    f"--num-layers 4 --hidden-size {HIDDEN} --seq-length {LENGTH} --padded-vocab-size 256 --bf16 "
    "--untie-embeddings-and-output-weights --disable-gloo-process-groups"
)


def captured(size: int, options: str) -> tuple[JobGraph, tuple[str, ...]]:
    script = Script(path=SCRIPT, arguments=f"{MODEL} {options}".split())
    made = capture_script(script, World(size=size), MegatronAdapter())
    return made.graph, made.notes  # type: ignore[return-value]


# -- what is not installed ------------------------------------------------------------------------------------


@pytest.mark.skipif(find_spec("transformer_engine") is not None, reason="Transformer Engine is installed")
def test_stand_ins_are_there_in_the_context_alone() -> None:
    import megatron.core.extensions.transformer_engine as without

    with standing_in():
        import megatron.core.extensions.transformer_engine as inside

        assert inside.HAVE_TE
        assert issubclass(inside.TERowParallelLinear, te.Linear)
    assert not without.HAVE_TE
    assert sys.modules["megatron.core.extensions.transformer_engine"] is without
    assert find_spec("transformer_engine") is None


def grouped(fuses: bool) -> Any:
    return te.GroupedLinear(
        num_gemms=3, in_features=4, out_features=5, init_method=torch.nn.init.normal_, bias=False,
        fuse_wgrad_accumulation=fuses, params_dtype=torch.float64,
    )  # fmt: skip


@pytest.mark.parametrize("fuses", [False, True])
def test_a_grouped_product_is_one_of_each_expert(fuses: bool) -> None:
    layer, splits = grouped(fuses), [2, 0, 3]
    given = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    weights = list(layer.parameters())
    for weight in weights:
        weight.main_grad = torch.ones_like(weight)
    above = torch.randn(5, 5, dtype=torch.float64)
    out = layer(given, splits)
    out.backward(above)
    parts = zip(torch.split(given.detach(), splits), torch.split(above, splits), weights, strict=True)
    expected = [(functional.linear(x, w), g @ w, g.t() @ x) for x, g, w in parts]
    torch.testing.assert_close(out, torch.cat([e[0] for e in expected]))
    torch.testing.assert_close(given.grad, torch.cat([e[1] for e in expected]))
    for weight, (_, _, gradient) in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight.main_grad - 1 if fuses else weight.grad, gradient)


def test_attention_is_that_of_its_definition() -> None:
    query, key, value = (torch.randn(6, 2, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    out = te.DotProductAttention(attention_dropout=0.0)(query, key, value, attn_mask_type="causal")
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, *(y.repeat_interleave(2, 2) for y in (key, value))))
    scores = (q @ k.mT / 8**0.5).masked_fill(torch.ones(6, 6).triu(1).bool(), float("-inf"))
    expected = (scores.softmax(-1) @ v).permute(2, 0, 1, 3).reshape(6, 2, 32)
    torch.testing.assert_close(out, expected)


def test_a_product_that_adds() -> None:
    given, gradient, total = torch.randn(7, 3), torch.randn(7, 5), torch.randn(5, 3)
    expected = total + gradient.t() @ given
    accumulate(given, gradient, total)
    torch.testing.assert_close(total, expected)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: te.DotProductAttention(attention_dropout=0.0, cp_group=1, cp_comm_type="ring"),
            "a2a",
        ),
        (lambda: te.DotProductAttention(attention_dropout=0.0, window_size=(8, 0)), "windows"),
    ],
)
def test_what_stand_ins_do_not_do_is_one_line(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(CaptureError, match=said) as raised:
        make()
    assert "\n" not in str(raised.value)


# -- experts --------------------------------------------------------------------------------------------------


@given(st.integers(0, 10_000), st.integers(1, 300))
def test_loads_are_equal_and_complete(choices: int, experts: int) -> None:
    found = loads(choices, experts)
    assert len(found) == experts
    assert sum(found) == choices
    assert max(found) - min(found) <= 1


POWERS = st.sampled_from([1, 2, 4])


@settings(max_examples=60, deadline=None)
@given(pp=POWERS, dp=POWERS, cp=POWERS, tp=POWERS, tensor=POWERS, experts=st.sampled_from([2, 4, 8]))
def test_groups_of_dense_layers_and_of_experts_are_axes(
    pp: int, dp: int, cp: int, tp: int, tensor: int, experts: int
) -> None:
    """Against megatron-core's own generator of groups."""
    from megatron.core.parallel_state import RankGenerator

    stage = dp * cp * tp
    if stage % (tensor * experts):
        return
    mesh = axes_with_experts({"pp": pp, "dp": dp, "cp": cp, "tp": tp}, experts, tensor)
    assert prod(mesh.values()) == pp * stage
    order = "tp-cp-ep-dp-pp"
    dense = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)
    sparse = RankGenerator(tp=tensor, ep=experts, dp=stage // (tensor * experts), pp=pp, cp=1, order=order)
    for generator, kinds in ((dense, ("tp", "cp", "dp", "pp", "tp-cp", "dp-cp")), (sparse, ("ep", "tp-ep", "dp"))):
        for kind in kinds:
            for ranks in generator.get_ranks(kind):
                assert len(ranks) == 1 or axes_of(ranks, mesh) is not None, (kind, ranks, mesh)


def test_ranks_of_context_parallelism_in_two_levels_are_two_axes() -> None:
    mesh = within_context({"pp": 2, "dp": 2, "cp": 8, "tp": 2}, 4)
    assert list(mesh.items()) == [("pp", 2), ("dp", 2), ("cp", 2), ("cp_inner", 4), ("tp", 2)]
    assert axes_of(range(0, 8, 2), mesh) == ("cp_inner",)
    assert axes_of((0, 8), mesh) == ("cp",)
    assert axes_of(range(0, 16, 2), mesh) == ("cp", "cp_inner")


# -- captures -------------------------------------------------------------------------------------------------


def work(job: JobGraph, stage: int) -> tuple[Counter[Any], list[Any]]:
    """Matrix products of a stage by micro-batch, phase and extents; its collectives in order."""
    products: Counter[Any] = Counter()
    collectives: list[Any] = []
    for _, begin, end, _, micro_batch in job.programs[stage].calls.tolist():
        for op in job.ops[begin:end]:
            match op:
                case t.Compute() if isinstance(op.attributes, t.Gemm):
                    a, b = (job.tensors.shape.row(i) for i in op.inputs[-2:])
                    products[micro_batch, op.phase.name, *sorted((*a, b[1]))] += 1
                case t.Collective():
                    axes = job.groups[op.group].axes
                    collectives.append(
                        (micro_batch, op.phase.name, op.collective.name, axes, op.bytes_per_rank, op.payload)
                    )
    return products, collectives


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel "
        "--use-distributed-optimizer --global-batch-size 4",
        "--tensor-model-parallel-size 4 --normalization RMSNorm --swiglu --disable-bias-linear",
        "--tensor-model-parallel-size 2 --recompute-granularity full",
    ],
)
def test_layers_of_transformer_engine_do_what_local_ones_do(options: str) -> None:
    """The same products and collectives in the same order."""
    theirs, notes = captured(8, f"{options} --transformer-impl transformer_engine")
    ours, silent = captured(8, options)
    for stage in range(len(ours.programs)):
        expected, found = work(ours, stage), work(theirs, stage)
        assert sum(expected[0].values()) > 0
        assert found[0] == expected[0]
        assert found[1] == expected[1]
    assert any("Transformer Engine" in note for note in notes)
    assert not any("Transformer Engine" in note for note in silent)


@pytest.mark.slow
@pytest.mark.parametrize("grouped_gemm", ["", "--moe-grouped-gemm"])
def test_experts_that_take_what_comes_have_equal_loads(grouped_gemm: str) -> None:
    """Each rank's choices go to all ranks in equal parts, and each expert's products have a part of the rows."""
    experts, ranks, choices = 8, 4, 2
    job, notes = captured(
        8,
        f"--expert-model-parallel-size {ranks} --num-experts {experts} --moe-router-topk {choices} "
        f"--moe-ffn-hidden-size 32 --disable-bias-linear --transformer-impl transformer_engine {grouped_gemm}",
    )
    assert [(axis.name, axis.size) for axis in job.mesh if axis.size > 1] == [("dp", 2), ("ep", ranks)]
    assert any("equal loads" in note for note in notes)
    rows = LENGTH * choices
    products, collectives = work(job, 0)
    sent = [call[4] for call in collectives if call[2] == "ALL_TO_ALL" and call[1] == "FORWARD"]
    # Tokens go and come back, in each layer; their probabilities go.
    assert Counter(sent) == {rows * HIDDEN * 2: 8, rows * 2: 4}
    each = rows * ranks // experts
    assert products[0, "FORWARD", *sorted((each, HIDDEN, 32))] == 4 * 2 * (experts // ranks)


@pytest.mark.slow
def test_gathered_tokens_have_equal_loads_too() -> None:
    """Of all ranks' choices, each expert of a rank takes as many."""
    experts, ranks, choices = 4, 2, 2
    job, notes = captured(
        2,
        f"--expert-model-parallel-size {ranks} --num-experts {experts} --moe-router-topk {choices} "
        "--moe-ffn-hidden-size 32 --disable-bias-linear --moe-token-dispatcher-type allgather",
    )
    assert any("equal loads" in note for note in notes)
    products, collectives = work(job, 0)
    each = LENGTH * choices * ranks // experts
    assert products[0, "FORWARD", *sorted((each, HIDDEN, 32))] == 4 * 2 * (experts // ranks)
    assert not any(call[2] == "ALL_TO_ALL" for call in collectives)

"""Tensor parallelism of what not every model has: few heads of keys, experts, recomputation, clipping, scaling."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest

from echograph.errors import PlanError
from echograph.frontend.pytorch.spec import StepSpec
from echograph.ir import types as t
from echograph.ir.graph import Graph, StepGraph
from echograph.ir.passes.data_parallel import DataParallel
from echograph.ir.passes.model import overflow_flags, total_norms
from echograph.ir.passes.recompute import Recompute
from echograph.ir.passes.tensor_parallel import TensorParallel
from echograph.models import from_config, get_model
from echograph.workflow.compile import compile_entry

LAYERS, POSITIONS = 2, 128
PLAIN = StepSpec()


@cache
def step(name: str, spec: StepSpec = PLAIN, **changes: Any) -> StepGraph:
    layers = {"n_layer" if name == "gpt2" else "num_hidden_layers": LAYERS}
    entry = get_model(name).with_config(**layers, **changes)
    return compile_entry(entry, spec, batch_size=1, seq_len=POSITIONS)


def calls(graph: Graph) -> Iterator[t.Op]:
    for _, begin, end, _, _ in graph.programs[0].calls.tolist():
        yield from graph.ops[begin:end]


def collectives(graph: Graph, part: str = "") -> Counter[tuple[str, str, int]]:
    found = (op for op in calls(graph) if isinstance(op, t.Collective) and part in op.module)
    return Counter((op.collective.name, op.phase.name, op.bytes_per_rank) for op in found)


def check_shapes(graph: Graph) -> int:
    """Products, attention, views and sums fit their tensors; how many products were looked at."""
    products = 0
    for op in graph.ops:
        read = [graph.tensors.shape.row(i) for i in op.inputs]
        made = [graph.tensors.shape.row(i) for i in op.outputs]
        if not isinstance(op, t.Compute):
            continue
        if isinstance(op.attributes, t.Gemm) and "grouped" not in op.name:
            products += 1
            a, b = read[-2:]
            assert (a[-1], made[0]) == (b[-2], (*a[:-1], b[-1])), op
            assert op.flops == 2 * int(np.prod(made[0])) * a[-1]
        elif op.name == "aten._grouped_mm":
            products += 1
            (a, b), inner = read[:2], len(read[1]) == 3
            assert a[-1] == (b[1] if inner else b[0]), op
            assert made[0] == ((a[0], b[2]) if inner else (made[0][0], a[0], b[1])), op
        elif isinstance(op.attributes, t.Attention):
            query, key = (read[1], read[2]) if "backward" in op.name else (read[0], read[1])
            assert (query[1], key[1]) == (op.attributes.heads, op.attributes.kv_heads), op
        elif op.name in ("aten.add", "aten.mul", "aten.div"):
            assert np.broadcast_shapes(*read) == made[0], op
        elif op.name in ("aten.view", "aten._unsafe_view"):
            assert np.prod(read[0]) == np.prod(made[0]), op
    return products


def flops(graph: Graph, part: str) -> int:
    return sum(op.flops for op in calls(graph) if isinstance(op, t.Compute) and part in op.module)


# -- fewer heads of keys and values than ranks -----------------------------------------------------------------


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("kv_heads", "size"), [(8, 16), (4, 8), (1, 8)])
def test_ranks_gather_keys_and_values_where_these_have_fewer_heads(
    kv_heads: int, size: int, sequence_parallel: bool
) -> None:
    """Megatron's `num_query_groups` below the ranks: outputs gathered forward, their gradients scattered back."""
    whole = step("llama-3-8b", num_key_value_heads=kv_heads)
    local = TensorParallel(size=size, sequence_parallel=sequence_parallel)(whole)
    exchanged = POSITIONS * kv_heads * 128 * 2
    attention = collectives(local, "self_attn")
    assert attention["ALL_GATHER", "FORWARD", exchanged] == 2 * LAYERS
    assert attention["REDUCE_SCATTER", "BACKWARD", exchanged] == 2 * LAYERS
    rest = collectives(TensorParallel(size=kv_heads, sequence_parallel=sequence_parallel)(whole), "self_attn")
    if kv_heads > 1:
        del attention["ALL_GATHER", "FORWARD", exchanged], attention["REDUCE_SCATTER", "BACKWARD", exchanged]
        assert attention == rest
    assert check_shapes(local) > 20
    kernels = [op.attributes for op in local.ops if isinstance(getattr(op, "attributes", None), t.Attention)]
    assert {(k.heads, k.kv_heads) for k in kernels if isinstance(k, t.Attention)} == {(32 // size, 1)}


def test_weights_of_shared_heads_are_divided_all_the_same() -> None:
    local = TensorParallel(size=16)(step("llama-3-8b"))
    weights = [x for x in local.tensors if x.role == t.TensorRole.PARAMETER and x.name.endswith("k_proj.weight")]
    assert {(x.shape, x.sharded) for x in weights if not x.port and x.alias_of is None} == {((64, 4096), ("tp",))}
    assert flops(local, "k_proj") * 16 == flops(step("llama-3-8b"), "k_proj")


def test_written_out_attention_shares_heads_like_the_fused_kernel() -> None:
    entry = get_model("llama-3-8b").with_config(num_hidden_layers=LAYERS)
    eager = compile_entry(entry, StepSpec(), batch_size=1, seq_len=POSITIONS, attention="eager")
    local = TensorParallel(size=16)(eager)
    assert collectives(local) == collectives(TensorParallel(size=16)(step("llama-3-8b")))
    check_shapes(local)
    scores = [op for op in local.ops if op.name == "aten._softmax"]
    assert {local.tensors.shape.row(op.outputs[0]) for op in scores} == {(1, 2, POSITIONS, POSITIONS)}


@pytest.mark.parametrize("size", [24, 64])
def test_heads_of_queries_have_to_divide(size: int) -> None:
    with pytest.raises(PlanError, match=r"extent of 12, which .* ranks do not share: choose a size of 12"):
        TensorParallel(size=size)(step("gpt2"))


# -- experts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_experts_share_their_hidden_channels_and_add_up_by_token(sequence_parallel: bool) -> None:
    """As Megatron's all-gather dispatcher: a sum for each token, whatever number of experts it went to."""
    whole = step("mixtral-8x7b")
    local = TensorParallel(size=4, sequence_parallel=sequence_parallel)(whole)
    assert flops(local, "experts") * 4 == flops(whole, "experts")
    tokens, router, weight = POSITIONS * 4096 * 2, POSITIONS * 8 * 4, 8 * 4096 * 2
    if sequence_parallel:
        assert collectives(local, "mlp.") == {
            ("ALL_GATHER", "FORWARD", router): LAYERS,
            ("ALL_GATHER", "FORWARD", tokens): LAYERS,
            ("REDUCE_SCATTER", "FORWARD", tokens): LAYERS,
            ("ALL_GATHER", "BACKWARD", tokens): LAYERS,
            ("REDUCE_SCATTER", "BACKWARD", tokens): LAYERS,
            ("REDUCE_SCATTER", "BACKWARD", router): LAYERS,
            ("ALL_REDUCE", "BACKWARD", weight): LAYERS,
        }
    else:
        assert collectives(local, "mlp.") == {
            ("ALL_REDUCE", "FORWARD", tokens): LAYERS,
            ("ALL_REDUCE", "BACKWARD", tokens): LAYERS,
            ("ALL_REDUCE", "BACKWARD", router): LAYERS,
        }
        assert flops(local, "mlp.gate") == flops(whole, "mlp.gate")
    assert check_shapes(local) > 20


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "gpt-oss-20b"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_other_experts_are_shared_too(name: str, sequence_parallel: bool) -> None:
    whole = step(name)
    tensor_parallel = TensorParallel(size=4, sequence_parallel=sequence_parallel)
    local = tensor_parallel(whole)
    assert flops(local, "experts") * 4 == flops(whole, "experts")
    check_shapes(local)
    if not sequence_parallel:
        assert all("router" in line or "gate" in line for line in tensor_parallel.with_notes(whole)[1])


# -- recomputation -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_full_recomputation_communicates_as_the_forward_pass_does(sequence_parallel: bool) -> None:
    """As Megatron's, which runs a layer's forward pass once more, whatever of it backward needs."""
    again = Recompute(policy="full", early_stop=False)(step("llama-3-8b"))
    local = collectives(TensorParallel(size=4, sequence_parallel=sequence_parallel)(again), "layers")
    forward = {(kind, size): n for (kind, phase, size), n in local.items() if phase == "FORWARD"}
    assert {(kind, size): n for (kind, phase, size), n in local.items() if phase == "RECOMPUTE"} == forward
    assert sum(forward.values()) == LAYERS * (4 if sequence_parallel else 2)
    without = collectives(
        TensorParallel(size=4, sequence_parallel=sequence_parallel)(step("llama-3-8b")), "layers"
    )
    assert {k: n for k, n in local.items() if k[1] != "RECOMPUTE"} == without


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_captured_recomputation_leaves_out_the_sum_that_nothing_waits_for(sequence_parallel: bool) -> None:
    """PyTorch stops recomputing before the last product of a layer, whose result backward does not read."""
    captured = step("llama-3-8b", StepSpec(recompute=True))
    local = TensorParallel(size=4, sequence_parallel=sequence_parallel)(captured)
    again = [op for op in calls(local) if isinstance(op, t.Collective) and op.phase == t.Phase.RECOMPUTE]
    modules = Counter(op.module.partition("{}.")[2] for op in again)
    gathers = {"self_attn.q_proj": LAYERS, "mlp.gate_proj": LAYERS} if sequence_parallel else {}
    assert modules == {"self_attn.o_proj": LAYERS, **gathers}
    check_shapes(local)


# -- scalars of all gradients ----------------------------------------------------------------------------------


def test_the_norm_and_the_overflow_flag_are_those_of_all_ranks() -> None:
    """Each rank takes norms of its shares; one scalar is reduced right after, and clipping waits for it."""
    whole = step("gpt2", StepSpec(dtype="fp16", clip_grad_norm=1.0))
    local = TensorParallel(size=4)(whole)
    sums = [op for op in calls(local) if isinstance(op, t.Collective) and op.phase == t.Phase.OPTIMIZER]
    assert [(op.bytes_per_rank, op.dtype, op.payload) for op in sums] == [(4, t.DType.FP32, t.Payload.OTHER)] * 2
    flag, norm = sums
    assert [flag.id] == overflow_flags(local)
    assert [local.maker[norm.inputs[0]]] == total_norms(local)
    assert local.ops[int(local.maker[flag.inputs[0]])].name.startswith("aten._amp_foreach_non_finite_check")
    readers = {
        local.ops[row].name
        for number, block in enumerate(local.blocks)
        for row in block.ops
        for index in local.ops.inputs.row(row)
        if local.value(number, 0, index)[2] in (flag.outputs[0], norm.outputs[0])
    }
    assert readers == {"aten.add", "aten._amp_update_scale_", "aten._fused_adamw_", "aten._foreach_sub_"}
    norms = [op for op in local.ops if op.name == "aten._foreach_norm" and "c_fc" in op.module]
    assert {local.tensors.shape.row(op.inputs[0]) for op in norms} == {(768, 768), (768,)}


def test_a_clipped_step_lowers_on_to_a_job() -> None:
    local = TensorParallel(size=4)(step("gpt2", StepSpec(clip_grad_norm=1.0)))
    job = DataParallel(replicas=2)(local)
    (scalar,) = (op for op in calls(job) if isinstance(op, t.Collective) and op.phase == t.Phase.OPTIMIZER)
    assert (scalar.bytes_per_rank, job.groups[scalar.group].axes) == (4, ("tp",))


# -- images in a text ------------------------------------------------------------------------------------------


def test_a_text_with_images_in_it_is_cut_along_the_sequence_before_the_first_layer() -> None:
    """Images find their places in whole sequences, of which each rank takes its share, as Megatron's LLaVA does.

    Backward, the shares' gradients are gathered (`scatter_to_sequence_parallel_region`).
    """
    layers = {"num_hidden_layers": LAYERS, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 64}
    text = {"model_type": "llama", **layers, "vocab_size": 256, "max_position_embeddings": 128}
    tower = {"model_type": "clip_vision_model", **layers, "image_size": 32, "patch_size": 8}
    entry = from_config(
        {"model_type": "llava", "text_config": text, "vision_config": tower, "image_token_index": 90}
    )
    whole = compile_entry(entry, PLAIN, batch_size=1, seq_len=64)
    local = TensorParallel(size=2, sequence_parallel=True)(whole)
    assert check_shapes(local) == check_shapes(whole)
    hidden = 64 * 32 * 2
    made = collectives(local)
    # Of each layer two gathers and two scatters forward; beside them the table's lookup, whole for the images, and
    # what the head reads.
    assert made["REDUCE_SCATTER", "FORWARD", hidden] == 2 * LAYERS + 1
    assert made["ALL_GATHER", "FORWARD", hidden] == 2 * LAYERS + 2
    shares = [op for op in calls(local) if op.name == "aten.slice" and op.phase == t.Phase.FORWARD]
    cut = [op for op in shares if local.tensors.shape.row(op.outputs[0]) == (1, 32, 32)]
    assert len(cut) == 1
    scattered = [
        op for op in calls(local) if isinstance(op, t.Compute) and op.name.startswith("aten.masked_scatter")
    ]
    assert {local.tensors.shape.row(op.outputs[0]) for op in scattered} >= {(1, 64, 32)}

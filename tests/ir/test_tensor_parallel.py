"""Tensor parallelism: local shapes and work, where it communicates, what it refuses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from echograph.errors import PlanError, UnknownNameError
from echograph.frontend.pytorch.spec import StepSpec
from echograph.ir import types as t
from echograph.ir.graph import Axis, Graph, StepGraph
from echograph.ir.passes.data_parallel import DataParallel
from echograph.ir.passes.tensor_parallel import TensorParallel
from echograph.ir.passes.tensor_parallel.plan import PLAN
from echograph.models import get_model
from echograph.workflow.compile import compile_entry
from echograph.workflow.predict import predict

LAYERS, POSITIONS, BATCH = 3, 128, 2
TOKENS = POSITIONS * BATCH
LAYER_KEY = {"gpt2": "n_layer"}
Step = Callable[[str], StepGraph]


@pytest.fixture(scope="module")
def step() -> Step:
    """Captured steps of three layers, each family once."""
    known: dict[str, StepGraph] = {}

    def get(name: str) -> StepGraph:
        if name not in known:
            entry = get_model(name).with_config(**{LAYER_KEY.get(name, "num_hidden_layers"): LAYERS})
            known[name] = compile_entry(entry, StepSpec(), batch_size=BATCH, seq_len=POSITIONS)
        return known[name]

    return get


def calls(graph: Graph) -> Iterator[t.Op]:
    """Every operation that the program runs."""
    for _, begin, end, _, _ in graph.programs[0].calls.tolist():
        yield from graph.ops[begin:end]


def collectives(graph: Graph) -> Counter[tuple[str, str, int]]:
    found = (op for op in calls(graph) if isinstance(op, t.Collective))
    return Counter((op.collective.name, op.phase.name, op.bytes_per_rank) for op in found)


def flops(graph: Graph, module: str = "") -> int:
    return sum(op.flops for op in calls(graph) if isinstance(op, t.Compute) and module in op.module)


def own_bytes(graph: Graph, role: t.TensorRole, part: str = "") -> int:
    """Bytes of what lives through the step, over all instances of all blocks."""
    total = 0
    for block in graph.blocks:
        rows = [graph.tensors[i] for i in block.tensors if graph.maker[i] < 0 and not graph.tensors.port[i]]
        total += len(block.instances) * sum(x.nbytes for x in rows if x.role == role and part in x.name)
    return total


@pytest.mark.parametrize("name", ["gpt2", "bert-base-uncased", "llama-3.2-1b", "bloom-7b1", "phi-2"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_every_operation_fits_the_shapes_that_it_reads_and_makes(
    step: Step, name: str, sequence_parallel: bool
) -> None:
    local = TensorParallel(size=2, sequence_parallel=sequence_parallel)(step(name))
    for op in local.ops:
        if not isinstance(op, t.Compute):
            continue
        made = [local.tensors.shape.row(i) for i in op.outputs]
        read = [local.tensors.shape.row(i) for i in op.inputs]
        if isinstance(op.attributes, t.Gemm):
            a, b = read[-2:]
            assert a[-1] == b[-2], op
            assert made[0] == (*a[:-1], b[-1]), op
            assert op.flops == 2 * int(np.prod(made[0])) * a[-1]
        if op.name in ("aten.add", "aten.mul", "aten.div", "aten.silu_backward", "aten.sub"):
            assert np.broadcast_shapes(*read) == made[0], op
        if isinstance(op.attributes, t.Attention):
            query = read[1] if "backward" in op.name else read[0]
            assert query[1] == op.attributes.heads
        if op.name in ("aten.view", "aten._unsafe_view"):
            assert np.prod(read[0]) == np.prod(made[0]), op


def test_ranks_share_the_products_of_the_layers_and_the_padded_head(step: Step) -> None:
    whole, local = step("gpt2"), TensorParallel(size=4)(step("gpt2"))
    assert flops(local, "transformer.h") * 4 == flops(whole, "transformer.h")
    padded = 512 * -(-50257 // 512)
    assert flops(local, "lm_head") * 4 == flops(whole, "lm_head") // 50257 * padded


def test_ranks_share_parameters_gradients_and_optimizer_state(step: Step) -> None:
    whole, local = step("llama-3.2-1b"), TensorParallel(size=4, vocab_multiple=1)(step("llama-3.2-1b"))
    for role, width in ((t.TensorRole.PARAMETER, 2), (t.TensorRole.OPTIMIZER_STATE, 4)):
        for part in ("_proj.weight", "embed_tokens.weight"):
            shared, total = own_bytes(local, role, part), own_bytes(whole, role, part)
            # The optimizer's step counts are scalars of four bytes, one a tensor.
            steps = total % (width * 1024)
            assert (shared - steps) * 4 == total - steps
        assert own_bytes(local, role, "norm.weight") == own_bytes(whole, role, "norm.weight")
    update = [op for op in local.ops if op.name == "aten._fused_adamw_" and op.module.endswith("gate_proj")]
    assert local.tensors.shape.row(update[0].outputs[0]) == (2048, 2048)


def test_the_layers_stay_one_block(step: Step) -> None:
    whole = step("gpt2")
    local = TensorParallel(size=2)(whole)
    assert [len(b.instances) for b in local.blocks] == [len(b.instances) for b in whole.blocks] == [1, LAYERS]
    assert isinstance(local, StepGraph)
    assert local.mesh == (Axis(name="tp", size=2),)


@pytest.mark.parametrize("name", ["gpt2", "bert-base-uncased", "llama-3.2-1b", "phi-2"])
def test_a_layer_all_reduces_where_megatron_does(step: Step, name: str) -> None:
    whole = step(name)
    local = TensorParallel(size=2)(whole)
    hidden = {"gpt2": 768, "bert-base-uncased": 768, "llama-3.2-1b": 2048, "phi-2": 2560}[name]
    sums = hidden * TOKENS * 2
    # Attention and feed-forward part once each way; phi's parallel parts share the norm, so one in backward.
    backward = 1 if name == "phi-2" else 2
    loss = 2 if name == "bert-base-uncased" else 4
    assert collectives(local) == {
        ("ALL_REDUCE", "FORWARD", sums): 2 * LAYERS + 1,
        ("ALL_REDUCE", "BACKWARD", sums): backward * LAYERS + 1,
        ("ALL_REDUCE", "FORWARD", TOKENS * loss): 3,
    }


def test_the_weight_gradient_is_computed_while_the_input_gradient_is_reduced(step: Step) -> None:
    local = TensorParallel(size=2)(step("gpt2"))
    reduce = next(
        op for op in local.ops if isinstance(op, t.Collective) and op.module.endswith("c_fc") and op.phase == 2
    )
    memory = local.root[reduce.outputs[0]]
    readers = [op.id for op in local.ops if memory in local.root[list(op.inputs)] and not _is_view(op)]
    worker = min(i for i in readers if i > reduce.id)
    between = [local.ops[i].name for i in range(reduce.id + 1, worker)]
    assert "aten.mm" in between
    assert local.ops[reduce.id - 1].name == "aten.mm"
    assert local.streams[reduce.stream] == "comm.tp"


def _is_view(op: t.Op) -> bool:
    return isinstance(op, t.Compute) and op.is_view


def test_a_row_parallel_bias_is_added_once_after_the_sum(step: Step) -> None:
    local = TensorParallel(size=2)(step("gpt2"))
    ops = [op for op in local.ops if op.module == "transformer.h.{}.mlp.c_proj" and op.phase == t.Phase.FORWARD]
    working = [op for op in ops if not _is_view(op)]
    assert [op.name for op in working] == ["aten.mm", "tp.all_reduce", "aten.add"]
    assert working[2].inputs[0] in working[1].outputs
    assert local.tensors[working[2].inputs[1]].name.endswith("c_proj.bias")


def test_sequence_parallelism_cuts_each_sum_into_a_scatter_and_a_gather(step: Step) -> None:
    whole = step("llama-3.2-1b")
    local = TensorParallel(size=4, sequence_parallel=True)(whole)
    found, sums, norms = collectives(local), 2048 * TOKENS * 2, 2048 * 2
    assert found == {
        ("REDUCE_SCATTER", "FORWARD", sums): 2 * LAYERS + 1,
        ("ALL_GATHER", "FORWARD", sums): 2 * LAYERS + 1,
        ("REDUCE_SCATTER", "BACKWARD", sums): 2 * LAYERS + 1,
        # Of output gradients (row-parallel) and again of inputs (column-parallel), head and embedding once each.
        ("ALL_GATHER", "BACKWARD", sums): 4 * LAYERS + 2,
        ("ALL_REDUCE", "BACKWARD", norms): 2 * LAYERS + 1,
        ("ALL_REDUCE", "FORWARD", TOKENS * 4): 3,
    }
    assert flops(local, "layers") * 4 == flops(whole, "layers")
    norm = next(op for op in local.ops if op.name == "aten.rsqrt")
    assert local.tensors.shape.row(norm.outputs[0]) == (BATCH, POSITIONS // 4, 1)


def test_what_stays_whole_is_reported(step: Step) -> None:
    lines = TensorParallel(size=2).with_notes(step("bert-base-uncased"))[1]
    assert lines == [
        "bert.pooler.dense (aten.addmm): whole on every rank",
        "cls.predictions.transform.dense (aten.addmm): whole on every rank",
        "cls.seq_relationship (aten.addmm): whole on every rank",
    ]
    assert TensorParallel(size=2).with_notes(step("gpt2"))[1] == []


def test_data_parallel_replicas_of_a_tensor_parallel_step_simulate(step: Step) -> None:
    local = TensorParallel(size=4)(step("gpt2"))
    job = DataParallel(replicas=2, micro_batches=2)(local)
    assert job.mesh == (Axis(name="dp", size=2), Axis(name="tp", size=4))
    assert {group.name: group.axes for group in job.groups} == {"tp": ("tp",), "dp": ("dp",)}
    buckets = [op for op in calls(job) if isinstance(op, t.Collective) and op.name.startswith("ddp.bucket")]
    assert {job.groups[op.group].name for op in buckets} == {"dp"}
    assert sum(op.bytes_per_rank for op in buckets) == own_bytes(local, t.TensorRole.PARAMETER)
    alone, _ = predict(DataParallel(replicas=2)(step("gpt2")))
    shared, _ = predict(DataParallel(replicas=2)(local))
    assert shared.gpus == 8
    assert 0 < shared.step_ps < 2 * alone.step_ps


def test_one_rank_is_the_step_itself(step: Step) -> None:
    assert TensorParallel(size=1)(step("gpt2")) is step("gpt2")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"size": 8}, "extent of 12, which 8 ranks do not share: choose a size of 6 or 12"),
        ({"size": 0}, "choose 1 to 1024"),
        ({"size": 2, "plan": {"*.nothing": "colwise"}}, "fits no parameter"),
        ({"size": 3, "sequence_parallel": True}, "the sequence of 128 does not divide"),
    ],
)
def test_plans_that_cannot_be_are_refused(step: Step, changes: dict[str, object], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        replace(TensorParallel(size=1), **changes)(step("gpt2"))  # type: ignore[arg-type]


def test_an_unknown_style_is_refused(step: Step) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'colwise'"):
        TensorParallel(size=2, plan={"*.c_fc": "columnwise"})(step("gpt2"))  # type: ignore[dict-item]


def test_a_step_is_not_shared_twice(step: Step) -> None:
    with pytest.raises(PlanError, match="tensor-parallel already"):
        TensorParallel(size=2)(TensorParallel(size=2)(step("gpt2")))


def test_a_plan_of_the_user_replaces_the_known_one(step: Step) -> None:
    plan = {k: v for k, v in PLAN.items() if ".mlp." in k}
    local = TensorParallel(size=2, plan=plan)(step("gpt2"))
    sums = 768 * TOKENS * 2
    assert collectives(local) == {
        ("ALL_REDUCE", "FORWARD", sums): LAYERS,
        ("ALL_REDUCE", "BACKWARD", sums): LAYERS,
    }

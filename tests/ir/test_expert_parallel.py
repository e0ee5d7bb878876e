"""Expert parallelism: local experts and their work, what is exchanged, what it composes with and refuses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from math import ceil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echograph.errors import PlanError, UnknownNameError
from echograph.frontend.pytorch.spec import StepSpec
from echograph.ir import types as t
from echograph.ir.graph import Axis, Graph, JobGraph, StepGraph, Workload
from echograph.ir.passes.context_parallel import ContextParallel
from echograph.ir.passes.data_parallel import DataParallel
from echograph.ir.passes.expert_parallel import ExpertParallel, Load, places
from echograph.ir.passes.fully_shard import FullyShard
from echograph.ir.passes.pipeline import Pipeline
from echograph.ir.passes.precision import Precision
from echograph.ir.passes.recompute import Recompute
from echograph.ir.passes.tensor_parallel import TensorParallel
from echograph.ir.unfold import difference, unfold
from echograph.models import get_model
from echograph.profiler.costs import load_device
from echograph.profiler.costs.estimate import estimate
from echograph.profiler.costs.gemm import grouped_gemm
from echograph.simulator.clusters import load_cluster
from echograph.units import to_ps
from echograph.workflow.compile import compile as compile_model
from echograph.workflow.compile import compile_entry
from echograph.workflow.plan import Plan, passes
from echograph.workflow.predict import predict

BATCH, POSITIONS, HIDDEN, INNER = 2, 32, 64, 96
TOKENS = BATCH * POSITIONS
SMALL = {
    "hidden_size": HIDDEN, "vocab_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": INNER, "moe_intermediate_size": INNER, "num_hidden_layers": 2,
}  # fmt: skip
CHANGES: dict[str, dict[str, int]] = {
    "mixtral-8x7b": {},
    "qwen3-30b-a3b": {"num_experts": 16, "num_experts_per_tok": 4, "head_dim": 16},
    "gpt-oss-20b": {"num_local_experts": 8, "head_dim": 16},
    "deepseek-v3": {
        "n_routed_experts": 16, "n_group": 4, "topk_group": 2, "q_lora_rank": 32, "kv_lora_rank": 32,
        "num_hidden_layers": 5,
    },
}  # fmt: skip
EXPERTS = {"mixtral-8x7b": 8, "qwen3-30b-a3b": 16, "gpt-oss-20b": 8, "deepseek-v3": 16}
CHOSEN = {"mixtral-8x7b": 2, "qwen3-30b-a3b": 4, "gpt-oss-20b": 4, "deepseek-v3": 8}
LAYERS = 2
FAMILIES = list(CHANGES)
EAGER = ("gpt-oss-20b", "deepseek-v3")


@cache
def step(name: str = "mixtral-8x7b", *, recompute: bool = False, clip: float | None = None) -> StepGraph:
    """A captured step with two layers of experts; DeepSeek's has three without before them."""
    entry = get_model(name).with_config(**(SMALL | CHANGES[name]))
    spec = StepSpec(recompute=recompute, clip_grad_norm=clip)
    attention = "eager" if name in EAGER else None
    return compile_entry(entry, spec, batch_size=BATCH, seq_len=POSITIONS, attention=attention)


def calls(graph: Graph) -> Iterator[t.Op]:
    """Every operation that the first program runs."""
    for _, begin, end, _, _ in graph.programs[0].calls.tolist():
        yield from graph.ops[begin:end]


def collectives(graph: Graph, group: str = "ep") -> Counter[tuple[str, str, int]]:
    found = (op for op in calls(graph) if isinstance(op, t.Collective) and graph.groups[op.group].name == group)
    return Counter((op.collective.name, op.phase.name, op.bytes_per_rank) for op in found)


def flops(graph: Graph, *, grouped: bool) -> int:
    found = (op for op in calls(graph) if isinstance(op, t.Compute) and ("_grouped_mm" in op.name) == grouped)
    return sum(op.flops for op in found)


def persistent_bytes(graph: Graph, role: t.TensorRole, sharded: tuple[str, ...]) -> int:
    """Bytes that live through the step, of tensors divided over these axes, over all instances of all blocks."""
    return sum(
        tensor.nbytes * len(block.instances)
        for block in graph.blocks
        for tensor in graph.tensors[block.tensors.start : block.tensors.stop]
        if tensor.role == role and tensor.alias_of is None and not tensor.port and tensor.sharded == sharded
    )


def row_bytes(name: str) -> int:
    """Bytes of the rows that one rank's tokens make for the experts of a layer."""
    return t.DType.BF16.nbytes(TOKENS * CHOSEN[name] * HIDDEN)


@pytest.mark.parametrize(
    ("name", "size"), [*((name, 4) for name in FAMILIES), *((FAMILIES[0], size) for size in (2, 8))]
)
def test_work_is_conserved(name: str, size: int) -> None:
    """Each rank brings its own micro-batch, so in balance a rank does as much as one that has all experts."""
    whole, local = step(name), ExpertParallel(size=size)(step(name))
    assert local.mesh == (Axis(name="ep", size=size),)
    for grouped in (True, False):
        assert flops(local, grouped=grouped) == flops(whole, grouped=grouped) > 0


@pytest.mark.parametrize(
    "role", [t.TensorRole.PARAMETER, t.TensorRole.GRADIENT, t.TensorRole.OPTIMIZER_STATE], ids=lambda r: r.name
)
@pytest.mark.parametrize("name", FAMILIES)
def test_experts_are_divided_and_nothing_else_is(name: str, role: t.TensorRole) -> None:
    whole, local = step(name), ExpertParallel(size=4)(step(name))
    shares, copies = persistent_bytes(local, role, ("ep",)), persistent_bytes(local, role, ())
    assert 4 * shares + copies == persistent_bytes(whole, role, ())
    matrices = LAYERS * EXPERTS[name] * 3 * HIDDEN * INNER
    biases = LAYERS * EXPERTS[name] * (2 * INNER + HIDDEN) if name == "gpt-oss-20b" else 0
    # bf16 parameters; bf16 and fp32 gradients; fp32 weights and two moments
    each = {t.TensorRole.PARAMETER: 2, t.TensorRole.GRADIENT: 6, t.TensorRole.OPTIMIZER_STATE: 12}[role]
    assert 4 * shares == each * (matrices + biases)


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("name", FAMILIES)
def test_rows_are_exchanged_twice_each_way(name: str, size: int) -> None:
    counts = t.DType.INT32.nbytes(size * EXPERTS[name])
    assert collectives(ExpertParallel(size=size)(step(name))) == {
        ("ALL_GATHER", "FORWARD", counts): LAYERS,
        ("ALL_TO_ALL", "FORWARD", row_bytes(name)): 2 * LAYERS,
        ("ALL_TO_ALL", "BACKWARD", row_bytes(name)): 2 * LAYERS,
    }


@pytest.mark.parametrize("captured", [True, False])
def test_recomputing_a_layer_exchanges_its_rows_again(captured: bool) -> None:
    whole = step(recompute=True) if captured else Recompute(policy="full")(step())
    found = collectives(ExpertParallel(size=4)(whole))
    forward = {key[::2]: n for key, n in found.items() if key[1] == "FORWARD"}
    again = {key[::2]: n for key, n in found.items() if key[1] == "RECOMPUTE"}
    assert forward == again == {("ALL_GATHER", 128): LAYERS, ("ALL_TO_ALL", row_bytes("mixtral-8x7b")): 2 * LAYERS}


def test_the_host_waits_for_the_counts_before_rows_are_sent() -> None:
    ops = [op for op in calls(ExpertParallel(size=4)(step())) if op.phase == t.Phase.FORWARD]
    kinds = [type(op).__name__ + getattr(op, "collective", t.CollectiveKind.BARRIER).name for op in ops]
    at = kinds.index("CollectiveALL_GATHER")
    wait = next(i for i, op in enumerate(ops) if isinstance(op, t.Host))
    assert at < wait < kinds.index("CollectiveALL_TO_ALL")
    (copied,) = ops[wait].deps
    copy = next(op for op in ops if op.id == copied)
    assert isinstance(copy, t.Copy) and copy.inputs == ops[at].outputs


@pytest.mark.parametrize("imbalance", [1.25, 2.0])
def test_the_busiest_rank_has_more_rows_of_experts_alone(imbalance: float) -> None:
    balanced, busy = ExpertParallel(size=4)(step()), ExpertParallel(size=4, imbalance=imbalance)(step())
    assert flops(busy, grouped=True) == imbalance * flops(balanced, grouped=True)
    assert flops(busy, grouped=False) == flops(balanced, grouped=False)
    sizes = {nbytes for kind, _, nbytes in collectives(busy) if kind == "ALL_TO_ALL"}
    assert sizes == {imbalance * row_bytes("mixtral-8x7b")}


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.25])
@pytest.mark.parametrize("size", [1, 4])
def test_a_capacity_is_known_beforehand(factor: float, size: int) -> None:
    whole, local = step(), ExpertParallel(size=size, capacity_factor=factor)(step())
    slots = 8 * ceil(factor * TOKENS * 2 / 8)
    assert flops(local, grouped=True) * TOKENS * 2 == flops(whole, grouped=True) * slots
    sizes = {(kind, nbytes) for kind, _, nbytes in collectives(local)}
    assert sizes == ({("ALL_TO_ALL", slots * HIDDEN * 2)} if size > 1 else set())
    assert not [op for op in calls(local) if isinstance(op, t.Host | t.Copy)]


def test_one_rank_with_all_experts_is_the_step_itself() -> None:
    assert ExpertParallel(size=1)(step()) is step()


@given(
    st.integers(1, 64), st.integers(1, 8), st.integers(1, 8), st.floats(0.1, 4.0), st.floats(1.0, 8.0),
    st.integers(1, 4096),
)  # fmt: skip
def test_rows_sent_and_received(
    local: int, size: int, chosen: int, factor: float, imbalance: float, tokens: int
) -> None:
    experts, rows = local * size, tokens * chosen
    limited = Load(size=size, capacity_factor=factor)
    assert limited.sent(rows, experts) == limited.received(rows, experts)
    assert limited.sent(rows, experts) % experts == 0
    assert -1e-5 * experts <= limited.sent(rows, experts) - factor * rows < experts
    free = Load(size=size, imbalance=imbalance)
    assert free.sent(rows, experts) == rows <= free.received(rows, experts)
    assert free.received(rows, experts) - imbalance * rows == pytest.approx(0.5, abs=0.5 + 1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_folding_changes_nothing(name: str) -> None:
    pass_ = ExpertParallel(size=4, imbalance=1.25)
    assert difference(unfold(pass_(step(name))), pass_(unfold(step(name)))) is None


def test_clipping_adds_up_the_norm_over_the_ranks() -> None:
    local = ExpertParallel(size=4)(step(clip=1.0))
    found = collectives(local)
    assert {key: n for key, n in found.items() if key[1] == "OPTIMIZER"} == {("ALL_REDUCE", "OPTIMIZER", 4): 1}
    ops = list(calls(local))
    at = next(i for i, op in enumerate(ops) if isinstance(op, t.Collective) and op.phase == t.Phase.OPTIMIZER)
    (norm,), (summed,) = ops[at].inputs, ops[at].outputs
    readers = [op for op in ops[at + 1 :] if norm in op.inputs or summed in op.inputs]
    assert readers and all(summed in op.inputs for op in readers)


def test_gradients_of_experts_are_added_up_over_fewer_ranks() -> None:
    job = DataParallel(replicas=3)(ExpertParallel(size=4)(step()))
    assert [(axis.name, axis.size) for axis in job.mesh] == [("dp", 3), ("ep", 4)]
    sums: Counter[tuple[str, ...]] = Counter()
    for op in calls(job):
        if isinstance(op, t.Collective) and op.collective == t.CollectiveKind.ALL_REDUCE:
            sums[job.groups[op.group].axes] += op.bytes_per_rank
    gradients = 2 * LAYERS * EXPERTS["mixtral-8x7b"] * 3 * HIDDEN * INNER
    assert sums["dp",] * 4 == gradients
    parameters = persistent_bytes(step(), t.TensorRole.PARAMETER, ())
    assert sums["dp", "ep"] == parameters - gradients


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_tensor_parallel_ranks_share_each_expert(name: str, sequence: bool) -> None:
    """Each of them exchanges all rows with its like on the other ranks, and multiplies them by its channels."""
    shared = TensorParallel(size=2, sequence_parallel=sequence)(step(name))
    local = ExpertParallel(size=4)(shared)
    assert [(axis.name, axis.size) for axis in local.mesh] == [("ep", 4), ("tp", 2)]
    assert collectives(local) == collectives(ExpertParallel(size=4)(step(name)))
    assert collectives(local, "tp") == collectives(shared, "tp")
    assert 2 * flops(local, grouped=True) == flops(step(name), grouped=True)
    matrices = LAYERS * EXPERTS[name] * 3 * HIDDEN * INNER
    biases = LAYERS * EXPERTS[name] * 2 * INNER if name == "gpt-oss-20b" else 0
    assert 8 * persistent_bytes(local, t.TensorRole.PARAMETER, ("ep", "tp")) == 2 * (matrices + biases)


@pytest.mark.parametrize("across", [False, True])
def test_context_parallel_ranks_exchange_their_tokens(across: bool) -> None:
    local = ExpertParallel(size=4, across=("cp",) if across else ())(ContextParallel(size=2)(step()))
    assert [(axis.name, axis.size) for axis in local.mesh] == [("ep", 2 if across else 4), ("cp", 2)]
    exchanged = {
        key: n for key, n in collectives(local, "ep+cp" if across else "ep").items() if key[0] != "ALL_GATHER"
    }
    half = row_bytes("mixtral-8x7b") // 2
    assert exchanged == {("ALL_TO_ALL", phase, half): 2 * LAYERS for phase in ("FORWARD", "BACKWARD")}
    assert 2 * flops(local, grouped=True) == flops(step(), grouped=True)


def test_gradients_that_add_up_in_fp32_are_divided_too() -> None:
    whole = Precision(grad_dtype="fp32")(step())
    local = ExpertParallel(size=4)(whole)
    shares = persistent_bytes(local, t.TensorRole.GRADIENT, ("ep",))
    copies = persistent_bytes(local, t.TensorRole.GRADIENT, ())
    assert 4 * shares + copies == persistent_bytes(whole, t.TensorRole.GRADIENT, ())


USER_MODEL = """
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(64, 8, bias=False)
        self.first = nn.Parameter(torch.zeros(8, 64, 96))
        self.second = nn.Parameter(torch.zeros(8, 96, 64))

    def forward(self, tokens):
        weight, chosen = self.router(tokens).softmax(-1).topk(2)
        order = chosen.flatten().argsort()
        ends = torch.nn.functional.one_hot(chosen.flatten(), 8).sum(0).cumsum(0).int()
        rows = torch._grouped_mm(tokens[order // 2], self.first, ends).relu()
        rows = torch._grouped_mm(rows * weight.flatten()[order, None], self.second, ends)
        return tokens.index_add(0, order // 2, rows)

def build():
    return nn.Sequential(Layer(), Layer()), (torch.zeros(64, 64, dtype=torch.bfloat16),), lambda y: y.sum()
"""


def test_a_layer_written_otherwise(tmp_path: Path) -> None:
    """Other names, no sorting of experts, and rows that are weighted between the products.

    The weights then go with the rows, and their gradients come back.
    """
    (tmp_path / "model.py").write_text(USER_MODEL)
    model = f"{tmp_path / 'model.py'}:build"
    whole = compile_model(model, StepSpec())
    local = ExpertParallel(size=4)(whole)
    rows, weights = TOKENS * 2 * HIDDEN * 2, TOKENS * 2 * 2
    assert collectives(local) == {
        ("ALL_GATHER", "FORWARD", 128): 2,
        ("ALL_TO_ALL", "FORWARD", rows): 4,
        ("ALL_TO_ALL", "BACKWARD", rows): 3,  # the tokens of the first layer need no gradient
        **{("ALL_TO_ALL", phase, weights): 2 for phase in ("FORWARD", "BACKWARD")},
    }
    assert flops(local, grouped=True) == flops(whole, grouped=True)


def test_stages_of_a_pipeline_exchange_the_rows_of_their_layers() -> None:
    local = ExpertParallel(size=4)(step())
    staged = Pipeline(stages=2, micro_batches=4)(local)
    job = DataParallel(replicas=2)(staged)
    assert [axis.name for axis in job.mesh] == ["pp", "dp", "ep"]
    exchanged = Counter(
        (number, op.bytes_per_rank)
        for number, program in enumerate(job.programs)
        for _, begin, end, _, _ in program.calls.tolist()
        for op in job.ops[begin:end]
        if isinstance(op, t.Collective) and op.collective == t.CollectiveKind.ALL_TO_ALL
    )
    assert exchanged == {(stage, row_bytes("mixtral-8x7b")): 4 * 4 * LAYERS // 2 for stage in range(2)}


def test_sharded_data_parallelism_keeps_the_exchanges() -> None:
    local = ExpertParallel(size=4)(step())
    job = FullyShard(replicas=2, shard=2)(local)
    assert collectives(job) == collectives(local)


def test_products_are_priced_by_local_shapes() -> None:
    """Four ranks' rows for two of eight experts."""
    device = load_device("h100-sxm")
    local = ExpertParallel(size=4)(step())
    job = DataParallel(replicas=1)(local)
    timed = estimate(job, device)(job)
    rows = TOKENS * 2 * 4 // EXPERTS["mixtral-8x7b"]
    expected = {
        ("FORWARD", (HIDDEN, 2 * INNER)): grouped_gemm(device, [rows] * 2, 2 * INNER, HIDDEN),
        ("FORWARD", (INNER, HIDDEN)): grouped_gemm(device, [rows] * 2, HIDDEN, INNER),
    }
    seen = 0
    for op in timed.ops:
        if op.name == "aten._grouped_mm" and op.phase == t.Phase.FORWARD:
            _, inner, outer = timed.tensors.shape.row(op.inputs[1])
            cost = expected["FORWARD", (inner, outer)]
            (duration,) = op.durations
            assert duration.picoseconds == to_ps(float(np.asarray(cost.seconds)))
            seen += 1
    assert seen == 2


@pytest.mark.slow
def test_a_job_of_64_gpus_spends_its_time_where_one_expects() -> None:
    """With enough tokens, the exchange is exposed, and grows with the busiest rank's rows, as the products do."""
    entry = get_model("mixtral-8x7b").with_config(num_hidden_layers=LAYERS)
    captured = compile_entry(entry, StepSpec(), batch_size=1, seq_len=4096)
    results = {
        imbalance: predict(captured, Plan(gpus=64, ep=8, expert_imbalance=imbalance))[0].to_json()["breakdown_s"]
        for imbalance in (1.0, 1.5)
    }
    even, busy = results[1.0], results[1.5]
    assert busy["exposed_communication"]["ep"] == pytest.approx(1.5 * even["exposed_communication"]["ep"], rel=0.1)
    assert even["compute"] < busy["compute"] < 1.5 * even["compute"]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"size": 3}, "over 3 ranks: a layer's 8 experts do not divide: choose a size of 2 or 4"),
        ({"size": 16}, "8 experts do not divide: choose a size of 8"),
        ({"size": 0}, "expert parallelism over 0 ranks: choose 1 to 4096"),
        ({"size": 4, "imbalance": 0.9}, "the busiest of 4 ranks has 1 to 4 times the mean"),
        ({"size": 4, "imbalance": 5.0}, "the busiest of 4 ranks has 1 to 4 times the mean"),
        ({"size": 4, "capacity_factor": 0.0}, "capacity factor 0 of the experts: give more than 0"),
        ({"size": 4, "capacity_factor": 1.0, "imbalance": 2.0}, "with a capacity all have as many rows"),
    ],
)
def test_refuses(options: dict[str, float], line: str) -> None:
    with pytest.raises(PlanError, match=line) as caught:
        ExpertParallel(**options)(step())  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def sequence_of_one_rank(ranks: int, axis: str) -> StepGraph:
    """A step as one of the ranks has it that divide a sequence; their attention is left out."""
    step_ = step()
    workload = replace(step_.workload, sequence_length=POSITIONS * ranks)
    return replace(step_, workload=workload, mesh=(Axis(name=axis, size=ranks),))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_experts_across_the_ranks_of_a_sequence(size: int) -> None:
    whole = sequence_of_one_rank(2, "cp")
    local = ExpertParallel(size=size, across=("cp",))(whole)
    axes = ("ep", "cp") if size > 2 else ("cp",)
    assert [(a.name, a.size) for a in local.mesh] == [("ep", size // 2), ("cp", 2)][-len(axes) :]
    assert {local.groups[op.group].axes for op in calls(local) if isinstance(op, t.Collective)} == {axes}
    shares = persistent_bytes(local, t.TensorRole.PARAMETER, axes)
    assert size * shares == 2 * LAYERS * EXPERTS["mixtral-8x7b"] * 3 * HIDDEN * INNER
    assert sum(collectives(local, "+".join(axes)).values()) == 5 * LAYERS
    assert flops(local, grouped=True) == flops(whole, grouped=True)


def test_refuses_experts_across_ranks_that_have_the_same_tokens() -> None:
    same = replace(sequence_of_one_rank(2, "tp"), workload=step().workload)
    for graph, size, line in (
        (same, 4, "experts across tp: the ranks do not have tokens of their own: leave it out"),
        (step(), 4, "experts across tp: the step's mesh has no axis: leave it out"),
        (sequence_of_one_rank(3, "tp"), 4, "across tp: no multiple of 3: choose 3 or 6"),
    ):
        with pytest.raises(PlanError, match=line):
            ExpertParallel(size=size, across=("tp",))(graph)


def test_refuses_to_share_experts_twice_or_where_there_are_none() -> None:
    with pytest.raises(PlanError, match="expert-parallel already"):
        ExpertParallel(size=2)(ExpertParallel(size=2)(step()))
    entry = get_model("gpt2").with_config(n_layer=1, n_embd=64, n_head=4, vocab_size=128)
    dense = compile_entry(entry, StepSpec(), batch_size=1, seq_len=16)
    with pytest.raises(PlanError, match="no grouped products of experts"):
        ExpertParallel(size=2)(dense)


def written(graph: Graph) -> int:
    """Bytes that the forward pass of the experts writes."""
    forward = (op for op in calls(graph) if isinstance(op, t.Compute) and op.phase == t.Phase.FORWARD)
    return sum(op.bytes_written for op in forward if ".experts" in op.module)


@pytest.mark.parametrize("name", FAMILIES)
def test_experts_that_tensor_parallel_ranks_leave_whole_are_shared_by_them(name: str) -> None:
    """Each routes, exchanges and multiplies the rows of its own share of the sequence (`--etp 1` of Megatron)."""
    shared = TensorParallel(size=2, sequence_parallel=True, expert_size=1)(step(name))
    local = ExpertParallel(size=4, across=("tp",))(shared)
    assert [(axis.name, axis.size) for axis in local.mesh] == [("ep", 2), ("tp", 2)]
    exchanged = {key: n for key, n in collectives(local, "ep+tp").items() if key[0] == "ALL_TO_ALL"}
    half = row_bytes(name) // 2
    assert exchanged == {("ALL_TO_ALL", phase, half): 2 * LAYERS for phase in ("FORWARD", "BACKWARD")}
    assert 2 * flops(local, grouped=True) == flops(step(name), grouped=True)
    matrices = LAYERS * EXPERTS[name] * 3 * HIDDEN * INNER
    biases = LAYERS * EXPERTS[name] * (2 * INNER + HIDDEN) if name == "gpt-oss-20b" else 0
    assert 4 * persistent_bytes(local, t.TensorRole.PARAMETER, ("ep", "tp")) == 2 * (matrices + biases)
    gathered = [op for op in shared.ops if isinstance(op, t.Collective) and ".mlp" in op.module]
    reduced = {
        shared.tensors[index].name for op in gathered for index in op.inputs if op.payload == op.payload.GRADIENT
    }
    assert all(".gate." in name or ".router." in name for name in reduced), "experts' gradients have all tokens"
    others = {op.module for op in gathered if op.payload == t.Payload.ACTIVATION}
    parts = ("shared_experts", "_proj")  # of a dense layer, too
    assert all(any(part in module for part in parts) for module in others), (
        f"a rank routes its own tokens: {others}"
    )
    assert written(shared) < 0.55 * written(step(name))


def test_refuses_experts_whole_where_ranks_have_the_same_tokens() -> None:
    for options, line in (
        (
            {"size": 4, "expert_size": 2, "sequence_parallel": True},
            "over 2 of 4 tensor-parallel ranks: choose 4, or",
        ),
        ({"size": 2, "expert_size": 1}, "or 1 with sequence parallelism"),
    ):
        with pytest.raises(PlanError, match=line):
            TensorParallel(**options)(step())


@cache
def piped(overlap: bool, schedule: str = "interleaved") -> JobGraph:
    changes = SMALL | CHANGES["qwen3-30b-a3b"] | {"num_hidden_layers": 4}
    entry = get_model("qwen3-30b-a3b").with_config(**changes)
    local = ExpertParallel(size=4)(compile_entry(entry, StepSpec(), batch_size=BATCH, seq_len=POSITIONS))
    pipeline = Pipeline(stages=2, micro_batches=4, schedule=schedule, chunks=2, overlap_experts=overlap)
    return pipeline(local)


@pytest.mark.parametrize("schedule", ["interleaved", pytest.param("dualpipe-v", marks=pytest.mark.slow)])
def test_a_pass_exchanges_while_the_one_beside_it_computes(schedule: str) -> None:
    """Paired passes run what they would run alone; the other's work stands between an exchange and its reader."""
    for alone, paired in zip(piped(False, schedule).programs, piped(True, schedule).programs, strict=True):
        runs = [
            Counter((block, row, *where) for block, begin, end, *where in calls for row in range(begin, end))
            for calls in (alone.calls.tolist(), paired.calls.tolist())
        ]
        assert runs[0] == runs[1]
    job = piped(True, schedule)
    hidden = exchanged = 0
    calls = job.programs[0].calls.tolist()
    for before, after in pairwise(calls):
        last = job.ops[before[2] - 1]
        if last.name == "ep.all_to_all":
            exchanged += 1
            hidden += job.ops[after[1]].phase != last.phase
    # Few of so few micro-batches are in the steady state of dualpipe-v.
    assert hidden > (0.5 if schedule == "interleaved" else 0.2) * exchanged > 0


@pytest.mark.parametrize("schedule", [pytest.param("", marks=pytest.mark.slow), "dualpipe-v"])
def test_pairing_hides_the_exchange_of_experts(schedule: str) -> None:
    plan = Plan(gpus=32, pp=2, vpp=2, ep=16, global_batch=128, micro_batch=1, schedule=schedule)
    entry = get_model("qwen3-30b-a3b").with_config(num_hidden_layers=4)
    graph = compile_entry(entry, StepSpec(), batch_size=1, seq_len=1024)
    results = [
        predict(graph, replace(plan, overlap_moe_expert_parallel_comm=overlap), memory=False)[0]
        for overlap in (False, True)
    ]
    exposed = [result.breakdown.exposed_communication["ep"] for result in results]
    assert exposed[1] < 0.8 * exposed[0]
    assert results[1].step_ps < results[0].step_ps


def test_pairs_are_of_interleaved_chunks() -> None:
    with pytest.raises(PlanError, match="are of schedule dualpipe-v or interleaved"):
        Pipeline(stages=2, micro_batches=4, overlap_experts=True)(ExpertParallel(size=4)(step()))


def test_pairs_need_more_micro_batches_than_stages() -> None:
    """Else a stage has made all forward passes before the first backward one, and waited for ever."""
    job = ExpertParallel(size=4)(step())
    with pytest.raises(PlanError, match="2 micro-batches on 2 stages leave no forward pass"):
        Pipeline(stages=2, micro_batches=2, chunks=2, schedule="interleaved", overlap_experts=True)(job)


@pytest.mark.parametrize(
    ("parts", "experts", "chosen", "groups"),
    [(8, 256, 8, (8, 4)), (64, 256, 8, (8, 4)), (4, 256, 8, (8, 4)), (4, 128, 8, (1, 1)), (2, 16, 4, (4, 2))],
)
def test_places_of_a_token_are_those_of_random_choices(
    parts: int, experts: int, chosen: int, groups: tuple[int, int]
) -> None:
    generator, (count, allowed), width = np.random.default_rng(1), groups, experts // groups[0]
    drawn = []
    for _ in range(4000):
        pool = generator.choice(count, allowed, replace=False)[:, None] * width + np.arange(width)
        mine = generator.choice(pool.ravel(), chosen, replace=False)
        drawn.append(len(np.unique(mine * parts // experts)))
    assert places(parts, experts, chosen, groups) == pytest.approx(np.mean(drawn), rel=0.02)


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "deepseek-v3"])
def test_a_token_is_sent_once_to_each_domain_or_rank(name: str) -> None:
    """DeepSeek's router chooses two groups of four first, which the step shows."""
    groups = (4, 2) if name == "deepseek-v3" else (1, 1)
    for domains, parts in ((1, 8), (2, 2)):
        local = ExpertParallel(size=8, dispatcher="deepep", domains=domains)(step(name))
        share = places(parts, EXPERTS[name], CHOSEN[name], groups) / CHOSEN[name]
        bytes_per_row = row_bytes(name) // (TOKENS * CHOSEN[name])
        carried = ceil(share * TOKENS * CHOSEN[name]) * bytes_per_row
        assert {key[2] for key in collectives(local) if key[0] == "ALL_TO_ALL"} == {carried}


def test_refuses_a_dispatcher_that_is_none() -> None:
    with pytest.raises(UnknownNameError, match="dispatcher of experts"):
        ExpertParallel(size=4, dispatcher="nvshmem")(step())  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="on 8 NVLink domains: give 1 to 4"):
        ExpertParallel(size=4, domains=8)(step())


def test_a_plan_says_on_how_many_domains_the_ranks_of_experts_are() -> None:
    cluster = load_cluster("dgx-h100")
    for options, domains in (
        ({"ep": 16}, 2),
        ({"ep": 8, "tp": 2}, 2),
        ({"ep": 16, "tp": 2, "sequence_parallel": True, "etp": 1}, 2),
        ({"ep": 4, "tp": 2}, 1),
    ):
        plan = Plan(gpus=64, moe_dispatcher="deepep", **options)
        (made,) = (
            one for one in passes(plan, Workload(dtype=t.DType.BF16), cluster) if one.name == "expert_parallel"
        )
        assert isinstance(made, ExpertParallel)
        assert (made.dispatcher, made.domains) == ("deepep", domains)

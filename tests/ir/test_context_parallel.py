"""Context parallelism: against captures of the short sequence, closed forms, and what other passes make of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from echograph.errors import PlanError, UnknownNameError
from echograph.frontend.pytorch.spec import StepSpec
from echograph.ir import types as t
from echograph.ir.graph import Axis, Graph, StepGraph
from echograph.ir.passes.context_parallel import ContextParallel
from echograph.ir.passes.data_parallel import DataParallel
from echograph.ir.passes.fully_shard import FullyShard
from echograph.ir.passes.pipeline import Pipeline
from echograph.ir.passes.recompute import Recompute
from echograph.ir.passes.tensor_parallel import TensorParallel
from echograph.models import get_model
from echograph.workflow.compile import compile_entry

BATCH, POSITIONS, LAYERS = 2, 64, 2
NAMES = ("llama-3.2-1b", "gpt2", "bert-base-uncased")
Step = Callable[..., StepGraph]
Method = Literal["ring", "all_to_all"]
BESIDE_RING = {
    "aten.cat", "aten.clone", "aten.copy_", "aten.split_with_sizes", "aten.zeros_like", "aten.logaddexp",
    "cp.merge", "aten.add_",
}  # fmt: skip
BESIDE_HEADS = {"aten.clone", "aten.repeat_interleave", "aten.sum"}
"""What the methods add beside attention and communications."""


@pytest.fixture(scope="module")
def step() -> Step:
    """Captured steps of two layers, each once."""
    known: dict[tuple[object, ...], StepGraph] = {}

    def get(name: str, positions: int = POSITIONS, attention: str | None = None, **spec: Any) -> StepGraph:
        key = (name, positions, attention, *spec.items())
        if key not in known:
            depth = {"gpt2": "n_layer", "t5-small": "num_layers"}.get(name, "num_hidden_layers")
            entry = get_model(name).with_config(**{depth: LAYERS})
            known[key] = compile_entry(
                entry,
                StepSpec(**spec),
                batch_size=BATCH,
                seq_len=positions,
                attention=attention,
            )
        return known[key]

    return get


def calls(graph: Graph) -> Iterator[t.Op]:
    """Every operation that the first program runs."""
    for _, begin, end, _, _ in graph.programs[0].calls.tolist():
        yield from graph.ops[begin:end]


def computes(graph: Graph) -> Iterator[t.Compute]:
    return (op for op in calls(graph) if isinstance(op, t.Compute))


def is_attention(op: t.Op) -> bool:
    return isinstance(op, t.Compute) and isinstance(op.attributes, t.Attention)


def beside_attention(graph: StepGraph) -> Counter[tuple[object, ...]]:
    """Operations other than attention and its communications, with shapes and work."""
    found: Counter[tuple[object, ...]] = Counter()
    for op in calls(graph):
        if is_attention(op) or op.name.startswith("cp."):
            continue
        shapes = tuple(graph.tensors.shape.row(i) for i in (*op.inputs, *op.outputs))
        work = tuple(getattr(op, f, 0) for f in ("flops", "bytes_read", "bytes_written", "bytes_per_rank"))
        found[op.name, op.phase, op.module, shapes, work] += 1
    return found


def moved(graph: Graph, phase: t.Phase) -> int:
    """Bytes that one rank sends to others for context parallelism."""
    total = 0
    for op in calls(graph):
        if op.phase == phase and isinstance(op, t.Send) and graph.groups[op.group].axes == ("cp",):
            total += op.nbytes
        if op.phase == phase and isinstance(op, t.Collective) and graph.groups[op.group].axes == ("cp",):
            size = next(axis.size for axis in graph.mesh if axis.name == "cp")
            total += op.bytes_per_rank * (size - 1) // size
    return total


def pairs(graph: Graph, phase: t.Phase) -> float:
    """Pairs of a query and a key that attention computes, a causal mask counted as half."""
    total = 0.0
    for op in computes(graph):
        if op.phase == phase and isinstance(op.attributes, t.Attention):
            first = 1 if op.name.endswith("backward") else 0
            query, key = (graph.tensors.shape.row(i) for i in op.inputs[first : first + 2])
            total += op.attributes.heads * query[0] * query[2] * key[2] * (0.5 if op.attributes.causal else 1)
    return total


def flops(graph: Graph) -> int:
    return sum(op.flops for op in computes(graph))


# -- against a capture of the rank's own part ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shared"),
    [*((name, None) for name in NAMES), *((NAMES[0], shared) for shared in (False, True))],
)
@pytest.mark.parametrize("method", ["ring", "all_to_all"])
def test_all_but_attention_is_what_a_capture_of_a_part_of_the_sequence_has(
    step: Step, name: str, method: Method, shared: bool | None
) -> None:
    """Without tensor parallelism, with it, and with sequence parallelism too."""
    whole, part = step(name), step(name, POSITIONS // 2)
    if shared is not None:
        whole, part = (TensorParallel(size=2, sequence_parallel=shared)(g) for g in (whole, part))
    made = beside_attention(ContextParallel(size=2, method=method)(whole))
    expected = beside_attention(part)
    assert not expected - made
    assert {key[0] for key in made - expected} <= (BESIDE_RING if method == "ring" else BESIDE_HEADS)


def test_a_part_of_each_layer_computes_again_with_a_ring_of_its_own(step: Step) -> None:
    graph = step("llama-3.2-1b", recompute=True)
    made = ContextParallel(size=4)(graph)
    assert moved(graph, t.Phase.RECOMPUTE) == 0
    assert moved(made, t.Phase.RECOMPUTE) == moved(made, t.Phase.FORWARD) == moved(made, t.Phase.BACKWARD) // 2 > 0
    assert flops(made) * 4 == flops(graph)


@pytest.mark.parametrize("name", ["llama-3.2-1b", "gpt2"])
def test_what_kept_attention_reads_and_is_computed_again_is_exchanged_again(step: Step, name: str) -> None:
    graph = Recompute(policy="selective_op")(step(name))
    forward = {
        op.id: op for op in graph.ops if isinstance(op, t.Compute) and isinstance(op.attributes, t.Attention)
    }
    again = Counter[bool]()
    for op in calls(graph):
        if op.id in forward and op.phase == t.Phase.BACKWARD:
            assert isinstance(op, t.Compute) and op.forward_op is not None
            again.update(index not in forward[op.forward_op].inputs for index in op.inputs[1:4])
    made = [
        op for op in calls(ContextParallel(size=2, method="all_to_all")(graph)) if isinstance(op, t.Collective)
    ]
    moved_back = [op for op in made if op.phase == t.Phase.BACKWARD]
    assert again[True] > 0
    assert len(moved_back) == 4 * LAYERS + again[True]
    assert sum(op.payload is t.Payload.ACTIVATION for op in moved_back) == again[True]


# -- closed forms --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama-3.2-1b", "gpt2"])
@pytest.mark.parametrize("method", ["ring", "all_to_all"])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_flops_of_all_ranks_are_those_of_the_step(step: Step, name: str, method: Method, size: int) -> None:
    if method == "all_to_all" and name == "gpt2" and size == 8:
        pytest.skip("12 heads")
    graph = step(name)
    assert size * flops(ContextParallel(size=size, method=method)(graph)) == flops(graph)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("phase", [t.Phase.FORWARD, t.Phase.BACKWARD])
def test_pairs_of_all_ranks_are_those_of_the_step(step: Step, size: int, phase: t.Phase) -> None:
    """With load balance no pair beyond the mask is computed, and every rank has as many."""
    graph = step("llama-3.2-1b", 96)
    assert size * pairs(ContextParallel(size=size)(graph), phase) == pairs(graph, phase)
    if size != 3:  # which does not divide 32 heads
        assert size * pairs(ContextParallel(size=size, method="all_to_all")(graph), phase) == pairs(graph, phase)
    last = pairs(ContextParallel(size=size, load_balance=False)(graph), phase)
    assert size**2 * last == pairs(graph, phase) * (2 * size - 1)


def test_a_mask_that_hides_nothing_needs_no_balance(step: Step) -> None:
    graph = step("bert-base-uncased")
    for balance in (True, False):
        made = ContextParallel(size=4, load_balance=balance)(graph)
        assert 4 * pairs(made, t.Phase.FORWARD) == pairs(graph, t.Phase.FORWARD)
    causal = Counter(op.attributes.causal for op in computes(made) if isinstance(op.attributes, t.Attention))
    assert set(causal) == {False}


def test_all_steps_of_a_balanced_ring_have_equal_work(step: Step) -> None:
    made = ContextParallel(size=4)(step("llama-3.2-1b"))
    forward = [op for op in computes(made) if is_attention(op) and op.phase == t.Phase.FORWARD][:4]
    shapes = [[made.tensors.shape.row(i)[2] for i in op.inputs[:2]] for op in forward]
    assert shapes == [[16, 16], [16, 8], [16, 8], [8, 16]]
    assert [op.attributes.causal for op in forward] == [True, False, False, False]  # type: ignore[union-attr]
    assert len({op.flops for op in forward}) == 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_ring_sends_keys_and_values_once_forward_and_twice_backward(step: Step, name: str, size: int) -> None:
    graph = step(name)
    attention = next(op.attributes for op in computes(graph) if isinstance(op.attributes, t.Attention))
    made = ContextParallel(size=size)(graph)
    own = 2 * BATCH * POSITIONS // size * attention.kv_heads * attention.head_dim * 2
    assert moved(made, t.Phase.FORWARD) == LAYERS * (size - 1) * own
    assert moved(made, t.Phase.BACKWARD) == 2 * LAYERS * (size - 1) * own
    sends, receives = ([op for op in calls(made) if isinstance(op, kind)] for kind in (t.Send, t.Recv))
    assert [(op.tag, op.nbytes, op.peer) for op in sends] == [(op.tag, op.nbytes, -op.peer) for op in receives]


def test_the_host_waits_for_two_comparisons_before_each_ring_of_forward(step: Step) -> None:
    """What is issued before a ring has ended when the ring begins, and all else is the same."""
    plain = ContextParallel(size=2)(step("llama-3.2-1b"))
    waiting = ContextParallel(size=2, host_waits=True)(step("llama-3.2-1b"))
    ops = list(waiting.ops)
    waits = [i for i, op in enumerate(ops) if isinstance(op, t.Host)]
    assert {ops[i].phase for i in waits} == {t.Phase.FORWARD}
    stored = sum(isinstance(op, t.Compute) and isinstance(op.attributes, t.Attention) for op in ops) // 2
    rings = stored // 2  # a ring of two attends twice, forward and backward
    assert len(waits) == 2 * rings > 0
    for first, second in zip(waits[::2], waits[1::2], strict=True):
        assert second - first == 3
        assert ops[second + 1].name == "aten.cat"  # keys and values, which go round
    added = Counter(op.name for op in ops) - Counter(op.name for op in plain.ops)
    assert added == {"aten.equal": 2 * rings, "equal": 2 * rings, "synchronize": 2 * rings}


def test_a_ring_of_two_copies_what_transformer_engine_does(step: Step) -> None:
    """Bytes read and written beside attention, in those of queries and of keys with values; rank 1 of 2."""
    made = ContextParallel(size=2)(step("llama-3.2-1b"))
    queries, pair = (BATCH * POSITIONS // 2 * heads * 64 * 2 for heads in (32, 2 * 8))
    sums = BATCH * POSITIONS // 2 * 32 * 4
    copied = {
        t.Phase.FORWARD: [
            ("aten.cat", pair, pair), ("aten.clone", pair // 2, pair // 2), ("aten.zeros_like", 0, queries),
            ("aten.logaddexp", 2 * sums, sums), *2 * [("cp.merge", 2 * queries + 2 * sums, queries)],
        ],
        t.Phase.BACKWARD: [
            ("aten.clone", pair, pair), ("aten.clone", pair // 2, pair // 2), ("aten.copy_", queries, queries),
            ("aten.cat", pair // 2, pair // 2), ("aten.copy_", pair // 2, pair // 2), ("aten.cat", pair, pair),
            ("aten.add_", 2 * queries, queries), ("aten.add_", 2 * pair, pair),
        ],
    }  # fmt: skip
    for phase, expected in copied.items():
        ops = [op for op in computes(made) if op.phase == phase and not op.is_view]
        found = Counter((op.name, op.bytes_read, op.bytes_written) for op in ops)
        assert not Counter({key: LAYERS * n for key, n in Counter(expected).items()}) - found


@pytest.mark.parametrize("size", [2, 4, 16])
def test_heads_are_exchanged_four_times_each_way(step: Step, size: int) -> None:
    """Sixteen ranks have a key-value head each, of eight repeated ones."""
    made = ContextParallel(size=size, method="all_to_all")(step("llama-3.2-1b"))
    one = BATCH * POSITIONS // size * 64 * 2
    expected = Counter({one * 32: 2 * LAYERS, one * max(8, size): 2 * LAYERS})
    for phase in (t.Phase.FORWARD, t.Phase.BACKWARD):
        found = [op for op in calls(made) if isinstance(op, t.Collective) and op.phase == phase]
        assert Counter(op.bytes_per_rank for op in found) == expected
    attention = next(op for op in computes(made) if is_attention(op))
    heads = [made.tensors.shape.row(i)[1:3] for i in attention.inputs[:2]]
    assert heads == [(32 // size, POSITIONS), (max(8, size) // size, POSITIONS)]


@pytest.mark.slow
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    size=st.sampled_from([1, 2, 4, 8, 16]),
    ring=st.booleans(),
    balance=st.booleans(),
    shared=st.sampled_from([None, False, True]),
    name=st.sampled_from(["llama-3.2-1b", "gpt2"]),
)
def test_any_size_is_a_graph_or_one_line(
    step: Step, size: int, ring: bool, balance: bool, shared: bool | None, name: str
) -> None:
    graph = step(name)
    if shared is not None:
        graph = TensorParallel(size=2, sequence_parallel=shared)(graph)
    try:
        made = ContextParallel(size=size, method="ring" if ring else "all_to_all", load_balance=balance)(graph)
    except PlanError as error:
        assert "\n" not in str(error)
        assert "all_to_all" in str(error)
    else:
        assert size * flops(made) == flops(graph)
        assert made.world_size == size * graph.world_size


@pytest.mark.parametrize("method", ["ring", "all_to_all"])
def test_padding_of_the_logarithms_is_not_kept(step: Step, method: Method) -> None:
    """The memory-efficient kernel (fp32) pads them to a multiple of 32."""
    graph = step("gpt2", 40, dtype="fp32")
    made = ContextParallel(size=4, method=method)(graph)
    attention = next(op for op in computes(made) if is_attention(op))
    result, logarithms = (made.tensors.shape.row(i) for i in attention.outputs[:2])
    assert logarithms == result[:3]


# -- with other passes ---------------------------------------------------------------------------------------


def test_it_lies_just_outside_tensor_parallelism(step: Step) -> None:
    made = ContextParallel(size=4)(TensorParallel(size=2)(step("gpt2")))
    assert made.mesh == (Axis(name="cp", size=4), Axis(name="tp", size=2))
    assert DataParallel(replicas=3)(made).mesh[-2:] == made.mesh


@pytest.mark.parametrize("method", ["ring", "all_to_all"])
def test_gradients_are_summands_that_data_parallelism_reduces(step: Step, method: Method) -> None:
    graph = step("llama-3.2-1b")
    made = ContextParallel(size=4, method=method)(graph)
    roles = [t.TensorRole.PARAMETER, t.TensorRole.GRADIENT, t.TensorRole.OPTIMIZER_STATE]
    before, after = (sorted((x.name, x.shape) for x in g.tensors if x.role in roles) for g in (graph, made))
    assert before == after
    job = DataParallel(replicas=2)(made)
    reduced: Counter[tuple[str, ...]] = Counter()
    for op in calls(job):
        if isinstance(op, t.Collective) and op.name.startswith("ddp.") and op.payload == t.Payload.GRADIENT:
            reduced[job.groups[op.group].axes] += op.bytes_per_rank
    assert set(reduced) == {("dp", "cp")}
    assert reduced["dp", "cp"] == graph.workload.parameters * 2


@pytest.mark.parametrize("method", ["ring", "all_to_all"])
def test_it_is_sharded_and_staged_as_any_step(step: Step, method: Method) -> None:
    made = ContextParallel(size=2, method=method)(
        TensorParallel(size=2, sequence_parallel=True)(step("llama-3.2-1b"))
    )
    sharded = FullyShard(replicas=2)(made)
    assert sharded.world_size == 8
    staged = Pipeline(stages=2, micro_batches=4, schedule="1f1b")(made)
    assert DataParallel(replicas=2)(staged).world_size == 16
    crossing = [op for op in calls(staged) if isinstance(op, t.Send) and staged.groups[op.group].axes == ("pp",)]
    assert {op.nbytes for op in crossing} == {BATCH * POSITIONS // 4 * 2048 * 2}


# -- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "choose 1 to"),
        ({"size": 3}, "into 6 chunks, which do not divide it: capture a sequence of 60 or 66"),
        (
            {"size": 3, "load_balance": False},
            "into 3 chunks, which do not divide it: capture a sequence of 63 or 66",
        ),
        ({"size": 128}, "capture a sequence of 256"),
        ({"size": 8, "method": "all_to_all"}, "choose a size of 6 or 12, or the ring"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_the_nearest(
    step: Step, options: dict[str, object], message: str
) -> None:
    with pytest.raises(PlanError, match=message) as error:
        ContextParallel(**options)(step("gpt2"))  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


def test_what_it_cannot_cut_is_refused(step: Step) -> None:
    graph = step("gpt2")
    with pytest.raises(PlanError, match="context-parallel already"):
        ContextParallel(size=2)(ContextParallel(size=2)(graph))
    with pytest.raises(PlanError, match="needs fused attention"):
        ContextParallel(size=2)(step("gpt2", attention="eager"))
    with pytest.raises(PlanError, match="mask or bias"):
        ContextParallel(size=2)(step("t5-small"))
    with pytest.raises(UnknownNameError, match="all_to_all"):
        ContextParallel(size=2, method="al_to_all")(graph)  # type: ignore[arg-type]


def test_one_rank_is_the_step(step: Step) -> None:
    assert ContextParallel(size=1)(step("gpt2")) is step("gpt2")

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from layered import layered_step
from pipelines import BACKWARD, FORWARD, flops, makespan, messages, parameter_bytes, runs, tied_step

from echograph.errors import PlanError
from echograph.ir.builder import GraphBuilder
from echograph.ir.graph import Axis, JobGraph, StepGraph
from echograph.ir.passes.fold import Fold
from echograph.ir.passes.pipeline import Pipeline
from echograph.ir.schedule import Schedule
from echograph.ir.serde import decode, encode
from echograph.ir.text import to_text
from echograph.ir.types import CollectiveKind, DType, OpKind, Phase, TensorRole
from echograph.simulator.clusters import load_cluster
from echograph.simulator.durations import durations
from echograph.simulator.groups import rendezvous_key
from echograph.simulator.memory import memory

LAYERS = 12


def step(layers: int = LAYERS) -> StepGraph:
    return Fold()(layered_step(layers))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("micro_batches", [1, 2, 5, 12])
def test_the_bubble_of_equal_stages_is_the_closed_form(schedule: str, stages: int, micro_batches: int) -> None:
    job = Pipeline(stages=stages, micro_batches=micro_batches, schedule=schedule)(step())
    of_a_stage = LAYERS // stages * (FORWARD + BACKWARD)
    assert makespan(job) == (micro_batches + stages - 1) * of_a_stage


def test_a_stage_of_the_embedding_or_the_head_alone() -> None:
    job = Pipeline(stages=4, micro_batches=2, layers=(0, 6, 6, 0))(tied_step(LAYERS))
    where = {
        name: [s for s in range(4) if runs(job, s)[name]] for name in ("aten.embedding embed", "aten.mm head")
    }
    assert where == {"aten.embedding embed": [0], "aten.mm head": [3]}
    assert not [name for stage in (0, 3) for name in runs(job, stage) if "h." in name]
    assert makespan(job) == 0  # no deadlock


@pytest.mark.parametrize(
    ("stages", "micro_batches", "chunks"), [(2, 2, 2), (2, 8, 3), (3, 6, 2), (4, 12, 3), (6, 6, 2)]
)
def test_interleaving_divides_the_bubble_by_the_chunks(stages: int, micro_batches: int, chunks: int) -> None:
    job = Pipeline(stages=stages, micro_batches=micro_batches, schedule="interleaved", chunks=chunks)(step())
    of_a_stage = LAYERS // stages * (FORWARD + BACKWARD)
    assert makespan(job) == micro_batches * of_a_stage + (stages - 1) * of_a_stage // chunks


PLANS = [
    Pipeline(stages=2),
    Pipeline(stages=3, micro_batches=7),
    Pipeline(stages=4, micro_batches=3, schedule="gpipe"),
    Pipeline(stages=2, micro_batches=4, schedule="interleaved", chunks=3),
    Pipeline(stages=4, micro_batches=8, schedule="interleaved", chunks=2, layers=(1, 1, 1, 1, 1, 1, 1, 5)),
    Pipeline(stages=3, micro_batches=2, layers=(6, 1, 5)),
    Pipeline(stages=3, micro_batches=7, schedule="zb-v", chunks=2),
    Pipeline(stages=3, micro_batches=7, schedule="dualpipe-v", chunks=2),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("make", [step, lambda: tied_step(LAYERS), lambda: tied_step(LAYERS, skip=True)])
def test_what_is_sent_is_received_in_the_same_order(plan: Pipeline, make: Callable[[], StepGraph]) -> None:
    if plan.where.turns and make is not step:
        pytest.skip("its first stage has both ends of the model, which share a weight")
    found = messages(plan(make()))
    assert found
    for both in found.values():
        assert both[OpKind.SEND] == both[OpKind.RECV]
    sent = sum(len(both[OpKind.SEND]) for both in found.values())
    turns = plan.chunks - 1 if plan.where.turns else 0
    assert sent % (2 * plan.micro_batches * (plan.stages * plan.chunks - 1 - turns)) == 0


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_every_operation_runs_on_one_stage_once_a_micro_batch(plan: Pipeline) -> None:
    graph = step()
    job = plan(graph)
    optimizer = graph.ops.phase == Phase.OPTIMIZER
    once = sum(
        int(graph.ops.flops[begin:end][optimizer[begin:end]].sum())
        for _, begin, end, _, _ in graph.programs[0].calls.tolist()
    )
    assert flops(job) == plan.micro_batches * (flops(graph) - once) + once
    total = sum((runs(job, stage) for stage in range(plan.stages)), Counter())
    assert total["aten.embedding embedding"] == total["aten.loss "] == plan.micro_batches
    assert all(total[f"aten._fused_adam_ layers.{i}.linear0"] == 1 for i in range(LAYERS))
    parameters = 2 * LAYERS + 1
    assert total["aten.add_ "] == (plan.micro_batches - 1) * parameters


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_every_parameter_is_on_one_stage(plan: Pipeline) -> None:
    job = plan(step())
    assert sum(parameter_bytes(job, s) for s in range(plan.stages)) == (2 * LAYERS + 1) * 512 * 512 * 4


def test_the_first_stage_embeds_and_the_last_has_the_loss() -> None:
    job = Pipeline(stages=3, micro_batches=2)(step())
    where = {
        name: [s for s in range(3) if runs(job, s)[name]] for name in ("aten.embedding embedding", "aten.loss ")
    }
    assert where == {"aten.embedding embedding": [0], "aten.loss ": [2]}
    assert [p.coordinates for p in job.programs] == [{"pp": 0}, {"pp": 1}, {"pp": 2}]
    assert [(a.name, a.size) for a in job.mesh] == [("pp", 3)]


def test_layers_are_split_as_asked() -> None:
    def layers(**options: object) -> list[int]:
        job = Pipeline(**options)(step())  # type: ignore[arg-type]
        return [
            sum(f"aten._fused_adam_ layers.{i}.linear0" in runs(job, s) for i in range(LAYERS)) for s in range(5)
        ]

    assert layers(stages=5) == [3, 3, 2, 2, 2]
    assert layers(stages=5, layers=(1, 2, 3, 2, 4)) == [1, 2, 3, 2, 4]


@pytest.mark.parametrize(("more", "empty"), [(1, (LAYERS,)), (2, (0, LAYERS + 1))])
def test_ends_have_no_layer_where_chunks_are_more_than_layers(more: int, empty: tuple[int, ...]) -> None:
    job = Pipeline(stages=LAYERS + more, micro_batches=2)(step())
    has = [
        any(f"layers.{i}." in name for name in runs(job, s) for i in range(LAYERS)) for s in range(LAYERS + more)
    ]
    assert [stage for stage, some in enumerate(has) if not some] == list(empty)


def test_three_chunks_more_than_layers_are_refused() -> None:
    with pytest.raises(PlanError, match=f"{LAYERS + 3} pipeline chunks, but the model has {LAYERS} layers"):
        Pipeline(stages=LAYERS + 3, micro_batches=2)(step())


def test_interleaved_stages_take_chunks_in_turn() -> None:
    job = Pipeline(stages=2, micro_batches=2, schedule="interleaved", chunks=3)(step())
    first = [i for i in range(LAYERS) if f"aten.mm layers.{i}.linear0" in runs(job, 0)]
    assert first == [0, 1, 4, 5, 8, 9]


@pytest.mark.parametrize(("stages", "positions"), [(2, ()), (4, (0, 3))])
def test_a_shared_weight_is_on_both_ends_and_its_gradient_all_reduced(
    stages: int, positions: tuple[int, ...]
) -> None:
    graph = tied_step(8)
    job = Pipeline(stages=stages, micro_batches=3)(graph)
    ends = (0, stages - 1)
    total = sum((runs(job, s) for s in range(stages)), Counter())
    assert "aten.add embed" not in total
    for s in ends:
        assert runs(job, s)["pp.all_reduce_shared_gradient "] == runs(job, s)["aten.sgd_ embed"] == 1
    reduce = np.flatnonzero(job.ops.kind == OpKind.COLLECTIVE)
    assert len(reduce) == 2
    for row in reduce.tolist():
        assert job.ops[row].collective == CollectiveKind.ALL_REDUCE
        assert job.ops[row].bytes_per_rank == 8 * 16 * 4
        assert job.groups[job.ops[row].group].positions == positions
    assert sum(parameter_bytes(job, s) for s in range(stages)) == (8 + 2) * 8 * 16 * 4
    keys = {rendezvous_key(job, s, row) for s, row in zip(ends, sorted(reduce.tolist()), strict=True)}
    assert len(keys) == 1 and None not in keys


def test_gradients_of_a_shared_weight_accumulate_on_both_ends() -> None:
    job = Pipeline(stages=2, micro_batches=3)(tied_step(8))
    for stage in range(2):
        calls = job.programs[stage].calls
        names = [job.strings[job.ops.name[row]] for _, x, y, _, _ in calls.tolist() for row in range(x, y)]
        assert names.count("aten.add_") == 2 * (4 + 1)
        last = max(i for i, name in enumerate(names) if name == "aten.add_")
        assert last < names.index("pp.all_reduce_shared_gradient") < names.index("aten.sgd_")


def test_a_mask_is_made_on_every_stage_rather_than_sent() -> None:
    job = Pipeline(stages=4, micro_batches=2)(tied_step(8))
    assert [runs(job, s)["aten.triu "] for s in range(4)] == [2, 2, 2, 2]
    assert {int(n) for n in job.ops.nbytes[job.ops.kind == OpKind.SEND]} == {8 * 16 * 4}
    assert int((job.ops.kind == OpKind.SEND).sum()) == 2 * 3


def test_a_skip_connection_is_handed_on_from_stage_to_stage() -> None:
    job = Pipeline(stages=4)(tied_step(8, skip=True))
    sends = [sum(runs(job, s)[f"pp.send_{way} "] for way in ("forward", "backward")) for s in range(4)]
    # The embedding goes up beside the activation, its gradient comes down beside the activation's.
    assert sends == [2, 4, 4, 2]


@pytest.mark.parametrize("micro_batches", [4, 16])
def test_1f1b_bounds_activations_by_the_stages_that_follow(micro_batches: int) -> None:
    def activations(schedule: str, stage: int) -> int:
        found = memory(Pipeline(stages=4, micro_batches=micro_batches, schedule=schedule)(step()), stage, 0)
        assert found is not None
        return found.by_role["activation"]

    one = memory(Pipeline(stages=4)(step()), 1, 0)
    assert one is not None
    for stage in (1, 2):
        assert activations("1f1b", stage) <= (4 - stage) * one.by_role["activation"]
    assert activations("gpipe", 1) > micro_batches / 4 * activations("1f1b", 1) * 0.9


def test_an_activation_lives_from_its_forward_to_its_backward_only() -> None:
    job = Pipeline(stages=4, micro_batches=16)(step())
    for stage, program in enumerate(job.programs):
        schedule = Schedule(job, program)
        layer = next(i for i in range(LAYERS) if f"aten.mm layers.{i}.linear0" in runs(job, stage))
        block = next(n for n, b in enumerate(job.blocks) if len(b.instances) == LAYERS)
        rows = job.blocks[block].ops
        first = next(r for r in rows if job.ops.phase[r] == Phase.FORWARD)
        last = max(r for r in rows if job.ops.phase[r] == Phase.BACKWARD)
        every = np.arange(16)
        begin = schedule.position(np.full(16, layer), every, np.full(16, first))
        end = schedule.position(np.full(16, layer), every, np.full(16, last))
        alive = max(int(((begin <= at) & (at <= end)).sum()) for at in begin.tolist())
        assert alive == 4 - stage


def test_a_send_to_another_node_takes_longer_than_one_within() -> None:
    job = Pipeline(stages=16)(tied_step(16))
    time = durations(_without_compute(job), load_cluster("dgx-h100")).picoseconds
    sends = {
        stage: int(time[row])
        for stage, program in enumerate(job.programs)
        for _, begin, end, _, _ in program.calls.tolist()
        for row in range(begin, end)
        if job.strings[job.ops.name[row]] == "pp.send_forward"
    }
    assert max(sends, key=lambda stage: sends[stage]) == 7
    assert len(set(sends.values())) == 2


def _without_compute(job: JobGraph) -> JobGraph:
    from layered import timed

    return timed(job, load_cluster("dgx-h100").device, 1)


def test_one_stage_sends_nothing_and_runs_all() -> None:
    graph = tied_step(4)
    job = Pipeline(stages=1, micro_batches=2)(graph)
    assert not np.isin(job.ops.kind, (OpKind.SEND, OpKind.RECV, OpKind.COLLECTIVE)).any()
    assert runs(job, 0)["aten.add embed"] == 2


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_folding_changes_nothing(plan: Pipeline) -> None:
    folded, unfolded = plan(step()), plan(layered_step(LAYERS))
    assert len(unfolded.blocks) < len(folded.blocks)
    assert makespan(folded) == makespan(unfolded)
    assert [runs(folded, s) for s in range(plan.stages)] == [runs(unfolded, s) for s in range(plan.stages)]


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (3, 9), (6, 20)])
def test_dualpipe_v_waits_at_the_ends_of_a_step_alone(stages: int, micro_batches: int) -> None:
    job = Pipeline(stages=stages, micro_batches=micro_batches, schedule="dualpipe-v", chunks=2)(step())
    assert makespan(job) == (6 * micro_batches + stages - 1) * (LAYERS // (2 * stages) * FORWARD)


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 3), (2, 9), (3, 5), (6, 11), (6, 20)])
def test_chunks_that_turn_back_wait_at_the_ends_of_a_step_alone(stages: int, micro_batches: int) -> None:
    """Passes of one length: a stage waits for (p - 1) forwards of a chunk, before its first or after its last."""
    job = Pipeline(stages=stages, micro_batches=micro_batches, schedule="zb-v", chunks=2)(step())
    of_a_chunk = LAYERS // (2 * stages) * FORWARD
    assert BACKWARD == 2 * FORWARD  # both halves of backward are as long as forward
    assert makespan(job) == (6 * micro_batches + stages - 1) * of_a_chunk


def test_what_crosses_where_chunks_turn_back_stays_on_the_stage() -> None:
    job = Pipeline(stages=3, micro_batches=5, schedule="zb-v", chunks=2)(step())
    assert {pair[:2] for pair in messages(job)} == {(0, 1), (1, 0), (1, 2), (2, 1)}
    where = [[i for i in range(LAYERS) if runs(job, s)[f"aten._fused_adam_ layers.{i}.linear0"]] for s in range(3)]
    assert where == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]


def test_a_weight_of_both_ends_is_refused_where_they_are_on_one_stage() -> None:
    with pytest.raises(PlanError, match=r"shared\.weight\.grad is in two chunks of a stage: use another schedule"):
        Pipeline(stages=3, schedule="zb-v", chunks=2)(tied_step(LAYERS))


def test_other_axes_of_the_mesh_stay_inside_a_stage() -> None:
    graph = replace(tied_step(8), mesh=(Axis(name="tp", size=4),))
    job = Pipeline(stages=2)(graph)
    assert [(a.name, a.size) for a in job.mesh] == [("pp", 2), ("tp", 4)]
    assert job.world_size == 8
    with pytest.raises(PlanError, match="a pipeline already"):
        Pipeline(stages=2)(replace(graph, mesh=job.mesh))


def test_tensor_parallel_ranks_share_the_sending_of_what_they_all_have() -> None:
    graph = replace(step(8), mesh=(Axis(name="tp", size=4),))
    whole, shared = (Pipeline(stages=3, micro_batches=2, scatter_gather=share)(graph) for share in (False, True))
    sent = [np.sum(job.ops.nbytes[job.ops.kind == OpKind.SEND]) for job in (whole, shared)]
    assert sent[0] == 4 * sent[1] > 0
    gathers = [op for op in shared.ops if op.name == "pp.all_gather"]
    assert sum(op.bytes_per_rank for op in gathers) == sent[0]
    assert {shared.groups[op.group].axes for op in gathers} == {("tp",)}
    assert not (whole.ops.kind == OpKind.COLLECTIVE).any()
    # What waits for the messages waits for the whole, too.
    waits = [op for op in shared.ops if op.name == "pp.wait"]
    assert {gather.id for gather in gathers} <= {dep for op in waits for dep in op.deps}
    assert makespan(shared) == makespan(whole)  # where communications take no time; no deadlock


def test_beside_other_axes_two_stages_exchange_a_shared_gradient() -> None:
    graph = tied_step(8)
    job = Pipeline(stages=4, micro_batches=2)(replace(graph, mesh=(Axis(name="tp", size=4),)))
    assert not (job.ops.kind == OpKind.COLLECTIVE).any()
    exchanged = ("pp.send_shared_gradient ", "pp.recv_shared_gradient ", "aten.sgd_ embed")
    assert [[runs(job, s)[name] for name in exchanged] for s in range(4)] == [[1] * 3, [0] * 3, [0] * 3, [1] * 3]
    found = messages(job)
    assert all(both[OpKind.SEND] == both[OpKind.RECV] for both in found.values())
    assert [k[:2] for k in found if k[2] == "comm.pp.shared_gradient"] == [(0, 3), (3, 0)]
    assert makespan(job) == 0  # no deadlock


def test_an_operation_without_a_phase_is_refused() -> None:
    builder = GraphBuilder()
    builder.compute("aten.relu")
    with pytest.raises(PlanError, match="has no phase"):
        Pipeline(stages=2)(builder.build(StepGraph))


def test_a_job_reads_back_as_it_was_written() -> None:
    job = Pipeline(stages=3, micro_batches=2)(tied_step(6, skip=True))
    assert list(to_text(decode(b"".join(encode(job))))) == list(to_text(job))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": 0}, "0 pipeline stages"),
        ({"stages": 10**6}, "pipeline stages"),
        ({"stages": 15}, "use 12 or fewer"),
        ({"stages": 4, "micro_batches": 4, "schedule": "interleaved", "chunks": 5}, "use 12 or fewer"),
        ({"stages": 2, "layers": (6, 5)}, "add up to the model's 12"),
        ({"stages": 3, "layers": (6, 0, 6)}, "1 or more"),
        ({"stages": 2, "layers": (13, -1)}, "such as 11, 1"),
        ({"stages": 4, "layers": (4, 4, 4, 4)}, "such as 4, 4, 3, 1"),
        ({"stages": 2, "layers": (4, 4, 4)}, "give 2 numbers"),
        ({"stages": 2, "layers": ()}, "give 2 numbers"),
        ({"stages": 2, "chunks": 2}, "use interleaved"),
        ({"stages": 2, "chunks": 0}, "0 chunks"),
        ({"stages": 1, "chunks": 2, "schedule": "interleaved"}, "2 or more"),
        ({"stages": 2, "micro_batches": 0}, "0 micro-batches"),
        ({"stages": 2, "micro_batches": 3, "chunks": 2, "schedule": "interleaved"}, "multiple of 2"),
        ({"stages": 2, "chunks": 2, "schedule": "zb-h1"}, "use interleaved"),
    ],
)
def test_wrong_plans_are_refused_in_one_line(options: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message) as error:
        Pipeline(**options)(step())  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


def test_one_kernel_over_the_gradients_of_several_stages_is_refused() -> None:
    with pytest.raises(PlanError, match="takes parameters one by one"):
        Pipeline(stages=2)(tied_step(4, clip=True))


def test_a_step_without_layers_is_refused() -> None:
    builder = GraphBuilder()
    x = builder.tensor("x", (4,), DType.FP32, TensorRole.INPUT)
    builder.compute("aten.relu", phase=Phase.FORWARD, inputs=(x,))
    with pytest.raises(PlanError, match="0 layers"):
        Pipeline(stages=2)(builder.build(StepGraph))

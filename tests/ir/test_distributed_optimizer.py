from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layered import PARAMETER_BYTES, WIDTH, layered_step, timed

from echograph.errors import PlanError
from echograph.ir.builder import GraphBuilder
from echograph.ir.graph import Axis, Graph, JobGraph, StepGraph
from echograph.ir.passes.data_parallel import DataParallel
from echograph.ir.passes.fold import Fold
from echograph.ir.passes.fully_shard import FullyShard
from echograph.ir.passes.pipeline import Pipeline
from echograph.ir.types import CollectiveKind, Compute, Duration, Op, Payload, Phase, Source, TensorRole
from echograph.simulator.clusters import load_cluster
from echograph.simulator.host import IssueTimes
from echograph.simulator.simulate import simulate

LAYERS = 6
PARAMETERS = 2 * LAYERS + 1
CLUSTER = load_cluster("dgx-h100")
PERSISTENT = (TensorRole.PARAMETER, TensorRole.GRADIENT, TensorRole.OPTIMIZER_STATE)


def run(graph: Graph, program: int = 0) -> Iterator[tuple[Op, int]]:
    """Every operation that a program runs, in order, with its micro-batch."""
    for _, begin, end, _, micro_batch in graph.programs[program].calls.tolist():
        for row in range(begin, end):
            yield graph.ops[row], micro_batch


def flops(graph: Graph, *phases: Phase) -> int:
    return sum(
        op.flops
        for p in range(len(graph.programs))
        for op, _ in run(graph, p)
        if op.phase in phases and hasattr(op, "flops")
    )


def communicated(graph: Graph) -> Counter[tuple[CollectiveKind, Payload]]:
    """Bytes of collectives, over all programs."""
    found: Counter[tuple[CollectiveKind, Payload]] = Counter()
    for program in range(len(graph.programs)):
        for op, _ in run(graph, program):
            if hasattr(op, "collective"):
                found[op.collective, op.payload] += op.bytes_per_rank
    return found


def held(graph: Graph, role: TensorRole) -> int:
    """Bytes of a role that one rank of every program holds together, of tensors that own their memory."""
    own = ~graph.tensors.port & (graph.tensors.alias_of < 0) & (graph.tensors.role == role)
    return sum(
        int(graph.tensors.nbytes[b.tensors.start : b.tensors.stop][own[b.tensors.start : b.tensors.stop]].sum())
        * len(b.instances)
        for b in graph.blocks
    )


def with_axes(sizes: dict[str, int], divided: dict[str, str]) -> StepGraph:
    """The layered step on a mesh, with the persistent tensors of some modules divided over an axis."""
    step = layered_step(2)
    builder = GraphBuilder(name="axes", workload=step.workload)
    builder.mesh = tuple(Axis(name=name, size=size) for name, size in sizes.items())
    for tensor in step.tensors:
        axis = [axis for part, axis in divided.items() if part in tensor.name and tensor.role in PERSISTENT]
        builder.tensor(
            tensor.name, tensor.shape, tensor.dtype, tensor.role, alias_of=tensor.alias_of, sharded=axis
        )
    for op in step.ops:
        builder.add(op)
    return builder.build(StepGraph)


def by_group(graph: Graph, kind: CollectiveKind) -> Counter[tuple[str, ...]]:
    """Bytes of a kind of collective of the first program, by the axes of its group."""
    found: Counter[tuple[str, ...]] = Counter()
    for op, _ in run(graph):
        if getattr(op, "collective", None) == kind:
            found[graph.groups[op.group].axes] += op.bytes_per_rank
    return found


# -- ZeRO 1 and 2 ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_every_rank_holds_its_share_of_the_optimizer_state(zero: int, ranks: int) -> None:
    step = Fold()(layered_step(LAYERS))
    job = DataParallel(replicas=ranks, zero=zero)(step)
    assert ranks * held(job, TensorRole.OPTIMIZER_STATE) == held(step, TensorRole.OPTIMIZER_STATE)
    assert held(job, TensorRole.PARAMETER) == held(step, TensorRole.PARAMETER)
    gradients = held(step, TensorRole.GRADIENT)
    assert held(job, TensorRole.GRADIENT) == (gradients if zero == 1 else gradients // ranks)
    divided = {job.strings[a] for a in job.tensors.sharded.values.tolist()}
    assert divided == {"dp"}


def test_shares_that_do_not_divide_are_filled_up() -> None:
    job = DataParallel(replicas=7, zero=1)(Fold()(layered_step(LAYERS)))
    assert held(job, TensorRole.OPTIMIZER_STATE) == PARAMETERS * ceil(WIDTH * WIDTH / 7) * 4
    (reduced,) = [n for (kind, _), n in communicated(job).items() if kind == CollectiveKind.REDUCE_SCATTER]
    elements = PARAMETERS * WIDTH * WIDTH
    assert reduced == ceil(elements / (7 * 128)) * 7 * 128 * 4


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_gradients_are_scattered_and_parameters_gathered(zero: int, micro_batches: int) -> None:
    job = DataParallel(replicas=8, zero=zero, micro_batches=micro_batches)(Fold()(layered_step(LAYERS)))
    times = micro_batches if zero == 2 else 1
    assert communicated(job) == {
        (CollectiveKind.REDUCE_SCATTER, Payload.GRADIENT): times * PARAMETERS * PARAMETER_BYTES,
        (CollectiveKind.ALL_GATHER, Payload.PARAMETER): PARAMETERS * PARAMETER_BYTES,
    }


def test_all_reducing_instead_moves_the_same_gradients() -> None:
    job = DataParallel(replicas=8, zero=1, reduce_scatter=False)(Fold()(layered_step(LAYERS)))
    assert communicated(job)[CollectiveKind.ALL_REDUCE, Payload.GRADIENT] == PARAMETERS * PARAMETER_BYTES


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_optimizer_alone_does_less(zero: int, micro_batches: int) -> None:
    step = Fold()(layered_step(LAYERS))
    job = DataParallel(replicas=8, zero=zero, micro_batches=micro_batches)(step)
    passes = (Phase.FORWARD, Phase.BACKWARD)
    assert flops(job, *passes) == micro_batches * flops(step, *passes)
    share = 1 if zero == 0 else 8
    assert flops(job, Phase.OPTIMIZER) == flops(step, Phase.OPTIMIZER) // share


def test_one_rank_divides_nothing() -> None:
    step = Fold()(layered_step(LAYERS))
    alone, plain = DataParallel(replicas=1, zero=1)(step), DataParallel(replicas=1)(step)
    assert not communicated(alone)
    assert held(alone, TensorRole.OPTIMIZER_STATE) == held(plain, TensorRole.OPTIMIZER_STATE)


def names(job: JobGraph, program: int = 0) -> list[str]:
    return [op.name for op, _ in run(job, program)]


def test_parameters_are_gathered_after_the_optimizer() -> None:
    job = DataParallel(replicas=8, zero=1, bucket_bytes=3 * PARAMETER_BYTES)(Fold()(layered_step(LAYERS)))
    found = names(job)
    assert found.count("zero.all_gather") == ceil(PARAMETERS / 3)
    assert max(i for i, n in enumerate(found) if n == "aten._fused_adam_") < found.index("zero.all_gather")


def test_gathers_run_one_bucket_ahead_of_forward() -> None:
    job = DataParallel(replicas=8, zero=1, bucket_bytes=3 * PARAMETER_BYTES, overlap_param_gather=True)(
        Fold()(layered_step(LAYERS))
    )
    found = [
        n for n in names(job) if n in ("zero.all_gather", "aten.embedding", "aten.mm", "zero.wait", "aten.loss")
    ]
    begin = found[: found.index("aten.loss")]
    # Filled from the last product on: a bucket of the embedding alone, then of three products each.
    assert begin[:4] == ["zero.all_gather", "zero.wait", "zero.all_gather", "aten.embedding"]
    assert begin[4:10] == ["zero.wait", "zero.all_gather", "aten.mm", "aten.mm", "aten.mm", "zero.wait"]
    assert begin.count("zero.all_gather") == begin.count("zero.wait") == ceil(PARAMETERS / 3)


def test_without_overlap_gradients_are_reduced_at_once_after_backward() -> None:
    for zero in (0, 1, 2):
        found = names(DataParallel(replicas=8, zero=zero, overlap_grad_reduce=False)(Fold()(layered_step(LAYERS))))
        bucket = [i for i, n in enumerate(found) if ".bucket_" in n and not n.startswith("ddp.copy")]
        assert len(bucket) == 1
        assert bucket[0] > max(i for i, n in enumerate(found) if n in ("aten.mm", "aten.embedding_backward"))


@settings(max_examples=20, deadline=None)
@given(
    ranks=st.integers(1, 9),
    micro_batches=st.integers(1, 3),
    zero=st.integers(0, 2),
    reduce=st.booleans(),
    gather=st.booleans(),
    stages=st.integers(1, 3),
    folded=st.booleans(),
    bucket=st.sampled_from([None, PARAMETER_BYTES, 3 * PARAMETER_BYTES]),
)
def test_any_plan_conserves_work_and_reduces_every_gradient(
    ranks: int,
    micro_batches: int,
    zero: int,
    reduce: bool,
    gather: bool,
    stages: int,
    folded: bool,
    bucket: int | None,
) -> None:
    step = layered_step(LAYERS)
    step = Fold()(step) if folded or stages > 1 else step
    staged = Pipeline(stages=stages, micro_batches=micro_batches)(step) if stages > 1 else step
    job = DataParallel(
        replicas=ranks, micro_batches=1 if stages > 1 else micro_batches, zero=zero, overlap_grad_reduce=reduce,
        overlap_param_gather=gather, bucket_bytes=bucket,
    )(staged)  # fmt: skip
    passes = (Phase.FORWARD, Phase.BACKWARD)
    assert flops(job, *passes) == micro_batches * flops(step, *passes)
    reduced = sum(n for (_, payload), n in communicated(job).items() if payload == Payload.GRADIENT)
    times = micro_batches if zero == 2 else 1
    whole = times * PARAMETERS * PARAMETER_BYTES if ranks > 1 else 0
    assert whole <= reduced < whole + times * PARAMETERS * ranks * 128 * 4 + 1
    result = simulate(timed(job, CLUSTER.device, 10**7), CLUSTER, IssueTimes(op_ps=10**5, launch_ps=10**5))
    assert result.samples == step.workload.batch_size * ranks * micro_batches


@pytest.mark.parametrize("zero", [-1, 3])
def test_other_stages_are_refused(zero: int) -> None:
    with pytest.raises(PlanError, match="choose 0, 1 or 2"):
        DataParallel(replicas=2, zero=zero)(layered_step(1))


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("stages", [1, 2])
def test_gradients_add_up_before_their_bucket_is_reduced(zero: int, stages: int) -> None:
    step = Fold()(layered_step(LAYERS))
    if stages > 1:
        job = DataParallel(replicas=8, zero=zero)(Pipeline(stages=stages, micro_batches=3)(step))
    else:
        job = DataParallel(replicas=8, zero=zero, micro_batches=3)(step)
    written: Counter[int] = Counter()
    for program in range(stages):
        for op, micro_batch in run(job, program):
            if op.name == "aten.add_":
                written[micro_batch] += op.bytes_written
            if ".bucket_" in op.name:
                assert [job.ops[d].name for d in op.deps].count("aten.add_") == len(op.inputs)
                assert micro_batch == 2
    assert written == {1: PARAMETERS * PARAMETER_BYTES, 2: PARAMETERS * PARAMETER_BYTES}


# -- axes beside dp ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dp", [1, 4])
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_experts_are_reduced_over_fewer_ranks(dp: int, zero: int) -> None:
    step = with_axes({"ep": 2, "cp": 3}, {"linear1": "ep"})
    job = DataParallel(replicas=dp, zero=zero, broadcast_buffers=False)(step)
    assert [a.name for a in job.mesh] == ["dp", "ep", "cp"]
    outer = ("dp",) if dp > 1 else ()
    dense, experts = (*outer, "ep", "cp"), (*outer, "cp")
    kind = CollectiveKind.REDUCE_SCATTER if zero else CollectiveKind.ALL_REDUCE
    found = by_group(job, kind)
    assert found.keys() == {dense, experts}
    for axes, count in ((dense, 3), (experts, 2)):
        assert count * PARAMETER_BYTES <= found[axes] < count * PARAMETER_BYTES + 24 * 128 * 4
    for reduce, _ in run(job):
        if getattr(reduce, "collective", None) == kind:
            sharded = {job.tensors[i].sharded for i in reduce.inputs}
            assert len(sharded) == 1


def test_gradients_of_no_other_rank_are_only_added_up() -> None:
    step = with_axes({"ep": 2}, {"linear1": "ep"})
    for zero in (0, 1, 2):
        job = DataParallel(replicas=1, zero=zero, micro_batches=3)(step)
        adds = Counter(
            m
            for op, m in run(job)
            if op.name == "aten.add_" and any(job.tensors[i].sharded == ("ep",) for i in op.inputs)
        )
        assert adds[0] == 0 and adds[1] and adds[2]


def test_samples_are_those_of_ranks_with_their_own_micro_batches() -> None:
    job = DataParallel(replicas=4, micro_batches=2)(with_axes({"ep": 2, "cp": 3, "tp": 2}, {}))
    result = simulate(timed(job, CLUSTER.device, 10**7), CLUSTER, IssueTimes(op_ps=10**5, launch_ps=10**5))
    assert result.samples == 4 * (4 * 2) * 2


def test_fully_sharded_experts_are_divided_over_the_ranks_that_hold_copies() -> None:
    job = FullyShard(replicas=4)(with_axes({"ep": 2, "cp": 3}, {"linear1": "ep"}))
    found = by_group(job, CollectiveKind.REDUCE_SCATTER)
    assert found.keys() == {("dp_shard", "ep", "cp"), ("dp_shard", "cp")}
    shares = {t.sharded for t in job.tensors if t.role == TensorRole.OPTIMIZER_STATE}
    assert shares == {("dp_shard", "ep", "cp"), ("ep", "dp_shard", "cp")}


# -- stages ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_stages_gather_once_and_reduce_after_their_last_backward(schedule: str) -> None:
    staged = Pipeline(stages=3, micro_batches=4, schedule=schedule)(Fold()(layered_step(LAYERS)))
    job = FullyShard(replicas=8, reshard_after_forward=False)(staged)
    assert communicated(job) == {
        (CollectiveKind.ALL_GATHER, Payload.PARAMETER): PARAMETERS * PARAMETER_BYTES,
        (CollectiveKind.REDUCE_SCATTER, Payload.GRADIENT): PARAMETERS * PARAMETER_BYTES,
    }
    for program in range(3):
        found = names(job, program)
        last = max(i for i, n in enumerate(found) if n == "aten.mm")
        assert last < found.index("fsdp.reduce_scatter") < found.index("aten._fused_adam_")
    assert 8 * held(job, TensorRole.PARAMETER) == held(staged, TensorRole.PARAMETER)
    simulate(timed(job, CLUSTER.device, 10**7), CLUSTER, IssueTimes(op_ps=10**5, launch_ps=10**5))


def test_stages_may_drop_parameters_and_reduce_every_micro_batch() -> None:
    staged = Pipeline(stages=3, micro_batches=4)(Fold()(layered_step(LAYERS)))
    job = FullyShard(replicas=8, reduce_every_micro_batch=True)(staged)
    layers = 4 * 2 * LAYERS * PARAMETER_BYTES
    assert communicated(job) == {
        (CollectiveKind.ALL_GATHER, Payload.PARAMETER): 2 * layers + 4 * PARAMETER_BYTES,
        (CollectiveKind.REDUCE_SCATTER, Payload.GRADIENT): layers + 4 * PARAMETER_BYTES,
    }
    adds = [op.bytes_written for p in range(3) for op, _ in run(job, p) if op.name == "aten.add_"]
    assert sum(adds) == 3 * PARAMETERS * PARAMETER_BYTES // 8


def test_interleaved_chunks_are_each_a_root() -> None:
    staged = Pipeline(stages=2, micro_batches=4, schedule="interleaved", chunks=3)(Fold()(layered_step(LAYERS)))
    job = FullyShard(replicas=8, reshard_after_forward=False)(staged)
    assert communicated(job)[CollectiveKind.ALL_GATHER, Payload.PARAMETER] == PARAMETERS * PARAMETER_BYTES
    # The first of six chunks has the embedding; the roots of the others hold no parameter.
    assert sum(names(job, p).count("fsdp.begin") for p in range(2)) == 5


# -- scalars of all gradients ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clipped() -> StepGraph:
    pytest.importorskip("torch")
    from echograph.frontend.pytorch.spec import StepSpec
    from echograph.models import get_model
    from echograph.workflow.compile import compile_entry

    entry = get_model("gpt2").with_config(n_layer=3)
    return compile_entry(entry, StepSpec(dtype="fp16", clip_grad_norm=1.0), batch_size=1, seq_len=64)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "axes"),
    [
        ({"zero": 0}, ()),
        ({"zero": 1}, ("dp",)),
        ({"zero": 2}, ("dp",)),
        ({"zero": 3}, ("dp_shard",)),
        ({"zero": 3, "shard": 4}, ("dp_shard",)),
        ({"zero": 3, "shard": 1}, ()),
    ],
)
def test_the_norm_and_the_overflow_of_shards_are_completed(
    clipped: StepGraph, options: dict[str, int], axes: tuple[str, ...]
) -> None:
    if options["zero"] == 3:
        job = FullyShard(replicas=8, micro_batches=2, shard=options.get("shard"))(clipped)
    else:
        job = DataParallel(replicas=8, micro_batches=2, zero=options["zero"])(clipped)
    scalars = [(job.groups[op.group].axes, m) for op, m in run(job) if getattr(op, "bytes_per_rank", 0) == 4]
    assert scalars == ([(axes, 1)] * 2 if axes else [])
    found = names(job)
    norm = found.index("aten.linalg_vector_norm")
    assert found[norm + 1].endswith(".all_reduce_scalar") == bool(axes)
    assert found[norm + 2].endswith(".wait") == bool(axes)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["aten._foreach_norm", "aten._fused_adamw_"])
def test_the_optimizer_of_fp16_works_on_shards(clipped: StepGraph, name: str) -> None:
    job = DataParallel(replicas=8, zero=1)(clipped)
    whole, local = (
        sum(op.bytes_read for op, _ in run(graph) if op.name == name)  # type: ignore[union-attr]
        for graph in (clipped, job)
    )
    assert whole / 8 <= local < whole / 8 * 1.01


# -- instances of the optimizer ----------------------------------------------------------------------------


def test_instances_divide_the_optimizer_among_fewer_ranks() -> None:
    """Each bucket is scattered within an instance, then its shards are all-reduced between the instances."""
    step = layered_step(LAYERS)
    one, two = (DataParallel(replicas=8, zero=1, instances=n)(step) for n in (1, 2))
    assert [(axis.name, axis.size) for axis in two.mesh] == [("dp_replicate", 2), ("dp", 4)]
    assert two.world_size == one.world_size == 8
    assert held(two, TensorRole.OPTIMIZER_STATE) == 2 * held(one, TensorRole.OPTIMIZER_STATE) > 0
    whole, gradient = communicated(one), Payload.GRADIENT
    said = communicated(two)
    assert (
        said[CollectiveKind.ALL_GATHER, Payload.PARAMETER] == whole[CollectiveKind.ALL_GATHER, Payload.PARAMETER]
    )
    scattered = said[CollectiveKind.REDUCE_SCATTER, gradient]
    assert scattered == whole[CollectiveKind.REDUCE_SCATTER, gradient]
    norms = whole[CollectiveKind.ALL_REDUCE, gradient]
    assert said[CollectiveKind.ALL_REDUCE, gradient] - norms == scattered // 4
    groups = {
        two.groups[op.group].axes
        for op, _ in run(two)
        if getattr(op, "collective", 0) == CollectiveKind.ALL_GATHER
    }
    assert groups == {("dp",)}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"instances": 3, "zero": 1}, "3 instances of the optimizer do not divide 8"),
        ({"instances": 2}, "with zero 0: give zero 1"),
        ({"instances": 8, "zero": 1}, "two ranks or more an instance"),
        ({"instances": 0, "zero": 1}, "0 instances"),
    ],
)
def test_instances_that_cannot_be(options: dict[str, int], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        DataParallel(replicas=8, **options)(layered_step(1))  # type: ignore[arg-type]


@pytest.mark.parametrize("spread", [DataParallel(replicas=4, zero=1), FullyShard(replicas=4)])
def test_measured_times_hold_of_what_ranks_do_whole_alone(spread: DataParallel | FullyShard) -> None:
    """A rank updates a part of the parameters, which takes less than was measured of all."""
    step, builder = layered_step(LAYERS), GraphBuilder(name="measured")
    for tensor in step.tensors:
        builder.add_tensor(tensor)
    for op in step.ops:
        measured = Duration(
            device="h100-sxm", picoseconds=7_000_000, source=Source.MEASURED, samples=3, spread=0.1
        )
        builder.add(op, durations=(measured,) if isinstance(op, Compute) else ())
    job = spread(builder.build(StepGraph))
    whole = {op.phase for op, _ in run(job) if op.durations}
    assert whole >= {Phase.FORWARD, Phase.BACKWARD} and Phase.OPTIMIZER not in whole

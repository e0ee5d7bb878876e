from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from layered import PARAMETER_BYTES, layered_step

from echograph.ir.builder import GraphBuilder
from echograph.ir.graph import BETWEEN_STEPS, JobGraph, Program
from echograph.ir.passes.data_parallel import DataParallel
from echograph.ir.passes.fold import Fold
from echograph.ir.passes.fully_shard import FullyShard
from echograph.ir.passes.pipeline import Pipeline
from echograph.ir.types import DType, Phase, TensorRole
from echograph.simulator.memory import Memory, Runtime, largest_memory, memory
from echograph.simulator.memory.allocator import CachingAllocator
from echograph.simulator.memory.lifetimes import Allocations, Lifetimes
from echograph.simulator.memory.usage import Usage

GIB = 2**30
BARE = Runtime(cublas_workspace_bytes=(), cuda_context_bytes=0, nccl_bytes=0, nccl_pair_bytes=0)


def usage(job: JobGraph, program: int = 0) -> Usage:
    return Usage(Lifetimes(Allocations(job), program))


def of(job: JobGraph, program: int = 0, capacity: int = 80 * GIB, runtime: Runtime = BARE) -> Memory:
    found = memory(job, program, capacity, runtime)
    assert found is not None
    return found


def levels_operation_by_operation(job: JobGraph, program: int) -> list[int]:
    """Bytes while each operation runs, from readers counted one by one, without calls, sequences or blocks."""
    graph = usage(job, program).lifetimes.allocations
    run = [
        (block, instance, op, micro_batch)
        for block, begin, end, instance, micro_batch in job.programs[program].calls.tolist()
        for op in range(begin, end)
    ]

    def owners(ragged: tuple[int, ...], block: int, instance: int) -> list[int]:
        found = []
        for tensor in ragged:
            row = tensor
            place = (block, instance)
            while True:
                if job.tensors.port[row]:
                    *where, row = job.locate_tensor(job.tensor_id(*place, row))
                    place = (where[0], where[1])
                elif job.tensors.alias_of[row] >= 0:
                    row = int(job.tensors.alias_of[row])
                else:
                    break
            found.append(job.tensor_id(*place, row))
        return found

    persistent = {r for r in TensorRole if r.persistent and r != TensorRole.GRADIENT}
    last: dict[tuple[int, int], int] = {}
    steps = []
    for at, (block, instance, op, micro_batch) in enumerate(run):
        reads = owners(job.ops.inputs.row(op), block, instance)
        makes = owners(job.ops.outputs.row(op), block, instance)
        steps.append((reads, [m for m in makes if m not in reads], micro_batch))
        for number in (*reads, *makes):
            last[number, micro_batch] = at
    alive: dict[tuple[int, int], int] = {}
    base, levels = 0, []
    touched = {number for number, _ in last}
    for number in range(graph.tensors):
        if job.tensors.role[job.locate_tensor(number)[2]] in persistent and number in touched:
            base += -(-int(graph.size[number]) // 512) * 512
    for at, (reads, makes, micro_batch) in enumerate(steps):
        beside = 0
        for number in (*reads, *makes):
            role = job.tensors.role[job.locate_tensor(number)[2]]
            size = -(-int(graph.size[number]) // 512) * 512
            if role == TensorRole.GRADIENT:
                beside += size if (number, 0) in alive and number in makes else 0
                alive[number, 0] = size
            elif role not in persistent:
                alive[number, micro_batch] = size
        levels.append(base + beside + sum(alive.values()))
        for number in {*reads, *makes}:
            gradient = job.tensors.role[job.locate_tensor(number)[2]] == TensorRole.GRADIENT
            if not gradient and last.get((number, micro_batch)) == at:
                alive.pop((number, micro_batch), None)
    return levels


JOBS: dict[str, Callable[[], JobGraph]] = {
    "flat": lambda: DataParallel(replicas=1)(layered_step(5)),
    "folded": lambda: DataParallel(replicas=1)(Fold()(layered_step(5))),
    "1f1b": lambda: Pipeline(stages=3, micro_batches=5, schedule="1f1b")(Fold()(layered_step(6))),
    "interleaved": lambda: Pipeline(stages=2, micro_batches=4, schedule="interleaved", chunks=2)(
        Fold()(layered_step(8))
    ),
    "micro-batches": lambda: DataParallel(replicas=1, micro_batches=3)(Fold()(layered_step(4))),
}


@pytest.mark.parametrize("name", JOBS)
def test_calls_summarised_are_operations_one_by_one(name: str) -> None:
    job = JOBS[name]()
    for program in range(len(job.programs)):
        found, one_by_one = usage(job, program), levels_operation_by_operation(job, program)
        assert found.peak_bytes == max(one_by_one)
        start = 0
        for call, (_, begin, end, _, _) in enumerate(found.calls.tolist()):
            assert found.peak[call] == max(one_by_one[start : start + end - begin])
            start += end - begin


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [2, 4])
def test_stages_hold_the_activations_of_the_micro_batches_under_way(schedule: str, stages: int) -> None:
    micro_batches = 6
    job = Pipeline(stages=stages, micro_batches=micro_batches, schedule=schedule)(Fold()(layered_step(8)))
    held = [of(job, stage).by_role["activation"] // PARAMETER_BYTES for stage in range(stages)]
    layers = 2 * 8 // stages  # two products a layer, each of which keeps its input
    for stage in range(stages):
        under_way = micro_batches if schedule == "gpipe" else min(micro_batches, stages - stage)
        assert held[stage] >= layers * under_way
        assert held[stage] <= (layers + 2) * under_way + 3


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("shard", [1, 4])
def test_what_is_alive_at_the_peak_adds_up_to_it(name: str, shard: int) -> None:
    job = JOBS[name]() if shard == 1 else FullyShard(replicas=shard)(Fold()(layered_step(6)))
    found = usage(job)
    assert int(found.size[found.alive].sum()) == found.peak_bytes
    result = of(job)
    assert sum(result.by_role.values()) == result.peak_bytes


def test_a_linear_chain_has_the_closed_form() -> None:
    # Every product's input waits for backward. When the first weight's gradient is made, the loss and what it
    # reads are gone: there are the gradient that comes from the loss, and the new one.
    layers, each = 6, 2
    result = of(DataParallel(replicas=1)(Fold()(layered_step(layers, parameters_per_layer=each))))
    products = layers * each
    parameters = products + 1
    assert result.by_role["parameter"] == parameters * PARAMETER_BYTES
    assert result.by_role["optimizer_state"] == parameters * PARAMETER_BYTES
    # A product's input goes when its weight's gradient is made, which takes its place: the peak does not move.
    assert result.by_role["activation"] + result.by_role["gradient"] == (products + 2) * PARAMETER_BYTES


def test_micro_batches_make_their_gradients_beside_those_that_add_up() -> None:
    one, two, many = (of(DataParallel(replicas=1, micro_batches=m)(Fold()(layered_step(4)))) for m in (1, 2, 9))
    assert one.peak_bytes < two.peak_bytes == many.peak_bytes


def test_sharding_divides_what_lives_through_the_step_and_adds_buffers() -> None:
    whole, sharded = (
        of(DataParallel(replicas=1)(Fold()(layered_step(6)))),
        of(FullyShard(replicas=8)(Fold()(layered_step(6)))),
    )
    for role in ("parameter", "optimizer_state"):
        assert sharded.by_role[role] * 8 == whole.by_role[role]
    assert sharded.by_role["communication"] > 0 == whole.by_role["communication"]


def test_folded_and_unfolded_steps_need_the_same() -> None:
    both = [of(DataParallel(replicas=4)(step)) for step in (layered_step(5), Fold()(layered_step(5)))]
    assert both[0] == both[1]
    assert both[0].contributors == both[1].contributors


def test_the_peak_does_not_depend_on_the_number_of_micro_batches_in_a_pipeline() -> None:
    found = [
        largest_memory(Pipeline(stages=4, micro_batches=m)(Fold()(layered_step(8))), 80 * GIB) for m in (8, 64)
    ]
    assert found[0] is not None and found[1] is not None
    assert found[0].peak_bytes == found[1].peak_bytes
    assert found[0].reserved_bytes == found[1].reserved_bytes
    assert found[0].programs == found[1].programs
    assert len(found[0].programs) == 4


def test_reserved_is_at_least_what_is_allocated() -> None:
    for expandable in (False, True):
        result = of(JOBS["folded"](), runtime=Runtime(expandable_segments=expandable))
        assert result.reserved_bytes is not None
        assert result.peak_bytes <= result.reserved_bytes < 2 * result.peak_bytes


def test_the_verdict_is_the_allocators() -> None:
    job = JOBS["folded"]()
    need = of(job)
    assert need.reserved_bytes is not None
    assert need.fits
    assert of(job, capacity=need.reserved_bytes).fits
    assert not of(job, capacity=need.peak_bytes - 1).fits
    # What else the device holds is not there for tensors.
    assert not of(job, capacity=need.peak_bytes + GIB, runtime=Runtime(cuda_context_bytes=2 * GIB)).fits


def test_a_step_too_long_to_replay_has_no_reserved_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echograph.simulator.memory.usage.MAX_REPLAYED", 10)
    result = of(JOBS["folded"](), capacity=GIB)
    assert result.reserved_bytes is None
    assert result.fits
    assert result.device_bytes == result.peak_bytes
    assert not of(JOBS["folded"](), capacity=result.peak_bytes - 1).fits


def test_only_what_outlives_the_step_is_left_after_it() -> None:
    found = usage(JOBS["micro-batches"]())
    allocator = CachingAllocator()
    assert found.replay(allocator)
    left = allocator.allocated_bytes
    assert left == found.before_bytes + PARAMETER_BYTES * len(found.gradient_from)


def test_communicators_and_the_context_are_counted_apart() -> None:
    step = Fold()(layered_step(3))
    alone, pair, many = (of(DataParallel(replicas=n)(step), runtime=Runtime()) for n in (1, 2, 8))
    runtime = Runtime()
    assert sum(alone.overhead_bytes.values()) == runtime.cuda_context_bytes
    assert sum(pair.overhead_bytes.values()) == runtime.cuda_context_bytes + runtime.nccl_pair_bytes
    assert sum(many.overhead_bytes.values()) == runtime.cuda_context_bytes + runtime.nccl_bytes
    assert many.device_bytes == many.reserved_bytes + sum(many.overhead_bytes.values())  # type: ignore[operator]
    framework = of(DataParallel(replicas=8)(step), runtime=Runtime(other_communicators=("dp-tp", "dp", "pp")))
    assert framework.device_bytes == many.device_bytes + 2 * runtime.nccl_bytes  # there is no pipeline


def test_contributors_say_what_to_shrink() -> None:
    result = of(JOBS["folded"]())
    first = result.contributors[0]
    assert first.where == "layers.*"
    assert first.nbytes == 10 * PARAMETER_BYTES
    assert sum(c.nbytes for c in result.contributors) <= result.peak_bytes
    assert [c.nbytes for c in result.contributors] == sorted((c.nbytes for c in result.contributors), reverse=True)
    assert result.lines(1)[0].startswith("10 MiB (")
    record = json.loads(json.dumps(result.to_json()))
    assert {"peak_bytes", "capacity_bytes", "fits"} <= record.keys()


def test_the_curve_is_the_peak_somewhere_and_ends_with_the_step() -> None:
    job = JOBS["micro-batches"]()
    result = of(job)
    assert max(nbytes for _, nbytes in result.curve) == result.peak_bytes
    positions = [at for at, _ in result.curve]
    assert positions[0] == 0
    assert positions == sorted(set(positions))
    assert positions[-1] < job.unfolded_ops
    assert len(usage(job).curve(4)) == 4


def test_views_share_and_gradients_that_nobody_makes_exist_before_the_step() -> None:
    b = GraphBuilder(name="views")
    size = (1024, 256)
    weight = b.tensor("weight", size, DType.FP32, TensorRole.PARAMETER)
    main = b.tensor("weight.main_grad", size, DType.FP32, TensorRole.GRADIENT)
    x = b.tensor("x", size, DType.FP32, TensorRole.ACTIVATION)
    view = b.tensor("view", size, DType.FP32, TensorRole.ACTIVATION, alias_of=x)
    added = b.tensor("weight.main_grad", size, DType.FP32, TensorRole.GRADIENT, alias_of=main)
    b.compute("make", phase=Phase.FORWARD, inputs=(weight,), outputs=(x,), bytes_written=1)
    b.compute("view", phase=Phase.FORWARD, inputs=(x,), outputs=(view,))
    b.compute("aten.add_", phase=Phase.BACKWARD, inputs=(view, main), outputs=(added,), bytes_written=1)
    b.program([(0, 0, 3, 0, 0)], role="rank")
    result = of(b.build(JobGraph))
    assert result.by_role == {
        **dict.fromkeys(result.by_role, 0), "parameter": 2**20, "gradient": 2**20, "activation": 2**20,
    }  # fmt: skip
    assert result.curve == ((0, 3 * 2**20),)


def test_a_job_without_tensors_has_no_memory() -> None:
    b = GraphBuilder(name="imported")
    b.compute("kernel", phase=Phase.FORWARD)
    b.program([(0, 0, 1, 0, 0)], role="rank")
    job = b.build(JobGraph)
    assert memory(job, 0, GIB) is None
    assert largest_memory(job, GIB) is None


def test_without_the_allocator_a_step_fits_where_its_tensors_do() -> None:
    job, runtime = JOBS["folded"](), Runtime(nccl_bytes=3 * GIB, nccl_pair_bytes=2 * GIB)
    need = of(job, runtime=runtime)
    bare = usage(job).peak_bytes + sum(runtime.cublas_workspace_bytes)
    capacity = bare + runtime.cuda_context_bytes
    found = [memory(job, 0, capacity + more, runtime, reserve=False) for more in (-1, 0)]
    assert [(m.reserved_bytes, m.fits, m.peak_bytes) for m in found if m is not None] == [
        (None, False, bare), (None, True, bare),
    ]  # fmt: skip
    assert need.peak_bytes == bare


def test_a_runtime_takes_what_its_sources_say() -> None:
    runtime, mib = Runtime(), 2**20
    assert runtime.cublas_workspace_bytes == (32 * mib, 32 * mib)
    assert (runtime.cuda_context_bytes, runtime.nccl_pair_bytes, runtime.nccl_bytes) == (
        512 * mib, 544 * mib, 688 * mib,
    )  # fmt: skip


def test_the_backward_of_flash_attention_adds_up_the_queries_gradient_in_fp32() -> None:
    """Beside its own inputs and outputs; there are fewer heads of keys and values than of queries."""
    b = GraphBuilder(name="attention")
    queries, keys = (2, 8, 1024, 64), (2, 2, 1024, 64)
    sizes = {"q": queries, "k": keys, "v": keys, "out": queries}
    made = {name: b.tensor(name, size, DType.BF16, TensorRole.ACTIVATION) for name, size in sizes.items()}
    forward = b.compute(
        "aten._scaled_dot_product_flash_attention", phase=Phase.FORWARD, flops=1, bytes_written=1,
        inputs=(made["q"], made["k"], made["v"]), outputs=(made["out"],),
    )  # fmt: skip
    gradients = [b.tensor(f"d{n}", sizes[n], DType.BF16, TensorRole.ACTIVATION) for n in ("q", "k", "v")]
    b.compute(
        "aten._scaled_dot_product_flash_attention_backward", phase=Phase.BACKWARD, flops=1, bytes_written=1,
        inputs=tuple(made.values()), outputs=gradients, forward_op=forward,
    )  # fmt: skip
    b.program([(0, 0, 2, 0, 0)], role="rank")
    found, of_queries, of_keys = of(b.build(JobGraph)), 2 * 2**20, 2**19
    assert found.by_role["activation"] == 3 * of_queries + 4 * of_keys
    assert found.by_role["workspace"] == 4 * 2**20
    assert found.peak_bytes == 3 * of_queries + 4 * of_keys + 4 * 2**20


@pytest.mark.parametrize(("architecture", "cublas", "engine"), [
    ("ampere", 8 * 2**20 + 2**17, 4 * 2**20), ("hopper", 2**25, 2**25 + 1024), ("", 2**25, 2**25 + 1024),
])  # fmt: skip
def test_workspaces_are_those_of_the_device(architecture: str, cublas: int, engine: int) -> None:
    """Of Transformer Engine, what the graph says is of a Hopper, and there may be several."""
    runtime = Runtime.on(architecture)
    calls = JOBS["folded"]().programs[0].calls
    assert runtime.workspaces(Program(calls=calls)) == (cublas, cublas)
    several = {"transformer_engine": 5 * (2**25 + 1024), BETWEEN_STEPS: 7}
    assert runtime.workspaces(Program(calls=calls, held=several)) == (cublas, cublas, 5 * engine)
    assert runtime.workspaces(Program(calls=calls, held={"cublas": 2**20})) == (2**20,)


def test_at_rest_is_what_lives_before_the_step_and_what_is_dropped_within_it() -> None:
    job = JOBS["folded"]()
    (program,) = job.programs
    keeps = replace(job, programs=(replace(program, held={BETWEEN_STEPS: 4096, "cublas": 2**20}),))
    before, after = of(job), of(keeps)
    states = sum(before.by_role[role] for role in ("parameter", "optimizer_state", "buffer"))
    assert before.at_rest_bytes == states
    assert after.at_rest_bytes == states + 4096 + 2**20
    assert after.peak_bytes == before.peak_bytes + 2**20
    largest = largest_memory(keeps, 80 * GIB, BARE)
    assert largest is not None
    assert list(largest.at_rest.values()) == [after.at_rest_bytes] == [largest.to_json()["at_rest_bytes"]]


def test_the_tensors_of_the_peak_are_named() -> None:
    """Those alike stand together; all of them are the peak, and the operation of the peak made or reads one."""
    found = of(JOBS["folded"]())
    assert sum(tensor.nbytes for tensor in found.tensors) <= found.peak_bytes
    assert [t.nbytes for t in found.tensors] == sorted((t.nbytes for t in found.tensors), reverse=True)
    parameters = [t for t in found.tensors if t.role == "parameter"]
    assert sum(t.nbytes for t in parameters) == found.by_role["parameter"]
    assert {t.operator for t in parameters} == {""}
    made = [t for t in found.tensors if t.role == "activation"]
    assert all(t.operator and t.phase and t.shape and t.count for t in made)
    assert found.peak_at["operator"]
    head, *lines = found.listed(3)
    assert found.peak_at["operator"] in head
    assert lines == [f"  {tensor}" for tensor in found.tensors[:3]]


def test_buckets_of_gradients_are_there_before_the_step() -> None:
    """`DistributedDataParallel` keeps its buckets from step to step, beside gradients that it sets to None."""
    alone, pair = (of(DataParallel(replicas=n)(layered_step(5))) for n in (1, 2))
    assert pair.at_rest_bytes - alone.at_rest_bytes == pair.by_role["buffer"] == alone.by_role["parameter"]


@pytest.mark.parametrize("repeated", [False, True])
def test_what_another_micro_batch_uses_lives_from_its_maker_to_its_last_reader(repeated: bool) -> None:
    """A buffer that the step makes; one of calls that come again cannot be told apart, and stays throughout."""
    b = GraphBuilder(name="put off")
    size = (1024, 256)
    x, y, z = (b.tensor(name, size, DType.FP32, TensorRole.ACTIVATION) for name in "xyz")
    put_off = b.tensor("put_off", size, DType.FP32, TensorRole.BUFFER)
    b.compute("first", phase=Phase.FORWARD, outputs=(x,), bytes_written=1)
    b.compute("kept", phase=Phase.BACKWARD, inputs=(x,), outputs=(put_off,), bytes_written=1)
    b.compute("other", phase=Phase.FORWARD, outputs=(y,), bytes_written=1)
    b.compute("drain", phase=Phase.BACKWARD, inputs=(put_off,), outputs=(z,), bytes_written=1)
    calls = [(0, 0, 2, 0, 0), (0, 2, 3, 0, 1), (0, 3, 4, 0, 2), (0, 2, 3, 0, 3)]
    b.program(calls + [(0, 0, 2, 0, 4), (0, 3, 4, 0, 5)] * repeated, role="rank")
    job = b.build(JobGraph)
    found, kept = of(job), 2**20 * repeated
    assert found.at_rest_bytes == kept
    assert [nbytes for _, nbytes in found.curve[:4]] == [2**21, 2**21, 2**21, 2**20 + kept]
    assert found.by_role["buffer"] == 2**20
    allocator = CachingAllocator()
    assert usage(job).replay(allocator)
    assert allocator.allocated_bytes == kept

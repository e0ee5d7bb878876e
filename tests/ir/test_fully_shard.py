from __future__ import annotations

import json
import subprocess
from collections import Counter
from dataclasses import replace
from math import ceil
from pathlib import Path

import pytest
from layered import PARAMETER_BYTES, WIDTH, layered_step, timed

from echograph.errors import PlanError
from echograph.ir.graph import JobGraph
from echograph.ir.passes.data_parallel import DataParallel
from echograph.ir.passes.fold import Fold
from echograph.ir.passes.fully_shard import FullyShard
from echograph.ir.passes.pipeline import Pipeline
from echograph.ir.passes.recompute import Recompute
from echograph.ir.types import Collective, CollectiveKind, Compute, DType, Op, OpKind, Phase, TensorRole
from echograph.simulator.clusters import load_cluster
from echograph.simulator.host import IssueTimes
from echograph.simulator.simulate import simulate

LAYERS = 5
LAYERS_OF = {"gpt2": {"n_layer": 3}, "t5-small": {"num_layers": 4, "num_decoder_layers": 4}}
CLUSTER = load_cluster("dgx-h100")


def lower(**options: object) -> JobGraph:
    return FullyShard(**{"replicas": 16, **options})(Fold()(layered_step(LAYERS)))


def executed(job: JobGraph) -> list[str]:
    return [
        f"{job.strings[job.ops.name[op]]} {instance if block else 'root'}"
        for block, begin, end, instance, _ in job.programs[0].calls.tolist()
        for op in range(begin, end)
    ]


def ran(job: JobGraph) -> list[Op]:
    calls = job.programs[0].calls.tolist()
    return [job.ops[op] for _, begin, end, _, _ in calls for op in range(begin, end)]


def collectives(job: JobGraph) -> Counter[tuple[str, int, str]]:
    found: Counter[tuple[str, int, str]] = Counter()
    ops = job.ops
    for _, begin, end, _, _ in job.programs[0].calls.tolist():
        for op in range(begin, end):
            if ops.kind[op] == OpKind.COLLECTIVE:
                kind, dtype = CollectiveKind(int(ops.variant[op])).name, DType(int(ops.dtype[op])).text
                found[kind, int(ops.nbytes[op]), dtype] += 1
    return found


def test_layers_are_gathered_twice_and_the_root_once() -> None:
    layer, root = 2 * PARAMETER_BYTES, PARAMETER_BYTES
    assert collectives(lower()) == {
        ("ALL_GATHER", layer, "fp32"): 2 * LAYERS,
        ("ALL_GATHER", root, "fp32"): 1,
        ("REDUCE_SCATTER", layer, "fp32"): LAYERS,
        ("REDUCE_SCATTER", root, "fp32"): 1,
    }


def test_keeping_the_parameters_gathers_once() -> None:
    found = collectives(lower(reshard_after_forward=False))
    assert found["ALL_GATHER", 2 * PARAMETER_BYTES, "fp32"] == LAYERS


def test_backward_gathers_run_one_layer_ahead() -> None:
    names = [n for n in executed(lower()) if n.startswith(("fsdp.all_gather ", "fsdp.reduce_scatter"))]
    assert names[LAYERS + 1 :] == [
        "fsdp.all_gather 4", "fsdp.all_gather 3", "fsdp.reduce_scatter 4", "fsdp.all_gather 2",
        "fsdp.reduce_scatter 3", "fsdp.all_gather 1", "fsdp.reduce_scatter 2", "fsdp.all_gather 0",
        "fsdp.reduce_scatter 1", "fsdp.reduce_scatter 0", "fsdp.reduce_scatter root",
    ]  # fmt: skip


def test_tensors_apart_have_collectives_of_their_own_a_layer_ahead() -> None:
    job = lower(apart=True)
    assert collectives(job) == {
        ("ALL_GATHER", PARAMETER_BYTES, "fp32"): 2 * 2 * LAYERS + 1,
        ("REDUCE_SCATTER", PARAMETER_BYTES, "fp32"): 2 * LAYERS + 1,
    }
    names = executed(job)
    for layer in range(1, LAYERS):
        first = names.index(f"aten.mm {layer - 1}")
        assert names.index(f"zero3.all_gather {layer}") < first < names.index(f"aten.mm {layer}")


def test_small_tensors_stay_gathered_where_tensors_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echograph.ir.passes.fully_shard.PERSISTENT_BELOW", WIDTH * WIDTH + 1)
    assert {kind for kind, _, _ in collectives(lower(apart=True))} == {"REDUCE_SCATTER"}


@pytest.mark.parametrize(("kept_within", "gathers"), [(2 * WIDTH * WIDTH, 2), (2 * WIDTH * WIDTH - 1, 3)])
def test_recomputation_drops_what_is_not_read_again_soon(
    monkeypatch: pytest.MonkeyPatch, kept_within: int, gathers: int
) -> None:
    """Of two tensors the first is read again when the second was read twice."""
    monkeypatch.setattr("echograph.ir.passes.fully_shard.KEPT_WITHIN", kept_within)
    graph = Recompute(policy="full", early_stop=False)(Fold()(layered_step(LAYERS)))
    found = collectives(FullyShard(replicas=16, apart=True)(graph))
    assert found["ALL_GATHER", PARAMETER_BYTES, "fp32"] == (2 + gathers) * LAYERS + 1


def test_the_host_waits_and_issues_a_list_of_tensors_one_by_one() -> None:
    host = IssueTimes(op_ps=4_000_000, launch_ps=3_000_000, waits=True)
    job = timed(lower(apart=True), CLUSTER.device, 10**9)
    each = 4_000_000 + 16 * (1_000_000 + 4_000_000)
    lists = [row for row, name in enumerate(job.ops.name) if job.strings[name] == "zero3.all_gather"]
    assert set(host.issue(job)[lists].tolist()) == {each}
    free, waiting = (simulate(job, CLUSTER, replace(host, waits=waits)).step_ps for waits in (False, True))
    # The device stands still while the host issues what it waited for.
    assert waiting - free >= each


def test_gradients_are_copied_for_a_reduction_where_kernels_run() -> None:
    """FSDP2 copies into the buffer before the stream of reductions waits for that of the kernels."""
    job = lower()
    copies = [op for op in ran(job) if op.name == "fsdp.chunk_cat"]
    assert len(copies) == LAYERS + 1
    assert {op.stream for op in copies} == {op.stream for op in ran(job) if op.name == "aten.mm"}


def test_views_of_one_tensor_are_gathered_without_a_copy_and_gradients_are_divided() -> None:
    """FSDP before `fully_shard`: parameters are torch.split's views, whose gradients one cat puts side by side."""
    apart, flat = ([op.name for op in ran(lower(flat=flat))] for flat in (False, True))
    assert "fsdp.split_with_sizes_copy" in apart and "fsdp.split_with_sizes_copy" not in flat
    assert flat.count("fsdp.views") == apart.count("fsdp.split_with_sizes_copy")
    job = lower(flat=True)
    ops = [op for op in ran(job) if isinstance(op, Compute)]
    cats, divided = ([op for op in ops if op.name == name] for name in ("aten.cat", "aten.div_"))
    assert len(cats) == len(divided) == LAYERS + 1
    assert [op.bytes_written for op in divided] == [op.bytes_written for op in cats]
    reductions = {op.stream for op in ran(job) if op.name == "fsdp.reduce_scatter"}
    assert {op.stream for op in cats} == {0} and {op.stream for op in divided} == reductions
    views = next(op for op in ops if op.name == "fsdp.views")
    assert views.bytes_read == views.bytes_written == 0


def test_a_stage_reduces_what_its_last_backward_pass_has_left() -> None:
    """torch's pipelines call FSDP for all layers of a stage behind its last backward pass (`REDUCE_GRAD`)."""
    job = FullyShard(replicas=4)(Pipeline(stages=2, micro_batches=3)(Fold()(layered_step(LAYERS))))
    calls = job.programs[0].calls.tolist()
    ops = [job.ops[op] for _, begin, end, _, _ in calls for op in range(begin, end)]
    on_kernels = [op for op in ops if isinstance(op, Compute) and op.stream == 0 and op.phase is Phase.BACKWARD]
    first = next(at for at, op in enumerate(on_kernels) if op.name == "fsdp.chunk_cat")
    assert first > 0 and {op.name for op in on_kernels[first:]} <= {"fsdp.chunk_cat", "fsdp.wait"}
    assert all(op.stream == 0 for op in ops if op.name == "fsdp.chunk_cat")


def test_copies_of_the_sharded_model_reduce_their_shards() -> None:
    found = collectives(lower(shard=4))
    assert found["ALL_REDUCE", 2 * PARAMETER_BYTES // 4, "fp32"] == LAYERS
    assert [(a.name, a.size) for a in lower(shard=4).mesh] == [("dp_replicate", 4), ("dp_shard", 4)]


def test_gradients_may_be_reduced_in_another_type() -> None:
    found = collectives(lower(reduce_dtype=DType.BF16))
    assert found["REDUCE_SCATTER", PARAMETER_BYTES, "bf16"] == LAYERS


@pytest.mark.parametrize("ranks", [1, 2, 16, 1000])
def test_persistent_memory_is_that_of_the_largest_shard(ranks: int) -> None:
    job = timed(lower(replicas=ranks), CLUSTER.device, 10**7)
    result = simulate(job, CLUSTER, IssueTimes(op_ps=10**6, launch_ps=10**6))
    shard = ceil(WIDTH / ranks) * WIDTH * 4
    parameters = 2 * LAYERS + 1
    assert result.memory is not None
    assert result.memory.by_role["parameter"] == parameters * shard
    assert result.memory.by_role["optimizer_state"] == parameters * shard
    replicated = simulate(
        timed(DataParallel(replicas=ranks)(layered_step(LAYERS)), CLUSTER.device, 10**7), CLUSTER,
        IssueTimes(op_ps=10**6, launch_ps=10**6),
    )  # fmt: skip
    assert replicated.memory is not None
    if ranks > 1:
        assert result.memory.peak_bytes < replicated.memory.peak_bytes


def test_forward_and_backward_work_is_what_it_was() -> None:
    step, job = layered_step(LAYERS), lower()

    def flops(graph: object, phase: Phase) -> int:
        ops = graph.ops  # type: ignore[attr-defined]
        calls = graph.programs[0].calls.tolist()  # type: ignore[attr-defined]
        return sum(int(ops.flops[op]) for _, b, e, _, _ in calls for op in range(b, e) if ops.phase[op] == phase)

    for phase in (Phase.FORWARD, Phase.BACKWARD):
        assert flops(job, phase) == flops(step, phase)
    assert flops(job, Phase.OPTIMIZER) < flops(step, Phase.OPTIMIZER)


def test_every_micro_batch_gathers_and_reduces() -> None:
    once, thrice = collectives(lower()), collectives(lower(micro_batches=3))
    assert thrice == {key: 3 * count for key, count in once.items()}
    adds = [op.bytes_written for op in ran(lower(micro_batches=3)) if op.name == "aten.add_"]
    assert sum(adds) == 2 * (2 * LAYERS + 1) * PARAMETER_BYTES // 16
    names = executed(lower(micro_batches=3))
    assert names.count("aten._fused_adam_ root") == 1


def test_whole_gradients_may_add_up_and_be_reduced_once() -> None:
    job = lower(micro_batches=3, reduce_every_micro_batch=False)
    once = collectives(lower())
    assert collectives(job) == {
        key: (3 if key[0] == "ALL_GATHER" else 1) * count for key, count in once.items()
    }  # fmt: skip
    adds = [op.bytes_written for op in ran(job) if op.name == "aten.add_"]
    assert sum(adds) == 2 * (2 * LAYERS + 1) * PARAMETER_BYTES


def test_ranks_that_share_no_copy_only_reduce_among_copies() -> None:
    found = collectives(lower(shard=1))
    assert found == {
        ("ALL_REDUCE", 2 * PARAMETER_BYTES, "fp32"): LAYERS,
        ("ALL_REDUCE", PARAMETER_BYTES, "fp32"): 1,
    }


@pytest.mark.parametrize("options", [{"shard": 3}, {"shard": 0}, {"replicas": 0}, {"micro_batches": 0}])
def test_wrong_plans_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(PlanError):
        lower(**options)


def test_what_layers_share_is_gathered_with_the_root() -> None:
    """A layer that runs at three places, each with a part of its own, is gathered once and dropped at the end."""
    pytest.importorskip("transformers", reason="needs the [torch] extra")
    from echograph.frontend.pytorch.spec import StepSpec
    from echograph.models import from_config
    from echograph.workflow.compile import compile_entry

    sizes = {"hidden_size": 64, "n_mamba_heads": 8, "num_attention_heads": 4, "vocab_size": 128}
    kinds = ["mamba", "hybrid"] * 3
    zamba = {"model_type": "zamba2", **sizes, "num_hidden_layers": 6, "layers_block_type": kinds}
    graph = compile_entry(from_config(zamba), StepSpec(), batch_size=1, seq_len=128)
    gathered = Counter[Phase]()
    for op in ran(FullyShard(replicas=8)(graph)):
        if isinstance(op, Collective) and op.collective == CollectiveKind.ALL_GATHER:
            gathered[op.phase] += op.bytes_per_rank
    whole = 2 * graph.workload.parameters
    assert whole <= gathered[Phase.FORWARD] < 1.1 * whole  # padded
    parameters = [x for x in graph.tensors if x.role == TensorRole.PARAMETER and not x.port and x.alias_of is None]
    shared = [x for x in parameters if "shared_transformer" in x.name and "adapter_list.0." not in x.name]
    assert len(shared) > 8
    assert gathered[Phase.FORWARD] - gathered[Phase.BACKWARD] >= sum(x.nbytes for x in shared)


def fsdp2(
    warm: Path, model: str, changes: dict[str, int], ranks: int, seq_len: int | None
) -> Counter[tuple[str, int, str]]:
    """What torch's FSDP2 does with the model, in a process of its own since it makes a default process group."""
    program = Path(__file__).with_name("torch_fsdp2.py")
    command = [warm / "python", program, model, json.dumps(changes), str(ranks), str(seq_len or 0)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(done.stdout.splitlines()[-1])
    return Counter({(kind, size, dtype): count for kind, size, dtype, count in rows})


@pytest.mark.parametrize(
    ("model", "ranks"),
    [
        ("llama-3.2-1b", 64),
        ("gpt2", 64),
        pytest.param("t5-small", 64, marks=pytest.mark.slow),
        pytest.param("vit-b-16", 64, marks=pytest.mark.slow),
        pytest.param("mixtral-8x7b", 64, marks=pytest.mark.slow),
        pytest.param("bert-base-uncased", 64, marks=pytest.mark.slow),
        pytest.param("llama-3.2-1b", 1024, marks=pytest.mark.slow),
        pytest.param("gpt2", 1024, marks=pytest.mark.slow),
        pytest.param("bert-base-uncased", 1024, marks=pytest.mark.slow),
    ],
)
def test_collectives_are_those_of_fsdp2(warm: Path, model: str, ranks: int) -> None:
    pytest.importorskip("torch")
    from echograph.frontend.pytorch.spec import StepSpec
    from echograph.models import get_model
    from echograph.workflow.compile import compile_entry

    changes = LAYERS_OF.get(model, {"num_hidden_layers": 3})
    seq_len = None if model.startswith("vit") else 64
    entry = get_model(model).with_config(**changes)
    step = compile_entry(entry, StepSpec(dtype="bf16"), batch_size=1, seq_len=seq_len)
    job = FullyShard(replicas=ranks, reduce_dtype=DType.FP32)(step)
    assert collectives(job) == fsdp2(warm, model, changes, ranks, seq_len)

"""What a step or a job says of its model: FLOPs by hand, and its layers."""

from __future__ import annotations

import pytest
from layered import layered_step

from echograph.ir.builder import GraphBuilder
from echograph.ir.graph import Axis, JobGraph, StepGraph
from echograph.ir.passes.data_parallel import DataParallel
from echograph.ir.passes.fold import Fold
from echograph.ir.passes.model import ModelFlops, count_job_flops, find_layers
from echograph.ir.passes.pipeline import Pipeline
from echograph.ir.types import Attention, Phase
from echograph.ir.unfold import unfold


def attend(builder: GraphBuilder, *, causal: bool) -> None:
    """A product and attention, forward and backward, and what is none of the model's work."""
    attributes = Attention(heads=2, kv_heads=2, head_dim=16, causal=causal)
    builder.compute("mm", phase=Phase.FORWARD, flops=1000)
    forward = builder.compute("attention", phase=Phase.FORWARD, flops=300, attributes=attributes)
    builder.compute(
        "attention_backward", phase=Phase.BACKWARD, flops=750, attributes=attributes, forward_op=forward
    )
    builder.compute("again", phase=Phase.RECOMPUTE, flops=300, attributes=attributes)
    builder.compute("mm", phase=Phase.BACKWARD, flops=2000)
    builder.compute("adam", phase=Phase.OPTIMIZER, flops=7)


@pytest.mark.parametrize("causal", [False, True])
def test_flops_are_those_of_forward_and_backward_and_attention_counts_thrice(causal: bool) -> None:
    """The backward of attention, which computes the scores again, counts as twice its forward."""
    builder = GraphBuilder()
    attend(builder, causal=causal)
    builder.program([(0, 0, 6, 0, 0)])
    workload = ModelFlops()(builder.build(StepGraph)).workload
    assert workload.model_flops == 3000 + 300 + 600
    assert workload.causal_attention_flops == (900 if causal else 0)


def _job(mesh: tuple[tuple[str, int], ...], micro_batches: int, stages: int = 1) -> JobGraph:
    builder = GraphBuilder()
    builder.mesh = tuple(Axis(name=name, size=size) for name, size in mesh)
    for stage in range(stages):
        begin = builder.op_count()
        attend(builder, causal=True)
        calls = [(0, begin, begin + 5, 0, n) for n in range(micro_batches)]
        builder.program(
            [*calls, (0, begin + 5, begin + 6, 0, micro_batches - 1)], role=f"stage {stage}",
            coordinates={"pp": stage} if stages > 1 else {},
        )  # fmt: skip
    return builder.build(JobGraph)


def test_a_job_tells_the_flops_of_a_micro_batch_where_its_ranks_compute_nothing_alike() -> None:
    for mesh in ((("dp", 6),), (("dp_replicate", 2), ("dp_shard", 3)), (("dp", 6), ("tp", 1), ("cp", 1))):
        workload = count_job_flops(_job(mesh, micro_batches=5)).workload
        assert (workload.model_flops, workload.causal_attention_flops) == (3900, 900)
    stages = count_job_flops(_job((("pp", 2), ("dp", 3)), micro_batches=4, stages=2)).workload
    assert (stages.model_flops, stages.causal_attention_flops) == (7800, 1800)
    for axis in ("tp", "cp", "ep"):
        job = _job((("dp", 3), (axis, 2)), micro_batches=4)
        assert count_job_flops(job) is job


def test_a_lowered_step_tells_the_flops_that_it_had() -> None:
    step = ModelFlops()(Fold()(layered_step(4)))
    assert step.workload.model_flops > 0
    for job in (
        DataParallel(replicas=3, micro_batches=2)(step),
        DataParallel(replicas=2)(Pipeline(stages=2, micro_batches=4)(step)),
    ):
        assert count_job_flops(job).workload.model_flops == step.workload.model_flops


def test_layers_are_the_instances_of_a_block_or_numbered_modules() -> None:
    """In the order in which they run forward, with their forward operations alone."""
    folded = Fold()(layered_step(5))
    flat = unfold(folded)
    layers = find_layers(folded)
    assert [(layer.block, layer.instance) for layer in layers] == [(1, n) for n in range(5)]
    numbered = find_layers(flat)
    assert [(layer.block, layer.instance) for layer in numbered] == [(0, 0)] * 5
    names = [{flat.ops[row].module.split(".")[1] for row in layer.rows} for layer in numbered]
    assert names == [{str(n)} for n in range(5)]
    for graph, its in ((folded, layers), (flat, numbered)):
        phases = {graph.ops[row].phase for layer in its for row in layer.rows}
        assert phases == {Phase.FORWARD}
        assert len({len(layer.rows) for layer in its}) == 1

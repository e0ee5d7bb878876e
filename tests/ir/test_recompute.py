from __future__ import annotations

import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from layered import layered_step

pytest.importorskip("torch", reason="needs the [torch] extra")
pytest.importorskip("transformers", reason="needs the [torch] extra")

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "e2e")]

from families import TEN, shallow, sizes
from recompute_model import LAYERS, WIDTH, step

from echograph.errors import PlanError, UnknownNameError
from echograph.frontend.pytorch.spec import StepSpec
from echograph.ir.graph import Graph, StepGraph
from echograph.ir.passes.data_parallel import DataParallel
from echograph.ir.passes.fold import Fold
from echograph.ir.passes.fully_shard import FullyShard
from echograph.ir.passes.pipeline import Pipeline
from echograph.ir.passes.recompute import Policy, Recompute
from echograph.ir.passes.tensor_parallel import TensorParallel
from echograph.ir.types import Phase
from echograph.ir.unfold import difference, unfold
from echograph.models import get_model
from echograph.simulator.memory import memory
from echograph.workflow.compile import compile_entry

POLICIES: tuple[Policy, ...] = ("full", "selective", "selective_op")
SLOW = pytest.mark.slow


@cache
def captured(name: str, layers: int = 3, *, recompute: bool = False, **options: object) -> StepGraph:
    return compile_entry(
        shallow(get_model(name), layers), StepSpec(recompute=recompute), **{**sizes(name), **options}
    )


def flops(graph: Graph, phase: Phase) -> int:
    """FLOPs of a phase that all programs run together."""
    ops = graph.ops
    calls = [call for program in graph.programs for call in program.calls.tolist()]
    return sum(int(ops.flops[b:e][ops.phase[b:e] == phase].sum()) for _, b, e, _, _ in calls)


def kinds(graph: StepGraph) -> Counter[object]:
    flat = unfold(graph)
    shapes = flat.tensors.shape
    return Counter(
        (op.name, op.phase, *(tuple(shapes.row(i)) for i in (*op.inputs, *op.outputs))) for op in flat.ops
    )


# -- against the models' own checkpointing --------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["gpt2", *(pytest.param(n, marks=SLOW) for n in TEN if n not in ("gpt2", "t5-small", "resnet-50"))],
)
def test_full_is_what_hugging_face_captures(name: str) -> None:
    """Op by op and tensor by tensor, in order."""
    ours = Recompute(policy="full")(captured(name))
    assert difference(unfold(ours), unfold(captured(name, recompute=True))) is None


@SLOW
def test_full_of_t5_but_for_its_position_bias() -> None:
    """When it checkpoints, Hugging Face's T5 makes the cross attention's zero bias require a gradient.

    So each layer's kernel returns that gradient, which is summed over the batch, and over the layers.
    """
    layers = 3
    ours, theirs = (
        kinds(Recompute(policy="full")(captured("t5-small", layers))),
        kinds(captured("t5-small", layers, recompute=True)),
    )
    kernel = "aten._scaled_dot_product_efficient_attention_backward"
    more, fewer = theirs - ours, ours - theirs
    assert {key[0]: count for key, count in fewer.items()} == {kernel: layers}
    assert {key[0]: count for key, count in more.items()} == {
        kernel: layers,
        "aten.sum": layers,
        "aten.add": layers - 1,
    }


# -- work -----------------------------------------------------------------------------------------------------


def test_everything_is_recomputed_without_early_stop() -> None:
    graph = captured("gpt2")
    ours = Recompute(policy="full", early_stop=False)(graph)
    main = graph.blocks[0].ops
    outside = sum(int(graph.ops.flops[r]) for r in main if graph.ops.phase[r] == Phase.FORWARD)
    assert flops(ours, Phase.RECOMPUTE) == flops(graph, Phase.FORWARD) - outside


@pytest.mark.parametrize("policy", POLICIES)
def test_forward_and_backward_work_is_what_it_was(policy: Policy) -> None:
    graph = captured("gpt2")
    ours = Recompute(policy=policy)(graph)
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER):
        assert flops(ours, phase) == flops(graph, phase)
    assert flops(ours, Phase.RECOMPUTE) > 0


def test_selective_work_is_that_of_the_paper() -> None:
    """Korthikanti et al. 2022, section 5: 4 b s^2 h FLOPs a layer, for scores and for weighted values."""
    layers, batch, sequence = 3, 2, 64
    ours = Recompute(policy="selective")(captured("gpt2", layers, attention="eager"))
    assert flops(ours, Phase.RECOMPUTE) == layers * 4 * batch * sequence**2 * 768


def test_every_second_product_is_kept() -> None:
    graph = Fold()(step())
    full, ours = Recompute(policy="full")(graph), Recompute(policy="selective_op")(graph)
    tokens = 2 * 16
    kept = (2 * tokens * WIDTH * (WIDTH + WIDTH + 3 * WIDTH) + 2 * 2 * tokens * 16 * WIDTH) * LAYERS
    assert flops(full, Phase.RECOMPUTE) - flops(ours, Phase.RECOMPUTE) == kept  # q, v, gate, and the attention


# -- form -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_layers_stay_folded(policy: Policy) -> None:
    graph = captured("gpt2")
    ours = Recompute(policy=policy)(graph)
    assert [len(block.instances) for block in ours.blocks] == [len(block.instances) for block in graph.blocks]
    assert difference(unfold(Fold()(unfold(ours))), unfold(ours)) is None


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_folding_changes_nothing(policy: Policy, every: int) -> None:
    graph = captured("gpt2", 4)
    recompute = Recompute(policy=policy, every=every)
    assert difference(unfold(recompute(graph)), recompute(unfold(graph))) is None


def test_every_third_layer_is_a_block_of_its_own() -> None:
    ours = Recompute(policy="full", every=3)(captured("gpt2", 7))
    labels = [[instance.label for instance in block.instances] for block in ours.blocks[1:]]
    assert labels == [["2", "5"], ["0", "1", "3", "4", "6"]]


@SLOW
def test_layers_that_do_not_fold_are_recomputed_too() -> None:
    """ResNet's stages begin with a layer unlike the others; the main block holds those."""
    graph = captured("resnet-50")
    ours = Recompute(policy="full")(graph)
    again = [ours.strings[ours.ops.module[r]] for r in ours.blocks[0].ops if ours.ops.phase[r] == Phase.RECOMPUTE]
    stages = {module.split(".layers.")[0] for module in again}
    assert stages == {f"resnet.encoder.stages.{number}" for number in range(4)}
    assert all(".layers.0." in module or module.endswith(".layers.0") for module in again)


@SLOW
def test_layers_of_stages_in_which_none_repeats_are_recomputed_too() -> None:
    """Of ResNet-18's four stages of two layers the first alone has two that are alike."""
    graph = captured("resnet-18")
    assert len(graph.blocks) == 2
    counts = Recompute(policy="full")(graph).run_counts()
    again = Recompute(policy="full")(graph)
    rows = [r for r in range(len(again.ops)) if again.ops.phases[r] == Phase.RECOMPUTE]
    convolutions = sum(int(counts[r]) for r in rows if again.strings[again.ops.name[r]] == "aten.convolution")
    assert convolutions == 19  # all but the stem's


def test_recomputation_names_what_it_repeats() -> None:
    ours = unfold(Recompute(policy="full")(captured("gpt2")))
    again = [op for op in ours.ops if op.phase == Phase.RECOMPUTE]
    for op in again:
        original = ours.ops[op.forward_op]  # type: ignore[union-attr, index]
        assert (original.name, original.module, original.phase) == (op.name, op.module, Phase.FORWARD)


# -- memory ---------------------------------------------------------------------------------------------------


def activations(graph: StepGraph) -> int:
    found = memory(DataParallel(replicas=1)(graph), 0, 1)
    assert found is not None
    return found.by_role["activation"]


def test_memory_drops_by_what_a_layer_saves() -> None:
    """Bytes by hand, a token's width the unit: what a layer saves beyond its input, for all layers but the last.

    16-bit: both norms' results 4; queries, keys, values 6; attention 2; residual 2; gate, its activation, up and
    their product 3 x 2 each. Beside them two statistics of each norm in 16 bit, and one in fp32 a head.
    """
    graph = Fold()(step(sizes=(64, 64)))
    saved = 64 * 64 * ((4 + 6 + 2 + 2 + 4 * 6) * WIDTH + 2 * 2 * 2 + 4 * 4)
    dropped = activations(graph) - activations(Recompute(policy="full")(graph))
    seeds = dropped - (LAYERS - 1) * saved
    assert 0 <= seeds <= (LAYERS - 1) * 1024  # a dropout's seed and offset, in allocations of 512 bytes
    half = activations(graph) - activations(Recompute(policy="full", every=2)(graph))
    assert half == dropped // (LAYERS - 1) * (LAYERS // 2 - 1)


def test_memory_is_between_none_and_full() -> None:
    graph = Fold()(step(fused=False, sizes=(64, 64)))
    none, selective, by_op, full = (
        activations(Recompute(policy=policy)(graph)) for policy in ("none", "selective", "selective_op", "full")
    )
    assert none > selective > by_op > full


# -- with other passes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_sharing_and_replicating_passes_take_it_on(policy: Policy, every: int) -> None:
    graph = Recompute(policy=policy, every=every)(captured("gpt2", 4))
    again = flops(graph, Phase.RECOMPUTE)
    shared = TensorParallel(size=2)(graph)
    assert flops(shared, Phase.RECOMPUTE) == again // 2
    assert flops(DataParallel(replicas=4, micro_batches=3)(graph), Phase.RECOMPUTE) == 3 * again
    assert flops(FullyShard(replicas=4, micro_batches=3)(shared), Phase.RECOMPUTE) == 3 * again // 2


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_pipelines_take_it_on(policy: Policy, every: int) -> None:
    graph = Recompute(policy=policy, every=every)(captured("gpt2", 4))
    job = Pipeline(stages=2, micro_batches=3)(TensorParallel(size=2, sequence_parallel=True)(graph))
    assert flops(DataParallel(replicas=4)(job), Phase.RECOMPUTE) == 3 * flops(graph, Phase.RECOMPUTE) // 2
    for program in job.programs:
        for block, begin, end, instance, micro_batch in program.calls.tolist():
            phases = {Phase(phase) for phase in job.ops.phase[begin:end].tolist()}
            assert Phase.FORWARD not in phases or Phase.RECOMPUTE not in phases, (block, instance, micro_batch)


# -- what is refused ------------------------------------------------------------------------------------------


def test_wrong_options_are_refused() -> None:
    graph = Fold()(layered_step(4))
    with pytest.raises(UnknownNameError, match="selective_op"):
        Recompute(policy="some")(graph)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="every 0 layers"):
        Recompute(policy="full", every=0)(graph)
    with pytest.raises(PlanError, match="choose 1 to 4"):
        Recompute(policy="full", every=5)(graph)
    with pytest.raises(PlanError, match="no layer has anything to recompute"):
        Recompute(policy="selective")(graph)
    with pytest.raises(PlanError, match="recomputes already"):
        Recompute(policy="full")(captured("gpt2", recompute=True))


def test_none_is_the_step_itself() -> None:
    graph = layered_step(2)
    assert Recompute(policy="none")(graph) is graph

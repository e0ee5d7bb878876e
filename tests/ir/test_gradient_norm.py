"""Which operations make the norm of all gradients and their overflow flag."""

from __future__ import annotations

import pytest

from echograph.errors import PlanError
from echograph.frontend.pytorch.spec import StepSpec
from echograph.ir.builder import GraphBuilder
from echograph.ir.graph import Graph, StepGraph, Workload
from echograph.ir.passes.data_parallel import DataParallel
from echograph.ir.passes.model import overflow_flags, total_norms
from echograph.ir.types import DType, Op, Phase, TensorRole
from echograph.models import get_model
from echograph.workflow.compile import compile_entry

LAYERS = 3


@pytest.fixture(scope="module")
def step() -> StepGraph:
    """GPT-2 in fp16 with loss scaling and clipping."""
    entry = get_model("gpt2").with_config(n_layer=LAYERS)
    return compile_entry(entry, StepSpec(dtype="fp16", clip_grad_norm=1.0), batch_size=1, seq_len=64)


def _readers(graph: Graph, tensor: int) -> list[Op]:
    """Operations that read a tensor's memory, in any block."""
    found = []
    for number, block in enumerate(graph.blocks):
        for instance in range(len(block.instances)):
            for row in block.ops:
                read = [graph.value(number, instance, i)[2] for i in graph.ops.inputs.row(row)]
                found += [graph.ops[row]] * (tensor in read)
    return found


@pytest.mark.parametrize("job", [False, True])
def test_the_norm_of_all_gradients_is_over_one_norm_for_each_parameter(step: StepGraph, job: bool) -> None:
    graph = DataParallel(replicas=2)(step) if job else step
    (row,) = total_norms(graph)
    (stack,) = graph.ops[row].inputs
    assert len(graph.ops[int(graph.maker[stack])].inputs) == 2 + 12 * LAYERS + 2
    # The coefficient of clipping is one over the norm, and all gradients are multiplied by it.
    (reader,) = _readers(graph, graph.ops[row].outputs[0])
    assert (reader.name, reader.phase) == ("aten.add", Phase.OPTIMIZER)


def test_the_overflow_flag_is_what_the_scaler_and_the_optimizer_read(step: StepGraph) -> None:
    (row,) = overflow_flags(step)
    readers = _readers(step, step.ops[row].outputs[-1])
    assert {op.name for op in readers} == {"aten._amp_update_scale_", "aten._fused_adamw_", "aten._foreach_sub_"}
    updates = [op for op in readers if op.name == "aten._fused_adamw_"]
    assert len(updates) == 2 + 12 * LAYERS + 2


def test_a_step_without_clipping_and_scaling_has_neither() -> None:
    entry = get_model("gpt2").with_config(n_layer=2)
    plain = compile_entry(entry, StepSpec(), batch_size=1, seq_len=64)
    assert total_norms(plain) == overflow_flags(plain) == []


def test_a_norm_of_activations_is_none_of_gradients() -> None:
    """Norms of norms in forward, and a norm of one gradient that nothing adds to others, are other norms."""
    builder = GraphBuilder(name="norms", workload=Workload())

    def norm(source: int, phase: Phase) -> int:
        made = builder.tensor("norm", (), DType.FP32, TensorRole.ACTIVATION)
        builder.compute("aten.linalg_vector_norm", phase=phase, inputs=(source,), outputs=(made,))
        return made

    x = builder.tensor("x", (4,), DType.FP32, TensorRole.INPUT)
    norm(norm(x, Phase.FORWARD), Phase.FORWARD)
    gradient = builder.tensor("w.grad", (4,), DType.FP32, TensorRole.GRADIENT)
    builder.compute("aten.mul", phase=Phase.BACKWARD, inputs=(x,), outputs=(gradient,))
    of_gradient = norm(gradient, Phase.OPTIMIZER)
    scaled = builder.tensor("w.grad", (4,), DType.FP32, TensorRole.GRADIENT, alias_of=gradient)
    builder.compute("aten.mul_", phase=Phase.OPTIMIZER, inputs=(gradient, of_gradient), outputs=(scaled,))
    norm(scaled, Phase.OPTIMIZER)
    builder.program([(0, 0, builder.op_count(), 0, 0)])
    assert total_norms(builder.build(StepGraph)) == []


def test_a_flag_that_one_instance_of_a_block_completes_is_refused() -> None:
    """Two layers, each with one gradient, of which the second is the last of the step."""
    builder = GraphBuilder(name="flag", workload=Workload())
    flag = builder.tensor("zeros", (), DType.FP32, TensorRole.ACTIVATION)
    builder.compute("aten.zeros", phase=Phase.OPTIMIZER, outputs=(flag,))
    layer = builder.begin_block("layers")
    port = builder.tensor("flag", (), DType.FP32, TensorRole.ACTIVATION, port=True)
    gradient = builder.tensor("{}.w.grad", (4,), DType.FP32, TensorRole.GRADIENT)
    raised = builder.tensor("flag", (), DType.FP32, TensorRole.ACTIVATION, alias_of=port)
    unscale = "aten._amp_foreach_non_finite_check_and_unscale_"
    builder.compute(unscale, phase=Phase.OPTIMIZER, inputs=(gradient, port), outputs=(raised,))
    # Each instance has two tensors of its own: the gradient, then the flag.
    builder.instance(layer, "0", bindings=(flag,))
    builder.instance(layer, "1", bindings=(flag + 2,))
    builder.program([(0, 0, 1, 0, 0), (layer, 1, 2, 0, 0), (layer, 1, 2, 1, 0)])
    with pytest.raises(PlanError, match="complete only in the last 'layers'"):
        overflow_flags(builder.build(StepGraph))

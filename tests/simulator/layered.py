"""A small layered training step with hand-set durations, for tests of passes and of the simulator."""

from __future__ import annotations

import numpy as np

from echograph.ir.builder import GraphBuilder
from echograph.ir.graph import JobGraph, StepGraph, Workload
from echograph.ir.passes.annotate import Annotate
from echograph.ir.types import DType, Gemm, Phase, Source, TensorRole

WIDTH = 512
PARAMETER_BYTES = WIDTH * WIDTH * 4


def layered_step(layers: int, *, parameters_per_layer: int = 2) -> StepGraph:
    """Linear layers with residuals: forward, loss, backward, one optimizer operation a parameter."""
    builder = GraphBuilder(name="layered", workload=Workload(model="layered", batch_size=4, sequence_length=16))

    def tensor(name: str, role: TensorRole, alias_of: int | None = None) -> int:
        return builder.tensor(name, (WIDTH, WIDTH), DType.FP32, role, alias_of=alias_of)

    def op(
        name: str,
        module: str,
        phase: Phase,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        forward: int | None = None,
    ) -> int:
        size = PARAMETER_BYTES
        return builder.compute(
            name, phase=phase, module=module, inputs=inputs, outputs=outputs, forward_op=forward, flops=1000,
            bytes_read=size * len(inputs), bytes_written=size * len(outputs),
        )  # fmt: skip

    embedding = tensor("embedding.weight", TensorRole.PARAMETER)
    tokens = tensor("tokens", TensorRole.INPUT)
    x = tensor("embed", TensorRole.ACTIVATION)
    embed = op("aten.embedding", "embedding", Phase.FORWARD, (embedding, tokens), (x,))
    done = []
    for layer in range(layers):
        for number in range(parameters_per_layer):
            module = f"layers.{layer}.linear{number}"
            weight = tensor(f"{module}.weight", TensorRole.PARAMETER)
            y = tensor("mm", TensorRole.ACTIVATION)
            forward = op("aten.mm", module, Phase.FORWARD, (x, weight), (y,))
            done.append((module, weight, x, forward))
            x = y
    loss = tensor("loss", TensorRole.ACTIVATION)
    op("aten.loss", "", Phase.FORWARD, (x,), (loss,))
    gradient = tensor("ones", TensorRole.ACTIVATION)
    op("aten.loss_backward", "", Phase.BACKWARD, (loss,), (gradient,))
    gradients = []
    for module, weight, saved, forward in reversed(done):
        of_weight = tensor(f"{module}.weight.grad", TensorRole.GRADIENT)
        op("aten.mm", module, Phase.BACKWARD, (gradient, saved), (of_weight,), forward)
        of_input = tensor("mm", TensorRole.ACTIVATION)
        op("aten.mm", module, Phase.BACKWARD, (gradient, weight), (of_input,), forward)
        gradients.append((module, weight, of_weight))
        gradient = of_input
    of_embedding = tensor("embedding.weight.grad", TensorRole.GRADIENT)
    op("aten.embedding_backward", "embedding", Phase.BACKWARD, (gradient, tokens), (of_embedding,), embed)
    gradients.append(("embedding", embedding, of_embedding))
    for module, weight, of_weight in reversed(gradients):
        moment = tensor(f"{module}.weight.moment", TensorRole.OPTIMIZER_STATE)
        updated = tensor(f"{module}.weight", TensorRole.PARAMETER, weight)
        op("aten._fused_adam_", module, Phase.OPTIMIZER, (weight, of_weight, moment), (updated,))
    return builder.build(StepGraph)


def product_step(picoseconds: int, source: Source, device: str = "h100-sxm") -> StepGraph:
    """A product and an activation, each of so many picoseconds."""
    builder = GraphBuilder(name="two", workload=Workload(model="two", batch_size=1))
    x, y, z = (builder.tensor(name, (64, 64), DType.BF16, TensorRole.ACTIVATION) for name in "xyz")
    start = builder.tensor("start", (64, 64), DType.BF16, TensorRole.INPUT)
    weight = builder.tensor("weight", (64, 64), DType.BF16, TensorRole.PARAMETER)
    builder.compute("aten.relu", phase=Phase.FORWARD, module="", inputs=(start,), outputs=(x,))
    builder.compute(
        "aten.mm", phase=Phase.FORWARD, module="", inputs=(x, weight), outputs=(y,), flops=2 * 64**3,
        attributes=Gemm(),
    )  # fmt: skip
    builder.compute("aten.relu", phase=Phase.FORWARD, module="", inputs=(y,), outputs=(z,))
    step = builder.build(StepGraph)
    count = len(step.ops)
    return Annotate(
        device=device, picoseconds=np.full(count, picoseconds), source=np.full(count, source, np.uint8),
        spread=np.zeros(count, np.float32), samples=np.ones(count, np.int64),
    )(step)  # fmt: skip


def timed(job: JobGraph, device: str, picoseconds: int, spread: float = 0.1) -> JobGraph:
    """The job with one duration on every device operation."""
    count = len(job.ops)
    works = (job.ops.kind == 1) & ~job.ops.is_view
    return Annotate(
        device=device,
        picoseconds=np.where(works, picoseconds, -1).astype(np.int64),
        source=np.full(count, Source.ANALYTICAL, np.uint8),
        spread=np.full(count, spread, np.float32),
        samples=np.zeros(count, np.int64),
    )(job)

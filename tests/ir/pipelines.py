"""Small steps for tests of pipelines, and what a pipeline of them does."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from echograph.ir.builder import GraphBuilder
from echograph.ir.graph import JobGraph, StepGraph
from echograph.ir.passes.fold import Fold
from echograph.ir.types import DType, OpKind, Phase, TensorRole
from echograph.simulator.engine.static import run
from echograph.simulator.tasks import expand

FORWARD, BACKWARD = 1000, 2000


def tied_step(
    layers: int,
    *,
    clip: bool = False,
    skip: bool = False,
    rows: Sequence[int] = (),
    skip_from: int | None = None,
    names: Sequence[int] = (),
) -> StepGraph:
    """Embedding and head share their weight; `skip` adds the embedding to what the head reads.

    With `rows`, weights of layers have so many, and layers of which they differ are none of one block. `skip_from`
    adds what a layer makes to what the head reads. With `names`, the backward pass of a layer says that it is of
    the forward pass of the layer that is so many before.
    """
    b = GraphBuilder(name="tied")

    def tensor(
        name: str, role: TensorRole = TensorRole.ACTIVATION, alias_of: int | None = None, rows: int = 8
    ) -> int:
        return b.tensor(name, (rows, 16), DType.FP32, role, alias_of=alias_of)

    def op(name: str, module: str, phase: Phase, reads: tuple[int, ...], made: int, forward: int | None) -> int:
        return b.compute(
            name, module=module, phase=phase, inputs=reads, outputs=(made,), forward_op=forward, flops=10,
            bytes_read=64, bytes_written=64,
        )  # fmt: skip

    def forward(name: str, module: str, *reads: int) -> tuple[int, int]:
        made = tensor(name)
        return made, op(name, module, Phase.FORWARD, reads, made, None)

    def backward(name: str, module: str, of: int, *reads: int, gradient_of: str = "", rows: int = 8) -> int:
        role = TensorRole.GRADIENT if gradient_of else TensorRole.ACTIVATION
        made = tensor(f"{gradient_of}.grad" if gradient_of else name, role, rows=rows)
        op(name, module, Phase.BACKWARD, reads, made, of)
        return made

    tokens, shared = tensor("tokens", TensorRole.INPUT), tensor("shared.weight", TensorRole.PARAMETER)
    mask, _ = forward("aten.triu", "", tokens)
    embedded, embed = forward("aten.embedding", "embed", shared, tokens)
    x, done, updates, of_layer, of_skipped = embedded, [], [], [*rows] or [8] * layers, embed
    for layer in range(layers):
        weight = tensor(f"h.{layer}.weight", TensorRole.PARAMETER, rows=of_layer[layer])
        y, at = forward("aten.mm", f"h.{layer}", x, weight, mask)
        done.append((layer, x, weight, at))
        x = y
        if layer == skip_from:
            embedded, of_skipped = y, at
    if skip or skip_from is not None:
        x, _ = forward("aten.add", "", x, embedded)
    logits, head = forward("aten.mm", "head", x, shared)
    d_logits = backward("aten.loss_backward", "", head, logits)
    of_head = backward("aten.mm", "head", head, d_logits, x)
    gradient = d_skip = backward("aten.mm", "head", head, d_logits, shared)
    for layer, x, weight, at in reversed(done):
        name = f"h.{layer}.weight"
        at = done[layer - names[layer]][3] if names else at
        if layer == skip_from:
            gradient = backward("aten.add", "", of_skipped, gradient, d_skip)
        of_weight = backward("aten.mm", f"h.{layer}", at, gradient, x, gradient_of=name, rows=of_layer[layer])
        updates.append((f"h.{layer}", name, weight, of_weight, of_layer[layer]))
        gradient = backward("aten.mm", f"h.{layer}", at, gradient, weight)
    if skip:
        gradient = backward("aten.add", "", embed, gradient, d_skip)
    of_embed = backward("aten.embedding_backward", "embed", embed, gradient, tokens)
    total = backward("aten.add", "embed", embed, of_head, of_embed, gradient_of="shared.weight")
    updates.append(("embed", "shared.weight", shared, total, 8))
    norm = tensor("norm")
    if clip:
        b.compute("aten._foreach_norm", phase=Phase.OPTIMIZER, inputs=[g for *_, g, _ in updates], outputs=(norm,))
    for module, name, weight, grad, its in reversed(updates):
        new = tensor(name, TensorRole.PARAMETER, weight, its)
        op("aten.sgd_", module, Phase.OPTIMIZER, (weight, grad, *((norm,) if clip else ())), new, None)
    return Fold()(b.build(StepGraph))


def makespan(job: JobGraph) -> int:
    """Time of a step whose layers take `FORWARD` and `BACKWARD` each, and all else nothing."""
    layer = np.array([".linear" in job.strings[m] for m in job.ops.module])
    time = np.where(layer & (job.ops.phase == Phase.FORWARD), FORWARD // 2, 0)
    time = np.where(layer & (job.ops.phase == Phase.BACKWARD), BACKWARD // 4, time).astype(np.int64)
    tasks = expand(job, time, np.zeros(len(job.ops), np.int64))
    start = run(tasks)
    return int((start + tasks.duration).max())


def messages(job: JobGraph) -> dict[tuple[int, int], dict[OpKind, list[tuple[int, ...]]]]:
    """For each (sender, receiver), what is sent and what received: (tag, bytes, micro-batch) in order, by tag."""
    found: dict[tuple[int, int], dict[OpKind, list[tuple[int, ...]]]] = defaultdict(lambda: defaultdict(list))
    for stage, program in enumerate(job.programs):
        for _, begin, end, _, micro_batch in program.calls.tolist():
            for row in range(begin, end):
                kind = OpKind(int(job.ops.kind[row]))
                if kind in (OpKind.SEND, OpKind.RECV):
                    other = stage + int(job.ops.peer[row])
                    pair = (stage, other) if kind == OpKind.SEND else (other, stage)
                    stream = job.streams[int(job.ops.stream[row])].rpartition(".")[0]
                    message = (int(job.ops.tag[row]), int(job.ops.nbytes[row]), micro_batch)
                    found[*pair, stream][kind].append(message)
    return found


def runs(job: JobGraph, stage: int) -> Counter[str]:
    """How often each operator of each module runs on a stage."""
    found: Counter[str] = Counter()
    for block, begin, end, instance, _ in job.programs[stage].calls.tolist():
        label = job.blocks[block].instances[instance].label
        for row in range(begin, end):
            module = job.strings[job.ops.module[row]].replace("{}", label)
            found[f"{job.strings[job.ops.name[row]]} {module}"] += 1
    return found


def flops(graph: StepGraph | JobGraph) -> int:
    return sum(
        int(graph.ops.flops[begin:end].sum()) for p in graph.programs for _, begin, end, _, _ in p.calls.tolist()
    )


def parameter_bytes(job: JobGraph, stage: int) -> int:
    """Bytes of the parameters that a stage touches, each once."""
    found: dict[tuple[int, int, int], int] = {}
    for block, begin, end, instance in {tuple(call[:4]) for call in job.programs[stage].calls.tolist()}:
        inputs = job.ops.inputs
        for tensor in set(inputs.values[inputs.offsets[begin] : inputs.offsets[end]].tolist()):
            owner = job.owner(block, instance, tensor)
            if job.tensors.role[owner[2]] == TensorRole.PARAMETER:
                found[owner] = int(job.tensors.nbytes[owner[2]])
    return sum(found.values())

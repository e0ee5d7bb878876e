"""The graphs of the conformance files: small, made by hand, each about one part of the format."""

from __future__ import annotations

from collections.abc import Callable

from echograph.ir import types as t
from echograph.ir.builder import GraphBuilder
from echograph.ir.graph import BETWEEN_STEPS, Axis, Graph, JobGraph, StepGraph, Workload

D, R, P = t.DType, t.TensorRole, t.Phase
FORWARD, BACKWARD = {"phase": P.FORWARD}, {"phase": P.BACKWARD}


def empty() -> Graph:
    """A step that computes nothing."""
    return GraphBuilder(name="empty").build(StepGraph)


def kinds() -> Graph:
    """Every operation kind, collective, attribute, role and type of format 1; streams, dependencies, times."""
    b = GraphBuilder(name="every kind", producer="by hand", streams=("compute", "communication", "host"))
    b.mesh = (Axis(name="dp", size=2),)
    dp = b.group("dp", axes=("dp",))
    x = b.tensor("x", (4, 8), D.FP32, R.INPUT)
    whole = [d for d in D if d.bits >= 8]
    tensors = [b.tensor(d.text, (2, 3), d, role) for d, role in zip(whole, [*R] * 3, strict=False)]
    attributes = (
        t.Gemm(), t.Gemm(transpose_a=True), t.Gemm(transpose_b=True), t.Gemm(transpose_a=True, transpose_b=True),
        t.Attention(heads=8, kv_heads=2, head_dim=64, causal=True, dropout=0.1),
        t.Attention(heads=1, kv_heads=1, head_dim=16),
        t.Convolution(stride=(2, 1), padding=(1, 0), dilation=(1, 3), groups=4, transposed=True),
        t.Convolution(stride=(1,), padding=(0,), dilation=(1,)),
        t.MultiTensor(parts=2, leads=True), t.MultiTensor(parts=2), None,
    )  # fmt: skip
    durations = (
        t.Duration(device="h100", picoseconds=1_500_000, source=t.Source.MEASURED, samples=20, spread=0.0125),
        t.Duration(device="a100", picoseconds=2_750_000, source=t.Source.FITTED, spread=0.1),
        t.Duration(device="b200", picoseconds=1, source=t.Source.ANALYTICAL),
        t.Duration(device="mi300x", picoseconds=0, source=t.Source.IMPORTED, samples=1),
    )
    for number, value in enumerate(attributes):
        y = b.tensor(f"y.{number}", (4, 8), D.FP32, R.ACTIVATION)
        phase = P(number % len(P) + 1)
        b.compute(f"op.{number}", inputs=(x,), outputs=(y,), phase=phase, flops=64, bytes_read=128,
                  bytes_written=128, attributes=value, durations=durations if number < 2 else (),
                  module="m")  # fmt: skip
    for kind in t.CollectiveKind:
        b.collective(f"{kind.name.lower()} it", kind, group=dp, bytes_per_rank=128, dtype=D(kind.value),
                     payload=t.Payload((kind - 1) % 5 + 1), asynchronous=kind % 2 == 0, stream=1, deps=(kind - 1,),
                     inputs=(x,), phase=P.BACKWARD)  # fmt: skip
    b.send("to next", group=dp, peer=1, tag=7, nbytes=128, payload=t.Payload.GRADIENT, inputs=(x,), stream=1)
    b.recv("from last", group=dp, peer=-1, tag=7, nbytes=128, outputs=(tensors[0],), stream=1)
    for direction in t.CopyDirection:
        b.copy("memcpy", direction, nbytes=96, inputs=(tensors[1],), **FORWARD)
    b.host("dataloader", stream=2, outputs=(tensors[2],))
    return b.build(JobGraph)


def two_layers() -> Graph:
    """Two layers as one block with two instances: forward, backward and optimizer. The example of docs/ir.md."""
    workload = Workload(
        model="mlp", parameters=32, batch_size=8, sequence_length=1, dtype=D.BF16, optimizer="sgd",
        master_weights=True,
    )  # fmt: skip
    b = GraphBuilder(name="two layers", producer="by hand", workload=workload)
    x = b.tensor("x", (8, 4), D.BF16, R.INPUT)
    b.tensor("", (8, 4), D.BF16, R.ACTIVATION, port=True)
    loss = b.tensor("loss", (), D.FP32, R.ACTIVATION)
    dy = b.tensor("d_y", (8, 4), D.BF16, R.ACTIVATION)
    b.compute("loss", inputs=(1,), outputs=(loss,), flops=64, bytes_read=64, bytes_written=4, **FORWARD)
    b.compute(
        "d_loss", inputs=(loss,), outputs=(dy,), flops=32, bytes_read=4, bytes_written=64, forward_op=0, **BACKWARD
    )

    layer = b.begin_block("layers")
    x_in = b.tensor("", (8, 4), D.BF16, R.ACTIVATION, port=True)
    w = b.tensor("layers.{}.weight", (4, 4), D.BF16, R.PARAMETER)
    y = b.tensor("layers.{}.y", (8, 4), D.BF16, R.ACTIVATION)
    d_out = b.tensor("", (8, 4), D.BF16, R.ACTIVATION, port=True)
    d_in = b.tensor("layers.{}.d_x", (8, 4), D.BF16, R.ACTIVATION)
    dw = b.tensor("layers.{}.weight.grad", (4, 4), D.BF16, R.GRADIENT)
    new = b.tensor("layers.{}.weight", (4, 4), D.BF16, R.PARAMETER, alias_of=w)
    module = {"module": "layers.{}"}
    forward = b.compute("aten.mm", inputs=(x_in, w), outputs=(y,), flops=256, bytes_read=96, bytes_written=64,
                        attributes=t.Gemm(), **FORWARD, **module)  # fmt: skip
    b.compute("aten.mm", inputs=(d_out, w), outputs=(d_in,), flops=256, bytes_read=96, bytes_written=64,
              attributes=t.Gemm(transpose_b=True), forward_op=forward, **BACKWARD, **module)  # fmt: skip
    b.compute("aten.mm", inputs=(x_in, d_out), outputs=(dw,), flops=256, bytes_read=128, bytes_written=32,
              attributes=t.Gemm(transpose_a=True), forward_op=forward, **BACKWARD, **module)  # fmt: skip
    b.compute("sgd_", inputs=(w, dw), outputs=(new,), flops=32, bytes_read=64, bytes_written=32, phase=P.OPTIMIZER,
              **module)  # fmt: skip

    # Tensor ids: main x 0, loss 1, d_y 2; layer 0 weight 3, y 4, d_x 5, grad 6, new 7; layer 1: 8 .. 12.
    b.instance(0, bindings=(9,))
    b.instance(layer, "0", bindings=(x, 10))
    b.instance(layer, "1", bindings=(4, 2))
    b.program([(1, 2, 3, 0, 0), (1, 2, 3, 1, 0), (0, 0, 2, 0, 0), (1, 3, 5, 1, 0), (1, 3, 5, 0, 0),
               (1, 5, 6, 0, 0), (1, 5, 6, 1, 0)])  # fmt: skip
    return b.build(StepGraph)


def aliases() -> Graph:
    """Chains of views and in-place updates, through ports, and a forward operation of another block."""
    b = GraphBuilder(name="aliases", workload=Workload(model="aliases", dtype=D.FP32))
    x = b.tensor("x", (2, 6), D.FP32, R.INPUT)
    v1 = b.tensor("x.flat", (12,), D.FP32, R.INPUT, alias_of=x)
    v2 = b.tensor("x.square", (3, 4), D.FP32, R.ACTIVATION, alias_of=v1)
    y = b.tensor("y", (3, 4), D.FP32, R.ACTIVATION)
    y1 = b.tensor("y", (3, 4), D.FP32, R.ACTIVATION, alias_of=y)
    total = b.tensor("", (3, 4), D.FP32, R.ACTIVATION, port=True)
    out = b.tensor("out", (12,), D.FP32, R.ACTIVATION, alias_of=total)
    b.compute("aten.view", inputs=(x,), outputs=(v1,), **FORWARD)
    b.compute("aten.view", inputs=(v1,), outputs=(v2,), **FORWARD)
    b.compute("aten.exp", inputs=(v2,), outputs=(y,), flops=12, bytes_read=48, bytes_written=48, **FORWARD)
    b.compute("aten.add_", inputs=(y, v2), outputs=(y1,), flops=12, bytes_read=96, bytes_written=48, **FORWARD)
    b.compute("aten.view", inputs=(total,), outputs=(out,), **FORWARD)
    b.compute("aten.sum", inputs=(out,), flops=12, bytes_read=48, bytes_written=4, **FORWARD)
    step = b.begin_block("steps")
    before = b.tensor("", (3, 4), D.FP32, R.ACTIVATION, port=True)
    after = b.tensor("steps.{}.state", (3, 4), D.FP32, R.ACTIVATION, alias_of=before)
    b.compute("aten.mul_", inputs=(before,), outputs=(after,), flops=12, bytes_read=48, bytes_written=48,
              module="steps.{}", **FORWARD)  # fmt: skip
    b.compute(
        "mul_backward", inputs=(after,), flops=12, bytes_read=48, forward_op=-2, module="steps.{}", **BACKWARD
    )
    # Tensor ids: main 0..4 and out 5; steps 6, 7, 8. Operation ids: main 0..5; steps 6 7, 8 9, 10 11.
    b.instance(0, bindings=(8,))
    for number, (bound, forward) in enumerate([(4, 3), (6, 6), (7, 8)]):
        b.instance(step, str(number), bindings=(bound,), op_bindings=(forward,))
    b.program([(0, 0, 4, 0, 0), *((1, 6, 7, k, 0) for k in range(3)), (0, 4, 6, 0, 0),
               *((1, 7, 8, k, 0) for k in (2, 1, 0))])  # fmt: skip
    return b.build(StepGraph)


def job() -> Graph:
    """Two pipeline stages of two micro-batches on a mesh pp=2 dp=2 tp=2, with gradients reduced asynchronously."""
    b = GraphBuilder(name="job", workload=Workload(model="mlp", batch_size=4), streams=("compute", "dp", "pp"))
    b.mesh = (Axis(name="pp", size=2), Axis(name="dp", size=2), Axis(name="tp", size=2))
    pp, dp, tp = (b.group(axis, axes=(axis,)) for axis in ("pp", "dp", "tp"))
    both, ends = b.group("dp x tp", axes=("dp", "tp")), b.group("first and last", ranks=range(8))
    calls: list[list[tuple[int, int, int, int, int]]] = []
    for stage in range(2):
        number = b.begin_block(f"stage.{stage}")
        low = b.op_count()
        _stage(b, stage, pp, dp, tp)
        b.instance(number, str(stage))
        middle, high = low + 3, b.op_count()
        order = [(low, middle, 0), (middle, high - 2, 0), (low, middle, 1), (middle, high - 2, 1)]
        if stage == 0:
            order = [order[0], order[2], order[1], order[3]]
        calls.append([*((number, begin, end, 0, m) for begin, end, m in order), (number, high - 2, high, 0, 1)])
    number = b.begin_block("end")
    b.collective(
        "norm", t.CollectiveKind.ALL_REDUCE, group=both, bytes_per_rank=4, dtype=D.FP32, phase=P.OPTIMIZER
    )
    b.collective("tied", t.CollectiveKind.ALL_REDUCE, group=ends, bytes_per_rank=64, dtype=D.FP32,
                 phase=P.OPTIMIZER, payload=t.Payload.GRADIENT)  # fmt: skip
    b.instance(number)
    for stage, (low, role) in enumerate([(b.op_count() - 2, "first"), (b.op_count() - 2, "last")]):
        b.program([*calls[stage], (number, low, low + 2, 0, 1)], role=role, coordinates={"pp": stage})
    return b.build(JobGraph)


def _stage(b: GraphBuilder, stage: int, pp: int, dp: int, tp: int) -> None:
    """Receives or loads, computes, sends or takes the loss; the same backward; reduces its gradient and steps."""
    x, w, y, dy, dx, dw, new = (
        b.tensor(f"stage.{{}}.{name}", (4, 4), D.FP32, role, alias_of=alias)
        for name, role, alias in _stage_tensors(b.tensor_count())
    )
    link = {"group": pp, "nbytes": 64, "stream": 2}
    if stage == 0:
        b.copy("load", t.CopyDirection.HOST_TO_DEVICE, nbytes=64, outputs=(x,), **FORWARD)
    else:
        b.recv("activation", peer=-1, tag=0, outputs=(x,), **link, **FORWARD)
    at = b.compute("aten.mm", inputs=(x, w), outputs=(y,), flops=128, bytes_read=128, bytes_written=64, **FORWARD)
    if stage == 0:
        b.send("activation", peer=1, tag=0, inputs=(y,), **link, **FORWARD)
        b.recv("gradient", peer=1, tag=1, outputs=(dy,), payload=t.Payload.GRADIENT, **link, **BACKWARD)
    else:
        b.collective("y", t.CollectiveKind.ALL_REDUCE, group=tp, bytes_per_rank=64, dtype=D.FP32, inputs=(y,),
                     payload=t.Payload.ACTIVATION, **FORWARD)  # fmt: skip
        b.compute("d_loss", inputs=(y,), outputs=(dy,), flops=16, bytes_read=64, bytes_written=64, **BACKWARD)
    b.compute("aten.mm", inputs=(dy, w), outputs=(dx,), forward_op=at, flops=128, bytes_read=128, bytes_written=64,
              **BACKWARD)  # fmt: skip
    if stage == 1:
        b.send("gradient", peer=-1, tag=1, inputs=(dx,), payload=t.Payload.GRADIENT, **link, **BACKWARD)
    b.compute("aten.mm", inputs=(x, dy), outputs=(dw,), forward_op=at, flops=128, bytes_read=128, bytes_written=64,
              **BACKWARD)  # fmt: skip
    reduce = b.collective("bucket", t.CollectiveKind.ALL_REDUCE, group=dp, bytes_per_rank=64, dtype=D.FP32,
                          payload=t.Payload.GRADIENT, asynchronous=True, stream=1, inputs=(dw,),
                          **BACKWARD)  # fmt: skip
    b.compute("sgd_", inputs=(w, dw), outputs=(new,), deps=(reduce,), flops=32, bytes_read=128, bytes_written=64,
              phase=P.OPTIMIZER)  # fmt: skip


def _stage_tensors(first: int) -> list[tuple[str, t.TensorRole, int | None]]:
    roles = [("x", R.ACTIVATION), ("weight", R.PARAMETER), ("y", R.ACTIVATION), ("d_y", R.ACTIVATION)]
    roles += [("d_x", R.ACTIVATION), ("weight.grad", R.GRADIENT)]
    return [*((name, role, None) for name, role in roles), ("weight", R.PARAMETER, first + 1)]


def ranks() -> Graph:
    """A job without a mesh, as an import makes it: each rank its own slice of the main block."""
    b = GraphBuilder(name="imported", producer="a trace", streams=("7", "20"))
    pair, names = b.group("pair", ranks=(0, 1)), ("sgemm", "nccl all reduce", "sgemm")
    spans = []
    for times in ((10, 20, 30), (11, 25, 31)):
        low = b.op_count()
        known = [[t.Duration(device="trace", picoseconds=x * 10**6, source=t.Source.IMPORTED)] for x in times]
        b.compute(names[0], durations=known[0], flops=100, **FORWARD)
        b.collective(names[1], t.CollectiveKind.ALL_REDUCE, group=pair, bytes_per_rank=1024, dtype=D.FP16,
                     stream=1, durations=known[1], deps=(low,), **BACKWARD)  # fmt: skip
        b.compute(names[2], durations=known[2], flops=100, deps=(low + 1,), **BACKWARD)
        spans.append((0, low, low + 3, 0, 0))
    for rank, span in enumerate(spans):
        b.program([span], role=f"rank {rank}", ranks=(rank,))
    return b.build(JobGraph)


def positions() -> Graph:
    """Three stages of two ranks each on a mesh pp=3 dp=2, of which the first and the last share a gradient."""
    b = GraphBuilder(name="positions", streams=("compute", "pp"))
    b.mesh = (Axis(name="pp", size=3), Axis(name="dp", size=2))
    ends = b.group("embedding", axes=("pp",), positions=(0, 2))
    b.compute("aten.mm", flops=128, bytes_read=128, bytes_written=64, **BACKWARD)
    b.collective("shared gradient", t.CollectiveKind.ALL_REDUCE, group=ends, bytes_per_rank=64, dtype=D.FP32,
                 payload=t.Payload.GRADIENT, stream=1, deps=(0,), **BACKWARD)  # fmt: skip
    for stage, last in enumerate((2, 1, 2)):
        b.program([(0, 0, last, 0, 0)], role=f"stage {stage}", coordinates={"pp": stage})
    return b.build(JobGraph)


def large_numbers() -> Graph:
    """Numbers beyond 2^53, names that are not plain words, a scalar and an extent of zero."""
    workload = Workload(parameters=2**60 + 1, model_flops=2**62 + 5, causal_attention_flops=2**61 + 1)
    b = GraphBuilder(name='a "name"\nof two lines', producer="Größe 大", workload=workload)
    big = b.tensor("big", (2**28 + 1, 2**28 - 1), D.FP32, R.PARAMETER)
    b.tensor("scalar", (), D.INT64, R.BUFFER)
    none = b.tensor("none", (0, 5), D.INT8, R.BUFFER)
    long = t.Duration(device="слон", picoseconds=2**62 + 3, source=t.Source.MEASURED, samples=2**40, spread=1 / 3)
    b.compute("huge", inputs=(big,), flops=2**62 + 1, bytes_read=2**58 + 1, bytes_written=2**57 + 3,
              durations=(long,), **FORWARD)  # fmt: skip
    b.compute("huge", inputs=(big, none), flops=2**61, bytes_read=1, **FORWARD)
    return b.build(StepGraph)


def passes() -> Graph:
    """A step that says which passes made it."""
    b = GraphBuilder(name="passes")
    b.passes = ("recompute{policy=full}", 'tensor_parallel{size=2,plan=("a b":colwise)}')
    b.compute("aten.mm", flops=128, bytes_read=128, bytes_written=64, **FORWARD)
    b.program([(0, 0, 1, 0, 0)])
    return b.build(StepGraph)


def four_bits() -> Graph:
    """Elements of half a byte, an odd number of them too, and a product that reads them; format 2."""
    b = GraphBuilder(name="four bits")
    x = b.tensor("x", (4, 32), D.FP4_E2M1, R.ACTIVATION)
    weight = b.tensor("weight", (32, 6), D.FP4_E2M1, R.BUFFER)
    b.tensor("odd", (3, 3), D.FP4_E2M1, R.BUFFER)
    y = b.tensor("y", (4, 6), D.BF16, R.ACTIVATION)
    b.compute("aten._scaled_mm", inputs=(x, weight), outputs=(y,), flops=1536, bytes_read=160, bytes_written=48,
              attributes=t.Gemm(transpose_b=True, block=16), **FORWARD)  # fmt: skip
    b.program([(0, 0, 1, 0, 0)])
    return b.build(StepGraph)


def stack() -> Graph:
    """A step that says which software was captured, and attention whose gradients are added up in one order."""
    b = GraphBuilder(name="stack", workload=Workload(model="gpt", dtype=D.BF16, stack="megatron-core"))
    q, k, v = (b.tensor(name, (1, 2, 8, 4), D.BF16, R.INPUT) for name in "qkv")
    y = b.tensor("y", (1, 2, 8, 4), D.BF16, R.ACTIVATION)
    fixed = t.Attention(heads=2, kv_heads=2, head_dim=4, causal=True, dropout=0.1, deterministic=True)
    b.compute("aten._scaled_dot_product_flash_attention", inputs=(q, k, v), outputs=(y,), flops=2048,
              bytes_read=384, bytes_written=128, attributes=fixed, **FORWARD)  # fmt: skip
    b.program([(0, 0, 1, 0, 0)])
    return b.build(StepGraph)


def rounded() -> Graph:
    """A product of fp32 whose operands may be rounded to TF32, and a convolution whose may not; format 1.5."""
    b = GraphBuilder(name="rounded")
    x, y = (b.tensor(name, (4, 4), D.FP32, role) for name, role in (("x", R.INPUT), ("y", R.ACTIVATION)))
    b.compute("aten.mm", inputs=(x, x), outputs=(y,), flops=128, bytes_read=64, bytes_written=64,
              attributes=t.Gemm(transpose_b=True, tf32=True), **FORWARD)  # fmt: skip
    z, made = (b.tensor(name, (1, 4, 4), D.FP32, role) for name, role in (("z", R.INPUT), ("w", R.ACTIVATION)))
    exact = t.Convolution(stride=(1,), padding=(0,), dilation=(1,), ieee=True)
    b.compute("aten.convolution", inputs=(z, z), outputs=(made,), attributes=exact, **FORWARD)
    b.program([(0, 0, 2, 0, 0)])
    return b.build(StepGraph)


def held() -> Graph:
    """Two roles, of which one says what libraries and the script hold besides tensors; format 1.4."""
    b = GraphBuilder(name="held")
    b.mesh = (Axis(name="pp", size=2),)
    b.compute("aten.mm", flops=128, bytes_read=128, bytes_written=64, **FORWARD)
    b.program([(0, 0, 1, 0, 0)], role="first", coordinates={"pp": 0})
    b.program(
        [(0, 0, 1, 0, 0)], role="last", coordinates={"pp": 1}, held={"cublas": 2**26, BETWEEN_STEPS: 2**33 + 512}
    )
    return b.build(JobGraph)


GRAPHS: dict[str, Callable[[], Graph]] = {
    make.__name__: make
    for make in (
        empty,
        kinds,
        two_layers,
        aliases,
        job,
        ranks,
        positions,
        large_numbers,
        passes,
        stack,
        held,
        rounded,
        four_bits,
    )
}

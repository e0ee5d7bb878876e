"""Which cost function an operation is asked of, and with what: each against the call that it stands for."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import msgspec
import numpy as np
import pytest

from echograph.errors import GraphError, UnavailableError
from echograph.ir.builder import GraphBuilder
from echograph.ir.graph import StepGraph
from echograph.ir.types import (
    Attention,
    Attributes,
    Compute,
    Convolution,
    Copy,
    CopyDirection,
    DType,
    Duration,
    Gemm,
    MultiTensor,
    Phase,
    Source,
    TensorRole,
)
from echograph.profiler.costs import (
    attention_backward,
    attention_forward,
    convolution,
    gemm,
    grouped_gemm,
    load_device,
    memory_bound,
)
from echograph.profiler.costs.device import CostEstimate
from echograph.profiler.costs.estimate import (
    ASSUMED_SPREAD,
    BOTH_SLOWER,
    ROWWISE_SLOWER,
    SCALE_CLOCKS,
    SCAN_KERNELS,
    SCAN_SHARE,
    KnownCosts,
    cost_of,
    estimate,
)
from echograph.profiler.costs.unrolled import unrolled_seconds
from echograph.units import to_ps

H100, V100 = load_device("h100-sxm"), load_device("v100-sxm2")
BF16, FP16, FP32, FP64, FP8, INT64 = DType.BF16, DType.FP16, DType.FP32, DType.FP64, DType.FP8_E4M3, DType.INT64
Shape = tuple[int, ...]
Operand = tuple[Shape, DType]


def cost(
    name: str,
    inputs: Sequence[Shape | Operand],
    outputs: Sequence[Shape | Operand],
    attributes: Attributes | None = None,
    *,
    dtype: DType = BF16,
    device: Any = H100,
    **more: Any,
) -> CostEstimate:
    """What an operation on tensors of a type costs; a tensor may have another."""
    builder = GraphBuilder()
    sides = []
    for side in (inputs, outputs):
        typed = [operand if operand and isinstance(operand[-1], DType) else (operand, dtype) for operand in side]
        sides.append([builder.tensor("x", shape, kind, TensorRole.ACTIVATION) for shape, kind in typed])  # type: ignore[arg-type]
    fields = {"phase": Phase.FORWARD, "flops": 1, "bytes_read": 3 << 20, "bytes_written": 1 << 20, **more}
    builder.compute(name, inputs=sides[0], outputs=sides[1], attributes=attributes, **fields)
    graph = builder.build(StepGraph)
    op = graph.ops[0]
    assert isinstance(op, Compute)
    return cost_of(op, ([graph.tensors[i] for i in op.inputs], [graph.tensors[i] for i in op.outputs]), device)


def by_bytes(kind: str, device: Any = H100, **more: float) -> CostEstimate:
    return memory_bound(device, kind, bytes_read=3 << 20, bytes_written=1 << 20, **more)


# -- products ----------------------------------------------------------------------------------------------------

A, B, C = (96, 4000), (4000, 520), (96, 520)


@pytest.mark.parametrize(
    ("attributes", "layout"),
    [(Gemm(), "NN"), (Gemm(transpose_b=True), "TN"), (Gemm(transpose_a=True), "NT"),
     (Gemm(transpose_a=True, transpose_b=True), "NT")],
)  # fmt: skip
def test_a_product_is_of_the_layout_that_it_reads(attributes: Gemm, layout: str) -> None:
    assert cost("aten.mm", [A, B], [C], attributes) == gemm(H100, 96, 520, 4000, layout=layout)


def test_the_operands_of_a_product_are_its_last_matrices() -> None:
    expected = gemm(H100, 96, 520, 4000, layout="NN")
    assert cost("aten.addmm", [(520,), A, B], [C], Gemm()) == expected
    batched = gemm(H100, 96, 520, 4000, batch=6, layout="NN")
    assert cost("aten.bmm", [(6, *A), (6, *B)], [(6, *C)], Gemm()) == batched
    assert cost("aten.matmul", [(2, 3, *A), (2, 3, *B)], [(2, 3, *C)], Gemm()) == batched


def test_a_product_that_adds_into_single_precision_pays_for_it() -> None:
    added = gemm(H100, 96, 520, 4000, layout="NT", accumulator_bytes=4.0)
    assert cost("aten.mm", [A, B], [(C, FP32)], Gemm(transpose_a=True)) == added
    single = gemm(H100, 96, 520, 4000, layout="NN", dtype="fp32")
    assert cost("aten.mm", [A, B], [C], Gemm(), dtype=FP32) == single


def test_a_product_that_adds_to_a_buffer_reads_it_too() -> None:
    added = gemm(H100, 96, 520, 4000, layout="NN", accumulator_bytes=2.0)
    assert cost("aten.addmm", [C, A, B], [C], Gemm()) == cost("aten.addmm_", [C, A, B], [C], Gemm()) == added
    plain, single = (gemm(H100, 96, 520, 4000, layout="NN", accumulator_bytes=n).seconds for n in (0.0, 4.0))
    assert single - plain == pytest.approx(
        3 * (added.seconds - plain)
    )  # 4 read and 4 written, for 2 and 2, less 2
    # A buffer is no scale: a product in FP8 that adds to one has a scale a tensor all the same.
    scales, buffer = [((), FP32), ((), FP32)], (C, FP32)
    expected = gemm(H100, 96, 520, 4000, dtype="fp8", accumulator_bytes=4.0, quantize=False)
    assert (
        cost("aten._scaled_mm", [A, B, *scales, buffer], [buffer], Gemm(transpose_b=True), dtype=FP8) == expected
    )


def test_experts_add_to_main_gradients_too() -> None:
    groups = (4, 128, 256)

    def found(dtype: DType, *buffer: Operand) -> float:
        inputs = [(128, 2000), (2000, 256), ((4,), INT64), *buffer]
        return float(cost("aten._grouped_mm", inputs, [(groups, dtype)], Gemm(), phase=Phase.BACKWARD).seconds)

    plain, half, single = found(BF16), found(BF16, (groups, BF16)), found(FP32, (groups, FP32))
    assert half > plain
    assert single - plain == pytest.approx(3 * (half - plain))


def test_a_scaled_product_has_its_scales_last_and_its_casts_apart() -> None:
    expected = gemm(H100, 96, 520, 4000, layout="TN", dtype="fp8", quantize=False)

    def found(*scales: Operand) -> CostEstimate:
        return cost("aten._scaled_mm", [A, B, *scales], [(C, BF16)], Gemm(transpose_b=True), dtype=FP8)

    assert found(((), FP32), ((), FP32)) == expected
    by_rows = found(((96, 1), FP32), ((1, 520), FP32))
    assert by_rows.seconds == pytest.approx(ROWWISE_SLOWER * expected.seconds) and by_rows.source == "analytical"
    whole = gemm(H100, 96, 520, 4000, layout="TN", dtype="fp8")
    assert cost("aten.mm", [A, B], [C], Gemm(transpose_b=True), dtype=FP8) == whole


@pytest.mark.parametrize(
    ("kernel", "longer"),
    [
        ("fp8.cast", 1.0),
        ("fp8.cast_transpose", 1.0),
        ("fp8.cast_both", BOTH_SLOWER),
    ],
)
def test_compiled_casts_of_both_layouts_are_slow(kernel: str, longer: float) -> None:
    found = cost(kernel, [A], [(A, FP8)])
    assert found.seconds == pytest.approx(longer * by_bytes("elementwise", library="fp8").seconds)


@pytest.mark.parametrize(
    ("kernel", "scales"),
    [
        ("fp8.cast_columns", [((1, 4096), FP32)]),
        ("fp8.cast_agreed", [((8192, 1), FP64)]),
        ("fp8.rescale", [((8192, 1), FP32), ((1, 4096), FP32)]),
        ("compiled.rescaled_add", 3 * [((8192, 1), FP32), ((1, 4096), FP32)]),
        ("compiled.add", []),
    ],
)
def test_each_scale_is_found_for_every_element(kernel: str, scales: list[Operand]) -> None:
    tensor = ((8192, 4096), BF16)
    found = cost(kernel, [tensor, *scales, ((4096,), FP32)], [tensor])
    clocks = SCALE_CLOCKS * len(scales) * 8192 * 4096
    alone = H100.memory_launch_s + clocks / (H100.datasheet.sm_count * H100.datasheet.clock_hz)
    free = cost("compiled.add", [tensor, *scales, ((4096,), FP32)], [tensor])
    assert found.seconds == pytest.approx(max(alone, float(free.seconds)))
    assert (found.spread > free.spread) == (found.seconds > free.seconds)


@pytest.mark.parametrize(("device", "longer"), [("h100-sxm", 1.15), ("h200", 1.15), ("b200", 1.0)])
def test_gradients_in_fp8_add_up_in_single_precision_on_hopper(device: str, longer: float) -> None:
    profile = load_device(device)
    builder = GraphBuilder(name="step", streams=("compute",))
    operands = [builder.tensor("x", shape, FP8, TensorRole.ACTIVATION) for shape in (A, B)]
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        made = builder.tensor("y", C, BF16, TensorRole.ACTIVATION)
        builder.compute(
            "aten._scaled_mm", phase=phase, inputs=operands, outputs=(made,), flops=1,
            attributes=Gemm(transpose_b=True),
        )  # fmt: skip
    builder.program([(0, 0, 2, 0, 0)])
    forward, backward = estimate(builder.build(StepGraph), profile).picoseconds.tolist()
    assert forward > 0
    assert backward == pytest.approx(longer * forward, rel=1e-6)


@pytest.mark.parametrize("shapes", [[(0, 4000), B], [A, (4000, 0)], [(96, 0), (0, 520)], [(0, 96, 8), (0, 8, 4)]])
def test_an_empty_product_moves_its_bytes(shapes: list[Shape]) -> None:
    assert cost("aten.mm", shapes, [C], Gemm()) == by_bytes("elementwise")


def test_experts_share_rows_evenly() -> None:
    rows = np.full(3, 100.0)
    forward = grouped_gemm(H100, rows, 520, 4000)
    name, tokens, experts = "aten._grouped_mm", (300, 4000), (3, 4000, 520)
    assert cost(name, [tokens, experts, (3,)], [(300, 520)], Gemm()) == forward
    backward: dict[str, Any] = {"phase": Phase.BACKWARD}
    inputs = grouped_gemm(H100, rows, 4000, 520, pass_="input_gradient")
    assert cost(name, [tokens, experts, (3,)], [(300, 520)], Gemm(), **backward) == inputs
    weights = grouped_gemm(H100, rows, 4000, 520, pass_="weight_gradient")
    assert cost(name, [(4000, 300), (300, 520), (3,)], [experts], Gemm(), **backward) == weights
    few = grouped_gemm(H100, np.full(3, 1.0), 520, 4000)
    assert cost(name, [(2, 4000), experts, (3,)], [(2, 520)], Gemm()) == few
    few = grouped_gemm(H100, np.full(3, 1.0), 4000, 520, pass_="weight_gradient")
    assert cost(name, [(4000, 2), (2, 520), (3,)], [experts], Gemm(), **backward) == few


# -- attention, convolutions -------------------------------------------------------------------------------------

FLASH = "aten._scaled_dot_product_flash_attention"
Q, K, V = (2, 8, 512, 64), (2, 4, 768, 64), (2, 4, 768, 32)
SHAPE: dict[str, Any] = {
    "batch": 2, "heads": 8, "seq": 512, "head_dim": 64, "kv_heads": 4, "kv_seq": 768, "v_head_dim": 32,
}  # fmt: skip


@pytest.mark.parametrize("causal", [True, False])
def test_attention_reads_its_sizes_off_its_operands(causal: bool) -> None:
    attributes = Attention(heads=8, kv_heads=4, head_dim=64, causal=causal)
    out = (2, 8, 512, 32)
    assert cost(FLASH, [Q, K, V], [out], attributes) == attention_forward(H100, **SHAPE, causal=causal)
    backward = cost(f"{FLASH}_backward", [out, Q, K, V, out], [Q, K, V], attributes)
    assert backward == attention_backward(H100, **SHAPE, causal=causal)


def test_attention_of_a_type_without_a_kernel_is_slower_by_the_peaks() -> None:
    attributes = Attention(heads=8, kv_heads=4, head_dim=64)
    half = attention_forward(H100, **SHAPE, causal=False)
    assert cost(FLASH, [Q, K, V], [Q], attributes, dtype=FP16) == half
    peaks = H100.datasheet.peak_flops_per_s
    found = cost(FLASH, [Q, K, V], [Q], attributes, dtype=FP32)
    assert found.seconds == pytest.approx(half.seconds * peaks["bf16"] / peaks["tf32"], rel=1e-12)
    assert (found.spread, found.source) == (0.5, "analytical")
    old = cost(FLASH, [Q, K, V], [Q], attributes, dtype=FP32, device=V100)
    assert old.seconds == attention_forward(V100, **SHAPE, causal=False).seconds


def test_a_convolution_backward_is_asked_for_the_gradients_that_it_makes() -> None:
    image, weight, made = (5, 12, 14, 15), (18, 4, 3, 2), (5, 18, 6, 7)
    attributes = Convolution(stride=(2, 2), padding=(0, 0), dilation=(1, 1), groups=3)

    def one(pass_: str) -> CostEstimate:
        return convolution(
            H100, batch=5, in_channels=12, out_channels=18, kernel=6, in_positions=210, out_positions=42, groups=3,
            pass_=pass_,
        )  # fmt: skip

    assert cost("aten.convolution", [image, weight, (18,)], [made], attributes) == one("forward")
    name, inputs = "aten.convolution_backward", [made, image, weight]
    assert cost(name, inputs, [image], attributes) == one("input_gradient")
    assert cost(name, inputs, [weight, (18,)], attributes) == one("weight_gradient")
    both = cost(name, inputs, [image, weight, (18,)], attributes)
    assert both.seconds == one("input_gradient").seconds + one("weight_gradient").seconds  # type: ignore[operator]


# -- bytes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten.native_layer_norm", "norm"), ("aten.normal_", "elementwise"), ("aten._foreach_norm", "reduction"),
        ("aten.linalg_vector_norm", "reduction"), ("aten._softmax", "softmax"), ("aten.embedding", "gather"),
        ("aten.index_put", "gather"), ("aten._fused_adamw_", "optimizer"), ("aten._foreach_add_", "optimizer"),
        ("aten.cat", "copy"), ("aten.copy_", "copy"), ("mamba2.causal_conv1d", "conv1d"),
        ("aten.sum", "reduction"), ("aten.mul", "elementwise"),
    ],
)  # fmt: skip
def test_what_has_no_attributes_is_bound_by_its_bytes(name: str, kind: str) -> None:
    rows = {"row_bytes": 2 * 3000} if kind in ("norm", "softmax") else {}
    # The row is that of the widest operand, of whichever side.
    assert cost(name, [(5, 10)], [(7, 3000)]) == by_bytes(kind, **rows)
    assert cost(name, [(7, 3000)], [(5, 10)]) == by_bytes(kind, **rows)
    assert cost(name, [], [()]) == cost(name, [], []) == by_bytes(kind)


def test_a_gradient_that_indices_point_into_is_filled_and_then_scattered_into() -> None:
    """Few tokens of a large vocabulary: zeros are written as a copy writes them, the rest goes to its rows."""
    few, many = 2 * 64 * 512, 2 * 50_000 * 512
    sizes = {"bytes_read": few, "bytes_written": many}
    made = cost("aten.embedding_dense_backward", [(64, 512)], [(50_000, 512)], **sizes)
    filled = memory_bound(H100, "copy", bytes_read=0, bytes_written=many)
    scattered = memory_bound(H100, "gather", bytes_read=few, bytes_written=few)
    assert made.seconds == pytest.approx(float(filled.seconds) + float(scattered.seconds))
    assert made.seconds < memory_bound(H100, "gather", **sizes).seconds


def test_a_fused_loss_is_by_its_rows_and_a_norm_by_who_wrote_it() -> None:
    loss = cost("fused.cross_entropy_backward", [(64, 128_000)], [(64, 128_000)])
    assert loss == by_bytes("loss", row_bytes=2 * 128_000)
    for maker in ("fused", "compiled"):
        assert cost(f"{maker}.norm", [(64, 3000)], [(64, 3000)]) == by_bytes("norm", row_bytes=6000, library=maker)
    # Where nobody timed them they are as PyTorch's.
    plain = cost("aten.native_layer_norm", [(64, 3000)], [(64, 3000)], device=V100, dtype=FP16)
    assert cost("fused.norm", [(64, 3000)], [(64, 3000)], device=V100, dtype=FP16) == plain


@pytest.mark.parametrize(("layers", "directions"), [(1, 1), (2, 1), (2, 2)])
def test_a_recurrent_layer_takes_a_product_and_its_gates_step_by_step(layers: int, directions: int) -> None:
    """Of an LSTM of 96 over 35 steps of 20 samples of 64."""
    steps, samples, hidden = 35, 20, 96
    widths = [64, *[directions * hidden] * (layers - 1)]
    of_cells = [[(4 * hidden, width), (4 * hidden, hidden), (4 * hidden,), (4 * hidden,)] for width in widths]
    weights = [shape for cell in of_cells for shape in cell * directions]
    state, reserve = (layers * directions, samples, hidden), (steps, samples, layers * directions * 5 * hidden)
    x, made = (steps, samples, 64), (steps, samples, directions * hidden)
    forward = cost("cudnn.rnn", [x, state, state, *weights], [made, state, state, reserve])
    backward = cost("cudnn.rnn_backward", [made, x, state, state, *weights, made, reserve], [x, *weights])
    gates = memory_bound(H100, "elementwise", bytes_read=40 * 4 * hidden, bytes_written=40 * 4 * hidden).seconds
    ahead = back = 0.0
    for width in widths:
        first, later = gemm(H100, 700, 384, width).seconds, gemm(H100, 20, 384, 96).seconds
        ahead += directions * (first + steps * (later + gates))
        products = [gemm(H100, 700, width, 384), gemm(H100, 384, width, 700), gemm(H100, 384, 96, 700)]
        back += directions * (sum(p.seconds for p in products) + steps * (gemm(H100, 20, 96, 384).seconds + gates))
    assert (forward.seconds, backward.seconds) == (pytest.approx(ahead), pytest.approx(back))
    assert forward.source == "analytical" and forward.spread == ASSUMED_SPREAD


def test_a_recurrent_layer_of_packed_sequences_takes_as_many_steps_as_the_longest() -> None:
    state, weights, sizes = (1, 20, 96), [(384, 64), (384, 96), (384,), (384,)], ((35,), DType.INT64)
    whole = cost("cudnn.rnn", [(35, 20, 64), state, *weights], [(35, 20, 96), state])
    packed = cost("cudnn.rnn", [(700, 1, 64), state, *weights, sizes], [(700, 1, 96), state])
    fewer = cost("cudnn.rnn", [(350, 1, 64), state, *weights, sizes], [(350, 1, 96), state])
    assert packed == whole and whole.seconds * 0.7 < fewer.seconds < whole.seconds


def test_a_scan_over_chunks_is_bound_by_its_products_or_its_bytes() -> None:
    scan = H100.scan
    assert scan is not None
    flops = 10**12
    launches = SCAN_KERNELS * H100.memory_launch_s
    long = cost("mamba2.ssd_scan", [(64, 3000)], [(64, 3000)], flops=flops)
    peak = H100.datasheet.peak_flops_per_s["bf16"]
    assert long.seconds == pytest.approx(flops / (scan.efficiency * peak) + launches)
    assert (long.source, long.spread) == ("analytical", 0.5)
    short = cost("mamba2.ssd_scan_backward", [(64, 3000)], [(64, 3000)], flops=1)
    assert short.seconds == pytest.approx(float(by_bytes("elementwise").seconds) + launches)
    without = msgspec.structs.replace(H100, scan=None)
    assumed = cost("mamba2.ssd_scan", [(8,)], [(8,)], device=without, flops=flops)
    assert assumed.seconds == pytest.approx(flops / (SCAN_SHARE * peak) + launches)


def test_only_the_leading_part_of_a_shared_launch_bears_it() -> None:
    whole = by_bytes("optimizer")
    assert cost("aten._fused_adamw_", [A], [A], MultiTensor(parts=2, leads=True)) == whole
    part = cost("aten._fused_adamw_", [A], [A], MultiTensor(parts=2))
    assert part == whole._replace(seconds=whole.seconds - H100.memory_launch_s)  # type: ignore[operator]
    nothing = cost("aten._fused_adamw_", [A], [A], MultiTensor(parts=2), bytes_read=0, bytes_written=0)
    assert nothing.seconds == 0.0


def test_a_copy_reads_and_writes_its_bytes() -> None:
    builder = GraphBuilder()
    builder.copy("memcpy", CopyDirection.DEVICE_TO_DEVICE, nbytes=12_345)
    op = builder.build(StepGraph).ops[0]
    assert isinstance(op, Copy)
    assert cost_of(op, ([], []), H100) == memory_bound(H100, "copy", bytes_read=12_345, bytes_written=12_345)


# -- types that a device has no model of -------------------------------------------------------------------------


def test_a_type_without_a_model_takes_what_single_precision_does_by_its_size() -> None:
    single = gemm(V100, 96, 520, 4000, layout="NN", dtype="fp32")
    for dtype, times in ((BF16, 1), (FP64, 2), (INT64, 2), (DType.INT32, 1), (DType.INT8, 1)):
        found = cost("aten.mm", [A, B], [C], Gemm(), dtype=dtype, device=V100)
        assert found == CostEstimate(times * single.seconds, 0.5, "analytical"), dtype
    with pytest.raises(UnavailableError):
        cost("aten.mm", [A, B], [C], Gemm(), dtype=FP8, device=V100)


def test_operands_that_contradict_their_attributes_are_named() -> None:
    with pytest.raises(GraphError, match=r"aten.bmm: Gemm.* does not fit its inputs \[5\]"):
        cost("aten.bmm", [(5,)], [C], Gemm())
    with pytest.raises(GraphError, match=r"does not fit its inputs none"):
        cost(FLASH, [], [], Attention(heads=1, kv_heads=1, head_dim=8))


# -- graphs ------------------------------------------------------------------------------------------------------


def test_what_is_known_stays_and_the_rest_is_estimated() -> None:
    builder = GraphBuilder()
    x = builder.tensor("x", A, BF16, TensorRole.ACTIVATION)
    view = builder.tensor("view", A, BF16, TensorRole.ACTIVATION, alias_of=x)
    sizes: dict[str, Any] = {"phase": Phase.FORWARD, "bytes_read": 1 << 20, "bytes_written": 1 << 20}

    def known(device: str, source: Source) -> dict[str, Any]:
        return {**sizes, "durations": (Duration(device=device, picoseconds=5, source=source),)}

    builder.compute("aten.mul", outputs=(x,), **sizes)
    builder.compute("aten.mul", inputs=(x,), **known(H100.name, Source.MEASURED))
    builder.compute("aten.mul", inputs=(x,), **known("elsewhere", Source.IMPORTED))
    builder.compute("aten.mul", inputs=(x,), **known("elsewhere", Source.MEASURED))
    builder.compute("aten.view", inputs=(x,), outputs=(view,), phase=Phase.FORWARD)
    builder.host("wait")
    builder.compute("aten.mul", inputs=(x,), **{**sizes, "bytes_read": 8 << 20})
    weight, made = (builder.tensor("w", shape, BF16, TensorRole.ACTIVATION) for shape in (B, C))
    builder.compute("aten.mm", inputs=(x, weight), outputs=(made,), attributes=Gemm(), **sizes)
    found = estimate(builder.build(StepGraph), H100)
    one, more = (memory_bound(H100, "elementwise", bytes_read=b << 20, bytes_written=1 << 20) for b in (1, 8))
    product = to_ps(float(gemm(H100, 96, 520, 4000, layout="NN").seconds))
    ps, longer = to_ps(float(one.seconds)), to_ps(float(more.seconds))
    assert found.device == H100.name
    assert found.picoseconds.tolist() == [ps, -1, -1, ps, -1, -1, longer, product]
    assert found.source[[0, 3, 6, 7]].tolist() == [Source.FITTED] * 4
    assert found.spread[[0, 6]].tolist() == pytest.approx([one.spread, more.spread])
    assert not found.samples.any()


def test_what_other_graphs_asked_for_is_known_whatever_they_number_it() -> None:
    """Names, attributes and types have other numbers in each graph; what is known is by what they are."""

    def two(first: str, second: str, shapes: tuple[Shape, Shape], gemm_first: bool) -> StepGraph:
        builder = GraphBuilder()
        x, y, z = (
            builder.tensor(f"{at}", shape, BF16, TensorRole.ACTIVATION)
            for at, shape in enumerate((*shapes, shapes[0]))
        )
        sizes: dict[str, Any] = {"phase": Phase.FORWARD, "bytes_read": 1 << 20, "bytes_written": 1 << 20}
        values = (Gemm(), None) if gemm_first else (None, Gemm())
        for name, attributes in zip((first, second), values, strict=True):
            operands: dict[str, Any] = {"inputs": (x, y), "outputs": (z,)} if attributes else {"inputs": (y,)}
            builder.compute(name, attributes=attributes, **operands, **sizes)
        return builder.build(StepGraph)

    known = KnownCosts()
    for graph in (
        two("aten.mm", "aten.mul", ((64, 64), (64, 64)), True),
        two("aten.mul", "aten.mm", ((512, 512), (512, 512)), False),
        two("aten.sum", "aten.mm", ((64, 64), (64, 64)), False),
        two("aten.mul", "aten.mm", ((64, 64), (64, 64)), False),
    ):
        assert estimate(graph, H100, 1.0, known).picoseconds.tolist() == estimate(graph, H100).picoseconds.tolist()
    # Products and their sizes, and kernels of other names or sizes; the last graph's were known.
    assert known.count == 5


def test_what_the_clock_does_not_count_is_refused() -> None:
    for nbytes, fits in ((2**61, True), (2**63 - 1, False)):
        builder = GraphBuilder()
        builder.compute("aten.mul", phase=Phase.FORWARD, bytes_read=nbytes, bytes_written=0)
        graph = builder.build(StepGraph)
        if fits:
            assert estimate(graph, V100).picoseconds[0] > 2**60
            continue
        with pytest.raises(GraphError, match=r"aten\.mul: would take over 53 days on v100-sxm2"):
            estimate(graph, V100)


def unrolled(elements: int, device: Any = H100) -> float:
    """Seconds of a kernel that takes its elements one by one, of device and host alike."""
    return float(device.memory_launch_s + unrolled_seconds(device.datasheet, elements))


@pytest.mark.parametrize("small", [(32768,), (2048, 1), (1, 32768)])
def test_a_repeated_operand_takes_as_long_an_element_whatever_its_type(small: Shape) -> None:
    size, elements = (2048, 32768), 2048 * 32768
    moved = {"bytes_read": 2 * elements, "bytes_written": 2 * elements}
    assert cost("aten.mul", [size, small], [size], **moved).seconds == unrolled(elements)
    wide = cost("aten.mul", [size, small], [size], dtype=DType.FP32, bytes_read=4 * elements, bytes_written=0)
    assert wide.seconds == unrolled(elements) and wide.source == "analytical"
    # Where memory takes longer, that is what counts; what a compiler writes knows the shapes that it is for.
    slow = {"bytes_read": 16 * elements, "bytes_written": 16 * elements}
    assert cost("aten.mul", [size, small], [size], **slow) == memory_bound(H100, "elementwise", **slow)
    assert cost("fused.mul", [size, small], [size], **moved) == memory_bound(H100, "elementwise", **moved)


@pytest.mark.parametrize(
    ("operator", "given", "made", "one_by_one"),
    [
        ("aten._to_copy", [BF16], DType.FP32, True),
        ("aten._to_copy", [DType.FP32], BF16, False),
        ("aten.clone", [BF16], BF16, False),
        ("aten.add_", [DType.FP32, BF16], DType.FP32, True),
        ("aten.mul", [BF16, BF16], BF16, False),
        ("aten.where", [DType.BOOL, BF16, BF16], BF16, False),
        ("aten.sum", [BF16], DType.FP32, False),
        ("fused.add_", [DType.FP32, BF16], DType.FP32, False),
    ],
)
def test_types_that_differ_are_converted_one_by_one(
    operator: str, given: list[DType], made: DType, one_by_one: bool
) -> None:
    size = (2048, 32768)
    found = cost(operator, [(size, kind) for kind in given], [(size, made)])
    assert (found.seconds == unrolled(2048 * 32768)) == one_by_one


@pytest.mark.parametrize(
    ("device", "dtype", "first", "measured_s"),
    [("h100-sxm", DType.FP32, "aten.add", 0.982848e-3), ("a100-sxm-80", BF16, "aten._to_copy", 1.91907e-3)],
)
def test_an_unfused_norm_takes_what_was_measured(device: str, dtype: DType, first: str, measured_s: float) -> None:
    """As Hugging Face's models write it (linkedin/Liger-Kernel's rows of 2,048 x 32,768)."""
    size, rows, on = (2048, 32768), (2048, 1), load_device(device)
    wide = DType.FP32

    def takes(name: str, inputs: list[tuple[Shape, DType]], result: tuple[Shape, DType]) -> float:
        read, written = (sum(kind.nbytes(prod(shape)) for shape, kind in side) for side in (inputs, [result]))
        return float(cost(name, inputs, [result], device=on, bytes_read=read, bytes_written=written).seconds)

    total = takes(first, [(size, dtype)] * (2 if first == "aten.add" else 1), (size, wide))
    total += takes("aten.pow", [(size, wide)], (size, wide))
    total += takes("aten.mean", [(size, wide)], (rows, wide))
    total += takes("aten.mul", [(size, wide), (rows, wide)], (size, wide))
    if dtype is BF16:
        total += takes("aten._to_copy", [(size, wide)], (size, dtype))
    total += takes("aten.mul", [((32768,), dtype), (size, dtype)], (size, dtype))
    assert total == pytest.approx(measured_s, rel=0.12)


def test_a_norm_that_goes_back_has_a_kind_of_its_own() -> None:
    def named(operator: str, inputs: list[tuple[int, ...]]) -> CostEstimate:
        return cost(operator, inputs, [(64, 3000)])

    for inputs in ([(64, 3000), ()], [(64, 3000), (64, 3000)], [(64, 3000), (100, 100)]):
        assert named("aten.mul", inputs) == by_bytes("elementwise")
    back = named("aten.native_layer_norm_backward", [(64, 3000)])
    assert back == by_bytes("norm_backward", row_bytes=2 * 3000)
    assert named("aten.native_batch_norm", [(64, 3000)]) == by_bytes("norm")


@pytest.mark.parametrize(("dtype", "statistics", "kernels"), [(BF16, 16, 2), (BF16, 0, 1), (DType.FP32, 16, 1)])
def test_batch_norm_reads_twice_where_pytorch_has_a_kernel_for_its_statistics(
    dtype: DType, statistics: int, kernels: int
) -> None:
    """Not in evaluation, which makes none, and not in types that it leaves to cuDNN."""
    shape, sizes = (64, 16, 56, 56), {"bytes_read": 10**9, "bytes_written": 10**9}
    builder = GraphBuilder()
    x, y, dx = (builder.tensor(name, shape, dtype, TensorRole.ACTIVATION) for name in ("x", "y", "dx"))
    mean = builder.tensor("mean", (statistics,), DType.FP32, TensorRole.ACTIVATION)
    builder.compute("aten.native_batch_norm", phase=Phase.FORWARD, inputs=(x,), outputs=(y, mean), **sizes)
    back = "aten.native_batch_norm_backward"
    builder.compute(back, phase=Phase.BACKWARD, inputs=(y, x, mean), outputs=(dx,), **sizes)
    forward, backward = estimate(builder.build(StepGraph), H100).picoseconds * 1e-12
    for kind, found, each in (("norm", forward, kernels), ("norm_backward", backward, 2 if dtype is BF16 else 1)):
        once = memory_bound(H100, kind, bytes_read=10**9, bytes_written=10**9).seconds
        more = memory_bound(H100, kind, bytes_read=10**9, bytes_written=0).seconds
        assert found == pytest.approx(once + (each - 1) * more, rel=1e-6)


def test_a_limit_of_power_slows_what_the_clock_paces_and_nothing_else() -> None:
    assert H100.power is not None
    builder = GraphBuilder()
    big = (8192, 8192)
    x, w, y, z = (builder.tensor(name, big, BF16, TensorRole.ACTIVATION) for name in "xwyz")
    sizes = {"phase": Phase.FORWARD, "bytes_read": 4 * 8192**2, "bytes_written": 2 * 8192**2}
    builder.compute("aten.mm", inputs=(x, w), outputs=(y,), attributes=Gemm(), flops=2 * 8192**3, **sizes)
    builder.compute("aten.silu", inputs=(y,), outputs=(z,), **sizes)
    graph = builder.build(StepGraph)
    free, kept, half = (
        estimate(graph, msgspec.structs.replace(H100, power=power)).picoseconds
        for power in (None, H100.power, msgspec.structs.replace(H100.power, limit_W=400.0))
    )
    assert free[1] == kept[1] == half[1]
    assert free[0] <= kept[0] < half[0] < 3 * free[0]


@pytest.mark.parametrize("kernel", ["flash2", "cudnn"])
def test_attention_draws_the_power_of_the_flops_that_it_executes(kernel: str) -> None:
    """A ring's step without a mask has all the FLOPs of its model counted, of which it executes half."""
    device = load_device("h100-sxm-hbm2e")
    assert device.power is not None
    shape = (1, 32, 8192, 128)
    found = {}
    for counted in (1.0, 2.0):
        builder = GraphBuilder()
        query, key, value, made = (builder.tensor(name, shape, BF16, TensorRole.ACTIVATION) for name in "qkvo")
        builder.compute(
            f"{kernel}.attention", phase=Phase.FORWARD, inputs=(query, key, value), outputs=(made,),
            flops=int(counted * 4 * 32 * 8192**2 * 128), bytes_read=3 * 2 * 32 * 8192 * 128,
            bytes_written=2 * 32 * 8192 * 128, attributes=Attention(heads=32, kv_heads=32, head_dim=128),
        )  # fmt: skip
        graph = builder.build(StepGraph)
        found[counted] = estimate(graph, device).picoseconds[0]
    burst = estimate(graph, msgspec.structs.replace(device, power=None)).picoseconds[0]
    assert found[1.0] == found[2.0] > burst

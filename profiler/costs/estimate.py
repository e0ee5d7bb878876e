"""Durations for a graph: each operation to the cost function of its kind.

An operation that nothing here knows is memory-bound: its bytes over the bandwidth of an elementwise kernel. That
is what almost all of them are; matrix products, attention and convolutions are told by their attributes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from echograph.errors import GraphError, UnavailableError
from echograph.ir.columns import NONE, Bools, Float32, Float64, Int64, Ragged, TensorTable, UInt8, equal_rows
from echograph.ir.graph import Graph, JobGraph
from echograph.ir.passes.annotate import Annotate
from echograph.ir.passes.fuse import DRAWS, RESCALED
from echograph.ir.passes.kernels import PADDED
from echograph.ir.types import (
    Attention,
    Attributes,
    CollectiveKind,
    Compute,
    Convolution,
    Copy,
    DType,
    Gemm,
    MultiTensor,
    OpKind,
    Phase,
    Source,
    Tensor,
)
from echograph.profiler.costs.attention import (
    attention_backward,
    attention_flops,
    attention_forward,
    attention_shape,
)
from echograph.profiler.costs.device import (
    DEFAULT_ROW_BYTES,
    CostEstimate,
    DeviceProfile,
    memory_bound,
)
from echograph.profiler.costs.dropout import SPREAD as DRAWN_SPREAD
from echograph.profiler.costs.dropout import drawn_seconds
from echograph.profiler.costs.gemm import (
    RESULT_BYTES,
    SINGLE_BYTES,
    STAND_IN,
    convolution,
    gemm,
    grouped_gemm,
)
from echograph.profiler.costs.power import PACED_AT, PACED_OF_PRODUCTS, sustained_clock
from echograph.profiler.costs.releases import library_of
from echograph.profiler.costs.unrolled import SPREAD as UNROLLED_SPREAD
from echograph.profiler.costs.unrolled import unrolled_seconds
from echograph.units import PS_PER_S, to_ps

DTYPE_NAMES = {
    DType.BF16: "bf16",
    DType.FP16: "fp16",
    DType.FP32: "fp32",
    DType.FP8_E4M3: "fp8",
    DType.FP8_E5M2: "fp8",
    DType.FP4_E2M1: "nvfp4",
}
_NARROW = ("fp8", "nvfp4")
BLOCKWISE = 128
"""Elements that share a scale in products of the model `fp8_block`."""
MXFP8, MXFP8_SLOWER, MXFP8_SPREAD = 32, 1.05, 0.1
"""Products with a scale for each 32 elements, of which there is no table, over those with a scale a tensor: 7.161
to 6.812 ms a layer on B300 (NVIDIA/TransformerEngine, docs/examples/gemm_profiling, quantized before); how far
other shapes and devices are from that is assumed."""
_SCANS, SCAN_SHARE = ("mamba2.ssd_scan", "recurrent.gated_delta_rule"), 0.1
"""Scans of Mamba-2, of which there is no table: the share of the bf16 peak that they run at, where memory does not
bind them. Assumed: a scan of 2,048 tokens takes what FlashAttention-2 takes on an A100 (Dao and Gu 2024,
arXiv:2405.21060, figure 10), which has five times the FLOPs, at half the peak. Devices with a table of a gated
delta rule have the share that this reaches (`DeviceProfile.scan`)."""
SCAN_KERNELS = 5
"""Of a scan (state-spaces/mamba, ops/triton/ssd_combined.py): sums of steps, states of chunks, states passed on,
products of B and C, the scan."""
_RECURRENT = "cudnn.rnn"
"""Recurrent layers of cuDNN, of which there is no table."""
SPLIT_ACCUMULATION, SPLIT_SPREAD = {"hopper": 1.15}, 0.05
"""FP8 products whose sums leave the tensor core every few steps of k, over those of the tables, whose sums are
taken to stay in it, by architecture: 1.1 to 1.2 (pytorch/ao#2377). Products of gradients are such ones, in
Transformer Engine (common/recipe: use_split_accumulator) and torchao (float8/config.py: use_fast_accum); Blackwell
has no such mode (NVIDIA/TransformerEngine#2748); products with scales of blocks always leave it."""
ROWWISE_SLOWER, ROWWISE_SPREAD = 1.05, 0.05
"""FP8 products with a scale a row, over those with a scale a tensor: most shapes reach 90 to 100 % of their rate
(pytorch/pytorch#147971; the middle is taken)."""
_BOTH, BOTH_SLOWER, BOTH_SPREAD = re.compile(r"\w+\.cast_both"), 2.2 / 1.4, 0.15
"""Kernels of torch.compile that cast a tensor and its transpose, over their bytes: they read it twice, and reach
1.4 TB/s for gradients on an H100 where its other kernels of FP8 reach 2.2 (pytorch/pytorch#133242; one that
is smaller 1.5 of 2)."""
_SCALES = re.compile(rf"fp8\.(cast_columns|cast_agreed|rescale)|\w+\.{RESCALED}_")
SCALE_CLOCKS, SCALES_SPREAD = 0.9, 0.3
"""Kernels of torch.compile that apply scales of rows or of columns, and what each scale takes for each element at
least, in clocks of a multiprocessor: the kernel finds it anew from the maximum for every element (a division in
fp64, a logarithm, a power of two), as torchao rounds such scales to powers of two (float8/config.py: rowwise) and
inductor takes what has one number a row into each kernel that reads it. Its code for sm_90 has 77 instructions a
scale and element, which take 0.6 clocks to issue. 108 speedups of a norm, a linear layer and a sigmoid, both ways,
with 8,192 to 32,768 rows on an H100 (pytorch/ao, pull request 2312, float8/README.md), taken for one of 500 W with
HBM2e as its authors' logs show, are met without bias so, by 6 % in the mean; with three times what the bytes of
kernels along columns need, and scales free, by 9 %. The spread is assumed."""
ASSUMED_SPREAD = 0.5
"""For a kernel of a type that no model covers (fp32 or fp64 attention): assumed, not measured."""

_KINDS = (
    ("loss", re.compile(r"cross_entropy")),
    ("conv1d", re.compile(r"causal_conv1d")),
    ("norm", re.compile(r"norm(?!al)")),
    ("softmax", re.compile(r"softmax")),
    ("gather", re.compile(r"embedding|gather|index|scatter|take|nll_loss")),
    ("optimizer", re.compile(r"_fused_adam|_fused_sgd|_foreach_|optimizer")),
    ("copy", re.compile(r"copy|clone|cat|contiguous|repeat|ddp\.|fill|zero|ones|stack")),
    ("reduction", re.compile(r"\.sum|\.mean|\.max|\.amax|\.var|argmax|cumsum|\.any|\.all")),
)
_REDUCING_NORMS = ("linalg_vector_norm", "_foreach_norm")
_ROWS = ("norm", "norm_backward", "softmax", "loss")
_OF_NO_ROWS = ("batch_norm", "group_norm")
_TWO_KERNELS = ("aten.native_batch_norm", "aten._native_batch_norm_legit")
"""Batch normalisation, which runs on PyTorch's own kernels in bf16, as it asks cuDNN for other types alone
(aten/src/ATen/native/Normalization.cpp, _select_batch_norm_backend): one makes the statistics, or the sums of
their gradients, another the result, and each reads its operands whole (an H200's kernels of a ResNet-50 show all
four)."""
_EAGER = "aten."
_FLOATS = (DType.FP32, DType.BF16, DType.FP16)
_DRAWS = re.compile(rf"compiled\.{DRAWS}_")

_InOut = tuple[list[Tensor], list[Tensor]]

LONGEST_S = 2.0**62 / PS_PER_S
"""What the clock of whole picoseconds in 64 bits counts, with room to add."""


class PowerDraw(NamedTuple):
    """What of an operation draws power.

    Attributes:
        peak: what its tensor cores work at; "" of one that has none.
        kernel: of attention; "" of anything else.
        flops: that an attention executes, which are fewer than those of its model where a mask hides some.
    """

    peak: str = ""
    kernel: str = ""
    flops: float = 0.0


class KnownCosts:
    """Costs of operations on one device, each asked for once, however many graphs have it.

    Names, attributes and types of tensors have a number each that holds for all graphs: operations cost alike
    whose rows of such numbers are equal.
    """

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._attributes: dict[Attributes, int] = {}
        self._types: dict[bytes, int] = {}
        self._numbers: dict[CostKey, int] = {}
        self._costs: list[tuple[CostEstimate, PowerDraw]] = []

    @property
    def count(self) -> int:
        """How many costs are known."""
        return len(self._costs)

    def of(
        self, graph: Graph, rows: Int64, device: DeviceProfile
    ) -> tuple[list[tuple[CostEstimate, PowerDraw]], Int64]:
        """What operations of a graph cost, and the peaks that their tensor cores work at.

        Returns:
            Those that differ, and for each operation which it is.

        Raises:
            GraphError: one takes longer than the clock counts, or its operands contradict each other.
        """
        keys, which = self.keys(graph, rows)
        for key, row in keys.items():
            if key not in self._numbers:
                self._costs.append(_asked(graph, row, device))
                self._numbers[key] = len(self._costs) - 1
        return [self._costs[self._numbers[key]] for key in keys], which

    def keys(self, graph: Graph, rows: Int64) -> tuple[dict[CostKey, int], Int64]:
        """What the costs of some operations depend on, as it stands in memory.

        Returns:
            Those that differ, each with the first row that has it, and for each operation which it is.
        """
        ops = graph.ops
        names = _renumbered(ops.name[rows], ops.strings, self._names)
        attributes = _renumbered(ops.attributes[rows], ops.attribute_values, self._attributes)
        sizes = ops.flops, ops.bytes_read, ops.bytes_written, ops.nbytes
        columns = _table([names, attributes, *(column[rows] for column in (ops.kind, ops.phase, *sizes))])
        type_of, sides = self._type_of(graph.tensors), list[Ragged]()
        for side in (ops.inputs, ops.outputs):
            lengths, where = side.places(rows)
            sides.append(Ragged(np.append(0, np.cumsum(lengths)), type_of[side.values[where]]))
        first, which = equal_rows(columns, *sides)
        its = [columns[row].tobytes() for row in first.tolist()]
        read, made = ([side[row].tobytes() for row in first.tolist()] for side in sides)
        keys: Iterator[CostKey] = zip(its, read, made, strict=True)
        return dict(zip(keys, rows[first].tolist(), strict=True)), which

    def _type_of(self, tensors: TensorTable) -> Int64:
        """For every tensor the number of its type: data type and extents."""
        shape, lengths = tensors.shape, tensors.shape.lengths
        width = max(int(lengths.max(initial=0)), USUAL_DIMS)
        extents = np.full((width, len(tensors)), NONE, np.int64)
        extents[np.arange(len(shape.values)) - np.repeat(shape.offsets[:-1], lengths), shape.rows] = shape.values
        types = self._types
        columns = _table([tensors.dtype, lengths, *extents])
        first, which = equal_rows(columns)
        keys = [columns[row].tobytes() for row in first.tolist()]
        return np.array([types.setdefault(key, len(types)) for key in keys], np.int64)[which]


CostKey = tuple[bytes, bytes, bytes]
"""An operation's columns, and the types of what it reads and makes."""
USUAL_DIMS = 8
"""Extents that the key of a tensor's type has at least, so that those of different graphs are equal."""
_Value = TypeVar("_Value")


def _renumbered(column: npt.NDArray[Any], values: Sequence[_Value], numbers: dict[_Value, int]) -> Int64:
    """A column of numbers of a graph's values in numbers that hold for all graphs; -1 is none."""
    found, which = np.unique(column, return_inverse=True)
    new = [NONE if at == NONE else numbers.setdefault(values[at], len(numbers)) for at in found.tolist()]
    return np.array(new, np.int64)[which.ravel()]


Exposed = Mapping[tuple[int, int], int]
"""Picoseconds that kernels wait for communication in a call, by its first row and the one behind its last."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bursts:
    """What the kernels of a graph take in bursts, and what the clock of a long run does to them (`power.py`).

    Attributes:
        device: what runs them.
        picoseconds: int64 [operations], in a burst; -1 of views, host work, and what has a duration already.
        source: uint8 [operations], of `types.Source`.
        spread: float32 [operations], relative standard errors.
        paced_s: float64 [operations], of that the seconds that the clock paces.
        of_cores: bool [operations], which run on tensor cores: these take longer on a slower board.
        spent: int64 [4, operations], of forward and backward passes: nanojoules of cores and of memory;
            picoseconds that the clock paces, and others. Of communication the bytes that it moves in memory.
    """

    device: DeviceProfile
    picoseconds: Int64
    source: UInt8
    spread: Float32
    paced_s: Float64
    of_cores: Bools
    spent: Int64

    def durations(self, clock: Float64, slower: float) -> Annotate:
        """Durations, to be put on the graph.

        Args:
            clock: float64 [operations], of a long run, over that of a burst.
            slower: how much longer kernels of tensor cores take than on a typical board (`power.slowest_of`).
        """
        its = self.picoseconds.copy()
        if self.device.power is not None:
            at = np.flatnonzero(its != NONE)
            seconds = its[at] / PS_PER_S
            its[at] = np.rint((seconds + self.paced_s[at] * (1.0 / clock[at] - 1.0)) * PS_PER_S)
        its[self.of_cores] = np.rint(its[self.of_cores] * slower)
        none = np.zeros(len(its), np.int64)
        return Annotate(
            device=self.device.name, picoseconds=its, source=self.source, spread=self.spread, samples=none
        )


def bursts(graph: Graph, device: DeviceProfile, known_costs: KnownCosts | None = None) -> Bursts:
    """What the device operations of a graph take, before it is known for how long they run.

    An operation that already has a duration on this device keeps it, since a measured one is better, and so does
    one with an imported duration, of whichever device.

    Args:
        graph: the graph.
        device: what runs it.
        known_costs: those of this device that other graphs have asked for; gets this one's.

    Raises:
        GraphError: an operation's operands contradict each other, or it takes longer than the clock counts.
    """
    count = len(graph.ops)
    picoseconds, of_cores = np.full(count, NONE, np.int64), np.zeros(count, np.bool_)
    source, spread = np.zeros(count, np.uint8), np.zeros(count, np.float32)
    known, _, _ = graph.ops.duration_on(device.name)
    known[graph.ops.duration.rows[graph.ops.duration_source == Source.IMPORTED]] = 0
    works = np.isin(graph.ops.kind, (OpKind.COMPUTE, OpKind.COPY)) & ~graph.ops.is_view & (known == NONE)
    at = np.flatnonzero(works)
    found, number_of = (KnownCosts() if known_costs is None else known_costs).of(graph, at, device)
    picoseconds[at] = np.array([to_ps(float(cost.seconds)) for cost, _ in found], np.int64)[number_of]
    fitted = [Source.FITTED if cost.source == "fitted" else Source.ANALYTICAL for cost, _ in found]
    source[at] = np.array(fitted, np.uint8)[number_of]
    spread[at] = np.array([cost.spread for cost, _ in found], np.float32)[number_of]
    cores = [core for _, core in found]
    of_cores[at] = np.array([bool(core.peak) for core in cores], bool)[number_of]
    paced_s, spent = _spent(graph, device, at, cores, number_of, picoseconds)
    return Bursts(
        device=device, picoseconds=picoseconds, source=source, spread=spread, paced_s=paced_s,
        of_cores=of_cores, spent=spent,
    )  # fmt: skip


def estimate(
    graph: Graph,
    device: DeviceProfile,
    slower: float = 1.0,
    known_costs: KnownCosts | None = None,
    exposed: Callable[[Annotate], Exposed] | None = None,
) -> Annotate:
    """Durations of the device operations of a graph in a long run; those that it has are kept, as by `bursts`.

    Args:
        graph: the graph.
        device: what runs it.
        slower: how much longer kernels of tensor cores take than on a typical board (`power.slowest_of`).
        known_costs: those of this device that other graphs have asked for; gets this one's.
        exposed: given the durations of kernels that wait for nothing, says what they wait in a call, in which the
            board is at rest.

    Raises:
        GraphError: an operation's operands contradict each other, or it takes longer than the clock counts.
    """
    its = bursts(graph, device, known_costs)
    alone = its.durations(_clocks(graph, its, {}), slower)
    waits = exposed(alone) if exposed is not None else {}
    return its.durations(_clocks(graph, its, waits), slower) if waits else alone


def _asked(graph: Graph, row: int, device: DeviceProfile) -> tuple[CostEstimate, PowerDraw]:
    """What an operation costs, and the peak that its tensor cores work at.

    Raises:
        GraphError: it takes longer than the clock counts, or its operands contradict each other.
    """
    op = graph.ops[row]
    assert isinstance(op, Compute | Copy)
    operands = [graph.tensors[i] for i in op.inputs], [graph.tensors[i] for i in op.outputs]
    cost = cost_of(op, operands, device)
    if not float(cost.seconds) < LONGEST_S:
        raise GraphError(f"operation {op.name}: would take over {LONGEST_S / 86400:.0f} days on {device.name}")
    return cost, _core(op, operands, device)


def _spent(
    graph: Graph,
    device: DeviceProfile,
    at: Int64,
    cores: Sequence[PowerDraw],
    core_of: Int64,
    picoseconds: Int64,
) -> tuple[Float64, Int64]:
    """Seconds that the clock paces, and what passes spend: `Bursts.paced_s`, `Bursts.spent`.

    `cores` are those that differ, `core_of` says which each of the rows `at` has. Of a product the clock paces a
    part, of attention all but the time that its operands take to move, of other kernels nothing.
    """
    power, paced_s, columns = device.power, np.zeros(len(graph.ops)), np.zeros((4, len(graph.ops)), np.int64)
    if power is None or not len(at):
        return paced_s, columns
    ops, seconds = graph.ops, picoseconds[at] / PS_PER_S
    peaks = device.datasheet.peak_flops_per_s
    peak = np.array([peaks[core.peak] if core.peak in power.joules_per_flop else np.inf for core in cores])
    joules = np.array([power.joules_of(core.peak, core.kernel) for core in cores])[core_of]
    peak, kernel = peak[core_of], np.array([bool(core.kernel) for core in cores])[core_of]
    executed = np.array([core.flops for core in cores])[core_of]
    flops = np.where(np.isfinite(peak), np.where(kernel, executed, ops.flops[at]), 0.0)
    moved = (ops.bytes_read[at] + ops.bytes_written[at]).astype(np.float64)
    attends = kernel & np.isfinite(peak)
    share = np.where(
        attends,
        1.0 - moved / (device.datasheet.memory_bandwidth_bytes_per_s * np.maximum(seconds, 1e-12)),
        PACED_OF_PRODUCTS * np.minimum(1.0, flops / (PACED_AT * peak * np.maximum(seconds, 1e-12))),
    )
    paced_s[at] = paced = seconds * np.clip(share, 0.0, 1.0)
    drawn = flops * joules + np.where(flops > 0.0, 0.0, seconds) * power.vector_W
    passes = np.isin(ops.phase[at], (Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTE))
    spent = (drawn * PER_JOULE, moved * power.joules_per_byte * PER_JOULE, paced * PS_PER_S)
    for column, values in zip(columns, (*spent, (seconds - paced) * PS_PER_S), strict=True):
        column[at] = np.rint(np.where(passes, values, 0.0))
    columns[1] += np.rint(_moved_by_collectives(graph) * power.joules_per_byte * PER_JOULE).astype(np.int64)
    return paced_s, columns


PER_JOULE = 1e9
"""Energies are added up as whole nanojoules, so that their order does not matter."""


def _moved_by_collectives(graph: Graph) -> Int64:
    """[operations] Bytes that collectives read and write of memory: the buffer once each, all-reduces twice."""
    ops = graph.ops
    times = np.where(ops.variant == CollectiveKind.ALL_REDUCE, 4, 2)
    return np.where(ops.kind == OpKind.COLLECTIVE, ops.nbytes * times, 0)


def _clocks(graph: Graph, its: Bursts, exposed: Exposed) -> Float64:
    """[operations] The clock of each: that of the program that runs it, the slowest of several.

    A program's is that of one micro-batch amid the others, as all of them draw alike; what runs once a step is not
    counted, the optimizer among it, which memory bounds.

    Args:
        graph: the graph.
        its: what its kernels take and spend.
        exposed: what kernels wait.
    """
    clocks, power, rows = np.ones(len(graph.ops)), its.device.power, len(graph.ops) + 1
    if power is None or not (its.picoseconds != NONE).any():
        return clocks
    until = np.concatenate([np.zeros((4, 1), np.int64), np.cumsum(its.spent, axis=1)], axis=1)
    for program in graph.programs:
        calls = program.calls
        opens = np.bincount(calls[:, 1], minlength=rows) - np.bincount(calls[:, 2], minlength=rows)
        runs = np.cumsum(opens)[:-1] > 0
        calls = program.usual_calls
        core, memory, paced, other = (until[:, calls[:, 2]] - until[:, calls[:, 1]]).sum(axis=1).tolist()
        other += sum(exposed.get(call, 0) for call in map(tuple, calls[:, 1:3].tolist()))
        clock = sustained_clock(power, core / PER_JOULE, memory / PER_JOULE, paced / PS_PER_S, other / PS_PER_S)
        clocks[runs] = np.minimum(clocks[runs], clock)
    return clocks


def step_joules(job: JobGraph, device: DeviceProfile, step_s: float) -> float:
    """What the boards of all ranks draw over a step, in joules: at rest, and by kernels and collectives.

    FLOPs and bytes are at full voltage, and no board draws more than its limit on average. Links, hosts and
    cooling are not in it.

    Args:
        job: what every rank executes.
        device: what runs it; it has a model of power.
        step_s: seconds of the step.
    """
    power, ops = device.power, job.ops
    assert power is not None
    rows = np.flatnonzero(np.isin(ops.kind, (OpKind.COMPUTE, OpKind.COPY)) & ~ops.is_view)
    keys, which = KnownCosts().keys(job, rows)
    differ = []
    for row in keys.values():
        op = job.ops[row]
        assert isinstance(op, Compute | Copy)
        differ.append(_core(op, ([job.tensors[i] for i in op.inputs], []), device))
    cores = [differ[number] for number in which.tolist()]
    per_flop = np.array([power.joules_of(core.peak, core.kernel) for core in differ])[which]
    runs = np.zeros(len(ops))
    for program in range(len(job.programs)):
        runs += job.run_counts(program) * float(job.rank_count(program))
    known, _, _ = ops.duration_on(device.name)
    seconds = np.maximum(known[rows], 0) / PS_PER_S
    flops = _executed(job, rows, cores)
    vector_J = np.where(per_flop * flops > 0.0, 0.0, seconds) * power.vector_W
    moved = (ops.bytes_read[rows] + ops.bytes_written[rows]) * power.joules_per_byte
    each = flops * per_flop + vector_J + moved
    collectives_J = float((_moved_by_collectives(job) * runs).sum()) * power.joules_per_byte
    boards = job.world_size * step_s
    busy_J = float((each * runs[rows]).sum()) + collectives_J
    return min(power.limit_W * boards, power.static_W * boards + busy_J)


def _executed(graph: Graph, at: Int64, cores: Sequence[PowerDraw]) -> Float64:
    """The FLOPs that are executed: kernels of causal attention leave out what the mask hides."""
    return np.where([bool(core.kernel) for core in cores], [core.flops for core in cores], graph.ops.flops[at])


def _core(op: Compute | Copy, operands: _InOut, device: DeviceProfile) -> PowerDraw:
    inputs, _ = operands
    if not isinstance(op, Compute) or not isinstance(op.attributes, Gemm | Attention | Convolution) or not inputs:
        return PowerDraw()
    name = DTYPE_NAMES.get(inputs[0].dtype, "")
    if name == "fp32" and isinstance(op.attributes, Gemm) and op.attributes.tf32 and "tf32" in device.gemm:
        name = "tf32"
    core = PowerDraw(STAND_IN.get(name, name))
    if not isinstance(op.attributes, Attention):
        return core
    backward = "backward" in op.name
    query, key, value = _query_key_value(op, inputs)
    shape = attention_shape(
        prod(query.shape[:-3]), op.attributes.heads, query.shape[-2], op.attributes.head_dim,
        kv_seq=key.shape[-2], v_head_dim=value.shape[-1],
    )  # fmt: skip
    flops = float(attention_flops(shape, op.attributes.causal, backward=backward))
    return core._replace(kernel=library_of(_kernel(op.name) or device.default_attention), flops=flops)


def _query_key_value(op: Compute, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    return inputs[1:4] if "backward" in op.name else inputs[:3]


def _table(columns: Sequence[npt.NDArray[Any]]) -> Int64:
    """[rows, columns] A table of integers."""
    return np.stack([column.astype(np.int64) for column in columns], axis=1)


def cost_of(op: Compute | Copy, operands: _InOut, device: DeviceProfile) -> CostEstimate:
    """Cost of one operation.

    Args:
        op: the operation.
        operands: its input and its output tensors.
        device: the profile to ask.

    Raises:
        GraphError: the operation's attributes and operands contradict each other.
    """
    cost = _model_cost(op, operands, device)
    if not device.traced:
        return cost
    found = device.traced.get(kernel_key(op, operands))
    if found is None or not float(cost.seconds) > 0:
        return cost
    spread = found.label.spread
    return CostEstimate(float(cost.seconds) * found.at(float(cost.seconds)), spread, found.label.source)


def kernel_key(op: Compute | Copy, operands: _InOut) -> str:
    """What a trace's kernels are told apart by: kind, pass and type, as "convolution backward fp32"."""
    kind = "copy" if isinstance(op, Copy) else _kind_of(op, operands)
    backward = isinstance(op, Compute) and op.phase is Phase.BACKWARD
    types = [tensor.dtype.text for side in operands for tensor in side]
    return f"{kind} {'backward' if backward else 'forward'} {types[0] if types else 'none'}"


def _kind_of(op: Compute, operands: _InOut) -> str:
    match op.attributes:
        case Gemm():
            return "product"
        case Attention():
            return "attention"
        case Convolution():
            return "convolution"
        case MultiTensor():
            return "optimizer"
    if any(name in op.name for name in _OF_NO_ROWS):
        return "batch_norm"
    return _memory_kind(op, operands)


def _model_cost(op: Compute | Copy, operands: _InOut, device: DeviceProfile) -> CostEstimate:
    if op.name.startswith(_SCANS):
        return _scan(op, operands, device)
    if op.name.startswith(_RECURRENT):
        return _recurrent(operands, device, backward=op.name.startswith(f"{_RECURRENT}_backward"))
    if isinstance(op, Copy):
        return memory_bound(device, "copy", bytes_read=op.nbytes, bytes_written=op.nbytes)
    for kind, cost in _BY_ATTRIBUTE:
        if isinstance(op.attributes, kind):
            try:
                return cost(op, operands, device)
            except (ValueError, IndexError, ZeroDivisionError) as error:
                shapes = ", ".join(str(list(t.shape)) for t in operands[0]) or "none"
                raise GraphError(
                    f"operation {op.name}: {op.attributes} does not fit its inputs {shapes}"
                ) from error
    return _memory(op, operands, device)


def _gemm(op: Compute, operands: _InOut, device: DeviceProfile) -> CostEstimate:
    attributes = op.attributes
    assert isinstance(attributes, Gemm)
    inputs, outputs = operands
    if "_grouped_mm" in op.name:
        return _grouped(op, operands, device)
    scaled = "_scaled_mm" in op.name  # its scales come after its operands, its casts are operations of their own
    a, b = inputs[:2] if scaled else [t for t in inputs if len(t.shape) >= 2][-2:]
    if len(a.shape) < 2 or len(b.shape) < 2:
        return _memory(op, operands, device)
    batch, m, k, n = prod(a.shape[:-2]), a.shape[-2], a.shape[-1], b.shape[-1]
    if min(batch, m, k, n) == 0:
        return _memory(op, operands, device)
    layout = "NT" if attributes.transpose_a else "TN" if attributes.transpose_b else "NN"
    added, scales = _added(operands), [t for t in inputs[2:] if t.shape != outputs[0].shape]
    device = in_tf32(device) if attributes.tf32 and a.dtype is DType.FP32 else device
    return _scaled(
        lambda dtype: gemm(
            device, m, n, k, batch=batch, dtype=dtype, layout=layout, accumulator_bytes=added, quantize=not scaled,
            padded=op.name.endswith(PADDED),
        ),
        a.dtype, op, device, by_rows=scaled and any(t.dtype == DType.FP32 and t.numel > 1 for t in scales),
    )  # fmt: skip


def _added(operands: _InOut) -> float:
    """Bytes an element of what a product of 16 bits or less adds its result to, as a main gradient; 0 without."""
    inputs, (result, *_) = operands
    matrices = [t for t in inputs if len(t.shape) >= 2]
    if result.dtype == DType.FP32:
        return 0.0 if all(t.dtype == DType.FP32 for t in matrices) else SINGLE_BYTES
    # A buffer comes before the operands (addmm) or behind them: one of three matrices, as large as the result.
    known = len(matrices) > 2 and any((t.dtype, t.shape) == (result.dtype, result.shape) for t in matrices)
    return RESULT_BYTES if known else 0.0


def _scaled(
    cost: Callable[[str], CostEstimate], dtype: DType, op: Compute, device: DeviceProfile, by_rows: bool = False
) -> CostEstimate:
    """The cost of a product in a type, whose rows or blocks may have scales of their own."""
    assert isinstance(op.attributes, Gemm)
    if DTYPE_NAMES.get(dtype) != "fp8":
        return _or_slower(cost, dtype, device)
    if op.attributes.block == BLOCKWISE:
        return cost("fp8_block")
    if op.attributes.block != MXFP8:
        single = _with_split_accumulation(_or_slower(cost, dtype, device), op, device)
        return _slower(single, ROWWISE_SLOWER, ROWWISE_SPREAD) if by_rows else single
    return _slower(cost("fp8"), MXFP8_SLOWER, MXFP8_SPREAD)


def _with_split_accumulation(cost: CostEstimate, op: Compute, device: DeviceProfile) -> CostEstimate:
    slower = SPLIT_ACCUMULATION.get(device.datasheet.architecture)
    if slower is None or op.phase != Phase.BACKWARD:
        return cost
    return _slower(cost, slower, SPLIT_SPREAD)


def _slower(cost: CostEstimate, factor: float, doubt: float) -> CostEstimate:
    return CostEstimate(cost.seconds * factor, float(np.hypot(cost.spread, doubt)), "analytical")


def _grouped(op: Compute, operands: _InOut, device: DeviceProfile) -> CostEstimate:
    """`_grouped_mm(a, b, offsets)`: tokens [T, k] x experts [E, k, n], or both 2-D for the weight gradients."""
    a, b = operands[0][:2]
    assert isinstance(op.attributes, Gemm)
    if len(b.shape) == 3:
        experts, k, n = b.shape
        rows = np.full(experts, max(1.0, a.shape[0] / experts))
        name = "forward" if op.phase.name != "BACKWARD" else "input_gradient"
        sizes = (n, k) if name == "forward" else (k, n)
    else:
        experts, m, n = operands[1][0].shape
        rows, sizes, name = np.full(experts, max(1.0, a.shape[1] / experts)), (m, n), "weight_gradient"
    return _scaled(
        lambda dtype: grouped_gemm(
            device, rows, sizes[0], sizes[1], pass_=name, dtype=dtype, accumulator_bytes=_added(operands),
            quantize="_scaled" not in op.name,
        ),
        a.dtype, op, device,
    )  # fmt: skip


def _attention(op: Compute, operands: _InOut, device: DeviceProfile) -> CostEstimate:
    attributes = op.attributes
    assert isinstance(attributes, Attention)
    backward = "backward" in op.name
    query, key, value = _query_key_value(op, operands[0])
    in_order = {"deterministic": attributes.deterministic} if backward else {}
    cost = (attention_backward if backward else attention_forward)(
        device,
        **in_order,
        batch=prod(query.shape[:-3]),
        heads=attributes.heads,
        seq=query.shape[-2],
        head_dim=attributes.head_dim,
        kv_heads=attributes.kv_heads,
        kv_seq=key.shape[-2],
        v_head_dim=value.shape[-1],
        causal=attributes.causal,
        kernel=_kernel(op.name),
        dropout=attributes.dropout > 0,
    )
    if query.dtype in (DType.BF16, DType.FP16):
        return cost
    peaks = device.datasheet.peak_flops_per_s
    slower = peaks["bf16"] / peaks.get("tf32", peaks["fp32"]) if "bf16" in peaks else 1.0
    return CostEstimate(cost.seconds * slower, ASSUMED_SPREAD, "analytical")


def _kernel(operator: str) -> str | None:
    """The kernel that an operator of attention names, as `cudnn.attention`; None: the device's own."""
    kernel, _, rest = operator.partition(".")
    return kernel if rest in ("attention", "attention_backward") else None


def _scan(op: Compute | Copy, operands: _InOut, device: DeviceProfile) -> CostEstimate:
    """Its FLOPs at the rate of such recurrences, at least what its operands take to move; several launches."""
    assert isinstance(op, Compute)
    memory = _memory(op, operands, device)
    peaks, known = device.datasheet.peak_flops_per_s, device.scan
    share = SCAN_SHARE if known is None else known.efficiency
    seconds = op.flops / (share * peaks.get("bf16", peaks["fp32"]))
    seconds = max(float(memory.seconds), seconds) + SCAN_KERNELS * device.memory_launch_s
    return CostEstimate(seconds, ASSUMED_SPREAD, "analytical")


def _recurrent(operands: _InOut, device: DeviceProfile, *, backward: bool) -> CostEstimate:
    """Products with the inputs of all steps at once, and for each step in turn a product and the gates.

    So cuDNN's standard algorithm works (Appleyard et al. 2016, arXiv:1604.01946, section 3), but that layers and
    directions may overlap, and that small layers run in one kernel (`CUDNN_RNN_ALGO_PERSIST_STATIC`): neither is
    modelled, and there is no table, so the spread is assumed. Packed sequences come as rows, with how many samples
    each step has; that is taken to be the mean.
    """
    inputs, outputs = operands
    packed = next((tensor.shape[0] for tensor in inputs if tensor.dtype is DType.INT64), None)
    inputs = [tensor for tensor in inputs if tensor.dtype is not DType.INT64]
    steps, samples = (inputs[-1] if backward else outputs[0]).shape[:2]
    weights = [tensor for tensor in inputs if len(tensor.shape) == 2]
    rows = steps * samples
    if packed is not None:
        steps, samples = packed, max(1, round(rows / packed))

    def product(m: int, n: int, k: int) -> float:
        cost = _or_slower(lambda dtype: gemm(device, m, n, k, dtype=dtype), weights[0].dtype, device)
        return float(cost.seconds)

    seconds, itemsize = 0.0, weights[0].nbytes / max(1, weights[0].numel)
    for of_input, of_state in zip(weights[::2], weights[1::2], strict=True):
        (gates, width), hidden = of_input.shape, of_state.shape[1]
        if backward:
            seconds += product(rows, width, gates) + product(gates, width, rows) + product(gates, hidden, rows)
        else:
            seconds += product(rows, gates, width)
        moved = samples * gates * itemsize
        cell = memory_bound(device, "elementwise", bytes_read=moved, bytes_written=moved)
        step = product(samples, hidden, gates) if backward else product(samples, gates, hidden)
        seconds += steps * (step + float(cell.seconds))
    return CostEstimate(seconds, ASSUMED_SPREAD, "analytical")


def _convolution(op: Compute, operands: _InOut, device: DeviceProfile) -> CostEstimate:
    attributes = op.attributes
    assert isinstance(attributes, Convolution)
    backward = "backward" in op.name
    inputs = [t for t in operands[0] if len(t.shape) >= 3]
    image, weight = inputs[1:3] if backward else inputs[:2]
    result = inputs[0] if backward else operands[1][0]
    passes = ["forward"]
    if backward:
        passes = [p for p, like in (("input_gradient", image), ("weight_gradient", weight))
                  if any(t.shape == like.shape for t in operands[1])]  # fmt: skip
    sizes: dict[str, Any] = {
        "batch": image.shape[0], "in_channels": image.shape[1], "out_channels": result.shape[1],
        "kernel": prod(weight.shape[2:]), "in_positions": prod(image.shape[2:]),
        "out_positions": prod(result.shape[2:]), "groups": attributes.groups,
    }  # fmt: skip
    rounded = image.dtype is DType.FP32 and not attributes.ieee
    where = _with_cudnns_default(device) if rounded else device

    def of_pass(which: str) -> CostEstimate:
        return _or_slower(lambda dtype: convolution(where, **sizes, pass_=which, dtype=dtype), image.dtype, where)

    costs = [of_pass(which) for which in passes]
    return CostEstimate(sum(float(c.seconds) for c in costs), max(float(c.spread) for c in costs), "analytical")


TF32_CONVOLUTIONS = ("ampere", "ada", "hopper", "blackwell")
"""Architectures on which PyTorch lets cuDNN round operands of fp32 to TF32 in convolutions, unless it is told not
to (`torch.backends.cudnn.allow_tf32`, which is true where `torch.backends.cuda.matmul.allow_tf32` is not)."""


def _with_cudnns_default(device: DeviceProfile) -> DeviceProfile:
    """A device whose convolutions of fp32 run in TF32 where PyTorch's default lets them."""
    if "tf32" not in device.gemm or not device.datasheet.architecture.startswith(TF32_CONVOLUTIONS):
        return device
    return in_tf32(device)


def in_tf32(device: DeviceProfile) -> DeviceProfile:
    """A device whose products of fp32 run in TF32, where it has such units."""
    if "tf32" not in device.gemm:
        return device
    return msgspec.structs.replace(device, gemm={**device.gemm, "fp32": device.gemm["tf32"]})


def _multi_tensor(op: Compute, operands: _InOut, device: DeviceProfile) -> CostEstimate:
    """A part of a shared launch: only the leading part bears it."""
    attributes = op.attributes
    assert isinstance(attributes, MultiTensor)
    whole = _memory(replace(op, attributes=None), operands, device)
    if attributes.leads:
        return whole
    return CostEstimate(max(0.0, float(whole.seconds) - device.memory_launch_s), whole.spread, whole.source)


def _memory_kind(op: Compute, operands: _InOut) -> str:
    """Which of `MEMORY_KINDS` an operation is."""
    kind = "elementwise"
    if any(name in op.name for name in _REDUCING_NORMS):
        kind = "reduction"
    else:
        kind = next((name for name, pattern in _KINDS if pattern.search(op.name)), kind)
    return "norm_backward" if kind == "norm" and "backward" in op.name else kind


def _memory(op: Compute, operands: _InOut, device: DeviceProfile) -> CostEstimate:
    kind = _memory_kind(op, operands)
    if kind == "gather" and "backward" in op.name:
        return _scattered(op, operands, device)
    widest = max((t for side in operands for t in side), key=lambda t: t.nbytes, default=None)
    by_row = kind in _ROWS and not any(name in op.name for name in _OF_NO_ROWS)
    row = widest.dtype.nbytes(widest.shape[-1]) if by_row and widest and widest.shape else 0
    cost = memory_bound(
        device,
        kind,
        bytes_read=op.bytes_read,
        bytes_written=op.bytes_written,
        row_bytes=row or DEFAULT_ROW_BYTES,
        element_bytes=widest.dtype.bits / 8 if row and widest else 2.0,
        library=op.name.partition(".")[0],
    )
    if _in_two_kernels(op, operands):
        first = memory_bound(device, kind, bytes_read=op.bytes_read, bytes_written=0, row_bytes=DEFAULT_ROW_BYTES)
        return CostEstimate(float(first.seconds) + float(cost.seconds), cost.spread, cost.source)
    if _DRAWS.match(op.name):
        drawn = drawn_seconds(device.datasheet, max(t.numel for t in operands[1]))
        return _at_least(cost, drawn, DRAWN_SPREAD)
    if op.name.startswith(_EAGER) and _unrolled(kind, operands):
        unrolled = unrolled_seconds(device.datasheet, max(t.numel for t in operands[1]))
        return _at_least(cost, device.memory_launch_s + unrolled, UNROLLED_SPREAD)
    if _BOTH.match(op.name):
        return _slower(cost, BOTH_SLOWER, BOTH_SPREAD)
    return _at_least(cost, _scaling_seconds(op, operands, device), SCALES_SPREAD)


def _scaling_seconds(op: Compute, operands: _InOut, device: DeviceProfile) -> float:
    """Seconds that a kernel takes at least to find the scales of rows and columns that it applies; 0 of others."""
    if not _SCALES.match(op.name):
        return 0.0
    inputs, outputs = operands
    wide = (DType.FP32, DType.FP64)
    scales = sum(t.dtype in wide and len(t.shape) == 2 and min(t.shape) == 1 < t.numel for t in inputs)
    sheet, elements = device.datasheet, max(t.numel for t in outputs)
    return device.memory_launch_s + SCALE_CLOCKS * scales * elements / (sheet.sm_count * sheet.clock_hz)


def _in_two_kernels(op: Compute, operands: _InOut) -> bool:
    """Whether an operation is a batch normalisation of two kernels, one of which makes statistics or sums."""
    inputs, outputs = operands
    if not op.name.startswith(_TWO_KERNELS) or not inputs or inputs[0].dtype is not DType.BF16:
        return False
    return "backward" in op.name or any(t.numel for t in outputs[1:])


def _at_least(cost: CostEstimate, seconds: float, spread: float) -> CostEstimate:
    """The cost of a kernel that moves memory while its instructions take so many seconds."""
    if seconds <= float(cost.seconds):
        return cost
    return CostEstimate(seconds, float(np.hypot(cost.spread, spread)), "analytical")


def _scattered(op: Compute, operands: _InOut, device: DeviceProfile) -> CostEstimate:
    """A gradient that is zero but where indices point: it is filled, then what is read goes to its places."""
    filled = memory_bound(device, "copy", bytes_read=0, bytes_written=op.bytes_written)
    scattered = memory_bound(
        device, "gather", bytes_read=op.bytes_read, bytes_written=min(op.bytes_read, op.bytes_written)
    )
    seconds = float(filled.seconds) + float(scattered.seconds)
    return CostEstimate(seconds, max(float(filled.spread), float(scattered.spread)), scattered.source)


def _unrolled(kind: str, operands: _InOut) -> bool:
    """Whether an operation of PyTorch's own runs in a kernel that takes its elements one by one.

    Copies from 32 bits to 16 are vectorised (pytorch/pytorch#110251 and #137053), those from 16 to 32 are not.
    """
    if kind not in ("elementwise", "copy"):
        return False
    inputs, outputs = operands
    types = {t.dtype for t in (*inputs, *outputs) if t.numel > 1 and t.dtype in _FLOATS}
    if kind == "copy":
        return len(types) > 1 and any(t.dtype is DType.FP32 for t in outputs)
    return len(types) > 1 or _broadcasts(operands)


def _broadcasts(operands: _InOut) -> bool:
    """Whether an operand of more than one element is repeated along the result."""
    result = max(operands[1], key=lambda t: t.numel, default=None)
    return result is not None and any(
        1 < t.numel < result.numel and _repeats(t.shape, result.shape) for t in operands[0]
    )


def _repeats(shape: tuple[int, ...], result: tuple[int, ...]) -> bool:
    """Whether a shape stretches to the result's, as PyTorch stretches it."""
    pairs = zip(reversed(shape), reversed(result), strict=False)
    return len(shape) <= len(result) and all(size in (1, whole) for size, whole in pairs)


def _or_slower(cost: Callable[[str], CostEstimate], dtype: DType, device: DeviceProfile) -> CostEstimate:
    """The cost in a type, or where the device has no model of the type that of fp32, labelled analytical."""
    name = DTYPE_NAMES.get(dtype)
    if name is not None:
        try:
            return cost(name)
        except UnavailableError:
            if name in ("fp32", *_NARROW):  # no wider unit computes on narrow operands
                raise
    single = cost("fp32")
    return CostEstimate(single.seconds * max(1.0, dtype.bits / 32), ASSUMED_SPREAD, "analytical")


_BY_ATTRIBUTE: tuple[tuple[type, Callable[[Compute, _InOut, DeviceProfile], CostEstimate]], ...] = (
    (Gemm, _gemm),
    (Attention, _attention),
    (Convolution, _convolution),
    (MultiTensor, _multi_tensor),
)

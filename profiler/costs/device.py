"""Device profiles, and what they say outright: the cost of a memory-bound kernel.

A profile is one JSON file: datasheet facts, fitted kernel models, host rates, and where each comes from. Models
hold ratios (of peak, of bandwidth), never absolute rates, so a device without measurements of its own borrows a
relative's models and brings its own datasheet. A cost is seconds, how far they may be off, and where they come
from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from echograph.errors import DataError, FormatError, UnavailableError, UnknownNameError
from echograph.ir.documents import read_json_record, require

FloatArray: TypeAlias = npt.NDArray[np.float64]
CostSource: TypeAlias = Literal["fitted", "analytical"]

SHORT_KERNEL_S = 20e-6
"""Below this a kernel is dominated by launch and drain, and its measurement by noise (seconds)."""


class CostEstimate(NamedTuple):
    """The predicted duration of one kernel, or of one per element of the shape arrays.

    Attributes:
        seconds: duration on the device, launch gap excluded.
        spread: relative one-sigma error of the model on rows that it had not seen.
        source: "fitted" on measurements of this device, or "analytical" (scaled or assumed).
    """

    seconds: float | FloatArray
    spread: float | FloatArray
    source: CostSource


def as_floats(*values: npt.ArrayLike) -> list[FloatArray]:
    """The values as float arrays of one common shape (0-d for scalars).

    Raises:
        ValueError: shapes do not broadcast, or a value is not positive.
    """
    arrays = np.broadcast_arrays(*(np.asarray(v, dtype=np.float64) for v in values))
    if any(np.any(~(a > 0)) for a in arrays):
        raise ValueError("every dimension of a kernel is a positive number")
    return [np.asarray(a) for a in arrays]


def make_cost(seconds: FloatArray, spread: float, spread_short: float, source: CostSource) -> CostEstimate:
    """A cost whose spread depends on the length of the kernel; 0-d arrays become floats."""
    wide = np.where(seconds < SHORT_KERNEL_S, spread_short, spread)
    if seconds.ndim == 0:
        return CostEstimate(float(seconds), float(wide), source)
    return CostEstimate(seconds, wide, source)


def widen(cost: CostEstimate, doubt: FloatArray) -> CostEstimate:
    """The cost with one more independent relative error."""
    spread = np.hypot(cost.spread, doubt)
    return cost._replace(spread=float(spread) if spread.ndim == 0 else spread)


FORMAT = 1
MAX_PROFILE_BYTES = 4 * 2**20

# What a file may hold: far beyond any device, and within what the formulas can be evaluated with.
_Rate = Annotated[float, msgspec.Meta(ge=1e6, le=1e21)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Factor = Annotated[float, msgspec.Meta(ge=1e-3, le=1e3)]
_Weight = Annotated[float, msgspec.Meta(ge=0, le=1e3)]
_Work = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
_Efficiency = Annotated[float, msgspec.Meta(ge=1e-4, le=2)]
_Spread = Annotated[float, msgspec.Meta(ge=0, le=10)]
_Error = Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)]
Positive = Annotated[float, msgspec.Meta(ge=1, le=1e30)]
Nbytes = Annotated[int, msgspec.Meta(ge=0, le=2**60)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=10**6)]
_Rows = Annotated[int, msgspec.Meta(ge=0, le=10**12)]
Knots = Annotated[list[Positive], msgspec.Meta(min_length=2, max_length=1000)]


_GROUPED_PASSES = ("forward", "input_gradient", "weight_gradient")
ALIGNED = 16
"""Bytes from which on alignment no longer matters."""


def _grows(sizes: Sequence[float]) -> bool:
    return all(low < high for low, high in pairwise(sizes))


class Datasheet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the maker states: dense peaks without sparsity, in FLOP/s; sizes in bytes."""

    title: str
    architecture: str
    peak_flops_per_s: dict[str, _Rate]
    memory_bandwidth_bytes_per_s: _Rate
    memory_bytes: Nbytes
    sm_count: _Count
    l2_bytes: Nbytes
    clock_hz: _Rate
    source: str

    def __post_init__(self) -> None:
        require("fp32" in self.peak_flops_per_s, "peak_flops_per_s has fp32")


class FitError(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Relative error of a fit over rows that it had not seen.

    `bias` is the mean signed error (positive: predicted too long), `rms` the root mean square.
    """

    rows: _Rows
    median_abs: _Error
    mean_abs: _Error
    bias: _Error
    rms: _Error


class HeldOut(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Held-out error of kernels of at least 20 us, and of the shorter ones apart."""

    long: FitError | None = None
    short: FitError | None = None


class Label(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a model comes from and how far it may be off (relative one sigma).

    `between_libraries` is the one-sigma spread of the measured libraries on the same shapes (0: one library); the
    model's own spread is at least that.
    """

    source: CostSource
    basis: str
    spread: _Spread
    spread_short: _Spread
    held_out: HeldOut = HeldOut()
    between_libraries: _Spread = 0.0


class Grid(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A correction of log time over log2 of three sizes: per mille at the knots, last axis fastest."""

    knots: tuple[Knots, Knots, Knots]
    permille: list[Annotated[int, msgspec.Meta(ge=-10_000, le=10_000)]]

    def __post_init__(self) -> None:
        require(all(map(_grows, self.knots)), "knots grow along each axis")
        cells = prod(map(len, self.knots))
        require(len(self.permille) == cells, f"permille has a number for each of {cells} knots")


class Quantize(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Casting the activation operand to fp8, with its scale, before the product: launches, seconds per element.

    The price rises from `cached` to `cached + streamed` around `knee_elements`, where the operand leaves L2.
    """

    launch_s: _Seconds
    cached_s_per_element: _Seconds
    streamed_s_per_element: _Seconds
    knee_elements: Positive
    sharpness: _Weight


class Alignment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Slowdown where a contiguous dimension is no multiple of 16 bytes, by the power of two that it has.

    `operand` applies to what is read (a narrower load pipeline), `output` to what is written.
    """

    operand: dict[int, _Factor]
    output: dict[int, _Factor]
    source: str

    def __post_init__(self) -> None:
        require(max(self.operand, default=0) >= ALIGNED, f"operand has an entry for {ALIGNED} bytes")
        require(max(self.output, default=0) >= ALIGNED, f"output has an entry for {ALIGNED} bytes")


class GemmModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tiles and waves over SMs; see `gemm.py` for the equations and the meaning of each field."""

    label: Label
    peak: str
    element_bytes: Annotated[float, msgspec.Meta(ge=0.125, le=16)]
    tiles: Annotated[list[tuple[_Count, _Count]], msgspec.Meta(min_length=1)]
    efficiency: list[_Efficiency]
    overhead_k: list[_Work]
    splits: Annotated[list[_Count], msgspec.Meta(min_length=1)]
    k_step: Annotated[int, msgspec.Meta(ge=0, le=4096)] = 0
    split_traffic: _Weight
    split_s: _Seconds
    wave_rounding: Annotated[float, msgspec.Meta(ge=0, le=1)]
    launch_s: _Seconds
    bandwidth_fraction: _Factor
    overlap_power: Annotated[float, msgspec.Meta(ge=0.1, le=1e3)]
    throttle: _Weight
    throttle_flops: Annotated[float, msgspec.Meta(ge=0, le=1e30)]
    traffic_cached: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    cache_share: _Factor = 1.0
    time_scale: _Factor = 1.0
    transposed_scale: dict[str, _Factor] = {}
    accumulate_exposure: _Weight = 1.0
    batched_scale: _Factor = 1.0
    batched_spread: _Spread = 0.0
    alignment: Alignment | None = None
    quantize: Quantize | None = None
    residual: Grid | None = None

    def __post_init__(self) -> None:
        lengths = {len(self.tiles), len(self.efficiency), len(self.overhead_k)}
        require(len(lengths) == 1, "tiles, efficiency and overhead_k are of one length")


class GroupedModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Products of experts in one launch, by dtype; of a dtype that is not there, one GEMM after another.

    `scale` is by pass: the time over the sum of single products. `together` is that of a backward pass in one
    launch over what the model of forward says of its sizes.
    """

    label: Label
    scale: dict[str, _Factor]
    products: dict[str, GemmModel] = {}
    together: dict[str, _Factor] = {}

    def __post_init__(self) -> None:
        require(set(_GROUPED_PASSES) <= set(self.scale), f"scale has {', '.join(_GROUPED_PASSES)}")


class AttentionPass(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One pass (forward or backward) of one fused attention kernel; see `attention.py`."""

    label: Label
    head_dims: Annotated[list[_Count], msgspec.Meta(min_length=1)]
    efficiency: list[_Efficiency]
    overhead: _Work
    overhead_per_element: _Work
    tail: _Weight
    launch_s: _Seconds
    tile: _Count = 128
    tile_elements: Annotated[int, msgspec.Meta(ge=0, le=10**6)] = 0
    tile_fits: Annotated[int, msgspec.Meta(ge=0, le=10**6)] = 0
    key_tile: _Count = 1
    wave_rounding: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    splits: Annotated[float, msgspec.Meta(ge=1, le=1e6)] = 1.0
    edge: _Weight = 0.5
    throttle: _Weight = 0.0
    throttle_flops: Annotated[float, msgspec.Meta(ge=0, le=1e30)] = 0.0
    query_traffic: _Weight = 0.0
    kv_traffic: _Weight = 0.0
    traffic_knee_bytes: Positive = 1.0
    traffic_sharpness: _Weight = 1.0
    traffic_cached: _Weight = 1.0
    time_scale: _Factor = 1.0
    plateau_keys: Positive = 1e30
    windowed_scale: _Factor = 1.0
    residual: Grid | None = None

    def __post_init__(self) -> None:
        require(_grows(self.head_dims), "head_dims grow")
        require(len(self.efficiency) == len(self.head_dims), "efficiency has a number for each of head_dims")


class AttentionModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fused attention kernel: an inference kernel has no backward pass."""

    peak: str
    padded_head_dims: Annotated[list[_Count], msgspec.Meta(min_length=1)]
    forward: AttentionPass
    backward: AttentionPass | None = None


class MemoryModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A memory-bound kind: fraction of the datasheet bandwidth at the knots of the row length.

    `moved_scale` multiplies it at the knots of all bytes moved: short kernels do not fill the memory's queues.

    A norm's backward pass ends with a kernel that adds up the gradient of the weights over all rows. It takes
    `finish_s`, or reads the tensors again: a block for each `BLOCK_COLUMNS`, one at a time on a multiprocessor,
    which takes `column_cycles` of the datasheet's clock for each row.
    """

    label: Label
    row_bytes: Annotated[list[Positive], msgspec.Meta(min_length=1)]
    bandwidth_fraction: list[_Factor]
    moved_bytes: list[Positive] = []
    moved_scale: list[_Factor] = []
    finish_s: _Seconds = 0.0
    column_cycles: _Weight = 0.0

    def __post_init__(self) -> None:
        require(_grows(self.row_bytes), "row_bytes grow")
        alike = len(self.bandwidth_fraction) == len(self.row_bytes)
        require(alike, "bandwidth_fraction has a number for each of row_bytes")
        require(_grows(self.moved_bytes), "moved_bytes grow")
        alike = len(self.moved_scale) == len(self.moved_bytes)
        require(alike, "moved_scale has a number for each of moved_bytes")


class ScanModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Recurrences computed chunk by chunk, in several kernels: the share of a peak that their FLOPs reach."""

    label: Label
    peak: str
    efficiency: _Efficiency


class TracedKernels(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much longer kernels of a kind took in a trace than the other models say, by how long these say.

    Between knots on a scale of logarithms; beyond them as at the last one.
    """

    label: Label
    predicted_s: Annotated[list[Annotated[float, msgspec.Meta(gt=0, le=1e6)]], msgspec.Meta(min_length=1)]
    factor: list[_Factor]

    def __post_init__(self) -> None:
        require(_grows(self.predicted_s), "predicted_s grow")
        require(len(self.factor) == len(self.predicted_s), "factor has a number for each of predicted_s")

    def at(self, seconds: float) -> float:
        """The factor of a kernel that would take so many seconds."""
        return float(np.exp(np.interp(np.log(seconds), np.log(self.predicted_s), np.log(self.factor))))


class HostModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """CPU time of the thread that feeds the device: one launch call, one eager framework op, and one view.

    `view_s` is that of an operation that launches nothing; None: what `op_s` leaves beside the launch.
    `communication_s` is that of a collective or message, from the call into the process group to its return; None:
    as `op_s`.
    """

    launch_s: _Seconds
    op_s: _Seconds
    source: Literal["measured", "assumed"]
    basis: str
    view_s: _Seconds | None = None
    communication_s: _Seconds | None = None

    def __post_init__(self) -> None:
        require(self.view_s is None or self.view_s <= self.op_s, "view_s is at most op_s")

    @property
    def kernel_s(self) -> float:
        """What an operation that launches a kernel costs beyond one that does not."""
        return self.launch_s if self.view_s is None else self.op_s - self.view_s


class PowerModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a device draws: `static_W` always, and energy for each FLOP (by peak) and byte at full voltage.

    `joules_per_attention_flop` has the kernels of attention whose own energy was measured, which count instead.
    `vector_W` is what kernels without tensor cores draw beyond `static_W` and their bytes.
    `limit_W` is the board's; `power.py` has the equations.
    """

    limit_W: _Work
    static_W: _Work
    joules_per_flop: dict[str, _Seconds]
    joules_per_byte: _Seconds
    source: str
    joules_per_attention_flop: dict[str, _Seconds] = {}
    vector_W: Annotated[float, msgspec.Meta(ge=0, le=1e4)] = 0.0

    def joules_of(self, peak: str, kernel: str = "") -> float:
        """Joules of a FLOP at a peak, in a kernel of attention or in none ("")."""
        return self.joules_per_attention_flop.get(kernel, self.joules_per_flop.get(peak, 0.0))


class Provenance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which tables the fits stand on, how many rows of each, and when they were fitted."""

    date: str
    method: str
    tables: dict[str, int]
    holdout: str


class DeviceProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that the cost functions know of a device."""

    format: Annotated[int, msgspec.Meta(ge=1)]
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    datasheet: Datasheet
    gemm: dict[str, GemmModel]
    grouped: GroupedModel
    attention: dict[str, AttentionModel]
    default_attention: str
    memory: dict[str, MemoryModel]
    memory_launch_s: _Seconds
    host: HostModel
    provenance: Provenance
    sustained_gemm_slowdown: _Factor = 1.0
    sustained_basis: str = ""
    power: PowerModel | None = None
    scan: ScanModel | None = None
    traced: dict[str, TracedKernels] | msgspec.UnsetType = msgspec.UNSET


HARDWARE = (
    (r"NVIDIA A100-(SXM|PG509).*", "a100-sxm"),
    (r"NVIDIA A100( 80GB)? PCIe|NVIDIA A100-PCIE.*", "a100-pcie-80"),
    (r"Tesla V100-SXM[23].*", "v100-sxm2"),
    (r"NVIDIA H100( 80GB HBM3| SXM.*)?", "h100-sxm"),
    (r"NVIDIA H100 (64|96)GB HBM2.*", "h100-sxm-hbm2e"),
    (r"NVIDIA H100 PCIe", "h100-pcie"),
    (r"NVIDIA H200( SXM.*)?", "h200"),
    (r"NVIDIA H800( SXM.*)?", "h800"),
    (r"NVIDIA H20", "h20"),
    (r"(NVIDIA )?GH200.*", "gh200"),
    (r"NVIDIA B200", "b200"),
    (r"NVIDIA B300.*", "b300"),
    (r"NVIDIA GB200", "gb200"),
    (r"NVIDIA GB300", "gb300"),
    (r"NVIDIA L40S", "l40s"),
    (r"NVIDIA RTX PRO 6000 Blackwell.*", "rtx-pro-6000"),
    (r"AMD Instinct MI300X.*", "mi300x"),
    (r"AMD Instinct MI325X.*", "mi325x"),
)
"""Names that drivers give to devices, and the profile; one line each."""


def profile_of_hardware(name: str, memory_bytes: int = 0) -> str | None:
    """The shipped profile of a device by the name that its driver gives it; None where there is none.

    Args:
        name: as `torch.cuda.get_device_name` or a trace's `deviceProperties` has it.
        memory_bytes: of the device: of an A100 the name does not say which it is.
    """
    found = next((profile for pattern, profile in HARDWARE if re.fullmatch(pattern, name)), None)
    if found == "a100-sxm":
        return "a100-sxm-80" if memory_bytes > 60 * 10**9 or "80GB" in name else "a100-sxm-40"
    return found


def device_names() -> tuple[str, ...]:
    """Names of the shipped profiles, sorted."""
    return tuple(sorted(p.stem for p in _folder().glob("*.json")))


def load_device(name: str | Path) -> DeviceProfile:
    """Reads a shipped profile by name, or a user's own by path (something that ends in .json).

    Raises:
        UnknownNameError: no shipped profile has this name.
        InputError: the file cannot be read.
        FormatError: the file is no JSON object, or a profile of a newer format.
        DataError: it breaks a rule of profiles; names the key, the value and what is permitted.
    """
    text = str(name)
    if text.endswith(".json"):
        return read_profile(Path(text))
    if text not in device_names():
        raise UnknownNameError("device", text, device_names(), hint="or the path of a profile.json")
    return _load_shipped(text)


def read_profile(path: Path) -> DeviceProfile:
    """Reads one profile file.

    Raises:
        InputError: the file cannot be read.
        FormatError: the file is no JSON object, or a profile of a newer format.
        DataError: it breaks a rule of profiles; names the key, the value and what is permitted.
    """
    profile = read_json_record(path, DeviceProfile, MAX_PROFILE_BYTES, "device profile")
    if profile.format > FORMAT:
        raise FormatError(f"{path}: profile format {profile.format} is newer than {FORMAT}: upgrade echograph")
    _check(profile, path)
    return profile


def _check(profile: DeviceProfile, path: Path) -> None:
    tables: dict[str, Mapping[str, GemmModel | AttentionModel]] = {
        "gemm": profile.gemm, "attention": profile.attention, "grouped": profile.grouped.products,
    }  # fmt: skip
    for table, models in tables.items():
        for key, model in models.items():
            if model.peak not in profile.datasheet.peak_flops_per_s:
                raise DataError(f"{path}: {table} '{key}' needs peak '{model.peak}': add it to the datasheet")
    if profile.default_attention not in profile.attention:
        raise DataError(f"{path}: default_attention '{profile.default_attention}' is not in 'attention'")


def _folder() -> Path:
    return Path(__file__).resolve().parent.parent / "devices"


@lru_cache(maxsize=32)
def _load_shipped(name: str) -> DeviceProfile:
    return read_profile(_folder() / f"{name}.json")


MEMORY_KINDS = (
    *("elementwise", "copy", "norm", "norm_backward", "softmax", "loss", "reduction", "gather"),
    *("optimizer", "conv1d"),
)
"""conv1d is a causal convolution of each channel alone; loss is a fused cross-entropy, its gradient included;
norm and softmax work on rows; gather is an embedding or its gradient; optimizer updates many tensors."""

LIKE = {"norm_backward": "norm", "loss": "elementwise", "conv1d": "elementwise"}
"""What stands for a kind that a device has no model of."""

DEFAULT_ROW_BYTES = 8192.0


BLOCK_COLUMNS = 32.0
"""Of a block of the kernel that adds up the gradient of a norm's weights (PyTorch, layer_norm_kernel.cu: 32 by 32
threads, which a multiprocessor's registers hold once)."""


def column_waves(columns: npt.ArrayLike, multiprocessors: int) -> FloatArray:
    """How many blocks of columns one multiprocessor works off in turn."""
    blocks = np.ceil(np.asarray(columns, dtype=np.float64) / BLOCK_COLUMNS)
    return np.asarray(np.ceil(blocks / multiprocessors))


def memory_bound(
    device: DeviceProfile,
    kind: str,
    *,
    bytes_read: npt.ArrayLike,
    bytes_written: npt.ArrayLike,
    row_bytes: npt.ArrayLike = DEFAULT_ROW_BYTES,
    element_bytes: float = 2.0,
    library: str = "",
) -> CostEstimate:
    """Cost of one memory-bound kernel.

    Args:
        device: the profile to ask.
        kind: one of `MEMORY_KINDS`.
        bytes_read: what it must read, each operand once.
        bytes_written: what it must write.
        row_bytes: bytes of one normalised row (norm and softmax slow down once a row outgrows the registers).
        element_bytes: of one of its elements.
        library: whose kernel it is ("fused", "compiled"), where the device has a model of it; else PyTorch's own.

    Raises:
        UnknownNameError: no such kind.
        UnavailableError: the device has no model of it.
        ValueError: a size is negative.
    """
    names = (f"{kind}:{library}", kind, LIKE.get(kind, kind))
    model = next((found for name in names if (found := device.memory.get(name)) is not None), None)
    if model is None:
        if kind in MEMORY_KINDS:
            raise UnavailableError(
                f"device {device.name} has no model of memory-bound kind '{kind}'", device.memory
            )
        raise UnknownNameError("memory-bound kind", kind, device.memory)
    moved = np.asarray(bytes_read, dtype=np.float64) + np.asarray(bytes_written, dtype=np.float64)
    if np.any(~(moved >= 0)):
        raise ValueError("bytes read and written are numbers >= 0")
    row = np.log2(np.maximum(np.asarray(row_bytes, dtype=np.float64), 1.0))
    fraction = np.interp(row, np.log2(model.row_bytes), model.bandwidth_fraction)
    if model.moved_bytes:
        size = np.log2(np.maximum(moved, 1.0))
        fraction = fraction * np.interp(size, np.log2(model.moved_bytes), model.moved_scale)
    bandwidth = device.datasheet.memory_bandwidth_bytes_per_s
    seconds = np.asarray(device.memory_launch_s + moved / (bandwidth * fraction) + model.finish_s)
    if model.column_cycles:
        row = np.maximum(np.asarray(row_bytes, dtype=np.float64), 1.0)
        rows = np.asarray(bytes_written, dtype=np.float64) / row
        waves = column_waves(row / element_bytes, device.datasheet.sm_count)
        seconds = seconds + model.column_cycles * rows * waves / device.datasheet.clock_hz
    return make_cost(seconds, model.label.spread, model.label.spread_short, model.label.source)


HOST_SPREAD = 0.5
"""Assumed: hosts of one device kind differ by about this much (processor, framework version, tracing)."""

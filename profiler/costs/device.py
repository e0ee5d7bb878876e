"""Device profiles: datasheet facts, fitted kernel models, host rates, and where each comes from.

A profile is one JSON file. Models hold ratios (of peak, of bandwidth), never absolute rates, so a device
without measurements of its own borrows a relative's models and brings its own datasheet.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, Literal

import msgspec

from echograph.errors import DataError, FormatError, UnknownNameError
from echograph.ir.files import read_whole
from echograph.profiler.costs.cost import Source

FORMAT = 1
MAX_PROFILE_BYTES = 4 * 2**20
MAX_NUMBER, MAX_PERMILLE, SMALLEST = 1e18, 10_000, 1e-18
_SIGNED = frozenset({"bias", "permille"})
# What costs divide by, take the logarithm of, or raise to a power.
_DIVISORS = frozenset({
    "peak_flops_per_s", "memory_bandwidth_bytes_per_s", "memory_bytes", "sm_count", "l2_bytes", "clock_hz",
    "element_bytes", "tiles", "efficiency", "splits", "bandwidth_fraction", "overlap_power", "time_scale",
    "transposed_scale", "batched_scale", "knots", "knee_elements", "sharpness", "head_dims", "padded_head_dims",
    "traffic_knee_bytes", "traffic_sharpness", "row_bytes", "sustained_gemm_slowdown", "operand", "output",
})  # fmt: skip
_MOST = {"overlap_power": 1e3, "sharpness": 1e3, "traffic_sharpness": 1e3, "time_scale": 1e6, "efficiency": 1e3}
_NAMES = _SIGNED | _DIVISORS | {"launch_s", "op_s", "split_s", "spread", "spread_short", "tables", "rows"}


class Datasheet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the maker states: dense peaks without sparsity, in FLOP/s; sizes in bytes."""

    title: str
    architecture: str
    peak_flops_per_s: dict[str, float]
    memory_bandwidth_bytes_per_s: float
    memory_bytes: int
    sm_count: int
    l2_bytes: int
    clock_hz: float
    source: str


class FitError(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Relative error of a fit over rows that it had not seen.

    `bias` is the mean signed error (positive: predicted too long), `rms` the root mean square.
    """

    rows: int
    median_abs: float
    mean_abs: float
    bias: float
    rms: float


class HeldOut(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Held-out error of kernels of at least 20 us, and of the shorter ones apart."""

    long: FitError | None = None
    short: FitError | None = None


class Label(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a model comes from and how far it may be off (relative one sigma)."""

    source: Source
    basis: str
    spread: float
    spread_short: float
    held_out: HeldOut = HeldOut()


class Grid(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A correction of log time over log2 of three sizes: per mille at the knots, last axis fastest."""

    knots: tuple[list[float], list[float], list[float]]
    permille: list[int]


class Quantize(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Casting the activation operand to fp8, with its scale, before the product: launches, seconds per element.

    The price rises from `cached` to `cached + streamed` around `knee_elements`, where the operand leaves L2.
    """

    launch_s: float
    cached_s_per_element: float
    streamed_s_per_element: float
    knee_elements: float
    sharpness: float


class Alignment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Slowdown where a contiguous dimension is no multiple of 16 bytes, by the power of two that it has.

    `operand` applies to what is read (a narrower load pipeline), `output` to what is written.
    """

    operand: dict[int, float]
    output: dict[int, float]
    source: str


class GemmModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tiles and waves over SMs; see `gemm.py` for the equations and the meaning of each field."""

    label: Label
    peak: str
    element_bytes: float
    tiles: list[tuple[int, int]]
    efficiency: list[float]
    overhead_k: list[float]
    splits: list[int]
    split_traffic: float
    split_s: float
    wave_rounding: float
    launch_s: float
    bandwidth_fraction: float
    overlap_power: float
    throttle: float
    throttle_flops: float
    time_scale: float = 1.0
    transposed_scale: dict[str, float] = {}
    accumulate_exposure: float = 1.0
    batched_scale: float = 1.0
    batched_spread: float = 0.0
    alignment: Alignment | None = None
    quantize: Quantize | None = None
    residual: Grid | None = None


class GroupedModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Expert products run as one GEMM after another: time over the sum of single products, by pass."""

    label: Label
    scale: dict[str, float]


class AttentionPass(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One pass (forward or backward) of one fused attention kernel; see `attention.py`."""

    label: Label
    head_dims: list[int]
    efficiency: list[float]
    overhead: float
    overhead_per_element: float
    tail: float
    launch_s: float
    query_traffic: float = 0.0
    kv_traffic: float = 0.0
    traffic_knee_bytes: float = 1.0
    traffic_sharpness: float = 1.0
    traffic_cached: float = 1.0
    time_scale: float = 1.0


class AttentionModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fused attention kernel: an inference kernel has no backward pass."""

    peak: str
    padded_head_dims: list[int]
    forward: AttentionPass
    backward: AttentionPass | None = None


class MemoryModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A memory-bound kind: fraction of the datasheet bandwidth at the knots of the row length."""

    label: Label
    row_bytes: list[float]
    bandwidth_fraction: list[float]


class HostModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """CPU time of the thread that feeds the device: one launch call, one eager framework op, and one view.

    `view_s` is that of an operation that launches nothing; None: what `op_s` leaves beside the launch.
    `communication_s` is that of a collective or message, from the call into the process group to its return; None:
    as `op_s`.
    """

    launch_s: float
    op_s: float
    source: Literal["measured", "assumed"]
    basis: str
    view_s: float | None = None
    communication_s: float | None = None

    @property
    def kernel_s(self) -> float:
        """What an operation that launches a kernel costs beyond one that does not."""
        return self.launch_s if self.view_s is None else self.op_s - self.view_s


class Provenance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which tables the fits stand on, how many rows of each, and when they were fitted."""

    date: str
    method: str
    tables: dict[str, int]
    holdout: str


class DeviceProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that the cost functions know of a device."""

    format: int
    name: str
    datasheet: Datasheet
    gemm: dict[str, GemmModel]
    grouped: GroupedModel
    attention: dict[str, AttentionModel]
    default_attention: str
    memory: dict[str, MemoryModel]
    memory_launch_s: float
    host: HostModel
    provenance: Provenance
    sustained_gemm_slowdown: float = 1.0
    sustained_basis: str = ""


def device_names() -> tuple[str, ...]:
    """Names of the shipped profiles, sorted."""
    return tuple(sorted(p.stem for p in _folder().glob("*.json")))


def load_device(name: str | Path) -> DeviceProfile:
    """Reads a shipped profile by name, or a user's own by path (something that ends in .json).

    Raises:
        UnknownNameError: no shipped profile has this name.
        InputError: the file cannot be read.
        FormatError: the file is no device profile, or one of a newer format.
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
        FormatError: the file is no device profile, or one of a newer format.
    """
    data = read_whole(path, "give the path of a device profile", MAX_PROFILE_BYTES)
    try:
        profile = msgspec.json.decode(data, type=DeviceProfile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"{path}: not a device profile: {error}: make one with 'echoprof fit'") from error
    if profile.format > FORMAT:
        raise FormatError(f"{path}: profile format {profile.format} is newer than {FORMAT}: upgrade echograph")
    _check(profile, path)
    return profile


def _check(profile: DeviceProfile, path: Path) -> None:
    for where, name, number in _numbers(msgspec.to_builtins(profile), "$", ""):
        least, most = (-MAX_PERMILLE, MAX_PERMILLE) if name in _SIGNED else (0, _MOST.get(name, MAX_NUMBER))
        if not least <= number <= most or (number < SMALLEST and name in _DIVISORS):
            raise DataError(f"{path}: {where} is {number:g}: no device has that: make one with 'echoprof fit'")
    _check_lists(profile, path)
    for key, model in profile.gemm.items():
        if model.peak not in profile.datasheet.peak_flops_per_s:
            raise DataError(f"{path}: gemm '{key}' needs peak '{model.peak}': add it to the datasheet")
    if profile.default_attention not in profile.attention:
        raise DataError(f"{path}: default_attention '{profile.default_attention}' is not in 'attention'")


def _check_lists(profile: DeviceProfile, path: Path) -> None:
    for key, gemm in profile.gemm.items():
        knots = [] if gemm.residual is None else [len(axis) for axis in gemm.residual.knots]
        tiles = {len(gemm.tiles), len(gemm.efficiency), len(gemm.overhead_k)}
        filled = gemm.residual is None or prod(knots) == len(gemm.residual.permille)
        if len(tiles) > 1 or not (gemm.tiles and gemm.splits and filled):
            raise DataError(f"{path}: gemm '{key}' has lists of different lengths, or empty ones")
    for key, kind in profile.attention.items():
        passes = [one for one in (kind.forward, kind.backward) if one is not None]
        if any(not one.head_dims or len(one.head_dims) != len(one.efficiency) for one in passes):
            raise DataError(f"{path}: attention '{key}' has lists of different lengths, or empty ones")
    for key, memory in profile.memory.items():
        if not memory.row_bytes or len(memory.row_bytes) != len(memory.bandwidth_fraction):
            raise DataError(f"{path}: memory '{key}' has lists of different lengths, or empty ones")


def _numbers(value: Any, where: str, name: str) -> Iterator[tuple[str, str, float]]:
    """All numbers of a tree, where they stand, and the name of the field that they, or their list, are in."""
    if isinstance(value, int | float):
        yield where, name, value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _numbers(part, f"{where}.{key}"[:80], key if key in _NAMES else name)
    elif isinstance(value, list | tuple):
        for at, part in enumerate(value):
            yield from _numbers(part, f"{where}[{at}]"[:80], name)


def _folder() -> Path:
    return Path(__file__).resolve().parent.parent / "devices"


@lru_cache(maxsize=32)
def _load_shipped(name: str) -> DeviceProfile:
    return read_profile(_folder() / f"{name}.json")

"""Datasheet facts and the rows that speak for a device, read from `profiler/devices/datasheets.toml`."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Literal

import msgspec

from echograph.errors import DataError, UnknownNameError
from echograph.profiler.costs.device import Datasheet

DATASHEETS = Path(__file__).resolve().parent.parent / "devices" / "datasheets.toml"


class RowChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which `gpu` cells of a table speak for a device, by what they measure.

    Attributes:
        tensor: products on tensor cores, fused attention, and what trains beside them.
        libraries: by dtype, the `kernel` cells whose products are fitted; of a dtype that is not here, all. The
            others tell how far libraries differ. Rows without the cell are always fitted.
        lent: dtypes whose products are the relative's, since rows here mislead; what rests on products (launches,
            groups, other types) is told from these rows all the same.
        same_chip: cells of another device of the same chip, whose layers of experts tell slips of a tuner here.
        largest_product_TFLOP: by dtype, larger products are left out, where the board that was measured braked.
        attention: fused attention whose passes were timed apart (`op` is `attention`).
        attention_TFLOPs: bf16 peak of the device measured for `attention`, where it is not this one (0: it is).
        fp32: products without tensor cores.
        fp32_TFLOPs: peak of the device measured for `fp32`, where it is not this one (0: it is).
        memory: memory-bound kernels.
        memory_bandwidth_GBps: bandwidth of the device measured for `memory` (0: this one's).
        norms: norms forward and backward.
        norms_bandwidth_GBps: bandwidth of the device measured for `norms` (0: this one's).
        scans: recurrences over chunks, and the convolutions before them.
        second_source: products timed apart, which tell layouts, accumulation and expert groups.
        calibration: products that set one scale on a relative's model.
        best: the one best product of a search, which sets one scale on a relative's model.
        best_of_relative: the relative's best product of the same search, to compare with.
    """

    tensor: list[str] = []
    libraries: dict[str, list[str]] = {}
    lent: list[str] = []
    same_chip: list[str] = []
    largest_product_TFLOP: dict[str, float] = {}
    attention: list[str] = []
    attention_TFLOPs: float = 0.0
    fp32: list[str] = []
    fp32_TFLOPs: float = 0.0
    memory: list[str] = []
    memory_bandwidth_GBps: float = 0.0
    norms: list[str] = []
    norms_bandwidth_GBps: float = 0.0
    scans: list[str] = []
    second_source: list[str] = []
    calibration: list[str] = []
    best: list[str] = []
    best_of_relative: list[str] = []


class MeasuredEnergy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a board draws at its full clock, told from runs with rests between kernels.

    Attributes:
        static_W: between kernels, its clock at the highest.
        pJ_per_flop: of products, by dtype, their operands' traffic taken out.
        pJ_per_attention_flop: by kernel of attention.
        source: of these figures.
    """

    static_W: float
    pJ_per_flop: dict[str, float]
    pJ_per_attention_flop: dict[str, float]
    source: str


class LongProducts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Matrix products that ran long enough for the clock to settle, under the limit that the board has.

    Attributes:
        sustained_TFLOPs: their rate.
        burst_TFLOPs: the same products' rate in a burst.
        source: of these figures.
    """

    sustained_TFLOPs: float
    burst_TFLOPs: float
    source: str


class PowerFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a board may draw, and what it sustains within that.

    Attributes:
        limit_W: of the board.
        measured: energies that were measured; else they are told from `products`, or are the relative's.
        products: by dtype, long runs.
        source: of the limit.
    """

    limit_W: float
    measured: MeasuredEnergy | None = None
    products: dict[str, LongProducts] = {}
    source: str


class DeviceFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device of the file; units are in the names."""

    title: str
    architecture: Literal["volta", "ampere", "ada", "hopper", "blackwell", "blackwell-rtx", "cdna3"]
    peak_TFLOPs: dict[str, float]
    bandwidth_GBps: float
    memory_GiB: float
    sm_count: int
    l2_MiB: float
    clock_MHz: float
    source: str
    relative: str
    default_attention: str
    host: Literal["assumed", "assumed-2020", "v100", "mi300x"]
    rows: RowChoice = RowChoice()
    power: PowerFacts | None = None

    def datasheet(self) -> Datasheet:
        """The facts in SI units."""
        return Datasheet(
            title=self.title,
            architecture=self.architecture,
            peak_flops_per_s={name: value * 1e12 for name, value in self.peak_TFLOPs.items()},
            memory_bandwidth_bytes_per_s=self.bandwidth_GBps * 1e9,
            memory_bytes=int(self.memory_GiB * 2**30),
            sm_count=self.sm_count,
            l2_bytes=int(self.l2_MiB * 2**20),
            clock_hz=self.clock_MHz * 1e6,
            source=self.source,
        )


def read_facts() -> dict[str, DeviceFacts]:
    """All devices of `DATASHEETS`, in its order.

    Raises:
        DataError: the file breaks a rule.
    """
    try:
        raw: dict[str, Any] = tomllib.loads(DATASHEETS.read_text(encoding="utf-8"))
        facts = msgspec.convert(raw, type=dict[str, DeviceFacts])
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise DataError(f"{DATASHEETS}: {error}") from error
    for name, device in facts.items():
        if device.relative and device.relative not in facts:
            raise DataError(f"{DATASHEETS}: [{name}] relative '{device.relative}': no such device in the file")
    return facts


def device_facts(name: str) -> DeviceFacts:
    """The facts of one device.

    Raises:
        UnknownNameError: the file has no such device.
    """
    facts = read_facts()
    if name not in facts:
        raise UnknownNameError("device", name, facts, hint="in profiler/devices/datasheets.toml")
    return facts[name]

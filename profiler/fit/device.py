"""Fits a device profile: what the table measures of a device is fitted, the rest borrowed, all of it labelled.

What a device lacks is lent by a fitted relative: ratios carry over, datasheets do not.

Memory-bound kinds are fitted here: the fraction of the datasheet bandwidth that their kernels reach. Each time is
read as an overhead of the source's timer plus bytes over bandwidth; the overhead (some 10 us a row) is no
property of the kernel and is not shipped.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from echograph.errors import DataError, OutputError
from echograph.profiler.costs.device import (
    FORMAT,
    SHORT_KERNEL_S,
    AttentionModel,
    AttentionPass,
    Datasheet,
    DeviceProfile,
    GemmModel,
    GroupedModel,
    HeldOut,
    HostModel,
    Label,
    MemoryModel,
    PowerModel,
    Provenance,
    ScanModel,
)
from echograph.profiler.costs.gemm import DTYPES, STAND_IN
from echograph.profiler.costs.power import PACED_OF_PRODUCTS, volts
from echograph.profiler.fit.attention import fit_attention
from echograph.profiler.fit.experts import fit_experts, fit_passes, layers_of_library, lent_group
from echograph.profiler.fit.facts import (
    DATASHEETS,
    DeviceFacts,
    LongProducts,
    RowChoice,
    device_facts,
)
from echograph.profiler.fit.gemm import (
    Products,
    calibrate_products,
    dense_products,
    fit_batched,
    fit_gemm,
    fit_grouped,
    fit_layouts,
    lent,
    log_ratio,
    sustained_slowdown,
)
from echograph.profiler.fit.memory import (
    OPERANDS,
    fit_casts,
    fit_gather,
    fit_loss,
    fit_memory,
    fit_norms,
)
from echograph.profiler.fit.regression import DESCRIPTION, disagreement
from echograph.profiler.fit.scan import fit_scans
from echograph.profiler.fit.table import KernelTable

SCALED_SPREAD = 0.15
SCALED_SPREAD_SHORT = 0.3
"""Assumed one-sigma error of a model on a device that it was not fitted on."""

ELEMENT_BYTES = {"nvfp4": 0.5, "fp8": 1.0, "fp8_block": 1.0, "bf16": 2.0, "fp16": 2.0, "tf32": 4.0, "fp32": 4.0}
SAME_UNITS = {"fp8_block": "fp8"}
"""Whose peak a dtype has that the datasheet does not list."""


TF32_LAYOUTS = {"hopper": {"NN": 1.11, "NT": 1.64}}
"""Of products in TF32, which Hopper's instruction reads only with k innermost (PTX ISA, wgmma: a transposed
operand is of 16 bits), their time over that of the layout which has it so: medians of 60 each of one H200's
(benchmarks/measured/h200_products.csv, 2026-11-27). In bf16 the same products take 1.00 times as long."""


def scaled_label(basis: str) -> Label:
    """The label of anything borrowed."""
    return Label(
        source="analytical",
        basis=basis,
        spread=SCALED_SPREAD,
        spread_short=SCALED_SPREAD_SHORT,
        held_out=HeldOut(),
    )


def derive(model: GemmModel, dtype: str, basis: str) -> GemmModel:
    """One dtype's model at another dtype's peak and operand size, without its corrections."""
    return msgspec.structs.replace(
        model,
        label=scaled_label(basis),
        peak=dtype,
        element_bytes=ELEMENT_BYTES[dtype],
        residual=None,
        quantize=None,
    )


def borrow_gemm(
    own: dict[str, GemmModel], relative: DeviceProfile | None, facts: DeviceFacts
) -> dict[str, GemmModel]:
    """A model for every peak of the datasheet: its own, else a relative's, else another dtype's."""
    theirs = relative.gemm if relative is not None else {}
    name = facts.relative
    models: dict[str, GemmModel] = {}
    same = [dtype for dtype, units in SAME_UNITS.items() if units in facts.peak_TFLOPs]
    for dtype in (*facts.peak_TFLOPs, *(dtype for dtype in same if dtype in own or dtype in theirs)):
        if dtype in own:
            models[dtype] = own[dtype]
        elif dtype == "tf32" and "bf16" in own:
            models[dtype] = derive(own["bf16"], dtype, f"assumed: bf16's model at the {dtype} peak")
        elif dtype in theirs:
            models[dtype] = lent(theirs[dtype], facts.datasheet(), scaled_label(f"scaled from {name}"))
        elif "bf16" in own:
            models[dtype] = derive(own["bf16"], dtype, f"assumed: bf16's model at the {dtype} peak")
        elif "bf16" in theirs:
            models[dtype] = derive(theirs["bf16"], dtype, f"scaled from {name}: bf16's model at the {dtype} peak")
    if {"bf16", "tf32"} <= models.keys():
        layouts = models["bf16"].transposed_scale | TF32_LAYOUTS.get(facts.architecture, {})
        models["tf32"] = msgspec.structs.replace(models["tf32"], transposed_scale=layouts)
    return models


KERNELS = {
    "volta": ("flash1",),
    "ampere": ("flash1", "flash2", "trtllm"),
    "ada": ("flash1", "flash2", "trtllm"),
    "hopper": ("flash1", "flash2", "flash3", "cudnn", "trtllm"),
    "blackwell": ("flash2", "cudnn", "trtllm"),
    "blackwell-rtx": ("flash1", "flash2", "trtllm"),
    "cdna3": ("flash2",),
}
"""Attention kernels that exist for an architecture."""

WARP_INSTRUCTION_KERNELS = ("flash1", "flash2")
"""Kernels of Ampere's matrix instruction, which later tensor cores run no faster per SM and clock."""


def borrow_attention(relative: DeviceProfile | None, facts: DeviceFacts) -> dict[str, AttentionModel]:
    """A relative's attention kernels, as far as they exist for this architecture."""
    if relative is None:
        return {}
    label = scaled_label(f"scaled from {facts.relative}")
    peak = "bf16" if "bf16" in facts.peak_TFLOPs else "fp16"
    slower = min(1.0, _flops_per_clock(relative.datasheet) / _flops_per_clock(facts.datasheet()))

    def lend(name: str, kernel: AttentionPass) -> AttentionPass:
        share = slower if name in WARP_INSTRUCTION_KERNELS else 1.0
        efficiency = [round(e * share, 6) for e in kernel.efficiency]
        return msgspec.structs.replace(kernel, label=label, efficiency=efficiency)

    return {
        name: msgspec.structs.replace(
            model,
            peak=peak,
            forward=lend(name, model.forward),
            backward=lend(name, model.backward) if model.backward is not None else None,
        )
        for name, model in relative.attention.items()
        if name in KERNELS[facts.architecture]
    }


def _flops_per_clock(sheet: Datasheet) -> float:
    """Tensor FLOPs of one SM in one clock."""
    peak = sheet.peak_flops_per_s.get("bf16") or sheet.peak_flops_per_s["fp16"]
    return peak / sheet.sm_count / sheet.clock_hz


def borrow_memory(relative: DeviceProfile | None, facts: DeviceFacts) -> dict[str, MemoryModel]:
    """A relative's fractions of bandwidth."""
    if relative is None:
        return {}
    return {
        kind: msgspec.structs.replace(model, label=scaled_label(f"scaled from {facts.relative}"))
        for kind, model in relative.memory.items()
    }


def borrow_grouped(relative: DeviceProfile | None, facts: DeviceFacts) -> GroupedModel:
    """A relative's groups; without one, groups cost the sum of their products.

    A factor below 1 is not lent: it says that the relative's single products are taken as too slow, not that
    grouping makes products faster.
    """
    if relative is None:
        ones = {"forward": 1.0, "input_gradient": 1.0, "weight_gradient": 1.0}
        return GroupedModel(label=scaled_label("assumed: the sum of the products"), scale=ones)
    scale = {name: max(1.0, factor) for name, factor in relative.grouped.scale.items()}
    return GroupedModel(label=scaled_label(f"scaled from {facts.relative}"), scale=scale)


METHOD = (
    "tiles and waves with a coarse residual grid (products), tiles (attention), bandwidth fractions (memory-bound)"
)
MIN_ROWS = 200
"""Fewer rows than this do not carry a fit of some thirty parameters."""

UNTIMED_LAUNCH_S = 4e-6
"""Assumed launch and drain where a source's own is hidden by its timer."""

CALL_QUANTILE = 0.01
HOST_MARGIN = 2.0
"""A source whose shortest rows take so many short kernels times its host's calls."""

SURELY_HOST = 8.0
"""A row that needs less than this part of a call at the datasheet's rates surely times the host."""

HOSTED_SHARE = 0.1
"""Of the rows: with fewer that surely time the host, what its calls take is not known."""

LONGEST_CALL_QUANTILE = 0.99
"""Of such rows: a row that is no longer than this may time the host."""

DENSE_ROWS = 1500
"""From this many rows on, a residual grid is fitted too."""


FRESH_BYTES = 192 * 2**20
"""Weights that nobody filled and that are larger are new memory, which is zeros; smaller ones hold what was there.

Zeros draw less power. On H100, H200, B200, B300, GB300, L40S and RTX PRO 6000 the time of a product of random
numbers (the same source's TensorRT-LLM 1.3.0rc20 and SGLang 0.5.14; 1 to 6 TFLOP) over that of weights unfilled
does not depend on the size of the weights below 192 MiB and grows from there on, by 1.1 to 1.35 times at 1.5 GiB.
"""

UNFILLED = ", whose weights nobody filled, up to 192 MiB of them"
"""What a label says of products that no table of filled weights has."""


def fit_device(
    table: KernelTable, name: str, facts: DeviceFacts, *, relative: DeviceProfile | None, date: str
) -> DeviceProfile:
    """A profile of one device.

    Args:
        table: measured kernels of any devices; `facts.rows` says which speak for this one.
        name: of the profile.
        facts: datasheet and choice of rows.
        relative: the profile to borrow from where the table says nothing.
        date: of the fit, as it shall stand in the profile.

    Raises:
        DataError: neither the table nor a relative says anything about products on this device.
        MissingExtraError: scipy is not installed.
    """
    sheet = facts.datasheet()
    used: dict[str, int] = {}
    own = _fit_gemm(table, facts, sheet, relative, used)
    own = _with_second_source(_launches(own), table, facts, sheet, relative)
    gemm = _calibrate(borrow_gemm(own, relative, facts), table, facts, relative, used)
    if not gemm:
        raise DataError(f"no rows for {', '.join(facts.rows.tensor) or name}: check the 'gpu' column of the table")
    memory = borrow_memory(relative, facts) | _fit_memory(table, facts, used)
    leading = gemm.get("bf16") or gemm.get("fp16") or next(iter(gemm.values()))
    memory |= _fit_training(table, facts, leading.launch_s, used)
    if not memory:
        raise DataError(f"no memory-bound rows for {name} and no relative to borrow from: add 'relative'")
    gemm = _with_batches(gemm, own, memory, table, facts, relative)
    attention = borrow_attention(relative, facts) | fit_attention(table, facts.rows, sheet, used)
    scans = table.select(gpus=facts.rows.scans, ops=["gated_deltanet"]) if facts.rows.scans else None
    scan = _lent_scan(relative, facts)
    if scans is not None and (own_scans := fit_scans(scans, sheet, leading.launch_s, _basis(scans, used))):
        memory["conv1d"], scan = own_scans
    sustained, why = _sustained(gemm, table, facts, relative)
    return DeviceProfile(
        format=FORMAT,
        name=name,
        datasheet=sheet,
        gemm=gemm | _lent_products(relative, facts),
        grouped=_grouped(gemm, table, facts, sheet, relative, used),
        attention=attention,
        default_attention=facts.default_attention,
        memory=memory,
        memory_launch_s=leading.launch_s,
        host=read_hosts()[facts.host],
        provenance=Provenance(date=date, method=METHOD, tables=dict(sorted(used.items())), holdout=DESCRIPTION),
        sustained_gemm_slowdown=sustained,
        sustained_basis=why,
        power=_power(facts, relative),
        scan=scan,
    )


def _lent_products(relative: DeviceProfile | None, facts: DeviceFacts) -> dict[str, GemmModel]:
    """The relative's models of what the device's own rows mislead about."""
    if relative is None:
        return {}
    models = {dtype: relative.gemm[dtype] for dtype in facts.rows.lent}
    label = scaled_label(f"scaled from {facts.relative}")
    return {
        dtype: lent(
            model,
            facts.datasheet(),
            msgspec.structs.replace(label, between_libraries=model.label.between_libraries),
        )
        for dtype, model in models.items()
    }


def _lent_scan(relative: DeviceProfile | None, facts: DeviceFacts) -> ScanModel | None:
    if relative is None or relative.scan is None or relative.scan.peak not in facts.peak_TFLOPs:
        return None
    label = msgspec.structs.replace(relative.scan.label, basis=f"scaled from {facts.relative}")
    return msgspec.structs.replace(relative.scan, label=label)


def refit(table: KernelTable, base: DeviceProfile, gpus: Sequence[str], *, date: str) -> DeviceProfile:
    """A shipped profile with everything fitted anew that a user's own table measures.

    Args:
        table: measured kernels.
        base: the profile to start from; what the table does not measure stays as it is.
        gpus: the `gpu` cells of the table that mean this device; empty means every row.
        date: of the fit.

    Raises:
        DataError: the table holds too few rows of any kind.
        UnknownNameError: the base is no device of the datasheet file.
        MissingExtraError: scipy is not installed.
    """
    cells = list(gpus) or list(table.text["gpu"].counts())
    rows = RowChoice(tensor=cells, fp32=cells, memory=cells, attention=cells)
    facts = msgspec.structs.replace(device_facts(base.name), rows=rows)
    used: dict[str, int] = {}
    own = _launches(_fit_gemm(table, facts, base.datasheet, base, used))
    own = _with_second_source(own, table, facts, base.datasheet, base)
    memory = _fit_memory(table, facts, used)
    attention = fit_attention(table, rows, base.datasheet, used)
    own = _with_batches(own, own, base.memory | memory, table, facts, base)
    if not (own or memory or attention):
        raise DataError(
            f"no kind of kernel has {MIN_ROWS} rows on {', '.join(cells)}: measure more, or name another device"
        )
    return msgspec.structs.replace(
        base,
        gemm=base.gemm | own,
        memory=base.memory | memory,
        attention=base.attention | attention,
        provenance=Provenance(date=date, method=METHOD, tables=dict(sorted(used.items())), holdout=DESCRIPTION),
    )


def write_profile(profile: DeviceProfile, path: Path) -> None:
    """Writes a profile as JSON, whole or not at all: one line a field, lists of numbers on one line.

    Raises:
        OutputError: the file cannot be written.
    """
    text = msgspec.json.format(msgspec.json.encode(profile), indent=1).decode()
    text = re.sub(r"\[\s+([^\[\]{}\"]*?)\s+\]", lambda m: "[" + re.sub(r"\s+", " ", m[1]) + "]", text)
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text + "\n", encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise OutputError(f"{path}: {error.strerror}: give a path that can be written") from error


def read_hosts() -> dict[str, HostModel]:
    """The measured and assumed hosts, by name."""
    path = DATASHEETS.with_name("hosts.toml")
    return msgspec.toml.decode(path.read_bytes(), type=dict[str, HostModel])


def products(table: KernelTable) -> Products:
    """Rows with m, n and k as products; no batch means one."""
    number = table.number
    batch = np.where(np.isnan(number["batch"]), 1.0, number["batch"])
    return Products(batch=batch, m=number["m"], n=number["n"], k=number["k"], seconds=table.seconds())


def _fit_gemm(
    table: KernelTable,
    facts: DeviceFacts,
    sheet: Datasheet,
    relative: DeviceProfile | None,
    used: dict[str, int],
) -> dict[str, GemmModel]:
    models: dict[str, GemmModel] = {}
    cut = facts.rows.largest_product_TFLOP
    for dtype in ("bf16", "fp8", "fp8_block", "nvfp4", "fp32"):
        gpus = facts.rows.fp32 if dtype == "fp32" else facts.rows.tensor
        if not gpus or SAME_UNITS.get(dtype, dtype) not in facts.peak_TFLOPs:
            continue
        every = table.select(gpus=gpus, ops=("gemm", "linear", "bmm"), dtypes=_alike(dtype))
        rows = fitted_rows(every, dtype, facts)
        if len(rows) < MIN_ROWS:
            continue
        slow_calls = float(np.min(rows.seconds())) > HOST_MARGIN * SHORT_KERNEL_S
        hosted = slow_calls and "bf16" in models and ELEMENT_BYTES[dtype] < ELEMENT_BYTES["bf16"]
        models[dtype] = fit_gemm(
            products(rows).distinct(),
            _measured_sheet(sheet, facts, dtype),
            peak=SAME_UNITS.get(dtype, dtype),
            element_bytes=ELEMENT_BYTES[dtype],
            basis=_basis(rows, used) + (UNFILLED if np.all(rows.unfilled()) else ""),
            with_grid=len(rows) >= DENSE_ROWS,
            between_libraries=_apart(every, dtype, rows, relative),
            # What a slow call hides: a product's own launch, and that of the cast before it, which is assumed.
            launch_s=models["bf16"].launch_s + UNTIMED_LAUNCH_S if hosted else None,
            slowed_as=relative.gemm.get(dtype) if relative is not None and dtype in cut else None,
        )
    return models


def _alike(dtype: str) -> list[str]:
    """How tables spell a dtype, and one that runs at the same rate."""
    return [name for name, model in DTYPES.items() if dtype in (model, STAND_IN.get(model))]


def fitted_rows(every: KernelTable, dtype: str, facts: DeviceFacts) -> KernelTable:
    """Of the products of a dtype (those of a type of the same rate beside them) the rows that are fitted."""
    choice = facts.rows
    own = [name for name, model in DTYPES.items() if model == dtype]
    mask = every.text["dtype"].among(own) & ~_of_zeros(every, dtype)
    if dtype in choice.libraries:
        mask &= every.text["kernel"].among(["", *choice.libraries[dtype]])
    flops = 2.0 * every.number["m"] * every.number["n"] * every.number["k"]
    mask &= flops <= choice.largest_product_TFLOP.get(dtype, np.inf) * 1e12
    rows = every.where(mask)
    filled = ~rows.unfilled()
    if np.count_nonzero(filled) >= DENSE_ROWS:
        rows = rows.where(filled)
    return rows.where(_of_the_device(rows, dtype, facts))


def _of_zeros(rows: KernelTable, dtype: str) -> npt.NDArray[np.bool_]:
    """True of products whose weights are memory that nobody filled and that nothing had used before."""
    weights = rows.number["n"] * rows.number["k"] * ELEMENT_BYTES[dtype]
    return np.asarray(rows.unfilled() & (weights > FRESH_BYTES))


def _apart(every: KernelTable, dtype: str, rows: KernelTable, relative: DeviceProfile | None) -> float:
    """How far libraries are apart; where nobody filled the weights of any row, at least as far as a relative's."""
    every = every.where(~_of_zeros(every, dtype))
    shapes = products(every)
    found = disagreement(shapes.shape(), every.text["kernel"].codes, shapes.seconds)
    theirs = relative.gemm.get(dtype) if relative is not None and np.all(rows.unfilled()) else None
    return found if theirs is None else max(found, theirs.label.between_libraries)


def _of_the_device(rows: KernelTable, dtype: str, facts: DeviceFacts) -> npt.NDArray[np.bool_]:
    """False of rows that may time the host: they take no longer than its calls do where kernels are shorter.

    Where few kernels are surely shorter, rows of up to twice the shortest are left out.
    """
    seconds = rows.seconds()
    call = float(np.quantile(seconds, CALL_QUANTILE)) if len(rows) else 0.0
    if call <= HOST_MARGIN * SHORT_KERNEL_S:
        return np.ones(len(rows), dtype=np.bool_)
    b, m, n, k = products(rows).shape()
    width = ELEMENT_BYTES[dtype]
    moved = b * ((m * k + k * n) * width + m * n * max(2.0, width))
    peak = facts.peak_TFLOPs[SAME_UNITS.get(dtype, dtype)] * 1e12
    least = np.maximum(2.0 * b * m * n * k / peak, moved / (facts.bandwidth_GBps * 1e9))
    host = least < call / SURELY_HOST
    if np.mean(host) < HOSTED_SHARE:
        return np.asarray(seconds > HOST_MARGIN * call)
    return np.asarray(~host & (seconds > np.quantile(seconds[host], LONGEST_CALL_QUANTILE)))


def _launches(own: dict[str, GemmModel]) -> dict[str, GemmModel]:
    """Takes out of a launch what is not the product's: the cast to fp8, and the timer of the fp32 source."""
    if "bf16" not in own:
        return {
            dtype: msgspec.structs.replace(model, launch_s=min(model.launch_s, UNTIMED_LAUNCH_S))
            for dtype, model in own.items()
        }
    plain = own["bf16"].launch_s
    found = dict(own)
    for dtype, model in own.items():
        quantize = model.quantize
        if quantize is not None:
            quantize = msgspec.structs.replace(quantize, launch_s=max(0.0, model.launch_s - plain))
        found[dtype] = msgspec.structs.replace(model, launch_s=min(plain, model.launch_s), quantize=quantize)
    return found


def _measured_sheet(sheet: Datasheet, facts: DeviceFacts, dtype: str) -> Datasheet:
    """The datasheet of the board that was measured, where it differs from this one."""
    if dtype != "fp32" or not facts.rows.fp32_TFLOPs:
        return sheet
    peaks = sheet.peak_flops_per_s | {"fp32": facts.rows.fp32_TFLOPs * 1e12}
    return msgspec.structs.replace(sheet, peak_flops_per_s=peaks)


def _with_second_source(
    own: dict[str, GemmModel],
    table: KernelTable,
    facts: DeviceFacts,
    sheet: Datasheet,
    relative: DeviceProfile | None,
) -> dict[str, GemmModel]:
    """Layout and accumulation: from a second source, else a relative's."""
    if "bf16" not in own:
        return own
    apart = table.select(gpus=facts.rows.second_source) if facts.rows.second_source else None
    if apart is not None and len(apart):
        found = fit_layouts(apart, own["bf16"], sheet)
        transposed, exposure = found.transposed, found.exposure
    elif relative is not None and "bf16" in relative.gemm:
        transposed = relative.gemm["bf16"].transposed_scale
        exposure = relative.gemm["bf16"].accumulate_exposure
    else:
        return own
    return {
        dtype: msgspec.structs.replace(model, transposed_scale=transposed, accumulate_exposure=exposure)
        if dtype != "fp32"
        else model
        for dtype, model in own.items()
    }


def _with_batches(
    gemm: dict[str, GemmModel],
    own: dict[str, GemmModel],
    memory: dict[str, MemoryModel],
    table: KernelTable,
    facts: DeviceFacts,
    relative: DeviceProfile | None,
) -> dict[str, GemmModel]:
    """Batches of narrow products: from charts of the device, else a relative's."""
    if "bf16" not in own:
        return gemm
    found = fit_batched(table, facts.rows.tensor, gemm["bf16"], memory, facts.datasheet())
    if found is None and relative is not None and "bf16" in relative.gemm:
        theirs = relative.gemm["bf16"]
        found = msgspec.structs.replace(
            gemm["bf16"], batched_scale=theirs.batched_scale, batched_spread=theirs.batched_spread
        )
    return gemm if found is None else gemm | {"bf16": found}


def _calibrate(
    gemm: dict[str, GemmModel],
    table: KernelTable,
    facts: DeviceFacts,
    relative: DeviceProfile | None,
    used: dict[str, int],
) -> dict[str, GemmModel]:
    sheet = facts.datasheet()
    if facts.rows.calibration:
        rows = table.select(gpus=facts.rows.calibration, ops=["matmul"])
        basis = f"scaled from {facts.relative}, one factor fitted: {_basis(rows, used)}"
        return gemm | {"bf16": calibrate_products(gemm["bf16"], sheet, dense_products(rows, "TN"), basis)}
    found = dict(gemm)
    if relative is None or not facts.rows.best:
        return found
    for dtype in ("bf16", "fp8"):
        rows = table.select(gpus=facts.rows.best, ops=["gemm_best"], dtypes=[dtype])
        there = table.select(gpus=facts.rows.best_of_relative, ops=["gemm_best"], dtypes=[dtype])
        if len(rows) and len(there) and dtype in gemm:
            # A search keeps its luckiest product: only the ratio of two searches says something of the device.
            scale = _best(rows, gemm[dtype], sheet) / _best(there, relative.gemm[dtype], relative.datasheet)
            basis = f"scaled from {facts.relative}, one factor from two searches' best: {_basis(rows, used)}"
            found[dtype] = msgspec.structs.replace(
                gemm[dtype], time_scale=round(scale, 4), label=scaled_label(basis)
            )
    return found


def _best(rows: KernelTable, model: GemmModel, sheet: Datasheet) -> float:
    m, n, k = (rows.number[size] for size in "mnk")
    seconds = 2.0 * m * n * k / (rows.number["tflops"] * 1e12)
    best = Products(batch=np.ones(len(rows)), m=m, n=n, k=k, seconds=seconds)
    return float(np.exp(np.median(log_ratio(model, sheet, best))))


def _fit_memory(table: KernelTable, facts: DeviceFacts, used: dict[str, int]) -> dict[str, MemoryModel]:
    """PyTorch's kernels in fp32, as far as the table has them."""
    if not facts.rows.memory:
        return {}
    rows = table.select(gpus=facts.rows.memory, ops=(*OPERANDS, "ln", "softmax"), dtypes=["fp32"])
    if len(rows) < MIN_ROWS:
        return {}
    return fit_memory(
        rows, facts.rows.memory_bandwidth_GBps * 1e9 or facts.bandwidth_GBps * 1e9, _basis(rows, used)
    )


def _fit_training(
    table: KernelTable,
    facts: DeviceFacts,
    launch_s: float,
    used: dict[str, int],
) -> dict[str, MemoryModel]:
    """Kernels of training: casts, norms, lookups and losses, as far as the table has them."""
    if not facts.rows.tensor:
        return {}
    sheet = facts.datasheet()
    own, found = table.select(gpus=facts.rows.tensor), dict[str, MemoryModel]()
    if len(casts := own.select(ops=["fp8_cast"])) >= MIN_ROWS:
        found["elementwise"] = fit_casts(casts, sheet, launch_s, _basis(casts, used))
        found["copy"] = msgspec.structs.replace(
            found["elementwise"], label=scaled_label("assumed: as elementwise, which are casts to FP8")
        )
    if facts.rows.norms and len(norms := table.select(gpus=facts.rows.norms, ops=["rms_norm"])):
        bandwidth = facts.rows.norms_bandwidth_GBps * 1e9 or sheet.memory_bandwidth_bytes_per_s
        found |= fit_norms(norms, sheet, bandwidth, launch_s, _basis(norms, used))
    bandwidth = sheet.memory_bandwidth_bytes_per_s
    if len(lookups := own.select(ops=["embedding"], dtypes=["fp16"])) >= MIN_ROWS:
        found["gather"] = fit_gather(lookups, bandwidth, launch_s, _basis(lookups, used))
    losses = own.select(ops=["megatron_cross_entropy"])
    losses = losses.where(losses.text["kernel"].among(["liger"]) & losses.text["part"].among(["forward"]))
    loss = fit_loss(losses, bandwidth, launch_s, _basis(losses, used)) if len(losses) else None
    found |= {"loss": loss} if loss is not None else {}
    return found


STATIC_SHARE = 0.22
"""Of a board's limit what it draws at any clock, from one GB300 at two limits: cuBLAS products at 617 TFLOP/s
under 500 W and at 1,600 to 2,174 under 1,400 W (facebookexperimental/triton, pull request 2023), and the law of
voltages. An H200 draws 126 of its 700 W between kernels."""

JOULES_PER_BYTE = 9.8e-11
"""Of what moves to and from memory: copies of 2 GiB on an H200, 4.24 TB/s at 541 W, 126 of them static
(benchmarks/measured/h200_power.csv, 2026-11-27). HBM itself takes some 30 of it."""

VECTOR_W_PER_SM = 1.4
"""Of a kernel without tensor cores, beyond static power and its bytes: 26 kinds of them on an H200 (the same file:
copies, casts, activations, norms, softmax, dropout, an optimizer, by PyTorch and by its compiler) drew up to 400 W
more than that, in the middle 199 over 132 multiprocessors, which is 1.5; casts to FP8 on a B200 and a GB200 120 to
150 over 148 and 152, which is 0.8 to 1.0 (ai-dynamo/aiconfigurator's tables with watts)."""

OF_BF16 = {"fp8": 0.54, "nvfp4": 0.39}
"""Energy of a FLOP over one in bf16, where a device has no long run of the dtype: GB200's, all of random numbers
by one library (`datasheets.toml`). An H200 has 0.51 in FP8, with a scale a tensor or a row."""

SUSTAINED_SIZE = 8192.0
"""Rows, columns and depth of the products that a long run stands for."""


def _power(facts: DeviceFacts, relative: DeviceProfile | None) -> PowerModel | None:
    """Energies as measured, or from what the board sustains within its limit; else a relative's."""
    known = facts.power
    if known is None:
        return None
    vector_W = round(VECTOR_W_PER_SM * facts.sm_count, 1)
    if known.measured is None and not known.products:
        if relative is None or relative.power is None:
            return None
        source = f"{known.source}; energies as on {facts.relative}"
        return msgspec.structs.replace(relative.power, limit_W=known.limit_W, vector_W=vector_W, source=source)
    if known.measured is not None:
        static, sources = known.measured.static_W, [known.source, known.measured.source]
        joules = {dtype: _significant(pJ * 1e-12) for dtype, pJ in known.measured.pJ_per_flop.items()}
        attention = {kernel: pJ * 1e-12 for kernel, pJ in known.measured.pJ_per_attention_flop.items()}
    else:
        static = round(STATIC_SHARE * known.limit_W, 1)
        joules = {dtype: _joules(run, known.limit_W, static) for dtype, run in known.products.items()}
        sources = [known.source, *(run.source for run in known.products.values())]
        attention = {}
    for dtype, share in OF_BF16.items():
        if dtype in facts.peak_TFLOPs and dtype not in joules:
            joules[dtype] = _significant(joules["bf16"] * share)
    return PowerModel(
        limit_W=known.limit_W,
        static_W=static,
        joules_per_flop=joules,
        joules_per_byte=JOULES_PER_BYTE,
        joules_per_attention_flop={kernel: _significant(joule) for kernel, joule in attention.items()},
        vector_W=vector_W,
        source="; ".join(dict.fromkeys(sources)),
    )


def _joules(run: LongProducts, limit_W: float, static_W: float) -> float:
    """Joules of a FLOP at full voltage, with which products under a limit come out at the rate of a long run."""
    traffic = run.sustained_TFLOPs * 1e12 * BYTES_PER_FLOP * JOULES_PER_BYTE
    longer = run.burst_TFLOPs / run.sustained_TFLOPs
    clock = PACED_OF_PRODUCTS / (longer - 1.0 + PACED_OF_PRODUCTS)
    return _significant((limit_W - static_W - traffic) / (run.sustained_TFLOPs * 1e12 * volts(clock) ** 2))


BYTES_PER_FLOP = 3.0 * 2.0 / (2.0 * SUSTAINED_SIZE)
"""What such a product moves of bf16 operands, each once."""


def _significant(value: float) -> float:
    return float(f"{value:.6g}")


def _sustained(
    gemm: dict[str, GemmModel], table: KernelTable, facts: DeviceFacts, relative: DeviceProfile | None
) -> tuple[float, str]:
    """Only where the second source timed this very device does its level mean anything."""
    if not set(facts.rows.second_source) & set(facts.rows.tensor):
        if relative is None or relative.datasheet.architecture != facts.architecture:
            return 1.0, ""
        return relative.sustained_gemm_slowdown, relative.sustained_basis and f"as on {facts.relative}"
    apart = table.select(gpus=facts.rows.second_source, ops=["matmul"])
    factor = sustained_slowdown(apart, gemm["bf16"], facts.datasheet())
    return factor, f"median over large bf16 products of {_source(apart)}, against the fit; not applied"


def _grouped(
    gemm: dict[str, GemmModel],
    table: KernelTable,
    facts: DeviceFacts,
    sheet: Datasheet,
    relative: DeviceProfile | None,
    used: dict[str, int],
) -> GroupedModel:
    """Passes of groups from a second source, else a relative's; groups by dtype from layers of experts."""
    model = _passes(gemm, table, facts, sheet, relative, used)
    label = scaled_label(f"scaled from {facts.relative}")
    products = {
        dtype: lent_group(theirs, sheet, label)
        for dtype, theirs in (relative.grouped.products if relative is not None else {}).items()
        if theirs.peak in facts.peak_TFLOPs
    }
    for dtype in ("bf16", "fp8", "fp8_block", "nvfp4"):
        every = table.select(gpus=facts.rows.tensor, ops=["fused_experts"], dtypes=_alike(dtype))
        if facts.rows.tensor and len(rows := layers_of_library(every)) >= MIN_ROWS:
            products[dtype] = fit_experts(
                rows,
                sheet,
                peak=SAME_UNITS.get(dtype, dtype),
                element_bytes=ELEMENT_BYTES[dtype],
                launch_s=gemm["bf16"].launch_s,
                basis=_basis(rows, used),
                same_chip=_same_chip(table, facts, dtype),
            )
    together = relative.grouped.together if relative is not None else {}
    apart = table.select(gpus=facts.rows.second_source, ops=["group_matmul"])
    if facts.rows.second_source and len(apart) and "bf16" in products:
        together = fit_passes(apart, products["bf16"], sheet)
    return msgspec.structs.replace(model, products=products, together=together)


def _same_chip(table: KernelTable, facts: DeviceFacts, dtype: str) -> KernelTable | None:
    """Layers of experts of another device of the chip, where the file names one that the table has."""
    if not facts.rows.same_chip:
        return None
    rows = table.select(gpus=facts.rows.same_chip, ops=["fused_experts"], dtypes=_alike(dtype))
    return rows if len(layers_of_library(rows)) else None


def _passes(
    gemm: dict[str, GemmModel],
    table: KernelTable,
    facts: DeviceFacts,
    sheet: Datasheet,
    relative: DeviceProfile | None,
    used: dict[str, int],
) -> GroupedModel:
    rows = table.select(gpus=facts.rows.second_source) if facts.rows.second_source else None
    if rows is None or not len(rows.select(ops=["group_matmul"])):
        return borrow_grouped(relative, facts)
    basis = _basis(rows.select(ops=["group_matmul"]), used)
    return fit_grouped(rows, gemm["bf16"], sheet, basis)


def _basis(rows: KernelTable, used: dict[str, int]) -> str:
    for name, count in rows.sources().items():
        used[name] = used.get(name, 0) + count
    gpus = rows.text["gpu"].counts()
    return f"{len(rows)} rows of {_source(rows)} on {', '.join(gpus)}"


def _source(rows: KernelTable) -> str:
    return ", ".join(sorted({name.split(":")[0] for name in rows.sources()}))

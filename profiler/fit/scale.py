"""Lends a fitted device's models to a relative without measurements: ratios carry over, datasheets do not."""

from __future__ import annotations

import msgspec

from echograph.profiler.costs.device import (
    AttentionModel,
    AttentionPass,
    Datasheet,
    DeviceProfile,
    GemmModel,
    GroupedModel,
    HeldOut,
    Label,
    MemoryModel,
)
from echograph.profiler.fit.facts import DeviceFacts

SCALED_SPREAD = 0.15
SCALED_SPREAD_SHORT = 0.3
"""Assumed one-sigma error of a model on a device that it was not fitted on."""

ELEMENT_BYTES = {"fp8": 1.0, "bf16": 2.0, "fp16": 2.0, "tf32": 4.0, "fp32": 4.0}


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
    lent = relative.gemm if relative is not None else {}
    name = facts.relative
    models: dict[str, GemmModel] = {}
    for dtype in facts.peak_TFLOPs:
        if dtype in own:
            models[dtype] = own[dtype]
        elif dtype == "tf32" and "bf16" in own:
            models[dtype] = derive(own["bf16"], dtype, f"assumed: bf16's model at the {dtype} peak")
        elif dtype in lent:
            models[dtype] = msgspec.structs.replace(lent[dtype], label=scaled_label(f"scaled from {name}"))
        elif "bf16" in own:
            models[dtype] = derive(own["bf16"], dtype, f"assumed: bf16's model at the {dtype} peak")
        elif "bf16" in lent:
            models[dtype] = derive(lent["bf16"], dtype, f"scaled from {name}: bf16's model at the {dtype} peak")
    return models


KERNELS = {
    "volta": ("flash1",),
    "ampere": ("flash1", "flash2", "trtllm"),
    "ada": ("flash1", "flash2", "trtllm"),
    "hopper": ("flash1", "flash2", "flash3", "cudnn", "trtllm"),
    "blackwell": ("flash2", "cudnn", "trtllm"),
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

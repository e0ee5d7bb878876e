"""What DeepSpeed's optimizers keep from step to step: flat parameters or shares, masters, moments, gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from echograph.frontend.pytorch import annotate
from echograph.frontend.scripts.recorder import ScriptRecorder

_LISTS = (
    ("bit16_groups_flat", annotate.PARAMETER, "flat"),
    ("fp16_partitioned_groups_flat", annotate.PARAMETER, "share"),
    ("single_partition_of_fp32_groups", annotate.OPTIMIZER_STATE, "master"),
    ("fp32_partitioned_groups_flat", annotate.OPTIMIZER_STATE, "master"),
    ("fp32_groups_flat_partition", annotate.OPTIMIZER_STATE, "master"),
)
"""(attribute of an optimizer, which is a tensor for each of its groups; role; name)."""


def name_memory(engine: Any, recorder: ScriptRecorder) -> None:
    """Tells a recorder what an engine's memory is, between two steps.

    ZeRO keeps the parameters of a group in one flat tensor, or this rank's share of it, and a model's parameters
    are parts of that, or (ZeRO-3) nothing until they are gathered.
    """
    zero = engine.optimizer
    trained = [p for p in engine.module.parameters() if p.requires_grad]
    recorder.memory.trained = sum(getattr(p, "ds_numel", p.numel()) for p in trained)
    for tensor, role, name in _flat(zero):
        recorder.name(tensor, role, name)
        _name_moments(zero, tensor, name, recorder)
    gradients = getattr(zero, "grad_partitions_flat_buffer", None)
    if isinstance(gradients, Tensor):
        recorder.name(gradients, annotate.GRADIENT, "share.grad")
    for name, parameter in engine.module.named_parameters():
        share = getattr(parameter, "ds_tensor", None)
        if isinstance(share, Tensor):
            recorder.name(share, annotate.PARAMETER, f"{name}.share")


def _flat(zero: Any) -> Iterator[tuple[Tensor, str, str]]:
    for attribute, role, name in _LISTS:
        for number, tensor in enumerate(getattr(zero, attribute, ())):
            if isinstance(tensor, Tensor):
                yield tensor, role, f"{name}.{number}"


def _name_moments(zero: Any, master: Tensor, name: str, recorder: ScriptRecorder) -> None:
    states = getattr(zero.optimizer, "state", {})
    for slot, value in states.get(master, {}).items() if master in states else ():
        if isinstance(value, Tensor):
            recorder.name(value, annotate.OPTIMIZER_STATE, f"{name}.{slot}")

"""What DeepSpeed's optimizers keep from step to step: flat parameters or shares, masters, moments, gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from echograph.frontend.deepspeed.offload import is_offloaded
from echograph.frontend.pytorch import annotate
from echograph.frontend.scripts.collectives import ranks_of
from echograph.frontend.scripts.recorder import ScriptRecorder

_PARAMETERS = (("bit16_groups_flat", "flat"), ("fp16_partitioned_groups_flat", "share"))
_MASTERS = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat", "fp32_groups_flat_partition")
_HOST_BUFFERS = (
    "param_buffer_of_bit16_for_cpu_offload_groups",
    "accumulated_grads_in_cpu",
    "temp_grad_buffer_for_cpu_offload",
    "offload_gradient_dict",
)
"""Attributes of ZeRO's optimizers; of the last ones, what they keep where the optimizer is offloaded."""


def name_memory(engine: Any, recorder: ScriptRecorder) -> set[str]:
    """Tells a recorder what an engine's memory is, between two steps.

    ZeRO keeps the parameters of a group in one flat tensor, or this rank's share of it, and a model's parameters
    are parts of that, or (ZeRO-3) nothing until they are gathered.

    Returns:
        The names of what lies on the host.
    """
    zero = engine.optimizer
    trained = [p for p in engine.module.parameters() if p.requires_grad]
    recorder.memory.trained = sum(getattr(p, "ds_numel", p.numel()) for p in trained)
    host: set[str] = set()
    stage, over = engine.zero_optimization_stage(), ranks_of(engine.seq_data_parallel_group)
    for tensor, name in _parameter_memory(zero, engine.module):
        recorder.memory.divide(tensor, [over] if stage == 3 else [])
        recorder.name(tensor, annotate.PARAMETER, name)
        host |= {name} if getattr(zero, "offload_param", False) else set()
    for tensor, role, name in _optimizer_memory(zero):
        if tensor.dim() and role != annotate.BUFFER:
            recorder.memory.divide(tensor, [over] if stage else [])
        recorder.name(tensor, role, name)
        host |= {name} if is_offloaded(engine.zero_offload_optimizer()) else set()
    gradients = getattr(zero, "grad_partitions_flat_buffer", None)
    if isinstance(gradients, Tensor):
        recorder.memory.divide(gradients, [over])
        recorder.name(gradients, annotate.GRADIENT, "share.grad")
    return host


def _parameter_memory(zero: Any, module: Any) -> Iterator[tuple[Tensor, str]]:
    """Flat parameters, shares of them, and shares that have memory of their own, with names."""
    for attribute, name in _PARAMETERS:
        for number, tensor in enumerate(_tensors(getattr(zero, attribute, ()))):
            yield tensor, f"{name}.{number}"
    for path, parameter in module.named_parameters():
        share = getattr(parameter, "ds_tensor", None)
        if isinstance(share, Tensor):
            yield share, f"{path}.share"


def _optimizer_memory(zero: Any) -> Iterator[tuple[Tensor, str, str]]:
    """Tensor, role and name of the masters, their gradients and moments, and of buffers for these."""
    state = getattr(getattr(zero, "optimizer", None), "state", {})
    masters = [tensor for attribute in _MASTERS for tensor in _tensors(getattr(zero, attribute, ()))]
    for number, master in enumerate(masters):
        yield master, annotate.OPTIMIZER_STATE, f"master.{number}"
        if master.grad is not None:
            yield master.grad, annotate.GRADIENT, f"master.{number}.grad"
        for slot, value in state[master].items() if master in state else ():
            if isinstance(value, Tensor):
                yield value, annotate.OPTIMIZER_STATE, f"master.{number}.{slot}"
    for attribute in _HOST_BUFFERS:
        for number, tensor in enumerate(_tensors(getattr(zero, attribute, ()))):
            yield tensor, annotate.BUFFER, f"{attribute}.{number}"


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)

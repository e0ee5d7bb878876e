"""What DeepSpeed's optimizers keep from step to step: flat parameters or shares, masters, moments, gradients.

Which copies of a recorded step go between host and device. In a capture both are one memory, so what lies on the
host is known by name: what an engine that offloads keeps from step to step, and what is made of that alone.
Parameters that lie there are moved to the device to be gathered. Within one memory such a move would be no work:
`FromHost` makes it a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.overrides import TorchFunctionMode

from echograph.frontend.pytorch import annotate
from echograph.frontend.pytorch.call_nodes import is_in_place
from echograph.frontend.scripts.collectives import ranks_of
from echograph.frontend.scripts.recorder import COPY, ScriptRecorder
from echograph.ir.types import CopyDirection

_TO_HOST, _TO_DEVICE = CopyDirection.DEVICE_TO_HOST, CopyDirection.HOST_TO_DEVICE


def is_offloaded(config: Any) -> bool:
    """Whether `offload_optimizer` or `offload_param` of a configuration asks for the host's memory."""
    return config is not None and config.device == "cpu"


class FromHost(TorchFunctionMode):
    """Copies what is moved to the device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        target = kwargs.get("device", args[1] if len(args) > 1 else None)
        if func is not Tensor.to or not isinstance(target, str | torch.device):
            return func(*args, **kwargs)
        (moved,) = args[:1]
        return torch.empty(moved.shape, dtype=moved.dtype, device=target).copy_(moved)


def gathering(original: Callable[..., Any], offloads: Callable[[], bool]) -> Callable[..., Any]:
    """Around a function that gathers parameters.

    Args:
        original: the function.
        offloads: whether they lie on the host.
    """

    def gather(*args: Any, **kwargs: Any) -> Any:
        if not offloads():
            return original(*args, **kwargs)
        with FromHost():
            return original(*args, **kwargs)

    return gather


def mark_copies(graph: Graph, host: Container[str]) -> None:
    """Marks the copies between host and device.

    Args:
        graph: of a recorded step.
        host: names of the placeholders that lie on the host.
    """
    there: set[Node] = set()
    for node in graph.nodes:
        written = node.args[0] if node.op == "call_function" and is_in_place(node) else None
        if node.op == "placeholder":
            lies_there = node.meta[annotate.FQN] in host
        elif isinstance(written, Node):
            lies_there = written in there
            if node.target is torch.ops.aten.copy_.default and lies_there != (node.args[1] in there):
                node.meta[COPY] = _TO_HOST if lies_there else _TO_DEVICE
        else:
            lies_there = bool(node.all_input_nodes) and there.issuperset(node.all_input_nodes)
        if lies_there:
            there.add(node)


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

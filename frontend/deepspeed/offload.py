"""Which copies of a recorded step go between host and device.

In a capture both are one memory, so what lies on the host is known by name: what an engine that offloads keeps
from step to step, and what is made of that alone. Parameters that lie there are moved to the device to be
gathered. Within one memory such a move would be no work: `FromHost` makes it a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.overrides import TorchFunctionMode

from echograph.frontend.pytorch import annotate
from echograph.frontend.pytorch.schema import is_in_place
from echograph.frontend.scripts.recorder import COPY
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

"""Which copies of a recorded step go between host and device.

In a capture both are one memory, so what lies on the host is known by name: what an engine that offloads keeps
from step to step, and what is made of that alone.
"""

from __future__ import annotations

from collections.abc import Container

import torch
from torch.fx import Graph, Node

from echograph.frontend.pytorch import annotate
from echograph.frontend.pytorch.schema import is_in_place
from echograph.frontend.scripts.recorder import COPY
from echograph.ir.types import CopyDirection

_TO_HOST, _TO_DEVICE = CopyDirection.DEVICE_TO_HOST, CopyDirection.HOST_TO_DEVICE


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

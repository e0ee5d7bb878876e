"""Drops what a graph says of the time of communications, so that a cluster's model says it."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import numpy as np

from echograph.ir.columns import Ragged
from echograph.ir.graph import Graph
from echograph.ir.types import COMMUNICATIONS

G = TypeVar("G", bound=Graph)


def forget_communication(graph: G) -> G:
    """The graph without durations of collectives, sends and receives."""
    ops = graph.ops
    dropped = np.isin(ops.kind, COMMUNICATIONS)
    kept = ~dropped[ops.duration.rows]
    lengths = np.where(dropped, 0, ops.duration.lengths)
    table = replace(
        ops,
        duration=Ragged(np.concatenate([[0], np.cumsum(lengths)]), ops.duration.values[kept]),
        duration_device=ops.duration_device[kept],
        duration_source=ops.duration_source[kept],
        duration_samples=ops.duration_samples[kept],
        duration_spread=ops.duration_spread[kept],
    )
    return replace(graph, ops=table)

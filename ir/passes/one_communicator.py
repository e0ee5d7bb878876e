"""Gives each group one stream for its collectives: they share links that a model gives to one at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import numpy as np

from echograph.ir.graph import Graph
from echograph.ir.types import OpKind

G = TypeVar("G", bound=Graph)


def one_communicator(graph: G) -> G:
    """The graph with the collectives of each group on a stream of their own, in the order of the program.

    Threads of a process (gloo's workers) or several streams run collectives of one group side by side, and each
    then takes longer. A model that says how long one takes alone is right about their sum if they follow each
    other.
    """
    ops = graph.ops
    rows = np.flatnonzero(ops.kind == OpKind.COLLECTIVE)
    used, place = np.unique(ops.group[rows], return_inverse=True)
    stream = ops.stream.copy()
    stream[rows] = len(graph.streams) + place
    names = tuple(f"communicator {graph.groups[group].name}" for group in used.tolist())
    return replace(graph, streams=(*graph.streams, *names), ops=replace(ops, stream=stream))

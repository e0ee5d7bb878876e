"""Puts durations on operations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from echograph.ir.columns import NONE, Float32, Int8, Int64, Ragged
from echograph.ir.graph import Graph

G = TypeVar("G", bound=Graph)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Annotate:
    """Adds one duration to each operation that has none for the device yet.

    Attributes:
        device: the device that the durations are of.
        picoseconds: int64 array, one a row of the operation table; -1 adds nothing.
        source: uint8 array of `types.Source` values.
        spread: float32 array of relative standard errors.
        samples: int64 array of measurements behind each.
    """

    device: str
    picoseconds: Int64
    source: Int8
    spread: Float32
    samples: Int64

    def __call__(self, graph: G) -> G:
        """The graph with the durations."""
        ops = graph.ops
        known, _, _ = ops.duration_on(self.device)
        rows = np.flatnonzero((self.picoseconds != NONE) & (known == NONE))
        if not len(rows):
            return graph
        strings = ops.strings if self.device in ops.strings else (*ops.strings, self.device)
        lengths = ops.duration.lengths.copy()
        lengths[rows] += 1
        at = ops.duration.offsets[rows + 1]
        table = replace(
            ops,
            strings=strings,
            duration=Ragged(
                np.concatenate([[0], np.cumsum(lengths)]),
                np.insert(ops.duration.values, at, self.picoseconds[rows]),
            ),
            duration_device=np.insert(ops.duration_device, at, strings.index(self.device)),
            duration_source=np.insert(ops.duration_source, at, self.source[rows]),
            duration_samples=np.insert(ops.duration_samples, at, self.samples[rows]),
            duration_spread=np.insert(ops.duration_spread, at, self.spread[rows]),
        )
        return replace(graph, ops=table, tensors=replace(graph.tensors, strings=strings))

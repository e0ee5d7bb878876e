"""Which part of a pipeline's step every operation runs in, and what of backward only weight gradients need.

A schedule that splits backward runs it as two passes (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024,
section 1). B makes what is sent on: an operation is in B if a gradient that some chunk sends depends on it, in any
instance of its block. The rest of backward is in W: gradients of weights, biases and embeddings. A kernel that
makes both kinds at once, as that of a layer norm's backward, is in B; so is all recomputation.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from echograph.ir import types as t
from echograph.ir.columns import NONE
from echograph.ir.graph import StepGraph
from echograph.ir.passes.pipeline_routes import Part, Routes, part_of


def parts(graph: StepGraph, routes: Routes, *, split: bool) -> list[Part]:
    """The part of every operation of the table; `split` divides backward in two."""
    found = [part_of(graph, row) for row in range(len(graph.ops))]
    if split:
        needed = _InputGradients(graph).needed(routes)
        for row in range(len(found)):
            if graph.ops.phase[row] == t.Phase.BACKWARD and row not in needed:
                found[row] = Part.WEIGHT
    return found


class _InputGradients:
    """Walks from what is sent to everything before it in the backward pass."""

    def __init__(self, graph: StepGraph) -> None:
        self.graph, self.views = graph, graph.ops.is_view
        self.readers: dict[int, list[int]] = defaultdict(list)
        inputs = graph.ops.inputs
        for tensor, row in zip(graph.root[inputs.values].tolist(), inputs.rows.tolist(), strict=True):
            self.readers[tensor].append(row)
        self.bound: dict[int, set[int]] = defaultdict(set)
        for block in graph.blocks:
            ports = [i for i in block.tensors if graph.tensors.port[i]]
            for instance in block.instances:
                for port, bound in zip(ports, instance.bindings, strict=True):
                    self.bound[port].add(bound)

    def needed(self, routes: Routes) -> set[int]:
        """Rows of the operations that something sent depends on, and of those that must stay beside them."""
        graph = self.graph
        left = [row for tensors in routes.down for tensor in tensors for row in self._makers(tensor)]
        # What makes nothing, as a wait does, is felt by what follows on its stream.
        silent = graph.ops.outputs.lengths == 0
        left += np.flatnonzero(silent | (graph.ops.phase == t.Phase.RECOMPUTE)).tolist()
        found: set[int] = set()
        while left:
            row = left.pop()
            if row not in found and part_of(graph, row) == Part.BACKWARD:
                found.add(row)
                left += graph.ops.deps.row(row)
                left += [maker for tensor in graph.ops.inputs.row(row) for maker in self._of(tensor)]
                left += self._read_before(row)
        return found

    def _makers(self, tensor: int) -> list[int]:
        """The operation behind a tensor id."""
        source = self.graph.source(*self.graph.locate_tensor(tensor))
        return [] if source is None else [source[2]]

    def _of(self, tensor: int) -> list[int]:
        """The operations that make what a row of the tensor table is, in any instance."""
        origin = int(self.graph.origin[tensor])
        if self.graph.tensors.port[origin]:
            return [maker for bound in self.bound[origin] for maker in self._makers(bound)]
        maker = int(self.graph.maker[origin])
        return [] if maker == NONE else [maker]

    def _read_before(self, row: int) -> list[int]:
        """What reads memory that an operation then overwrites: it may not run after it."""
        graph, found = self.graph, list[int]()
        if self.views[row]:
            return found
        for tensor in graph.ops.outputs.row(row):
            if graph.tensors.alias_of[tensor] == NONE:
                continue
            root = int(graph.root[tensor])
            found += [reader for reader in self.readers[root] if reader < row]
            for bound in self.bound.get(root, ()):
                found += self.readers[int(graph.root[graph.locate_tensor(bound)[2]])]
        return found

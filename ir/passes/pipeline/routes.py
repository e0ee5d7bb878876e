"""Which values cross from chunk to chunk of a pipeline, and when; which part of the step every operation runs in.

A value goes from neighbour to neighbour: what forward makes goes up, with the forward pass, to every chunk that
reads it; what backward makes goes down, with the backward pass. A chunk that only passes it on receives it too.

A schedule that splits backward runs it as two passes (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024,
section 1). B makes what is sent on: an operation is in B if a gradient that some chunk sends depends on it, in any
instance of its block. The rest of backward is in W: gradients of weights, biases and embeddings. A kernel that
makes both kinds at once, as that of a layer norm's backward, is in B; so is all recomputation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from echograph.errors import PlanError
from echograph.ir import types as t
from echograph.ir.columns import NONE
from echograph.ir.graph import StepGraph
from echograph.ir.passes.pipeline.placement import Partition


class PipelinePhase(IntEnum):
    """The part of the step that an operation runs in: once a micro-batch, or once a step.

    `WEIGHT` is the end of backward, where a schedule runs it as a pass of its own; for all else it is backward.
    """

    FORWARD = 0
    BACKWARD = 1
    WEIGHT = 2
    UPDATE = 3


def part_of(graph: StepGraph, row: int) -> PipelinePhase:
    """The part of an operation; recomputation belongs to the backward pass."""
    phase = int(graph.ops.phase[row])
    return {t.Phase.FORWARD: PipelinePhase.FORWARD, t.Phase.OPTIMIZER: PipelinePhase.UPDATE}.get(
        t.Phase(phase), PipelinePhase.BACKWARD
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """Tensor ids that each chunk receives, in the order of sending.

    Attributes:
        up: for every chunk, what it receives from the chunk before it in its forward pass.
        down: for every chunk, what it receives from the chunk after it in its backward pass.
    """

    up: tuple[tuple[int, ...], ...]
    down: tuple[tuple[int, ...], ...]


def route(graph: StepGraph, placement: Partition) -> Routes:
    """Finds what crosses.

    Raises:
        PlanError: a value would have to go against the direction of its pass, or a parameter is shared by layers
            of several chunks.
    """
    up: list[set[int]] = [set() for _ in range(placement.chunks)]
    down: list[set[int]] = [set() for _ in range(placement.chunks)]
    readers: dict[int, dict[int, PipelinePhase]] = defaultdict(dict)
    for tensor, chunk, part in _reads(graph, placement):
        readers[tensor][chunk] = min(part, readers[tensor].get(chunk, part))
    for tensor, parts in readers.items():
        source = graph.source(*graph.locate_tensor(tensor))
        homes = _homes(graph, placement, tensor)
        for chunk, part in parts.items():
            if homes is None or chunk in homes:
                continue
            if source is not None and part_of(graph, source[2]) == PipelinePhase.UPDATE:
                continue  # stages agree on it when their passes are done (`placement.Optimizer`)
            _check_crosses(graph, tensor)
            assert source is not None
            made, home = part_of(graph, source[2]), min(homes, default=chunk)
            if made == PipelinePhase.FORWARD and home < chunk and part != PipelinePhase.UPDATE:
                for hop in range(home + 1, chunk + 1):
                    up[hop].add(tensor)
            elif made != PipelinePhase.UPDATE and home > chunk and part == PipelinePhase.BACKWARD:
                for hop in range(chunk, home):
                    down[hop].add(tensor)
            else:
                made_in, read_in = f"chunk {home}'s {made.name.lower()}", f"chunk {chunk}'s {part.name.lower()}"
                raise PlanError(
                    f"tensor {_name(graph, tensor)} of pipeline {made_in} is read in {read_in}, which no schedule "
                    "can do: give other layers or fewer stages"
                )
    return Routes(up=tuple(tuple(sorted(s)) for s in up), down=tuple(tuple(sorted(s)) for s in down))


def _reads(graph: StepGraph, placement: Partition) -> Iterator[tuple[int, int, PipelinePhase]]:
    """(tensor id, chunk, part) of what operations read: those of the main block, and ports of the others."""
    for row, chunks in placement.ops.items():
        for chunk in chunks:
            for tensor in graph.ops.inputs.row(row):
                term = placement.terms.get((chunk, tensor), tensor)
                yield graph.tensor_id(0, 0, term), chunk, part_of(graph, row)
    parts = [_port_parts(graph, block.ops) for block in graph.blocks]
    for (number, index), chunk in placement.instances.items():
        ports = [i for i in graph.blocks[number].tensors if graph.tensors.port[i]]
        for port, bound in zip(ports, graph.blocks[number].instances[index].bindings, strict=True):
            yield bound, chunk, parts[number].get(port, PipelinePhase.FORWARD)


def _port_parts(graph: StepGraph, ops: range) -> dict[int, PipelinePhase]:
    """For every port that operations of a block read, the part in which it is read first."""
    parts: dict[int, PipelinePhase] = {}
    for row in ops:
        for tensor in graph.ops.inputs.row(row):
            origin = int(graph.origin[tensor])
            if graph.tensors.port[origin]:
                parts[origin] = min(part_of(graph, row), parts.get(origin, PipelinePhase.UPDATE))
    return parts


def _homes(graph: StepGraph, placement: Partition, tensor: int) -> frozenset[int] | None:
    """The chunks that have a value without receiving it; None where all do."""
    source = graph.source(*graph.locate_tensor(tensor))
    if source is not None:
        return placement.of(source)
    block, instance, _ = graph.value(*graph.locate_tensor(tensor))
    return frozenset((placement.instances[block, instance],)) if block else None


def _check_crosses(graph: StepGraph, tensor: int) -> None:
    """Only what belongs to one micro-batch can be sent; an input of the step is everywhere."""
    _, _, row = graph.locate_tensor(tensor)
    if graph.tensors[row].role.persistent:
        raise PlanError(
            f"{graph.tensors[row].role.name.lower()} {_name(graph, tensor)} is used by layers of several pipeline "
            "stages: put them on one stage"
        )
    if graph.maker[graph.value(*graph.locate_tensor(tensor))[2]] == NONE:
        raise PlanError(
            f"input {_name(graph, tensor)} is held by a layer of another pipeline stage: fold differently"
        )


def _name(graph: StepGraph, tensor: int) -> str:
    block, instance, row = graph.locate_tensor(tensor)
    return graph.tensors[row].name.replace("{}", graph.blocks[block].instances[instance].label)


def parts(graph: StepGraph, routes: Routes, *, split: bool) -> list[PipelinePhase]:
    """The part of every operation of the table; `split` divides backward in two."""
    found = [part_of(graph, row) for row in range(len(graph.ops))]
    if split:
        needed = _InputGradients(graph).needed(routes)
        for row in range(len(found)):
            if graph.ops.phase[row] == t.Phase.BACKWARD and row not in needed:
                found[row] = PipelinePhase.WEIGHT
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
            if row not in found and part_of(graph, row) == PipelinePhase.BACKWARD:
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

"""The same step of a model with more layers of the kind that it repeats.

A folded capture has its layers as instances of one block. Each instance reads its neighbours, or what all of them
share, so more of them are more instances: bound to their own neighbours as the captured ones are to theirs. What
else knows how many layers there are is the launches of the optimizer that handle the parameters of all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import ClassVar

import numpy as np

from echograph.errors import PlanError
from echograph.ir.builder import GraphBuilder
from echograph.ir.columns import NONE
from echograph.ir.graph import Block, Instance, StepGraph
from echograph.ir.passes.rewrite import Call, copy_rows, empty_copy
from echograph.ir.types import Compute, MultiTensor, Op, TensorRole

FEWEST = 4
"""Layers of a capture that show the pattern: a first and a last one, and two between them to compare."""
MAX_LAYERS = 10_000
InstanceRow = tuple[int, int, int]
"""Block, instance and row of the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """The step of a deeper model.

    Attributes:
        layers: of the model; at least as many as were captured.
    """

    name: ClassVar[str] = "depth"

    layers: int

    def __call__(self, graph: StepGraph) -> StepGraph:
        """The step with `layers` layers: that of a capture of so many.

        Raises:
            PlanError: fewer layers than captured or too many, or the capture does not repeat one layer, shows
                fewer than four of it, or its layers do not read each other in one way.
        """
        block = _repeated(graph)
        captured = len(graph.blocks[block].instances)
        if not captured <= self.layers <= MAX_LAYERS:
            raise PlanError(f"{self.layers} layers: the capture has {captured}: give {captured} to {MAX_LAYERS:,}")
        if self.layers == captured:
            return graph
        if captured < FEWEST:
            raise PlanError(f"a capture of {captured} layers does not show how they repeat: capture {FEWEST}")
        builder = empty_copy(graph)
        more = self.layers - captured
        builder.workload = replace(
            graph.workload, parameters=graph.workload.parameters + more * _parameters(graph, graph.blocks[block])
        )
        _copy_rows(graph, builder, _parts(graph, block, more))
        for number, instance in _Instances(graph, block, self.layers).all():
            builder.instance(number, instance.label, bindings=instance.bindings, op_bindings=instance.op_bindings)
        builder.program(_calls(graph, block, self.layers))
        return builder.build(StepGraph)


def _repeated(graph: StepGraph) -> int:
    """The number of the one block that repeats."""
    found = [n for n, block in enumerate(graph.blocks) if len(block.instances) > 1]
    if len(found) != 1:
        raise PlanError(f"{graph.name}: {len(found)} kinds of layers repeat: capture the model as deep as it is")
    labels = [instance.label for instance in graph.blocks[found[0]].instances]
    if labels != [str(i) for i in range(len(labels))]:
        raise PlanError(f"{graph.name}: its layers are not numbered from 0: capture the model as deep as it is")
    return found[0]


def _parameters(graph: StepGraph, block: Block) -> int:
    """Trainable elements of a layer."""
    tensors = (graph.tensors[i] for i in block.tensors)
    return sum(
        int(np.prod(tensor.shape, dtype=np.int64))
        for tensor in tensors
        if tensor.role == TensorRole.PARAMETER and not tensor.port and tensor.alias_of is None
    )


def _parts(graph: StepGraph, block: int, more: int) -> dict[int, int]:
    """For every share of a multi-tensor launch, how many there are with more layers."""
    layers, of_block = len(graph.blocks[block].instances), graph.blocks[block].ops
    shares = {i for i, value in enumerate(graph.ops.attribute_values) if isinstance(value, MultiTensor)}
    found: dict[int, int] = {}
    launch: list[int] = []
    for _, begin, end, _, _ in graph.programs[0].calls.tolist():
        for row in range(begin, end):
            value = graph.ops.attributes[row]
            if value == NONE or value not in shares:
                continue
            launch.append(row)
            attributes = graph.ops.attribute_values[value]
            assert isinstance(attributes, MultiTensor)
            if len(launch) < attributes.parts:
                continue
            of_layers = sum(r in of_block for r in launch)
            if of_layers % layers or len(set(graph.ops.name[launch].tolist())) != 1:
                raise PlanError(f"{graph.name}: layers share launches unevenly: capture it as deep as it is")
            found |= dict.fromkeys(launch, attributes.parts + more * of_layers // layers)
            launch = []
    return found


def _copy_rows(graph: StepGraph, builder: GraphBuilder, parts: dict[int, int]) -> None:
    for number, block in enumerate(graph.blocks):
        if number:
            builder.begin_block(block.name)
        launches = (op for op in graph.ops[block.ops.start : block.ops.stop] if op.id in parts)
        copy_rows(builder, graph, block, {op.id: _launch(op, parts[op.id]) for op in launches})


def _launch(op: Op, parts: int) -> MultiTensor:
    assert isinstance(op, Compute) and isinstance(op.attributes, MultiTensor)
    return replace(op.attributes, parts=parts)


def _calls(graph: StepGraph, block: int, layers: int) -> Iterator[Call]:
    """The program, with runs over all captured layers made longer."""
    captured = list(range(len(graph.blocks[block].instances)))
    calls: list[Call] = [tuple(call) for call in graph.programs[0].calls.tolist()]
    for (number, begin, end, micro_batch), run in groupby(calls, key=lambda c: (c[0], c[1], c[2], c[4])):
        instances = [instance for _, _, _, instance, _ in run]
        order: list[int] | range = instances
        if number == block:
            if instances not in (captured, captured[::-1]):
                raise PlanError(f"{graph.name}: its layers run out of order: capture it as deep as it is")
            order = range(layers) if instances == captured else range(layers - 1, -1, -1)
        for instance in order:
            yield number, begin, end, instance, micro_batch


class _Instances:
    """The instances of all blocks, bound anew.

    Args:
        graph: the capture.
        block: the block that repeats.
        layers: how often it is to stand.
    """

    def __init__(self, graph: StepGraph, block: int, layers: int) -> None:
        self.graph, self.block, self.layers = graph, block, layers
        self.captured = len(graph.blocks[block].instances)
        self.more = layers - self.captured

    def all(self) -> Iterator[tuple[int, Instance]]:
        """Each with the number of its block, in order."""
        for number, block in enumerate(self.graph.blocks):
            if number != self.block:
                yield from ((number, self._outside(instance)) for instance in block.instances)
                continue
            first, *inner, last = block.instances
            pattern = self._pattern(inner)
            yield number, self._moved(first, 0, pattern)
            yield from ((number, self._moved(inner[0], by, pattern)) for by in range(self.layers - 2))
            yield number, self._moved(last, self.more, pattern)

    def _pattern(self, inner: list[Instance]) -> list[int]:
        """For every binding, how far the instance moves that it is of, from a layer to the next: 1, or 0."""
        steps: list[int] = []
        places = [[self._place(kind, i) for kind, i in _bound(instance)] for instance in inner]
        for slot in zip(*places, strict=True):
            by = {after[1] - before[1] for before, after in pairwise(slot)}
            if len({(block, row) for block, _, row in slot}) != 1 or by not in ({0}, {1}):
                self._refuse()
            steps.append(by.pop())
        return steps

    def _moved(self, like: Instance, by: int, pattern: list[int]) -> Instance:
        """A layer bound as a captured one `by` layers before it is."""
        places = [self._place(kind, i) for kind, i in _bound(like)]
        moves = [
            step * by if block == self.block else 0 for (block, _, _), step in zip(places, pattern, strict=True)
        ]
        return self._instance(like, str(int(like.label) + by), places, moves)

    def _outside(self, instance: Instance) -> Instance:
        """An instance of another block, which may know the first layer and the last."""
        places = [self._place(kind, i) for kind, i in _bound(instance)]
        if any(block == self.block and layer not in (0, self.captured - 1) for block, layer, _ in places):
            self._refuse()
        moves = [self.more if block == self.block and layer else 0 for block, layer, _ in places]
        return self._instance(instance, instance.label, places, moves)

    def _instance(self, like: Instance, label: str, places: list[InstanceRow], moves: list[int]) -> Instance:
        ids = [
            self._identity(kind, block, instance + by, row)
            for (kind, _), (block, instance, row), by in zip(_bound(like), places, moves, strict=True)
        ]
        count = len(like.bindings)
        return Instance(label=label, bindings=tuple(ids[:count]), op_bindings=tuple(ids[count:]))

    def _place(self, kind: str, identity: int) -> InstanceRow:
        graph = self.graph
        return graph.locate_tensor(identity) if kind == "tensor" else graph.locate_op(identity)

    def _identity(self, kind: str, block: int, instance: int, row: int) -> int:
        """The id in the deeper graph: blocks after the one that repeats begin later."""
        graph = self.graph
        bases = graph.tensor_bases if kind == "tensor" else graph.op_bases
        base, count = bases[block]
        place = int(graph.local_position[row]) if kind == "tensor" else row - graph.blocks[block].ops.start
        return base + (self.more * bases[self.block][1] if block > self.block else 0) + instance * count + place

    def _refuse(self) -> None:
        raise PlanError(f"{self.graph.name}: its layers do not repeat in one way: capture it as deep as it is")


def _bound(instance: Instance) -> list[tuple[str, int]]:
    """All that an instance is bound to, tensors and then operations."""
    return [*(("tensor", i) for i in instance.bindings), *(("op", i) for i in instance.op_bindings)]

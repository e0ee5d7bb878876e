"""Which chunk of a pipeline runs which operation of a step.

A chunk is a run of layers; chunk k feeds chunk k + 1. Layers are what stands under one numbered component of a
module path (`encoder.layer.3`), in the order of their first forward operation. An instance of a repeated block
belongs to one layer; an operation of the main block goes

- with its layer, if it is in one;
- forward otherwise: with the layer before it in the program, to the first chunk where there is none and to the
  last one after all layers; but to every chunk that reads it, if it depends on no parameter and no layer (position
  ids, rotary tables, masks);
- backward otherwise: with the forward operation that it differentiates;
- optimizer: with the parameter that it updates, to every chunk that holds the parameter (`pipeline_optimizer`).

A parameter that several chunks read is on each of them. The additions that sum its gradient over chunks do not
run: each chunk keeps its own share, and the shares are all-reduced (Shoeybi et al., "Megatron-LM", 2019; the
embedding group of Megatron-LM).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from echograph.errors import PlanError
from echograph.ir import types as t
from echograph.ir.columns import NONE
from echograph.ir.graph import Graph, StepGraph
from echograph.ir.passes.data_parallel_gradients import final_gradients

Chunks = frozenset[int]


@dataclass(slots=True, kw_only=True)
class Placement:
    """Where everything runs.

    Attributes:
        chunks: number of chunks.
        instances: chunk of each (block, instance) other than the main block's.
        ops: for every operation of the main block, the chunks that run it.
        holders: for every parameter of the main block that is used, the chunks that hold a copy.
        shares: for (chunk, gradient of the main block), the tensor that holds the chunk's share of it, where the
            sum over chunks is left to an all-reduce.
        terms: the same for every sum within these gradients, for the operations that read it.
        stagewide: operations of the optimizer that every stage runs, in its first chunk.
        totals: those of them whose result is the stage's share of a sum over the stages.
        flags: for operations that complete a flag which all stages have a share of, the tensor id of the flag.
        flag_memory: (block, instance, tensor) of the memory of these flags.
    """

    chunks: int
    instances: dict[tuple[int, int], int] = field(default_factory=dict)
    ops: dict[int, Chunks] = field(default_factory=dict)
    holders: dict[int, Chunks] = field(default_factory=dict)
    shares: dict[tuple[int, int], int] = field(default_factory=dict)
    terms: dict[tuple[int, int], int] = field(default_factory=dict)
    stagewide: set[int] = field(default_factory=set)
    totals: set[int] = field(default_factory=set)
    flags: dict[int, int] = field(default_factory=dict)
    flag_memory: set[tuple[int, int, int]] = field(default_factory=set)

    def of(self, source: tuple[int, int, int]) -> Chunks:
        """The chunks that run (block, instance, operation)."""
        block, instance, op = source
        return self.ops[op] if block == 0 else frozenset((self.instances[block, instance],))


def place(graph: StepGraph, chunks: int, layers: tuple[int, ...] | None) -> Placement:
    """Places the forward and backward operations of a step on chunks.

    Args:
        graph: a folded step graph.
        chunks: number of chunks.
        layers: layers of each chunk; None splits evenly, and the first take one more where it does not divide. The
            first chunk may have none, which leaves it the embedding, and the last, which leaves it the head.

    Raises:
        PlanError: there are fewer layers than chunks, `layers` do not add up, or operations cannot be placed.
    """
    if len(odd := np.flatnonzero(graph.ops.phase == t.Phase.OTHER)):
        name = graph.strings[graph.ops.name[odd[0]]]
        raise PlanError(
            f"operation {odd[0]} ({name}) has no phase: a pipeline needs forward, backward or optimizer"
        )
    found = layer_names(graph)
    return _Placer(graph, chunks, _split(found, chunks, layers)).place()


def memory_of(graph: Graph, block: int, instance: int, tensor: int) -> tuple[int, int, int]:
    """(block, instance, tensor) that owns the memory behind a tensor, through aliases and ports."""
    while graph.tensors.port[tensor := int(graph.root[tensor])]:
        block, instance, tensor = graph.locate_tensor(graph.tensor_id(block, instance, tensor))
    return block, instance, tensor


def layer_of(module: str, label: str = "") -> str | None:
    """The layer that a module belongs to: its path to the first numbered component; None where there is none."""
    parts = module.replace("{}", label).split(".") if label else module.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return None if number is None else ".".join(parts[: number + 1])


def layer_names(graph: StepGraph) -> list[str]:
    """All layers, by the paths of their modules, in the order of their first forward operation."""
    found: dict[str | None, None] = {}
    for block, begin, end, instance, _ in graph.programs[0].calls.tolist():
        for row in range(begin, end) if block == 0 else (begin,):
            if graph.ops.phase[row] == t.Phase.FORWARD:
                label = graph.blocks[block].instances[instance].label
                found.setdefault(layer_of(graph.strings[graph.ops.module[row]], label))
    return [name for name in found if name is not None]


def _split(names: list[str], chunks: int, layers: tuple[int, ...] | None) -> dict[str, int]:
    """The chunk of every layer."""
    if layers is None:
        if chunks > len(names):
            raise PlanError(
                f"{chunks} pipeline chunks, but the model has {len(names)} layers: use {len(names)} or fewer"
            )
        least, more = divmod(len(names), chunks)
        layers = tuple(least + (chunk < more) for chunk in range(chunks))
    ends = min(layers[0], layers[-1]) if layers else -1
    middle = min(layers[1:-1], default=1)
    if len(layers) != chunks or sum(layers) != len(names) or not names or ends < 0 or middle < 1:
        given = ", ".join(map(str, layers))
        raise PlanError(
            f"layers ({given}): give {chunks} numbers of 1 or more, 0 at the ends alone, that add up to the "
            f"model's {len(names)} layers{_near(layers, chunks, len(names))}"
        )
    number = [chunk for chunk, count in enumerate(layers) for _ in range(count)]
    return dict(zip(names, number, strict=True))


def _near(layers: tuple[int, ...], chunks: int, total: int) -> str:
    """The split that is nearest to one of the right length: too many layers are taken from the last chunks."""
    near = [max(1, count) for count in layers]
    if len(near) != chunks or total < chunks:
        return ""
    near[-1] += max(0, total - sum(near))
    for chunk in reversed(range(chunks)):
        near[chunk] = max(1, near[chunk] - max(0, sum(near) - total))
    return f", such as {', '.join(map(str, near))}"


class _Placer:
    def __init__(self, graph: StepGraph, chunks: int, layers: dict[str, int]) -> None:
        self.graph, self.layers = graph, layers
        self.placement = Placement(chunks=chunks)
        self.main = graph.blocks[0].ops

    def place(self) -> Placement:
        graph, placement = self.graph, self.placement
        for number, block in enumerate(graph.blocks[1:], 1):
            module = graph.strings[graph.ops.module[block.ops.start]]
            for index, instance in enumerate(block.instances):
                placement.instances[number, index] = self.layers[str(layer_of(module, instance.label))]
        common = self._common()
        home = self._forward_and_backward()
        placement.ops |= {row: frozenset((chunk,)) for row, chunk in home.items() if row not in common}
        self._replicate(common, home)
        _Gradients(graph, placement).share()
        self._hold()
        return placement

    def _common(self) -> set[int]:
        """Forward operations of the main block that depend on no parameter and no layer."""
        graph, common = self.graph, set[int]()
        fixed = (t.TensorRole.INPUT, t.TensorRole.BUFFER)
        for row in self.main:
            if graph.ops.phase[row] != t.Phase.FORWARD or graph.ops.kind[row] != t.OpKind.COMPUTE:
                continue
            origins = [int(graph.origin[tensor]) for tensor in graph.ops.inputs.row(row)]
            if all(
                int(graph.maker[i]) in common
                or (graph.maker[i] == NONE and not graph.tensors.port[i] and graph.tensors.role[i] in fixed)
                for i in origins
            ):
                common.add(row)
        return common

    def _forward_and_backward(self) -> dict[int, int]:
        """The chunk of every operation of the main block before the optimizer's."""
        graph, home, current = self.graph, dict[int, int](), 0
        final, ended = next(reversed(self.layers)), False
        for block, begin, end, instance, _ in graph.programs[0].calls.tolist():
            if block:
                current = self.placement.instances[block, instance]
                module = graph.strings[graph.ops.module[begin]]
                ended |= layer_of(module, graph.blocks[block].instances[instance].label) == final
                continue
            for row in range(begin, end):
                if graph.ops.phase[row] == t.Phase.OPTIMIZER:
                    continue
                layer = str(layer_of(graph.strings[graph.ops.module[row]]))
                own = self.layers.get(layer)
                if own is not None:
                    current, ended = own, ended or layer == final
                elif graph.ops.phase[row] == t.Phase.FORWARD and ended:
                    own = current = self.placement.chunks - 1
                elif graph.ops.phase[row] != t.Phase.FORWARD:
                    own = self._of_forward_op(row, home)
                home[row] = current if own is None else own
        return home

    def _of_forward_op(self, row: int, home: dict[int, int]) -> int | None:
        forward = int(self.graph.ops.forward_op[row])
        if forward == NONE:
            return None
        if forward < NONE:
            identity = self.graph.blocks[0].instances[0].op_bindings[-2 - forward]
            block, instance, forward = self.graph.locate_op(identity)
            if block:
                return self.placement.instances[block, instance]
        return home.get(forward)

    def _replicate(self, common: set[int], home: dict[int, int]) -> None:
        """Common operations run on every chunk that reads them; what nothing reads, where it stands."""
        graph, placement = self.graph, self.placement
        wanted: dict[int, set[int]] = defaultdict(set)
        for (block, instance), chunk in placement.instances.items():
            for bound in graph.blocks[block].instances[instance].bindings:
                source = graph.source(*graph.locate_tensor(bound))
                if source is not None and source[0] == 0:
                    wanted[source[2]].add(chunk)
        for row in reversed(self.main):
            if row in common:
                placement.ops[row] = frozenset(wanted[row] or {home[row]})
            if row in placement.ops:
                for tensor in graph.ops.inputs.row(row):
                    source = graph.source(0, 0, tensor)
                    if source is not None and source[2] in common and source[0] == 0:
                        wanted[source[2]] |= placement.ops[row]

    def _hold(self) -> None:
        """Which chunks read which parameter of the main block."""
        graph, placement = self.graph, self.placement
        held: dict[int, set[int]] = defaultdict(set)
        for row, chunks in placement.ops.items():
            for tensor in graph.ops.inputs.row(row):
                if graph.tensors.role[tensor] == t.TensorRole.PARAMETER and graph.maker[tensor] == NONE:
                    held[int(graph.root[tensor])] |= chunks
        for (block, instance), chunk in placement.instances.items():
            for bound in graph.blocks[block].instances[instance].bindings:
                owner, _, tensor = graph.locate_tensor(bound)
                parameter = graph.tensors.role[tensor] == t.TensorRole.PARAMETER and graph.maker[tensor] == NONE
                if owner == 0 and parameter:
                    held[int(graph.root[tensor])].add(chunk)
        placement.holders = {tensor: frozenset(chunks) for tensor, chunks in held.items()}


class _Gradients:
    """Splits sums of gradients that cross chunks."""

    def __init__(self, graph: StepGraph, placement: Placement) -> None:
        self.graph, self.placement = graph, placement

    def share(self) -> None:
        """Fills `placement.shares`, and places the additions where both sides are."""
        graph, placement = self.graph, self.placement
        main = graph.blocks[0].tensors
        for gradient in (tensor for tensor in final_gradients(graph) if tensor in main):
            chunks = self._chunks(gradient)
            if len(chunks) > 1:
                for chunk in chunks:
                    placement.shares[chunk, gradient] = self._share(gradient, chunk)
            self._place(gradient)

    def _sum(self, tensor: int) -> tuple[int, int] | None:
        """What an addition of two gradients adds; None where the tensor is no such sum."""
        maker = int(self.graph.maker[tensor])
        if maker == NONE or self.graph.ops.phase[maker] != t.Phase.BACKWARD:
            return None
        inputs = self.graph.ops.inputs.row(maker)
        name = self.graph.strings[self.graph.ops.name[maker]]
        return (inputs[0], inputs[1]) if name == "aten.add" and len(inputs) == 2 else None

    def _chunks(self, tensor: int) -> Chunks:
        """The chunks that the terms of a sum are made on."""
        if added := self._sum(tensor):
            return self._chunks(added[0]) | self._chunks(added[1])
        source = self.graph.source(0, 0, tensor)
        return frozenset() if source is None else self.placement.of(source)

    def _share(self, tensor: int, chunk: int) -> int:
        """The tensor that holds a chunk's terms of a sum."""
        if added := self._sum(tensor):
            here = [side for side in added if chunk in self._chunks(side)]
            return tensor if len(here) == 2 else self._share(here[0], chunk)
        if self.graph.tensors.port[self.graph.root[tensor]]:
            name = self.graph.tensors[tensor].name
            raise PlanError(f"gradient {name} is summed over layers of several stages: use fewer stages")
        return tensor

    def _place(self, tensor: int) -> None:
        """An addition runs where both of its sides are; elsewhere one side, or none, is what there is of it."""
        if added := self._sum(tensor):
            both = self._chunks(added[0]) & self._chunks(added[1])
            for chunk in self._chunks(tensor) - both:
                self.placement.terms[chunk, tensor] = self._share(tensor, chunk)
            for side in added:
                self._place(side)
            self.placement.ops[int(self.graph.maker[tensor])] = both

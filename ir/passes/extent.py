"""Finds where the batch, or the sequence, lies in every tensor of a step.

It begins with the inputs, and follows the extent through all operations, both ways, until nothing more is found
(`extent_rules`). What is not found does not carry it: parameters, and what is made of them alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from echograph.errors import PlanError
from echograph.ir import types as t
from echograph.ir.columns import NONE
from echograph.ir.graph import StepGraph
from echograph.ir.passes.extent_rules import COLLECTIVES, Ambiguous, Place, Shape, Site, follow

_READ_IN_PART = frozenset(("slice", "narrow", "select", "index", "gather", "embedding", "expand"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """What is looked for.

    Attributes:
        name: for messages: "batch", "sequence".
        size: the extent in the inputs.
        dim: which dim of the inputs it is.
        advice: what to do where it cannot be told apart.
    """

    name: str
    size: int
    dim: int
    advice: str


class Carriers:
    """The place of an extent in each tensor, by row of the tensor table.

    Rows are common to the instances of a block, which must agree.

    Args:
        graph: the step.
        extent: what is looked for.

    Raises:
        PlanError: the inputs lack it, dims of equal extent cannot be told apart, or a parameter would carry it.
    """

    def __init__(self, graph: StepGraph, extent: Extent) -> None:
        self.graph, self.extent = graph, extent
        self.places: dict[int, Place] = {}
        self._touching = _touching(graph)
        self._bound = _bound(graph)
        self._parts = tuple(axis.size for axis in graph.mesh if axis.size > 1)
        self._shapes: dict[int, Shape] = {}
        self._todo: list[int] = []
        for index in _inputs(graph, extent):
            self._set(index, Place(extent.dim), None)
        if not self.places:
            raise PlanError(f"no input of the step has the {extent.name} of {extent.size} as dim {extent.dim}")
        self._exhaust()
        for row in self._unread():
            self._set(row, Place(extent.dim), None)
        self._exhaust()

    def carried(self, rows: Iterable[int]) -> bool:
        """Whether any of some tensors carries the extent."""
        return any(row in self.places for row in rows)

    def resized(self, row: int, size: int) -> Shape:
        """Shape of a tensor with another extent.

        Args:
            row: of the tensor table.
            size: what `Extent.size` becomes.

        Raises:
            PlanError: a share of the extent does not divide.
        """
        shape, place = self._shape(row), self.places.get(row)
        if place is None:
            return shape
        now = shape[place.dim] - place.extra
        if now * size % self.extent.size:
            raise PlanError(
                f"{self._where(row)}: its extent of {now} does not scale from a {self.extent.name} of "
                f"{self.extent.size} to {size}: {self.extent.advice}"
            )
        return (*shape[: place.dim], now * size // self.extent.size + place.extra, *shape[place.dim + 1 :])

    def _shape(self, row: int) -> Shape:
        if row not in self._shapes:
            self._shapes[row] = self.graph.tensors.shape.row(row)
        return self._shapes[row]

    def _exhaust(self) -> None:
        while self._todo:
            self._spread(self._todo.pop())

    def _unread(self) -> list[int]:
        """What is made or expanded with the extent, although nothing reads it: no reader could say so."""
        size, dim, ops = self.extent.size, self.extent.dim, self.graph.ops
        rows = []
        for row in range(len(self.graph.tensors)):
            maker = int(self.graph.maker[row])
            if row in self.places or maker == NONE or self._shape(row)[dim : dim + 1] != (size,):
                continue
            reads = ops.inputs.row(maker)
            begins = not reads or (self._made_by(row, "expand") and self._shape(reads[0])[dim : dim + 1] == (1,))
            if begins and self._dead(row):
                rows.append(row)
        return rows

    def _dead(self, row: int) -> bool:
        """Whether nothing but views, which nothing reads, reads a tensor."""
        readers = [op for op in self._touching[row] if op != self.graph.maker[row]]
        made = [out for op in readers for out in self.graph.ops.outputs.row(op)]
        return all(self.graph.ops.is_view[op] for op in readers) and all(map(self._dead, made))

    def _spread(self, row: int) -> None:
        """Tells a tensor's operations, aliases and bindings where it carries the extent."""
        place = self.places[row]
        for op in self._touching[row]:
            self._follow(op, row, place)
        for other in self._bound[row]:
            self._set(other, place, None)

    def _follow(self, op: int, row: int, place: Place) -> None:
        ops = self.graph.ops
        operands = (*ops.inputs.row(op), *ops.outputs.row(op))
        site = Site(
            name=self._name(op),
            shapes=tuple(map(self._shape, operands)),
            inputs=len(ops.inputs.row(op)),
            least=max(1, self.extent.size // prod(self._parts)),
            parts=self._parts,
            positions=self.extent.dim == 1,
        )
        try:
            for at in [i for i, operand in enumerate(operands) if operand == row]:
                for other, found in follow(site, at, place):
                    if not (
                        site.name in _READ_IN_PART and other < site.inputs and self._persistent(operands[other])
                    ):
                        self._set(operands[other], found, op)
        except Ambiguous:
            raise self._unclear(op) from None

    def _name(self, op: int) -> str:
        ops = self.graph.ops
        if ops.kind[op] == t.OpKind.COLLECTIVE:
            return COLLECTIVES[t.CollectiveKind(int(ops.variant[op]))]
        return str(self.graph.strings[ops.name[op]]).rpartition(".")[2].removesuffix("_")

    def _set(self, row: int, place: Place, op: int | None) -> None:
        known = self.places.get(row)
        if known == place:
            return
        if self._persistent(row):
            raise PlanError(f"{self._where(row)} would change with the {self.extent.name}: {self.extent.advice}")
        if known is not None:
            raise self._unclear(op)
        self.places[row] = place
        self._todo.append(row)

    def _persistent(self, row: int) -> bool:
        """Whether it is common to all micro-batches; a part or a repetition has the role, but is not."""
        role = t.TensorRole(int(self.graph.tensors.role[row]))
        return role.persistent and not self._made_by(row, "expand", "slice")

    def _made_by(self, row: int, *names: str) -> bool:
        maker = int(self.graph.maker[row])
        return maker != NONE and self._name(maker) in names

    def _unclear(self, op: int | None) -> PlanError:
        graph, extent = self.graph, self.extent
        where = "a block's border" if op is None else f"{graph.strings[graph.ops.module[op]] or 'the loss'}"
        if op is not None:
            shapes = [list(map(self._shape, side.row(op))) for side in (graph.ops.inputs, graph.ops.outputs)]
            where += f" ({graph.strings[graph.ops.name[op]]} {shapes[0]} -> {shapes[1]})"
        return PlanError(
            f"{where}: which dim is the {extent.name} of {extent.size} cannot be told: {extent.advice}"
        )

    def _where(self, row: int) -> str:
        graph, maker = self.graph, int(self.graph.maker[row])
        name = str(graph.tensors[row].name)
        return name if maker == NONE else f"{graph.strings[graph.ops.module[maker]]} ({name})"


def _inputs(graph: StepGraph, extent: Extent) -> list[int]:
    rows = [i for i in range(len(graph.tensors)) if graph.tensors.role[i] == t.TensorRole.INPUT]
    shapes = {i: graph.tensors.shape.row(i) for i in rows if graph.maker[i] == NONE}
    return [i for i, s in shapes.items() if len(s) > extent.dim and s[extent.dim] == extent.size]


def _touching(graph: StepGraph) -> Mapping[int, list[int]]:
    """The operations that read or make each tensor, each once."""
    touching: dict[int, list[int]] = defaultdict(list)
    for ragged in (graph.ops.inputs, graph.ops.outputs):
        for tensor, op in zip(ragged.values.tolist(), ragged.rows.tolist(), strict=True):
            if not touching[tensor] or touching[tensor][-1] != op:
                touching[tensor].append(op)
    return touching


def _bound(graph: StepGraph) -> Mapping[int, set[int]]:
    """Rows that stand for the same tensor: a port and what instances bind to it, memory and what it is renamed."""
    bound: dict[int, set[int]] = defaultdict(set)
    for block in graph.blocks:
        ports = [i for i in block.tensors if graph.tensors.port[i]]
        for instance in block.instances:
            for port, identity in zip(ports, instance.bindings, strict=True):
                other = graph.locate_tensor(identity)[2]
                bound[port].add(other)
                bound[other].add(port)
    for row, alias in enumerate(graph.tensors.alias_of.tolist()):
        same = alias != NONE and graph.tensors.shape.row(row) == graph.tensors.shape.row(alias)
        maker = int(graph.maker[row])
        if same and (maker == NONE or graph.strings[graph.ops.name[maker]].endswith("_")):
            bound[row].add(alias)
            bound[alias].add(row)
    return bound

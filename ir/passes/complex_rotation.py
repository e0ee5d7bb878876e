"""Rotary embeddings that are worked out on complex numbers, pair by pair, as Llama's first code does.

Captured steps rotate by cosines and sines, which a compiler makes one kernel of 16-bit numbers. Code that takes
two neighbours for a complex number (`torch.view_as_complex`) converts to fp32, multiplies, and converts back, and
inductor generates no code for complex numbers: the product is PyTorch's own kernel, which nothing is fused with
("Torchinductor does not support code generation for complex operators", pytorch/torchtitan#15).

It comes before the pass that fuses elementwise operations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar

from echograph.ir import types as t
from echograph.ir.columns import NONE
from echograph.ir.graph import StepGraph
from echograph.ir.passes.rewrite import StepWriter

_HALVES = ("aten.cat", "aten.slice_backward")
_TURNED = {"aten.mul", "aten.neg", "aten.add", "aten.slice", *_HALVES}
"""What turns a vector by a right angle and scales it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComplexRotation:
    """The step whose rotations are products of complex numbers in fp32, between two conversions."""

    name: ClassVar[str] = "complex_rotation"

    def __call__(self, graph: StepGraph) -> StepGraph:
        """The step graph."""
        return _Writer(graph).write()


@dataclass(frozen=True, slots=True)
class _Rotation:
    """A rotation: what it turns, by which factors, and the operations that do it but the addition at its end."""

    vector: int
    factors: tuple[int, ...]
    rows: frozenset[int]


class _Finder:
    """Finds x cos + turned(x) sin, which is also the form of its gradient."""

    def __init__(self, graph: StepGraph) -> None:
        self.graph = graph
        self.names = [graph.strings[name] for name in graph.ops.name.tolist()]
        self.readers = defaultdict[int, set[int]](set)
        for row in range(len(graph.ops)):
            for index in graph.ops.inputs.row(row):
                self.readers[index].add(row)
        bound = {i for block in graph.blocks for instance in block.instances for i in instance.bindings}
        self.kept = {graph.locate_tensor(i)[2] for i in bound}

    def rotations(self) -> Iterator[tuple[int, _Rotation]]:
        """The last operation of each rotation, and the rotation."""
        taken: set[int] = set()
        for row in range(len(self.graph.ops) - 1, -1, -1):
            if self.names[row] == "aten.add" and row not in taken and (found := self._rotation(row)) is not None:
                taken |= found.rows
                yield row, found

    def _rotation(self, last: int) -> _Rotation | None:
        """The rotation that an addition ends: one of its terms is scaled alone, and the others are turned."""
        terms, rows = [int(i) for i in self.graph.ops.inputs.row(last)], set[int]()
        for index in terms:  # grows: the terms of what is itself a sum
            if (row := self._maker(index, "aten.add")) is not None:
                rows.add(row)
                terms += map(int, self.graph.ops.inputs.row(row))
        terms = [index for index in terms if self._maker(index, "aten.add") is None]
        return next(filter(None, (self._of(last, rows, one, terms) for one in terms)), None)

    def _of(self, last: int, sums: set[int], straight: int, terms: list[int]) -> _Rotation | None:
        scaled = self._maker(straight, "aten.mul")
        if scaled is None or len(terms) < 2:
            return None
        vector, *factor = sorted(map(int, self.graph.ops.inputs.row(scaled)), key=self._size, reverse=True)
        (made,) = self.graph.ops.outputs.row(last)
        shapes = {tuple(self.graph.tensors.shape.row(i)) for i in (vector, made)}
        if len(factor) != 1 or self._size(factor[0]) >= self._size(vector) or len(shapes) != 1:
            return None
        factors, rows = set(factor), sums | {scaled}
        for term in terms:
            turned = set[int]() if term == straight else self._turn(term, vector, factors)
            if turned is None:
                return None
            rows |= turned
        names = {self.names[row] for row in rows}
        if "aten.neg" not in names or names.isdisjoint(_HALVES) or len(factors) > 2:
            return None
        inside = {int(i) for row in rows for i in self.graph.ops.outputs.row(row)}
        if inside & self.kept or any(self.readers[i] - rows - {last} for i in inside):
            return None
        return _Rotation(vector, tuple(sorted(factors)), frozenset(rows))

    def _turn(self, index: int, vector: int, factors: set[int]) -> set[int] | None:
        """The operations that make a tensor of a vector and factors alone; None where others do."""
        if index == vector:
            return set()
        row = int(self.graph.maker[index])
        if row == NONE or self.names[row] not in _TURNED:
            return None
        inputs = [int(i) for i in self.graph.ops.inputs.row(row)]
        if self.names[row] == "aten.mul" and len(inputs) == 2:
            inputs.sort(key=self._size)
            if self._size(inputs[0]) < self._size(inputs[1]):
                factors.add(inputs.pop(0))
        rows = {row}
        for before in inputs:
            found = self._turn(before, vector, factors)
            if found is None:
                return None
            rows |= found
        return rows

    def _maker(self, index: int, name: str) -> int | None:
        row = int(self.graph.maker[index])
        return row if row != NONE and self.names[row] == name else None

    def _size(self, index: int) -> int:
        return prod(self.graph.tensors.shape.row(index))


class _Writer(StepWriter):
    def __init__(self, graph: StepGraph) -> None:
        super().__init__(graph)
        self.last = dict(_Finder(graph).rotations())
        self.inside = {row for rotation in self.last.values() for row in rotation.rows}

    def operation(self, op: t.Op) -> None:
        if op.id in self.last and isinstance(op, t.Compute):
            self._rotate(op, self.last[op.id])
        elif op.id not in self.inside:
            self.copy(op)

    def _rotate(self, op: t.Compute, rotation: _Rotation) -> None:
        vector, (made,) = self.graph.tensors[rotation.vector], op.outputs
        exact = replace(vector, dtype=t.DType.FP32, alias_of=None, port=False)
        parts = [self.builder.tensor(vector.name, vector.shape, t.DType.FP32, vector.role) for _ in range(2)]
        factors = [self.tensor(i) for i in rotation.factors]
        moved = sum(self.graph.tensors[i].nbytes for i in rotation.factors)
        steps = (
            ("aten._to_copy", [self.tensor(vector.id)], parts[0], vector.nbytes, exact.nbytes),
            ("complex.mul", [parts[0], *factors], parts[1], exact.nbytes + moved, exact.nbytes),
            ("aten._to_copy", [parts[1]], self.tensor(made), exact.nbytes, self.graph.tensors[made].nbytes),
        )
        for name, inputs, output, read, written in steps:
            self.copy(
                replace(op, name=name, durations=(), flops=0), inputs=inputs, outputs=[output], deps=(),
                bytes_read=read, bytes_written=written,
            )  # fmt: skip
        for row in rotation.rows:
            self.part.ops[row] = self.part.ops[op.id]

"""The folded graph written out, and equality of two graphs whatever the numbering of their tensors."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields

from echograph.errors import GraphError
from echograph.ir.builder import GraphBuilder
from echograph.ir.columns import NONE
from echograph.ir.graph import StepGraph
from echograph.ir.types import Op, Tensor


def unfold(graph: StepGraph) -> StepGraph:
    """The same step with every call written out in the main block, in the order in which they run.

    Tensors are numbered in order of appearance, graph inputs that no operation reads last.
    """
    if len(graph.blocks) == 1:
        return graph
    builder = GraphBuilder(
        name=graph.name, workload=graph.workload, producer=graph.producer, streams=graph.streams
    )
    builder.unknown, builder.mesh, builder.passes = graph.unknown, graph.mesh, graph.passes
    for group in graph.groups:
        builder.add_group(group)
    writer = _Unfolder(graph, builder)
    for block, begin, end, instance, _ in graph.programs[0].calls.tolist():
        for index in range(begin, end):
            writer.op(block, instance, index)
    for index in graph.blocks[0].tensors:
        if not graph.tensors.port[index]:
            writer.tensor(0, 0, index)
    return builder.build(StepGraph)


class _Unfolder:
    def __init__(self, graph: StepGraph, builder: GraphBuilder) -> None:
        self.graph, self.builder = graph, builder
        self.tensors: dict[int, int] = {}
        self.ops: dict[int, int] = {}

    def tensor(self, block: int, instance: int, index: int) -> int:
        identity = self.graph.tensor_id(block, instance, index)
        if identity not in self.tensors:
            block, instance, index = self.graph.locate_tensor(identity)
            tensor = self.graph.tensors[index]
            alias = None if tensor.alias_of is None else self.tensor(block, instance, tensor.alias_of)
            name = self._name(tensor.name, block, instance)
            self.tensors[identity] = self.builder.tensor(
                name, tensor.shape, tensor.dtype, tensor.role, alias_of=alias, sharded=tensor.sharded
            )
        return self.tensors[identity]

    def op(self, block: int, instance: int, index: int) -> None:
        op = self.graph.ops[index]
        changes: dict[str, object] = {
            "inputs": [self.tensor(block, instance, i) for i in op.inputs],
            "outputs": [self.tensor(block, instance, i) for i in op.outputs],
            "deps": [self._row(op, self.graph.op_id(block, instance, d)) for d in op.deps],
            "module": self._name(op.module, block, instance),
        }
        forward = getattr(op, "forward_op", None)
        if forward is not None:
            identity = (
                self.graph.op_id(block, instance, forward)
                if forward >= 0
                else self.graph.blocks[block].instances[instance].op_bindings[-2 - forward]
            )
            changes["forward_op"] = self._row(op, identity)
        self.ops[self.graph.op_id(block, instance, index)] = self.builder.add(op, **changes)

    def _row(self, op: Op, identity: int) -> int:
        if identity not in self.ops:
            block, instance, index = self.graph.locate_op(identity)
            where = f"operation {index} of instance {instance} of block {block}"
            raise GraphError(
                f"operation {op.id} ({op.name}) refers to {where}, which the program does not run before it"
            )
        return self.ops[identity]

    def _name(self, text: str, block: int, instance: int) -> str:
        return text.replace("{}", self.graph.blocks[block].instances[instance].label) if block else text


def difference(left: StepGraph, right: StepGraph) -> str | None:
    """The first difference of two unfolded graphs, or None: equal op by op, with tensors matched one to one."""
    if left.workload != right.workload or left.streams != right.streams:
        return "the workloads or streams differ"
    if len(left.ops) != len(right.ops) or len(left.tensors) != len(right.tensors):
        tensors = f"{len(left.tensors)} and {len(right.tensors)} tensors"
        return f"{len(left.ops)} and {len(right.ops)} operations, {tensors}"
    match: dict[int, int] = {}
    for a, b in zip(left.ops, right.ops, strict=True):
        if type(a) is not type(b) or _own_fields(a) != _own_fields(b):
            return f"operation {a.id}: {a} differs from {b}"
        if len(a.inputs) != len(b.inputs) or len(a.outputs) != len(b.outputs):
            return f"operation {a.id}: reads or makes another number of tensors"
        for i, j in zip((*a.inputs, *a.outputs), (*b.inputs, *b.outputs), strict=True):
            if not _matched(left, right, i, j, match):
                return f"operation {a.id}: tensor {i} stands for {match.get(i)} and {j}"
    if len(set(match.values())) != len(match):
        return "two tensors of one graph stand for one of the other"
    for i, j in match.items():
        if _type(left.tensors[i]) != _type(right.tensors[j]):
            return f"tensor {i}: {left.tensors[i]} differs from {right.tensors[j]}"
    if _rest(left, set(match)) != _rest(right, set(match.values())):
        return "the tensors that no operation touches differ"
    return None


def _matched(left: StepGraph, right: StepGraph, i: int, j: int, match: dict[int, int]) -> bool:
    """Matches two tensors and what they are aliases of; False if one is matched to another already."""
    while i not in match:
        match[i] = j
        i, j = int(left.tensors.alias_of[i]), int(right.tensors.alias_of[j])
        if NONE in (i, j):
            return i == j
    return match[i] == j


def _rest(graph: StepGraph, matched: set[int]) -> Counter[tuple[object, ...]]:
    return Counter(_type(tensor) for tensor in graph.tensors if tensor.id not in matched)


def _own_fields(op: Op) -> list[object]:
    """What is compared; what an operator was given a folded graph says only where all its instances agree."""
    return [getattr(op, f.name) for f in fields(op) if f.name not in ("inputs", "outputs", "arguments")]


def _type(tensor: Tensor) -> tuple[object, ...]:
    return tensor.name, tensor.shape, tensor.dtype, tensor.role, tensor.port, tensor.sharded

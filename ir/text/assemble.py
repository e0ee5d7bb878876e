"""A graph from its frozen types: what the readers of text and of plain values end with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, field

from echograph.errors import FormatError, GraphError
from echograph.ir import types as t
from echograph.ir.builder import GraphBuilder
from echograph.ir.graph import Axis, Group, Instance, JobGraph, Program, StepGraph, Workload

MIN_NUMBER = -(2**63)
"""Readers refuse what is not of 64 bits where it stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphHead:
    """Everything of a graph but its rows and programs; `strings` and `attributes` order the tables."""

    level: type[StepGraph] | type[JobGraph] = StepGraph
    name: str = ""
    producer: str = ""
    workload: Workload = field(default_factory=Workload)
    streams: tuple[str, ...] = ("compute",)
    mesh: tuple[Axis, ...] = ()
    groups: tuple[Group, ...] = ()
    passes: tuple[str, ...] = ()
    strings: tuple[str, ...] = ()
    attributes: tuple[t.Attributes, ...] = ()
    unknown: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRows:
    """A block: its name, its instances, and its rows of both tables."""

    name: str
    instances: tuple[Instance, ...] = (Instance(),)
    tensors: tuple[t.Tensor, ...] = ()
    ops: tuple[t.Op, ...] = ()


def assemble(head: GraphHead, blocks: Sequence[BlockRows], programs: Iterable[Program]) -> StepGraph | JobGraph:
    """Builds and verifies the graph.

    Raises:
        FormatError: rows are not numbered on, a number is beyond 64 bits, or an invariant does not hold.
    """
    try:
        builder = _begin(head)
        _fill(builder, blocks)
        for item in programs:
            builder.program(item.calls, role=item.role, coordinates=item.coordinates, ranks=item.ranks)
        graph = builder.build(head.level)
    except OverflowError:
        raise FormatError("a number is beyond 64 bits") from None
    except GraphError as error:
        raise FormatError(f"no valid graph: {error}") from None
    for told in (head.workload, *graph.ops.attribute_values):
        if (lowest := min(_numbers(astuple(told)), default=0)) < 0:
            raise FormatError(f"no valid graph: {type(told).__name__} has the negative number {lowest}")
    return graph


def _numbers(values: Iterable[object]) -> Iterator[int]:
    for value in values:
        if isinstance(value, tuple):
            yield from _numbers(value)
        elif isinstance(value, int):
            yield value


def _begin(head: GraphHead) -> GraphBuilder:
    builder = GraphBuilder(name=head.name, producer=head.producer, workload=head.workload, streams=head.streams)
    builder.unknown, builder.mesh, builder.passes = head.unknown, head.mesh, head.passes
    for number, group in enumerate(head.groups):
        if builder.add_group(group) != number:
            raise FormatError(f"group {number} ({group.name}) repeats an earlier one")
    for text in head.strings:
        builder.string(text)
    for attributes in head.attributes:
        builder.attribute(attributes)
    return builder


def _fill(builder: GraphBuilder, blocks: Sequence[BlockRows]) -> None:
    begins, ends, tensors, ops = [], [], 0, 0
    for block in blocks:
        begins.append((block.name, tensors, ops))
        tensors, ops = tensors + len(block.tensors), ops + len(block.ops)
        ends.append((tensors, ops))
    if not blocks or len(blocks[0].instances) != 1:
        raise FormatError("the first block is the main one, and it has one instance")
    builder.set_blocks(begins, ends)
    for number, block in enumerate(blocks):
        for item in block.instances:
            builder.instance(number, item.label, bindings=item.bindings, op_bindings=item.op_bindings)
        for tensor in block.tensors:
            _check("tensor", tensor.id, builder.tensor_count())
            builder.tensor(
                tensor.name, tensor.shape, tensor.dtype, tensor.role, alias_of=tensor.alias_of, port=tensor.port,
                sharded=tensor.sharded,
            )  # fmt: skip
        for op in block.ops:
            _check("operation", op.id, builder.op_count())
            builder.add(op)


def _check(what: str, identity: int, position: int) -> None:
    if identity != position:
        raise FormatError(
            f"{what} {identity} stands where {position} is next: rows are numbered on from block to block"
        )

"""Copies a block's rows from a graph into a builder, column by column: as many as a block has, at one go."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from echograph.ir.builder import GraphBuilder
from echograph.ir.columns import NONE, Int64, Ragged
from echograph.ir.graph import Block, Graph
from echograph.ir.types import Attributes

_AS_THEY_ARE = (
    "kind", "phase", "stream", "flops", "bytes_read", "bytes_written", "variant", "dtype", "payload",
    "asynchronous", "group", "peer", "tag", "nbytes",
)  # fmt: skip


def copy_rows(
    builder: GraphBuilder, graph: Graph, block: Block, attributes: Mapping[int, Attributes] = MappingProxyType({})
) -> None:
    """Copies the tensors and operations of a block into the open block, wherever that begins.

    Args:
        builder: of the new graph, with the groups and streams of the old one.
        graph: the old one.
        block: of it.
        attributes: by row, those of operations that have others now.
    """
    tensors, ops = graph.tensors, graph.ops
    low, high = block.tensors.start, block.tensors.stop
    begin, end = block.ops.start, block.ops.stop
    strings = _strings(builder, graph, block)
    later, later_op = builder.tensor_count() - low, builder.op_count() - begin
    column = {name: its.items for name, its in (builder._t | builder._o | builder._d).items()}
    t, o = ({name: its.items for name, its in table.items()} for table in (builder._t, builder._o))
    alias, forward = tensors.alias_of[low:high], ops.forward_op[begin:end]
    _extend(t["name"], strings[tensors.name[low:high]])
    _extend(t["alias_of"], np.where(alias == NONE, NONE, alias + later))
    for name in ("dtype", "role", "port"):
        _extend(t[name], getattr(tensors, name)[low:high])
    for name in _AS_THEY_ARE:
        _extend(o[name], getattr(ops, name)[begin:end])
    for name in ("name", "module", "arguments"):
        _extend(o[name], strings[getattr(ops, name)[begin:end]])
    _extend(o["forward_op"], np.where(forward >= 0, forward + later_op, forward))
    _extend(o["attributes"], _attributes(builder, graph, block, attributes))
    spans = slice(int(ops.duration.offsets[begin]), int(ops.duration.offsets[end]))
    _extend(column["duration_device"], strings[ops.duration_device[spans]])
    for name in ("duration_source", "duration_samples", "duration_spread"):
        _extend(column[name], getattr(ops, name)[spans])
    for of, ragged, rows, shift in (
        (builder._shape, tensors.shape, (low, high), 0),
        (builder._inputs, ops.inputs, (begin, end), later),
        (builder._outputs, ops.outputs, (begin, end), later),
        (builder._deps, ops.deps, (begin, end), later_op),
        (builder._duration, ops.duration, (begin, end), 0),
    ):
        _extend_rows(of, ragged, rows, lambda values, shift=shift: values + shift)
    _extend_rows(builder._sharded, tensors.sharded, (low, high), lambda values: strings[values])


def _strings(builder: GraphBuilder, graph: Graph, block: Block) -> Int64:
    """For every string of the graph that the block uses, its index in the builder; added in the order of use."""
    tensors, ops = graph.tensors, graph.ops
    rows, its = slice(block.tensors.start, block.tensors.stop), slice(block.ops.start, block.ops.stop)
    names = np.asarray(tensors.name[rows], np.int64)
    sharded = Ragged(tensors.sharded.offsets[rows.start : rows.stop + 1], tensors.sharded.values)
    spans = slice(int(ops.duration.offsets[its.start]), int(ops.duration.offsets[its.stop]))
    each = np.repeat(np.arange(its.stop - its.start), np.diff(ops.duration.offsets[its.start : its.stop + 1]))
    used = (
        _in_turn(
            (np.arange(len(names)), names),
            (sharded.rows, tensors.sharded.values[sharded.offsets[0] : sharded.offsets[-1]]),
        ),
        _in_turn(
            (np.arange(its.stop - its.start), ops.name[its]),
            (np.arange(its.stop - its.start), ops.module[its]),
            (np.arange(its.stop - its.start), ops.arguments[its]),
            (each, ops.duration_device[spans]),
        ),
    )
    found = np.full(len(graph.strings), NONE, np.int64)
    for index in _first_uses(np.concatenate(used)):
        found[index] = builder.string(graph.strings[index])
    return found


def _in_turn(*columns: tuple[Any, Any]) -> Int64:
    """Values in the order of their rows; of one row, in the order of the columns."""
    rows = np.concatenate([row for row, _ in columns])
    values: Int64 = np.concatenate([np.asarray(value, np.int64) for _, value in columns])
    return values[np.argsort(rows, kind="stable")]


def _first_uses(values: Int64) -> list[int]:
    found: list[int] = values[np.sort(np.unique(values, return_index=True)[1])].tolist()
    return found


def _attributes(builder: GraphBuilder, graph: Graph, block: Block, others: Mapping[int, Attributes]) -> Int64:
    old = np.asarray(graph.ops.attributes[block.ops.start : block.ops.stop], np.int64)
    mine = {row - block.ops.start: value for row, value in others.items() if row in block.ops}
    old[list(mine)] = NONE
    new = np.full(len(graph.ops.attribute_values) + 1, NONE, np.int64)
    for index in _first_uses(old):
        if index != NONE:
            new[index] = builder.attribute(graph.ops.attribute_values[index])
    found: Int64 = new[old]
    for row, value in mine.items():
        found[row] = builder.attribute(value)
    return found


def _extend(items: array[Any], values: Any) -> None:
    code = {"f": np.float32, "B": np.uint8, "i": np.int32, "q": np.int64}[items.typecode]
    items.frombytes(np.ascontiguousarray(values, code).tobytes())


def _extend_rows(of: Any, ragged: Ragged, rows: tuple[int, int], value: Any) -> None:
    offsets = ragged.offsets[rows[0] : rows[1] + 1]
    begin = len(of.values.items)
    _extend(of.values.items, value(np.asarray(ragged.values[offsets[0] : offsets[-1]], np.int64)))
    _extend(of.offsets.items, offsets[1:] - offsets[0] + begin)

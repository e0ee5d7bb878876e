"""`GraphBuilder`: the one way to make a graph. It collects columns, verifies, and freezes.

    builder = GraphBuilder(name="tiny")
    x = builder.tensor("x", (8, 4), DType.BF16, TensorRole.INPUT)
    w = builder.tensor("w", (4, 4), DType.BF16, TensorRole.PARAMETER)
    y = builder.tensor("y", (8, 4), DType.BF16, TensorRole.ACTIVATION)
    builder.compute("aten.mm", inputs=(x, w), outputs=(y,), flops=256, bytes_read=96, bytes_written=64)
    graph = builder.build(StepGraph)

Tensors and operations go to the block that was begun last; the main block is open from the start.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain, islice
from types import MappingProxyType
from typing import Any, TypedDict, TypeVar, Unpack

import numpy as np
import numpy.typing as npt

from echograph.errors import GraphError
from echograph.ir import types as t
from echograph.ir.columns import (
    NONE,
    OP_COLUMNS,
    TENSOR_COLUMNS,
    Column,
    Float64,
    Holds,
    Int64,
    OpTable,
    Ragged,
    TensorTable,
)
from echograph.ir.graph import Axis, Block, Graph, Group, Instance, JobGraph, Program, Workload
from echograph.ir.verify import verify

G = TypeVar("G", bound=Graph)

_CODES = {"?": "B", "u1": "B", "i4": "i", "i8": "q", "f4": "f"}


class Common(TypedDict, total=False):
    """What every operation may have; the fields of `types.Op`."""

    phase: t.Phase
    module: str
    inputs: Iterable[int]
    outputs: Iterable[int]
    stream: int
    deps: Iterable[int]
    durations: Iterable[t.Duration]


class _Column:
    """A growing column that becomes a numpy array without a copy. Rows that are left out have the default."""

    __slots__ = ("default", "dtype", "items")

    def __init__(self, dtype: str, default: int = 0) -> None:
        self.dtype, self.default = dtype, default
        self.items = array(_CODES[dtype])

    def put(self, row: int, value: int) -> None:
        """Says what a row has, and that rows before it that were left out have the default."""
        self.fill(row)
        self.items.append(value)

    def fill(self, count: int) -> None:
        """Gives rows that were left out the default, up to so many rows."""
        if (left := count - len(self.items)) > 0:
            self.items.extend([self.default] * left)

    def extend(self, values: npt.ArrayLike) -> None:
        """Appends many values."""
        self.items.frombytes(np.ascontiguousarray(values, self.dtype).tobytes())

    def freeze(self) -> Any:
        """The array."""
        return np.frombuffer(self.items, self.dtype) if self.items else np.zeros(0, self.dtype)


class _RaggedColumn:
    __slots__ = ("offsets", "values")

    def __init__(self, dtype: str) -> None:
        self.offsets = _Column("i8")
        self.offsets.items.append(0)
        self.values = _Column(dtype)

    def append(self, row: Iterable[int]) -> None:
        self.values.items.extend(row)
        self.offsets.items.append(len(self.values.items))

    def many(self, rows: Sequence[Sequence[int]]) -> None:
        """Appends rows."""
        self.values.items.extend(chain.from_iterable(rows))
        self.offsets.items.extend(islice(accumulate(map(len, rows), initial=self.offsets.items[-1]), 1, None))

    def extend(self, lengths: Int64, values: npt.ArrayLike) -> None:
        """Appends rows of these lengths, given one after the other."""
        self.offsets.extend(len(self.values.items) + lengths.cumsum())
        self.values.extend(values)

    def freeze(self) -> Any:
        """The rows."""
        return Ragged(self.offsets.freeze(), self.values.freeze())


def _plain(columns: Mapping[str, Column], of: str = "") -> dict[str, _Column]:
    return {name: _Column(c.dtype, c.default) for name, c in columns.items() if not c.ragged and c.of == of}


def _ragged(columns: Mapping[str, Column]) -> dict[str, _RaggedColumn]:
    return {name: _RaggedColumn(c.dtype) for name, c in columns.items() if c.ragged}


class GraphBuilder:
    """Collects tensors, operations, blocks and programs; `build` verifies and freezes them.

    Args:
        name: the graph's name.
        workload: what the step trains.
        producer: which program made the graph.
        streams: names of the streams that operations are issued on.
    """

    def __init__(
        self,
        *,
        name: str = "",
        workload: Workload | None = None,
        producer: str = "echograph",
        streams: Sequence[str] = ("compute",),
    ) -> None:
        self.name = name
        self.producer = producer
        self.workload = workload or Workload()
        self.unknown = b""
        self.streams = list(streams)
        self.mesh: tuple[Axis, ...] = ()
        self.passes: tuple[str, ...] = ()
        self._strings: dict[str, int] = {"": 0}
        self._attributes: dict[t.Attributes, int] = {}
        self._groups: dict[Group, int] = {}
        self._blocks: list[tuple[str, int, int]] = [("main", 0, 0)]
        self._instances: list[list[Instance]] = [[Instance()]]
        self._programs: list[Program] = []
        self._t, self._t_ragged = _plain(TENSOR_COLUMNS), _ragged(TENSOR_COLUMNS)
        self._o, self._o_ragged = _plain(OP_COLUMNS), _ragged(OP_COLUMNS)
        self._d = _plain(OP_COLUMNS, "duration")
        self._ends: list[tuple[int, int]] = []
        self._copied: dict[int, tuple[Graph, Int64]] = {}
        self._tensor_appends: list[tuple[str, Callable[[Any], None], Any]] = [
            (name, self._t_ragged[name].append, ())
            if column.ragged
            else (name, self._t[name].items.append, column.default)
            for name, column in TENSOR_COLUMNS.items()
        ]
        self._inputs, self._outputs, self._deps, self._duration = (
            self._o_ragged[name] for name in ("inputs", "outputs", "deps", "duration")
        )
        self._duration_appends: list[Callable[[Any], None]] = [c.items.append for c in self._d.values()]
        self._op_appends = [self._o[name].items.append for name in _GIVEN]

    # -- tables ------------------------------------------------------------------------------------------

    def string(self, text: str) -> int:
        """Index of a string in the graph's table; added when it is new. What UTF-8 cannot say becomes `?`."""
        known = self._strings.get(text)
        if known is None:  # a trace's JSON may hold half a surrogate pair, which no file can
            text = text.encode("utf-8", "replace").decode()
            known = self._strings.setdefault(text, len(self._strings))
        return known

    def stream(self, name: str) -> int:
        """Index of a stream; added when it is new."""
        if name not in self.streams:
            self.streams.append(name)
        return self.streams.index(name)

    def group(
        self, name: str, *, axes: Iterable[str] = (), ranks: Iterable[int] = (), positions: Iterable[int] = ()
    ) -> int:
        """Index of a process group (`Group` has the fields); added when it is new."""
        return self.add_group(Group(name=name, axes=tuple(axes), ranks=tuple(ranks), positions=tuple(positions)))

    def add_group(self, group: Group) -> int:
        """Index of a process group; added when it is new."""
        return self._groups.setdefault(group, len(self._groups))

    def tensor(
        self,
        name: str,
        shape: Iterable[int],
        dtype: t.DType,
        role: t.TensorRole,
        *,
        alias_of: int | None = None,
        port: bool = False,
        sharded: Iterable[str] = (),
    ) -> int:
        """Adds a tensor to the open block; returns its index. The fields are those of `types.Tensor`."""
        plain, ragged = self._t, self._t_ragged
        plain["name"].items.append(self.string(name))
        ragged["shape"].append(shape)
        plain["dtype"].items.append(dtype)
        plain["role"].items.append(role)
        plain["alias_of"].items.append(NONE if alias_of is None else alias_of)
        plain["port"].items.append(port)
        ragged["sharded"].append([self.string(text) for text in sharded])
        return len(plain["name"].items) - 1

    def tensors(
        self,
        made: Sequence[t.Tensor],
        *,
        names: Sequence[str] = (),
        roles: Sequence[t.TensorRole] = (),
        ports: Sequence[bool] = (),
        alias_of: Sequence[int] = (),
        sharded: Sequence[tuple[str, ...]] = (),
    ) -> range:
        """Adds many tensors to the open block at once; returns their rows.

        Args:
            made: the tensors, of which shapes and data types are taken, and what is not given here.
            names: name of each tensor; (): as in `made`.
            roles: role of each tensor; (): as in `made`.
            ports: whether each is a port of the block; (): none is.
            alias_of: row of the tensor that each is an alias of, -1 for none; (): none is.
            sharded: names of the axes that divide each; (): as in `made`.
        """
        first, plain, ragged = self.tensor_count(), self._t, self._t_ragged
        plain["name"].items.extend([self.string(name) for name in (names or [each.name for each in made])])
        plain["dtype"].items.extend([each.dtype for each in made])
        plain["role"].items.extend(roles or [each.role for each in made])
        plain["alias_of"].items.extend(alias_of or [NONE] * len(made))
        plain["port"].items.extend(ports or [False] * len(made))
        ragged["shape"].many([each.shape for each in made])
        axes = sharded or [each.sharded for each in made]
        ragged["sharded"].many([[self.string(axis) for axis in its] for its in axes])
        return range(first, self.tensor_count())

    def computes(
        self,
        operators: Sequence[str],
        *,
        phase: t.Phase,
        inputs: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]] = (),
        bytes_read: Sequence[int],
        bytes_written: Sequence[int],
    ) -> range:
        """Adds many kernels to the open block at once, each told by its place in all columns; returns their rows.

        Raises:
            GraphError: bytes beyond 64 bits.
        """
        count = len(operators)
        return self.rows(
            operators, kind=[t.OpKind.COMPUTE] * count, phase=phase, inputs=inputs,
            outputs=outputs or [()] * count, deps=[()] * count, bytes_read=bytes_read, bytes_written=bytes_written,
        )  # fmt: skip

    def rows(
        self,
        names: Sequence[str],
        *,
        kind: Sequence[int],
        phase: t.Phase,
        inputs: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]],
        deps: Sequence[Sequence[int]],
        **columns: Sequence[int],
    ) -> range:
        """Adds many operations of one phase to the open block at once; returns their rows.

        Args:
            names: name of each operation, [operations] as all that follow.
            kind: `OpKind` of each.
            phase: phase of all of them.
            inputs: rows of the tensors that each reads.
            outputs: rows of the tensors that each writes.
            deps: rows of the operations that each waits for beside those that made its inputs.
            columns: other columns of the operation table, by name; those left out have their default.

        Raises:
            GraphError: a number beyond 64 bits.
        """
        first, count = self.op_count(), len(names)
        given: dict[str, Sequence[int]] = {
            "kind": kind, "name": [self.string(name) for name in names], "phase": [phase] * count,
            "module": [0] * count, "stream": [0] * count, **columns,
        }  # fmt: skip
        try:
            for name, values in given.items():
                self._o[name].fill(first)
                self._o[name].items.extend(values)
        except OverflowError:
            raise GraphError(_BEYOND.format(names[0])) from None
        self._inputs.many(inputs)
        self._outputs.many(outputs)
        self._deps.many(deps)
        self._duration.offsets.items.extend([len(self._duration.values.items)] * count)
        return range(first, self.op_count())

    def add_tensor(self, tensor: t.Tensor, **changes: Any) -> int:
        """Adds a tensor given as its frozen type, with fields of `changes` replaced."""
        values = {field: getattr(tensor, field) for field in TENSOR_COLUMNS} | changes
        return self.tensor(**values)

    # -- operations --------------------------------------------------------------------------------------

    def compute(
        self,
        operator: str,
        *,
        forward_op: int | None = None,
        flops: int = 0,
        bytes_read: int = 0,
        bytes_written: int = 0,
        attributes: t.Attributes | None = None,
        arguments: str = "",
        **common: Unpack[Common],
    ) -> int:
        """Adds a device kernel or a view; the fields are those of `types.Compute`."""
        return self._add(
            t.OpKind.COMPUTE, operator, common, forward_op=NONE if forward_op is None else forward_op, flops=flops,
            bytes_read=bytes_read, bytes_written=bytes_written,
            attributes=NONE if attributes is None else self.attribute(attributes),
            arguments=self.string(arguments),
        )  # fmt: skip

    def collective(
        self,
        name: str,
        collective: t.CollectiveKind,
        *,
        group: int,
        bytes_per_rank: int,
        dtype: t.DType,
        payload: t.Payload = t.Payload.OTHER,
        asynchronous: bool = False,
        **common: Unpack[Common],
    ) -> int:
        """Adds a collective; the fields are those of `types.Collective`."""
        return self._add(
            t.OpKind.COLLECTIVE, name, common, variant=collective, group=group, nbytes=bytes_per_rank, dtype=dtype,
            payload=payload, asynchronous=asynchronous,
        )  # fmt: skip

    def send(
        self,
        name: str,
        *,
        group: int,
        peer: int,
        tag: int,
        nbytes: int,
        payload: t.Payload = t.Payload.ACTIVATION,
        **common: Unpack[Common],
    ) -> int:
        """Adds a send; the fields are those of `types.Send`."""
        return self._add(
            t.OpKind.SEND, name, common, group=group, peer=peer, tag=tag, nbytes=nbytes, payload=payload
        )

    def recv(
        self,
        name: str,
        *,
        group: int,
        peer: int,
        tag: int,
        nbytes: int,
        payload: t.Payload = t.Payload.ACTIVATION,
        **common: Unpack[Common],
    ) -> int:
        """Adds a receive; the fields are those of `types.Recv`."""
        return self._add(
            t.OpKind.RECV, name, common, group=group, peer=peer, tag=tag, nbytes=nbytes, payload=payload
        )

    def copy(self, name: str, direction: t.CopyDirection, *, nbytes: int, **common: Unpack[Common]) -> int:
        """Adds a copy between memories."""
        return self._add(t.OpKind.COPY, name, common, variant=direction, nbytes=nbytes)

    def host(self, name: str, **common: Unpack[Common]) -> int:
        """Adds work of the host."""
        return self._add(t.OpKind.HOST, name, common)

    def add(self, op: t.Op, **changes: object) -> int:
        """Adds an operation given as its frozen type, with fields of `changes` replaced."""
        values = {f: getattr(op, f) for f in op.__dataclass_fields__ if f not in ("id", "name")} | changes
        match op:
            case t.Compute():
                return self.compute(op.name, **values)
            case t.Collective():
                return self.collective(op.name, values.pop("collective"), **values)
            case t.Send():
                return self.send(op.name, **values)
            case t.Recv():
                return self.recv(op.name, **values)
            case t.Copy():
                return self.copy(op.name, values.pop("direction"), **values)
            case t.Host():
                return self.host(op.name, **values)

    # -- blocks and programs -----------------------------------------------------------------------------

    def begin_block(self, name: str, begin: tuple[int, int] | None = None) -> int:
        """Closes the open block and opens a new one; returns its number.

        Args:
            name: of the new block.
            begin: its first tensor and operation, where these stand already; None: those that come next.
        """
        self._blocks.append((name, *(begin or (len(self._t["name"].items), len(self._o["kind"].items)))))
        self._instances.append([])
        return len(self._blocks) - 1

    def instance(
        self, block: int, label: str = "", *, bindings: Iterable[int] = (), op_bindings: Iterable[int] = ()
    ) -> int:
        """Adds an instance to a block (for the main block: sets its bindings); returns its number."""
        made = Instance(label=label, bindings=tuple(bindings), op_bindings=tuple(op_bindings))
        if block == 0:
            self._instances[0] = [made]
            return 0
        self._instances[block].append(made)
        return len(self._instances[block]) - 1

    def program(
        self,
        calls: Iterable[Sequence[int]] | Int64,
        *,
        role: str = "",
        coordinates: Mapping[str, int] | None = None,
        ranks: Iterable[int] = (),
        held: Mapping[str, int] | None = None,
    ) -> int:
        """Adds a program: calls (block, begin, end, instance, micro_batch); returns its number."""
        rows = np.array(calls if isinstance(calls, np.ndarray) else list(calls), np.int64).reshape(-1, 5)
        rows.setflags(write=False)
        made = Program(
            calls=rows, role=role, coordinates=dict(coordinates or {}), ranks=tuple(ranks), held=dict(held or {})
        )  # fmt: skip
        self._programs.append(made)
        return len(self._programs) - 1

    def op_count(self) -> int:
        """Operations added so far: the index that the next one will get."""
        return len(self._o["kind"].items)

    def tensor_count(self) -> int:
        """Tensors added so far."""
        return len(self._t["name"].items)

    def build(self, graph_type: type[G], *, whole: bool = True) -> G:
        """Freezes and verifies the graph. Without a program, one that runs the main block is added.

        Args:
            graph_type: a step or a job.
            whole: whether it is one: a job of some stages, to which others send, breaks invariants.

        Raises:
            GraphError: an invariant does not hold; names the operation or tensor.
        """
        strings = tuple(self._strings)
        blocks = self._freeze_blocks()
        if not self._programs:
            self.program([(0, 0, blocks[0].ops.stop, 0, 0)] if blocks[0].ops else [])
        tensors = TensorTable(
            strings=strings,
            **{name: column.freeze() for name, column in (self._t | self._t_ragged).items()},
        )
        if issubclass(graph_type, JobGraph):  # its passes have changed the shapes that arguments speak of
            self._o["arguments"] = _Column("i4")
            self._o["arguments"].items.extend(bytes(self.op_count()))
        self.fill_ops()
        ops = OpTable(
            strings=strings,
            attribute_values=tuple(self._attributes),
            **{name: column.freeze() for name, column in (self._o | self._o_ragged | self._d).items()},
        )
        graph = graph_type(
            name=self.name, producer=self.producer, workload=self.workload, streams=tuple(self.streams),
            tensors=tensors, ops=ops, blocks=blocks, programs=tuple(self._programs), mesh=self.mesh,
            groups=tuple(self._groups), passes=self.passes, unknown=self.unknown,
        )  # fmt: skip
        if whole:
            verify(graph)
        return graph

    # -- rows, for readers that hold indices already -------------------------------------------------------

    def tensor_row(self, values: Mapping[str, Any]) -> int:
        """Appends a tensor given as column values; columns not named take their default. Returns its index."""
        for name, append, default in self._tensor_appends:
            append(values.get(name, default))
        return len(self._t["name"].items) - 1

    def attribute(self, attributes: t.Attributes) -> int:
        """Index of attributes in the graph's table; added when they are new."""
        return self._attributes.setdefault(attributes, len(self._attributes))

    def op_row(
        self,
        kind: int,
        name: int,
        phase: int,
        module: int,
        stream: int,
        inputs: Iterable[int],
        outputs: Iterable[int],
        deps: Iterable[int],
        durations: Iterable[tuple[int, int, int, int, float]],
        **values: int,
    ) -> None:
        """Appends an operation given as indices and column values; columns not named take their default."""
        self._inputs.append(inputs)
        self._outputs.append(outputs)
        self._deps.append(deps)
        for device, picoseconds, source, samples, spread in durations:
            self._duration.values.items.append(picoseconds)
            for push, value in zip(self._duration_appends, (device, source, samples, spread), strict=True):
                push(value)
        self._duration.offsets.items.append(len(self._duration.values.items))
        row = len(self._o["kind"].items)
        for push, value in zip(self._op_appends, (kind, name, phase, module, stream), strict=True):
            push(value)
        for column, value in values.items():
            its = self._o[column]
            if value != its.default:
                its.put(row, value)

    def fill_ops(self) -> None:
        """Gives operations the defaults of columns that they were not given."""
        for column in self._o.values():
            column.fill(self.op_count())

    def op_columns(
        self,
        columns: Mapping[str, npt.NDArray[Any]],
        deps: Ragged,
        durations: tuple[npt.NDArray[Any], str, t.Source | npt.NDArray[Any]],
        samples: int = 0,
    ) -> None:
        """Appends operations given as columns, without inputs and outputs.

        Args:
            columns: columns of the operation table, by name, [operations]; those not named take their default.
            deps: rows of the operations that each waits for.
            durations: picoseconds, [operations], -1 where unknown; the device they are of; their source, one for
                all or [operations].
            samples: how often each was measured.
        """
        count = len(deps)
        self.fill_ops()
        for name, column in self._o.items():
            values = columns.get(name)
            if values is None:
                values = np.full(count, OP_COLUMNS[name].default)
            column.extend(values)
        self._inputs.extend(np.zeros(count, np.int64), ())
        self._outputs.extend(np.zeros(count, np.int64), ())
        self._deps.extend(deps.lengths, deps.values)
        picoseconds, device, source = durations
        known = picoseconds >= 0
        self._duration.extend(known.astype(np.int64), picoseconds[known])
        made = int(known.sum())
        stated: dict[str, Any] = {
            "duration_device": self.string(device) if made else 0,
            "duration_source": source[known] if isinstance(source, np.ndarray) else source,
            "duration_samples": samples,
        }
        for name, column in self._d.items():
            column.extend(np.broadcast_to(stated.get(name, 0), made))

    def set_blocks(self, begins: Sequence[tuple[str, int, int]], ends: Sequence[tuple[int, int]]) -> None:
        """Declares all blocks at once: (name, first tensor, first operation), and where each ends."""
        self._blocks = list(begins)
        self._ends = list(ends)
        self._instances = [[] for _ in begins]

    # -- private -----------------------------------------------------------------------------------------

    def _freeze_blocks(self) -> tuple[Block, ...]:
        ends = self._ends or [
            *((t0, o0) for _, t0, o0 in self._blocks[1:]),
            (len(self._t["name"].items), len(self._o["kind"].items)),
        ]
        return tuple(
            Block(name=name, tensors=range(t0, t1), ops=range(o0, o1), instances=tuple(instances))
            for (name, t0, o0), (t1, o1), instances in zip(self._blocks, ends, self._instances, strict=True)
        )

    def _add(self, kind: t.OpKind, name: str, common: Common, **values: int) -> int:
        if unknown := common.keys() - Common.__annotations__.keys():
            raise TypeError(f"unexpected arguments: {', '.join(sorted(unknown))}")
        # Texts are numbered in the order in which they come, which a stored graph shows.
        name_of, module = self.string(name), self.string(common.get("module", ""))
        try:
            self.op_row(
                kind,
                name_of,
                common.get("phase", t.Phase.OTHER),
                module,
                common.get("stream", 0),
                common.get("inputs", ()),
                common.get("outputs", ()),
                common.get("deps", ()),
                [
                    (self.string(d.device), d.picoseconds, d.source, d.samples, d.spread)
                    for d in common.get("durations", ())
                ],
                **values,
            )
        except OverflowError:
            raise GraphError(_BEYOND.format(name)) from None
        return len(self._o["kind"].items) - 1


_BEYOND = "operation '{}' has a number beyond 64 bits: check what it is made of"
_GIVEN = ("kind", "name", "phase", "module", "stream")
"""Columns that every operation states."""


# -- copies of a block ----------------------------------------------------------------------------------------
# Copies a block's rows from a graph into a builder, column by column: as many as a block has, at one go.


def copy_rows(
    builder: GraphBuilder,
    graph: Graph,
    block: Block,
    attributes: Mapping[int, t.Attributes] = MappingProxyType({}),
) -> None:
    """Copies the tensors and operations of a block into the open block, wherever that begins.

    Args:
        builder: the builder of the new graph, with the groups and streams of the old one.
        graph: the old graph.
        block: the block of the old graph that is copied.
        attributes: new attributes of some operations, by their row in the old graph.
    """
    tensors = np.arange(len(graph.tensors)) + (builder.tensor_count() - block.tensors.start)
    ops = np.arange(len(graph.ops)) + (builder.op_count() - block.ops.start)
    copy_tensors(builder, graph, block.tensors, tensors)
    copy_ops(builder, graph, block.ops, tensors, ops, attributes)


def append_blocks(builder: GraphBuilder, graph: Graph, blocks: Sequence[Block]) -> None:
    """Copies blocks that follow each other, the first into the open block, without their instances.

    As `copy_rows` and `begin_block` for one after the other, but all rows at one go.
    """
    first, last = blocks[0], blocks[-1]
    new_tensor, new_op = builder.tensor_count() - first.tensors.start, builder.op_count() - first.ops.start
    for block in blocks:  # texts are numbered block by block
        _strings(builder, graph, graph.tensors, block.tensors)
        _strings(builder, graph, graph.ops, block.ops)
    tensors, ops = np.arange(len(graph.tensors)) + new_tensor, np.arange(len(graph.ops)) + new_op
    copy_tensors(builder, graph, range(first.tensors.start, last.tensors.stop), tensors)
    copy_ops(builder, graph, range(first.ops.start, last.ops.stop), tensors, ops)
    for block in blocks[1:]:
        builder.begin_block(block.name, (new_tensor + block.tensors.start, new_op + block.ops.start))


Rows = Int64 | range
"""Rows of a table, in the order in which they are to stand."""


def copy_tensors(
    builder: GraphBuilder,
    graph: Graph,
    rows: Rows,
    tensors: Int64,
    roles: Mapping[int, t.TensorRole] = MappingProxyType({}),
) -> None:
    """Copies tensors into the open block.

    Args:
        builder: of the new graph.
        graph: the old one.
        rows: of its table, in the order in which they are to stand.
        tensors: int64, for each of its tensors the new row, where one of these is an alias of it.
        roles: by new row, those of tensors that have others now.
    """
    strings = _strings(builder, graph, graph.tensors, rows)
    stored = {
        Holds.STRING: lambda values: strings[values],
        Holds.TENSOR: lambda values: np.where(values >= 0, tensors[values], values),
    }
    _copy(graph.tensors, TENSOR_COLUMNS, rows, builder._t, builder._t_ragged, stored)
    for row, role in roles.items():
        builder._t["role"].items[row] = role


def copy_ops(
    builder: GraphBuilder,
    graph: Graph,
    rows: Rows,
    tensors: Int64,
    ops: Int64,
    attributes: Mapping[int, t.Attributes] = MappingProxyType({}),
    shares: Float64 | None = None,
) -> None:
    """Copies operations into the open block.

    Args:
        builder: of the new graph, with the groups and streams of the old one.
        graph: the old one.
        rows: of its table, in the order in which they are to stand.
        tensors: int64, for each of its tensors that these read or make the new row.
        ops: int64, for each of its operations that these name the new row.
        attributes: by row, those of operations that have others now.
        shares: how much of its work each has left; durations of what has not all no longer hold. None: all have.
    """
    table, at, given = graph.ops, _index(rows), dict[str, Int64]()
    if shares is not None and (less := shares != 1.0).any():
        table = _without_durations(table, np.arange(len(table))[at][less])
        for name in ("flops", "bytes_read", "bytes_written", "nbytes"):
            size = getattr(table, name)[at]
            given[name] = np.where(less, np.ceil(size * shares).astype(np.int64), size)
    strings = _strings(builder, graph, table, rows)
    stored = {
        Holds.STRING: lambda values: strings[values],
        Holds.TENSOR: lambda values: np.where(values >= 0, tensors[values], values),
        Holds.OP: lambda values: np.where(values >= 0, ops[values], values),
        Holds.ATTRIBUTES: lambda _: _attributes(builder, graph, rows, attributes),
    }
    kernels = bool((table.kind[at] == t.OpKind.COMPUTE).all())
    columns = _KERNEL_COLUMNS if kernels else OP_COLUMNS
    _copy(table, columns, rows, builder._o | builder._d, builder._o_ragged, stored, given)


def _without_durations(ops: OpTable, rows: Int64) -> OpTable:
    """The table, but for what is known of how long some operations take."""
    if not len(ops.duration.values):
        return ops
    of = ops.duration.rows
    stays = ~np.isin(of, rows)
    ends = np.append(0, np.cumsum(np.bincount(of[stays], minlength=len(ops))))
    about = {name: getattr(ops, name)[stays] for name, column in OP_COLUMNS.items() if column.of}
    return replace(ops, duration=Ragged(ends, ops.duration.values[stays]), **about)


_KERNEL_COLUMNS = {
    name: column
    for name, column in OP_COLUMNS.items()
    if name not in ("variant", "dtype", "payload", "asynchronous", "group", "peer", "tag", "nbytes")
}
"""Columns of which kernels have more than the default: the others say what is communicated or copied."""


def _copy(
    table: Sequence[object],
    columns: Mapping[str, Column],
    rows: Rows,
    plain: Mapping[str, _Column],
    ragged: Mapping[str, _RaggedColumn],
    stored: Mapping[Holds, Callable[[Any], Any]],
    given: Mapping[str, Int64] = MappingProxyType({}),
) -> None:
    """Appends rows of a table, column by column, with what each is stored as; numbers as they are, or as given."""
    first, at = len(plain["name"].items), _index(rows)
    for name, column in columns.items():
        old, as_stored = getattr(table, name), stored.get(column.holds)
        if column.ragged:
            lengths, where = _places(old, rows)
            values = old.values[where]
        elif column.of:
            if not len(old):
                continue
            values = old[_places(getattr(table, column.of), rows)[1]]
        else:
            values = given[name] if name in given else old[at]
            plain[name].fill(first)
        if as_stored is not None and len(values):
            values = as_stored(values)
        if column.ragged:
            ragged[name].extend(lengths, values)
        else:
            plain[name].extend(values)


def _index(rows: Rows) -> Int64 | slice:
    return slice(rows.start, rows.stop) if isinstance(rows, range) else rows


def _places(ragged: Ragged, rows: Rows) -> tuple[Int64, Int64 | slice]:
    """How many values some rows have, and where they stand."""
    if isinstance(rows, range):
        ends = ragged.offsets[rows.start : rows.stop + 1]
        return ends[1:] - ends[:-1], slice(ends.item(0), ends.item(-1))
    return ragged.places(rows)


def _strings(builder: GraphBuilder, graph: Graph, table: TensorTable | OpTable, rows: Rows) -> Int64:
    """For every string of the graph, its index in the builder; those of rows are added in the order of use."""
    known, found = builder._copied.get(id(graph), (None, None))
    if known is not graph or found is None:
        found = np.full(len(graph.strings), NONE, np.int64)
        builder._copied[id(graph)] = graph, found
    values = table.texts.values[_places(table.texts, rows)[1]]
    new = values[found[values] == NONE]
    for index in _first_uses(new) if len(new) else ():
        found[index] = builder.string(graph.strings[index])
    return found


def _first_uses(values: Int64) -> list[int]:
    found: list[int] = values[np.sort(np.unique(values, return_index=True)[1])].tolist()
    return found


def _attributes(builder: GraphBuilder, graph: Graph, rows: Rows, others: Mapping[int, t.Attributes]) -> Int64:
    old = np.array(graph.ops.attributes[_index(rows)], np.int64)
    mine = [(at, others[row]) for at, row in enumerate(map(int, rows)) if row in others] if others else []
    old[[at for at, _ in mine]] = NONE
    new = np.full(len(graph.ops.attribute_values) + 1, NONE, np.int64)
    for index in _first_uses(old):
        if index != NONE:
            new[index] = builder.attribute(graph.ops.attribute_values[index])
    found: Int64 = new[old]
    for at, value in mine:
        found[at] = builder.attribute(value)
    return found

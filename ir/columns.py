"""Columns behind a graph: one numpy array a field, and sequences that show a row as its frozen type.

What a column's numbers are is said once, where it is declared: builder, copies of rows, file and text follow.

Engines and analyses read the columns; people read rows. Ragged fields (shapes, inputs, ...) are an array of
offsets and an array of values, as in a compressed sparse row matrix. All arrays are read-only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from enum import Enum, auto
from functools import cache, cached_property
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_origin, get_type_hints, overload

import numpy as np
import numpy.typing as npt

from echograph.ir import types as t

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Bools = npt.NDArray[np.bool_]
UInt8 = npt.NDArray[np.uint8]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

NONE = -1


MOST_LISTED = 1 << 16
"""Values of a column up to which Python's own stand beside it, once a row was asked for."""


@dataclass(frozen=True, slots=True)
class Ragged:
    """Rows of differing length: row i is `values[offsets[i]:offsets[i + 1]]`."""

    offsets: Int64
    values: Any
    _lists: tuple[list[int], list[int]] | None = field(default=None, init=False, repr=False, compare=False)

    def __getitem__(self, row: int) -> Any:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def row(self, row: int) -> tuple[int, ...]:
        """Row as a tuple of Python integers."""
        # Numbers of numpy's are slow to slice by, and rows are read by the hundred thousand.
        if self._lists is None:
            if len(self.values) > MOST_LISTED:
                return tuple(self.values[self.offsets.item(row) : self.offsets.item(row + 1)].tolist())
            object.__setattr__(self, "_lists", (self.offsets.tolist(), self.values.tolist()))
        assert self._lists is not None
        offsets, values = self._lists
        return tuple(values[offsets[row] : offsets[row + 1]])

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def places(self, rows: Int64) -> tuple[Int64, Int64]:
        """How many values each of some rows has, and where all of them stand, row by row."""
        begin, end = self.offsets[rows], self.offsets[rows + 1]
        return end - begin, expand_ranges(begin, end)

    @property
    def lengths(self) -> Int64:
        """Length of every row."""
        return np.diff(self.offsets)

    @property
    def rows(self) -> Int64:
        """For every value, the row that it stands in."""
        return np.repeat(np.arange(len(self), dtype=np.int64), self.lengths)


class Holds(Enum):
    """What the numbers of a column are."""

    NUMBER = auto()
    """Themselves, or members of an enumeration."""
    STRING = auto()
    """Strings of the graph."""
    TENSOR = auto()
    """Rows of the tensor table; below 0 none."""
    OP = auto()
    """Rows of the operation table; below 0 none, or ports."""
    ATTRIBUTES = auto()
    """Attributes of the graph; -1 for none."""


@dataclass(frozen=True, slots=True)
class Column:
    """How a field stands in its table.

    Attributes:
        dtype: numpy's, of the values.
        holds: what they are.
        default: the value of rows that do not state one.
        ragged: whether a row has any number of values, and none by default.
        of: the ragged column whose values it goes with one by one; "" where it has a value a row.
        text: its keyword in the text form; "" where that has a place of its own for it.
    """

    dtype: str
    holds: Holds = Holds.NUMBER
    _: KW_ONLY
    default: int = 0
    ragged: bool = False
    of: str = ""
    text: str = ""


@cache
def _columns(table: type) -> dict[str, Column]:
    """The columns of a table by name, in its order."""
    hints = get_type_hints(table, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if get_origin(hint) is Annotated}


_DTYPES = {int(dtype): dtype for dtype in t.DType}
_ROLES = {int(role): role for role in t.TensorRole}
_PHASES = {int(phase): phase for phase in t.Phase}


def distinct(values: npt.ArrayLike) -> Int64:
    """Distinct integers, ascending: `numpy.unique`, which hashes and loads `numpy.ma`, in less time."""
    ascending = np.sort(np.asarray(values, np.int64), axis=None)
    found: Int64 = ascending[np.concatenate([[True], ascending[1:] != ascending[:-1]])[: len(ascending)]]
    return found


def expand_ranges(begin: Int64, end: Int64) -> Int64:
    """The numbers of some ranges, one range after the other: 2..4 and 7..9 are 2, 3, 7, 8.

    Args:
        begin: [ranges] first number of each.
        end: [ranges] one past its last number.

    Returns:
        [sum of the lengths] all of them.
    """
    lengths = end - begin
    numbers: Int64 = np.repeat(begin - (np.cumsum(lengths) - lengths), lengths)
    numbers += np.arange(len(numbers))
    return numbers


def enumerate_ranges(begin: Int64, end: Int64) -> tuple[Int64, Int64]:
    """As `expand_ranges`, with the range that each number is of: [sum of the lengths] both."""
    return np.repeat(np.arange(len(begin)), end - begin), expand_ranges(begin, end)


def ascending(values: Int64) -> Int64:
    """Rows by ascending value, equal ones in their order: a stable `numpy.argsort`, several times quicker.

    Args:
        values: int64 [rows].
    """
    bits = len(values).bit_length()
    low, high = int(values.min(initial=0)), int(values.max(initial=0))
    if high - low >= 1 << (62 - bits):
        return np.argsort(values, kind="stable")
    # Numbers that hold value and row differ, so that their order is one, however they are sorted.
    numbers = (np.asarray(values, np.int64) - low) << bits | np.arange(len(values))
    rows: Int64 = np.sort(numbers) & ((1 << bits) - 1)
    return rows


class EqualRows(NamedTuple):
    """Rows by what they are equal in, as `numpy.unique` has them.

    Attributes:
        first: int64 [values], the first row of each value, by that value; of several columns, ascending.
        of: int64 [rows], the number of each row's value.
    """

    first: Int64
    of: Int64


def equal_rows(values: Int64, *ragged: Ragged) -> EqualRows:
    """Finds rows that have the same value.

    Args:
        values: int64 [rows], or [rows, columns] where all of a row is its value.
        ragged: of several columns: what else is of a row's value.
    """
    if values.ndim > 1:
        return _equal_records(values, ragged)
    order = ascending(values)
    new = np.diff(values[order], prepend=0) != 0
    new[:1] = True
    of = np.empty(len(values), np.int64)
    of[order] = np.cumsum(new) - 1
    return EqualRows(order[new], of)


_FACTOR = 0x5851F42D4C957F2D
"""Of the polynomials that rows are hashed by: the multiplier of Knuth's generator MMIX."""


def _equal_records(values: Int64, ragged: Sequence[Ragged]) -> EqualRows:
    """Rows of several columns that are equal: those whose hashes are, which are compared then."""
    hashes = _polynomials(np.arange(values.shape[1]), values).sum(axis=1)
    for its in ragged:
        terms = _polynomials(np.arange(len(its.values)) - its.offsets[its.rows], its.values)
        until = np.append(0, np.cumsum(terms))
        hashes = (hashes * _FACTOR + until[its.offsets[1:]] - until[its.offsets[:-1]]) * _FACTOR + its.lengths
    first, of = equal_rows(hashes)
    if not _same(values, ragged, first[of]):
        # Two rows that differ have one hash: rows as they are.
        numbers: dict[object, int] = {}
        rows = zip(values, *ragged, strict=True)
        of = np.array(
            [numbers.setdefault(tuple(x.tobytes() for x in row), len(numbers)) for row in rows], np.int64
        )
        return equal_rows(of)
    order = np.argsort(first)
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return EqualRows(first[order], place[of])


def _polynomials(powers: Int64, values: npt.NDArray[Any]) -> Int64:
    """Values, each by a power of the factor; what 64 bits do not hold is cut off."""
    factors = np.cumprod(np.full(int(powers.max(initial=0)) + 1, _FACTOR, np.int64))
    return np.asarray((values.astype(np.int64) + 1) * factors[powers], np.int64)


def _same(values: Int64, ragged: Sequence[Ragged], others: Int64) -> bool:
    """Whether all rows equal the others that they are said to equal."""
    if not np.array_equal(values, values[others]):
        return False
    for its in ragged:
        lengths, where = its.places(others)
        if not (np.array_equal(lengths, its.lengths) and np.array_equal(its.values[where], its.values)):
            return False
    return True


def _freeze(table: DataclassInstance) -> None:
    for column in fields(table):
        value = getattr(table, column.name)
        arrays = (value.offsets, value.values) if isinstance(value, Ragged) else (value,)
        for array in arrays:
            if isinstance(array, np.ndarray):
                array.setflags(write=False)


def _texts(table: DataclassInstance, length: int) -> Ragged:
    """The strings that each row of a table of so many names, column after column."""
    named = []
    for name, column in _columns(type(table)).items():
        if column.holds == Holds.STRING:
            values = getattr(table, name)
            ragged = values if column.ragged else getattr(table, column.of) if column.of else None
            of = np.arange(len(values)) if ragged is None else ragged.rows
            named.append((of, values.values if column.ragged else values))
    rows = np.concatenate([of for of, _ in named])
    values = np.concatenate([np.asarray(values, np.int64) for _, values in named])
    counts = np.bincount(rows, minlength=length)
    return Ragged(np.append(0, np.cumsum(counts)), values[ascending(rows)])


@dataclass(frozen=True, eq=False)
class TensorTable(Sequence[t.Tensor]):
    """All tensors of a graph, block after block."""

    strings: tuple[str, ...]
    name: Annotated[Int32, Column("i4", Holds.STRING)]
    shape: Annotated[Ragged, Column("i8", ragged=True)]
    dtype: Annotated[UInt8, Column("u1")]
    role: Annotated[UInt8, Column("u1")]
    alias_of: Annotated[Int64, Column("i8", Holds.TENSOR, default=NONE, text="alias")]
    port: Annotated[Bools, Column("?")]
    sharded: Annotated[Ragged, Column("i8", Holds.STRING, ragged=True, text="sharded")]

    def __post_init__(self) -> None:
        _freeze(self)

    def __len__(self) -> int:
        return len(self.name)

    @overload
    def __getitem__(self, index: int) -> t.Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[t.Tensor]: ...
    def __getitem__(self, index: int | slice) -> t.Tensor | Sequence[t.Tensor]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row = range(len(self))[index]
        alias = self.alias_of.item(row)
        return t.Tensor(
            id=row,
            name=self.strings[self.name.item(row)],
            shape=self.shape.row(row),
            dtype=_DTYPES[self.dtype.item(row)],
            role=_ROLES[self.role.item(row)],
            alias_of=None if alias == NONE else alias,
            port=self.port.item(row),
            sharded=tuple([self.strings[i] for i in self.sharded.row(row)]),
        )

    def __iter__(self) -> Iterator[t.Tensor]:
        return (self[i] for i in range(len(self)))

    @cached_property
    def texts(self) -> Ragged:
        """The strings that each tensor names, in the order in which they are numbered."""
        return _texts(self, len(self))

    @cached_property
    def roles(self) -> list[int]:
        """The role of every tensor, for those who read them one by one: a number of numpy's is slow to compare."""
        return self.role.tolist()  # type: ignore[no-any-return]

    @property
    def nbytes(self) -> Int64:
        """Bytes that each tensor's elements span (aliases included)."""
        bits = np.zeros(256, np.int64)
        for dtype in t.DType:
            bits[dtype] = dtype.bits
        bits = bits[self.dtype]
        # Whole bytes first: bits of the largest tensors would not fit the integer.
        return np.where(bits < 8, -(-self.numel * bits // 8), self.numel * (bits // 8))

    @cached_property
    def numel(self) -> Int64:
        """Elements of each tensor."""
        padded = np.append(np.asarray(self.shape.values, np.int64), 1)
        numel = np.multiply.reduceat(padded, np.minimum(self.shape.offsets[:-1], len(padded) - 1))
        numel[self.shape.lengths == 0] = 1
        numel.flags.writeable = False
        return numel


@dataclass(frozen=True, eq=False)
class OpTable(Sequence[t.Op]):
    """All operations of a graph, block after block.

    `variant` is the collective's kind or the copy's direction; `nbytes` is what a communication or copy moves;
    `attributes` indexes `attribute_values`, `arguments` the strings; `group`, `peer`, `tag` belong to
    communications.
    """

    strings: tuple[str, ...]
    attribute_values: tuple[t.Attributes, ...]
    kind: Annotated[UInt8, Column("u1")]
    name: Annotated[Int32, Column("i4", Holds.STRING)]
    phase: Annotated[UInt8, Column("u1")]
    module: Annotated[Int32, Column("i4", Holds.STRING)]
    stream: Annotated[Int32, Column("i4")]
    inputs: Annotated[Ragged, Column("i4", Holds.TENSOR, ragged=True)]
    outputs: Annotated[Ragged, Column("i4", Holds.TENSOR, ragged=True)]
    deps: Annotated[Ragged, Column("i4", Holds.OP, ragged=True)]
    forward_op: Annotated[Int64, Column("i8", Holds.OP, default=NONE)]
    flops: Annotated[Int64, Column("i8")]
    bytes_read: Annotated[Int64, Column("i8")]
    bytes_written: Annotated[Int64, Column("i8")]
    attributes: Annotated[Int32, Column("i4", Holds.ATTRIBUTES, default=NONE)]
    arguments: Annotated[Int32, Column("i4", Holds.STRING)]
    variant: Annotated[UInt8, Column("u1")]
    dtype: Annotated[UInt8, Column("u1")]
    payload: Annotated[UInt8, Column("u1")]
    asynchronous: Annotated[Bools, Column("?")]
    group: Annotated[Int32, Column("i4", default=NONE)]
    peer: Annotated[Int32, Column("i4")]
    tag: Annotated[Int64, Column("i8")]
    nbytes: Annotated[Int64, Column("i8")]
    duration: Annotated[Ragged, Column("i8", ragged=True)]
    duration_device: Annotated[Int32, Column("i4", Holds.STRING, of="duration")]
    duration_source: Annotated[UInt8, Column("u1", of="duration")]
    duration_samples: Annotated[Int64, Column("i8", of="duration")]
    duration_spread: Annotated[Float32, Column("f4", of="duration")]

    def __post_init__(self) -> None:
        _freeze(self)

    def __len__(self) -> int:
        return len(self.kind)

    @overload
    def __getitem__(self, index: int) -> t.Op: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[t.Op]: ...
    def __getitem__(self, index: int | slice) -> t.Op | Sequence[t.Op]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row = range(len(self))[index]
        return _MAKERS[self.kind.item(row)](self, row)

    def __iter__(self) -> Iterator[t.Op]:
        return (self[i] for i in range(len(self)))

    def moved_bytes(self, runs: Int64) -> int:
        """What operations read and write together, each as often as it runs.

        Args:
            runs: int64 [operations]. Reads and writes are each within 64 bits, and their sum need not be.
        """
        return int(np.dot(runs, self.bytes_read)) + int(np.dot(runs, self.bytes_written))

    @cached_property
    def texts(self) -> Ragged:
        """The strings that each operation names, in the order in which they are numbered."""
        return _texts(self, len(self))

    @cached_property
    def phases(self) -> list[int]:
        """The phase of every operation, for those who read them one by one."""
        return self.phase.tolist()  # type: ignore[no-any-return]

    @cached_property
    def kinds(self) -> list[int]:
        """The kind of every operation, likewise."""
        return self.kind.tolist()  # type: ignore[no-any-return]

    @cached_property
    def is_view(self) -> Bools:
        """Which operations cost the device nothing. Read row by row, too, and so worked out once."""
        still = (self.flops == 0) & (self.bytes_read == 0) & (self.bytes_written == 0)
        view: Bools = (self.kind == t.OpKind.COMPUTE) & still
        view.flags.writeable = False
        return view

    def touched(self, rows: range) -> list[int]:
        """The tensors that operations read or make, each once, in the order in which they do."""
        values, turns = [], []
        for side, its in enumerate((self.inputs, self.outputs)):
            ends = its.offsets[rows.start : rows.stop + 1]
            values.append(its.values[ends[0] : ends[-1]])
            turns.append(2 * np.repeat(np.arange(len(rows)), np.diff(ends)) + side)
        every = np.concatenate(values)[np.argsort(np.concatenate(turns), kind="stable")]
        found: list[int] = every[np.sort(np.unique(every, return_index=True)[1])].tolist()
        return found

    def durations_of(self, row: int) -> tuple[t.Duration, ...]:
        """What is known of the time of one operation."""
        if not len(self.duration.values):
            return ()
        span = range(int(self.duration.offsets[row]), int(self.duration.offsets[row + 1]))
        return tuple(
            t.Duration(
                device=self.strings[self.duration_device[i]],
                picoseconds=int(self.duration.values[i]),
                source=t.Source(int(self.duration_source[i])),
                samples=int(self.duration_samples[i]),
                spread=float(self.duration_spread[i]),
            )
            for i in span
        )

    def duration_on(self, device: str) -> tuple[Int64, UInt8, Float32]:
        """Picoseconds, source and spread of every operation on one device; -1, 0 and 0 where unknown."""
        picoseconds = np.full(len(self), NONE, np.int64)
        source = np.zeros(len(self), np.uint8)
        spread = np.zeros(len(self), np.float32)
        if device in self.strings:
            hit = np.flatnonzero(self.duration_device == self.strings.index(device))
            rows = self.duration.rows[hit]
            picoseconds[rows] = self.duration.values[hit]
            source[rows] = self.duration_source[hit]
            spread[rows] = self.duration_spread[hit]
        return picoseconds, source, spread


TENSOR_COLUMNS, OP_COLUMNS = _columns(TensorTable), _columns(OpTable)


def _common(ops: OpTable, row: int) -> dict[str, Any]:
    return {
        "id": row,
        "name": ops.strings[ops.name.item(row)],
        "phase": _PHASES[ops.phase.item(row)],
        "module": ops.strings[ops.module.item(row)],
        "inputs": ops.inputs.row(row),
        "outputs": ops.outputs.row(row),
        "stream": ops.stream.item(row),
        "deps": ops.deps.row(row),
        "durations": ops.durations_of(row),
    }


def _compute(ops: OpTable, row: int) -> t.Op:
    forward, attributes = ops.forward_op.item(row), ops.attributes.item(row)
    return t.Compute(
        **_common(ops, row),
        forward_op=None if forward == NONE else forward,
        flops=ops.flops.item(row),
        bytes_read=ops.bytes_read.item(row),
        bytes_written=ops.bytes_written.item(row),
        attributes=None if attributes == NONE else ops.attribute_values[attributes],
        arguments=ops.strings[ops.arguments.item(row)],
    )


def _collective(ops: OpTable, row: int) -> t.Op:
    return t.Collective(
        **_common(ops, row),
        collective=t.CollectiveKind(int(ops.variant[row])),
        group=int(ops.group[row]),
        bytes_per_rank=int(ops.nbytes[row]),
        dtype=t.DType(int(ops.dtype[row])),
        payload=t.Payload(int(ops.payload[row])),
        asynchronous=bool(ops.asynchronous[row]),
    )


def _point_to_point(ops: OpTable, row: int) -> t.Op:
    maker = t.Send if ops.kind[row] == t.OpKind.SEND else t.Recv
    return maker(
        **_common(ops, row),
        group=int(ops.group[row]),
        peer=int(ops.peer[row]),
        tag=int(ops.tag[row]),
        nbytes=int(ops.nbytes[row]),
        payload=t.Payload(int(ops.payload[row])),
    )


def _copy(ops: OpTable, row: int) -> t.Op:
    return t.Copy(
        **_common(ops, row),
        direction=t.CopyDirection(int(ops.variant[row])),
        nbytes=int(ops.nbytes[row]),
    )


def _host(ops: OpTable, row: int) -> t.Op:
    return t.Host(**_common(ops, row))


_MAKERS: dict[int, Callable[[OpTable, int], t.Op]] = {
    t.OpKind.COMPUTE: _compute,
    t.OpKind.COLLECTIVE: _collective,
    t.OpKind.SEND: _point_to_point,
    t.OpKind.RECV: _point_to_point,
    t.OpKind.COPY: _copy,
    t.OpKind.HOST: _host,
}

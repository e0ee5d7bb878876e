"""What every graph keeps: one function an invariant, each with its own error.

The checks run in order, and a later one relies on the earlier ones: after the ranges hold, the columns may be
used to index each other. They are written on columns, so millions of operations take a second or two, and they
accept any numbers at all: a corrupted file ends here in one line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from functools import cached_property
from itertools import pairwise, product
from math import prod
from typing import Any, NamedTuple, NoReturn

import numpy as np

from echograph.errors import GraphError
from echograph.ir import types as t
from echograph.ir.columns import NONE, Int64, ascending, distinct, enumerate_ranges, equal_rows
from echograph.ir.graph import Block, Graph, Group, JobGraph, Program, StepGraph
from echograph.ir.schedule import Schedule
from echograph.ir.types import COMMUNICATIONS, OpKind

MAX_TENSOR_BYTES = 2**60
MAX_RANKS = 2**40
MAX_TOTAL = 2.0**63


def verify(graph: Graph) -> None:
    """Checks every invariant.

    Raises:
        GraphError: names the invariant, and the operation, tensor, block or program that breaks it.
    """
    for check in CHECKS:
        check(graph)


def _fail(invariant: str, where: str, what: str) -> NoReturn:
    raise GraphError(f"{where} {what} [{invariant}]")


def _first(broken: Any) -> int | None:
    hits = np.flatnonzero(broken)
    return int(hits[0]) if len(hits) else None


def _known(invariant: str, what: str, column: Any, kinds: type[IntEnum], where: Any = None) -> None:
    bad = ~np.isin(column, [int(k) for k in kinds])
    if where is not None:
        bad &= where
    if (row := _first(bad)) is not None:
        _fail(invariant, f"{what} {row}", f"has the unknown {kinds.__name__} {int(column[row])}")


def strings_in_range(graph: Graph) -> None:
    """Every name is an index into the string table."""
    columns = (
        ("tensor", graph.tensors.name), ("operation", graph.ops.name), ("operation", graph.ops.module),
        ("operation", graph.ops.arguments), ("duration", graph.ops.duration_device),
    )  # fmt: skip
    for what, column in columns:
        if (row := _first((column < 0) | (column >= len(graph.strings)))) is not None:
            _fail(
                "strings_in_range",
                f"{what} {row}",
                f"names string {int(column[row])} of {len(graph.strings)}",
            )


def enumerations_known(graph: Graph) -> None:
    """Every enumeration has a value of this format version."""
    ops, invariant = graph.ops, "enumerations_known"
    _known(invariant, "tensor", graph.tensors.dtype, t.DType)
    _known(invariant, "tensor", graph.tensors.role, t.TensorRole)
    _known(invariant, "operation", ops.kind, t.OpKind)
    _known(invariant, "operation", ops.phase, t.Phase)
    _known(invariant, "operation", ops.variant, t.CollectiveKind, ops.kind == t.OpKind.COLLECTIVE)
    _known(invariant, "operation", ops.dtype, t.DType, ops.kind == t.OpKind.COLLECTIVE)
    _known(invariant, "operation", ops.payload, t.Payload, np.isin(ops.kind, COMMUNICATIONS))
    _known(invariant, "operation", ops.variant, t.CopyDirection, ops.kind == t.OpKind.COPY)
    _known(invariant, "duration", ops.duration_source, t.Source)


def blocks_cover_tables(graph: Graph) -> None:
    """The blocks' rows follow each other and cover both tables; the main block has one instance."""
    tensors = ops = 0
    if not graph.blocks or len(graph.blocks[0].instances) != 1:
        _fail("blocks_cover_tables", "the graph", "has no main block with one instance")
    for number, block in enumerate(graph.blocks):
        if (
            block.tensors.start != tensors
            or block.ops.start != ops
            or block.tensors.stop < tensors
            or block.ops.stop < ops
        ):
            _fail("blocks_cover_tables", f"block {number}", "does not begin where the one before it ends")
        tensors, ops = block.tensors.stop, block.ops.stop
    if tensors != len(graph.tensors) or ops != len(graph.ops):
        _fail("blocks_cover_tables", "the last block", "does not end where the tables end")


def sizes_sane(graph: Graph) -> None:
    """Extents, work and times are not negative, and no tensor is beyond 2^60 bytes."""
    for name in ("parameters", "batch_size", "sequence_length", "model_flops", "causal_attention_flops"):
        if not 0 <= (count := getattr(graph.workload, name)) < 2**63:
            _fail("sizes_sane", "the workload", f"has {name} {count}")
    for number, program in enumerate(graph.programs):
        for by, nbytes in program.held.items():
            if not 0 <= nbytes < MAX_TENSOR_BYTES:
                _fail("sizes_sane", f"program {number}", f"has {nbytes} bytes held by {by}")
    shape = graph.tensors.shape
    if (at := _first(shape.values < 0)) is not None:
        _fail("sizes_sane", f"tensor {int(shape.rows[at])}", f"has the extent {int(shape.values[at])}")
    logs = np.zeros(len(graph.tensors) + 1)
    np.add.at(logs, shape.rows, np.log2(np.maximum(shape.values, 1).astype(np.float64)))
    if (row := _first(logs[:-1] > np.log2(MAX_TENSOR_BYTES) - 3)) is not None:
        _fail("sizes_sane", f"tensor {row}", f"has the shape {shape.row(row)}, beyond 2^60 bytes")
    for name in ("flops", "bytes_read", "bytes_written", "nbytes", "tag"):
        if (row := _first(getattr(graph.ops, name) < 0)) is not None:
            _fail("sizes_sane", f"operation {row}", f"has negative {name}")
    ops = graph.ops
    spread_bad = ~np.isfinite(ops.duration_spread) | (ops.duration_spread < 0)
    if (row := _first((ops.duration.values < 0) | spread_bad | (ops.duration_samples < 0))) is not None:
        _fail("sizes_sane", f"duration {row}", "is negative or not finite")


def shards_in_mesh(graph: Graph) -> None:
    """A tensor is divided over axes that the mesh has."""
    sharded = graph.tensors.sharded
    axes = {axis.name for axis in graph.mesh}
    known = np.array([*(name in axes for name in graph.strings), False])
    if (at := _first(~known[np.clip(sharded.values, -1, len(graph.strings))])) is not None:
        _fail("shards_in_mesh", f"tensor {int(sharded.rows[at])}", "is divided over an axis that the mesh lacks")


def tensors_in_block(graph: Graph) -> None:
    """An operation reads and makes tensors of its own block."""
    for ragged, verb in ((graph.ops.inputs, "reads"), (graph.ops.outputs, "makes")):
        rows = ragged.rows
        low, high = _block_bounds(graph, rows)
        if (at := _first((ragged.values < low) | (ragged.values >= high))) is not None:
            _fail(
                "tensors_in_block",
                _op(graph, rows[at]),
                f"{verb} tensor {int(ragged.values[at])} of another block",
            )


def aliases_point_back(graph: Graph) -> None:
    """A tensor shares memory only with an earlier tensor of its block, so alias chains end."""
    alias = graph.tensors.alias_of
    low = np.repeat([b.tensors.start for b in graph.blocks], [len(b.tensors) for b in graph.blocks])
    bad = (alias != NONE) & ((alias < low) | (alias >= np.arange(len(alias))))
    if (row := _first(bad)) is not None:
        _fail("aliases_point_back", f"tensor {row}", f"is an alias of {int(alias[row])}, not of an earlier one")


def one_maker(graph: Graph) -> None:
    """Each tensor is made by one operation at most, and no operation makes a port."""
    made = graph.ops.outputs.values
    counts = np.bincount(made, minlength=len(graph.tensors))
    if (row := _first(counts > 1)) is not None:
        _fail("one_maker", f"tensor {row}", f"is made by {int(counts[row])} operations")
    if (row := _first(graph.tensors.port & ((counts > 0) | (graph.tensors.alias_of != NONE)))) is not None:
        _fail("one_maker", f"tensor {row}", "is a port, yet made or an alias inside its block")


def made_before_read(graph: Graph) -> None:
    """Inside a block an operation reads only what earlier ones made; it depends on earlier ones only."""
    ops = graph.ops
    makers, rows = graph.maker[graph.origin[ops.inputs.values]], ops.inputs.rows
    if (at := _first(makers >= rows)) is not None:
        reads = int(ops.inputs.values[at])
        _fail(
            "made_before_read",
            _op(graph, rows[at]),
            f"reads tensor {reads}, made later by operation {int(makers[at])}",
        )
    rows = ops.deps.rows
    begins = np.array([b.ops.start for b in graph.blocks])[graph.block_of_op[rows]]
    if (at := _first((ops.deps.values < begins) | (ops.deps.values >= rows))) is not None:
        _fail(
            "made_before_read",
            _op(graph, rows[at]),
            f"depends on operation {int(ops.deps.values[at])}, not an earlier one of its block",
        )


def forward_ops_earlier(graph: Graph) -> None:
    """A forward operation is an earlier one of the block, or one of the instance's `op_bindings`."""
    forward, rows = graph.ops.forward_op, np.arange(len(graph.ops))
    begins = np.array([b.ops.start for b in graph.blocks])[graph.block_of_op]
    if (row := _first((forward >= 0) & ((forward < begins) | (forward >= rows)))) is not None:
        _fail(
            "forward_ops_earlier",
            _op(graph, row),
            f"names operation {int(forward[row])} as its forward operation",
        )
    for number, block in enumerate(graph.blocks):
        lowest = int(forward[block.ops.start : block.ops.stop].min(initial=NONE))
        for instance in block.instances:
            if -2 - lowest >= len(instance.op_bindings) and lowest < NONE:
                _fail(
                    "forward_ops_earlier",
                    f"block {number}",
                    f"has {len(instance.op_bindings)} op_bindings, too few",
                )


def streams_and_groups(graph: Graph) -> None:
    """Streams and groups are in their tables, and the groups in the mesh."""
    ops = graph.ops
    if (row := _first((ops.stream < 0) | (ops.stream >= len(graph.streams)))) is not None:
        _fail(
            "streams_and_groups",
            _op(graph, row),
            f"runs on stream {int(ops.stream[row])} of {len(graph.streams)}",
        )
    communicates = np.isin(ops.kind, COMMUNICATIONS)
    if (row := _first(communicates & ((ops.group < 0) | (ops.group >= len(graph.groups))))) is not None:
        _fail("streams_and_groups", _op(graph, row), f"uses group {int(ops.group[row])} of {len(graph.groups)}")
    names = [axis.name for axis in graph.mesh]
    if len(set(names)) != len(names) or any(axis.size < 1 for axis in graph.mesh):
        _fail("streams_and_groups", "the mesh", "has an axis twice, or one of size 0")
    if graph.world_size > MAX_RANKS:
        _fail("streams_and_groups", "the mesh", "has more than 2^40 ranks")
    listed = [r for group in graph.groups for r in group.ranks] + [r for p in graph.programs for r in p.ranks]
    if min(listed, default=0) < 0 or (graph.mesh and max(listed, default=0) >= graph.world_size):
        where = f"rank {min(listed) if min(listed) < 0 else max(listed)}"
        _fail("streams_and_groups", where, "is listed by a group or program, but is outside the mesh")
    for group in graph.groups:
        if not set(group.axes) <= set(names) or len(set(group.ranks)) != len(group.ranks):
            where = f"group '{group.name}'"
            _fail("streams_and_groups", where, "names an axis that the mesh lacks, or a rank twice")
        if not (group.axes or group.ranks):
            _fail("streams_and_groups", f"group '{group.name}'", "has neither axes nor ranks")


def instances_bound(graph: Graph) -> None:
    """Every instance binds each port to a tensor of the same shape and type."""
    total = sum(count * len(b.instances) for (_, count), b in zip(graph.tensor_bases, graph.blocks, strict=True))
    total_ops = sum(count * len(b.instances) for (_, count), b in zip(graph.op_bases, graph.blocks, strict=True))
    for number, block in enumerate(graph.blocks):
        ports = int(graph.tensors.port[block.tensors.start : block.tensors.stop].sum())
        for index, instance in enumerate(block.instances):
            if len(instance.bindings) != ports:
                where = f"instance {index} of block {number}"
                _fail("instances_bound", where, f"binds {len(instance.bindings)} of {ports} ports")
            if not (_all_below(instance.bindings, total) and _all_below(instance.op_bindings, total_ops)):
                where = f"instance {index} of block {number}"
                _fail("instances_bound", where, "binds an id that the graph does not have")
    _same_types(graph)
    if (slot := _first(graph.ports.last(graph.root) == NONE)) is not None:
        _fail("instances_bound", _slot(graph, slot), "binds a port to itself")


def _all_below(ids: Sequence[int], bound: int) -> bool:
    return not ids or (min(ids) >= 0 and max(ids) < bound)


def _slot(graph: Graph, slot: int) -> str:
    block, instance = (int(column[slot]) for column in graph.ports.instances)
    return f"instance {instance} of block {block}"


def _same_types(graph: Graph) -> None:
    dtype, shape = graph.tensors.dtype, graph.tensors.shape
    port, bound = graph.ports.rows, graph.ports.located[2]
    same = (dtype[port] == dtype[bound]) & (shape.lengths[port] == shape.lengths[bound])
    rank = np.where(same, shape.lengths[port], 0)
    slot = np.repeat(np.arange(len(port)), rank)
    dim = np.arange(len(slot)) - (np.cumsum(rank) - rank)[slot]
    differ = shape.values[shape.offsets[port[slot]] + dim] != shape.values[shape.offsets[bound[slot]] + dim]
    same[slot[differ]] = False
    if (at := _first(~same)) is not None:
        what = f"binds port {int(port[at])} to tensor {int(bound[at])} of another shape or type"
        _fail("instances_bound", _slot(graph, at), what)


def calls_in_range(graph: Graph) -> None:
    """Calls name operations and instances that exist; no operation of an instance runs twice in a micro-batch."""
    if isinstance(graph, StepGraph) and len(graph.programs) != 1:
        _fail("calls_in_range", "a step graph", f"has {len(graph.programs)} programs")
    sizes = {axis.name: axis.size for axis in graph.mesh}
    for number, program in enumerate(graph.programs):
        where = f"program {number}"
        if any(not 0 <= value < sizes.get(axis, 0) for axis, value in program.coordinates.items()):
            _fail("calls_in_range", where, "has a coordinate outside the mesh")
        block, begin, end, instance, micro_batch = (program.calls[:, i] for i in range(5))
        if (row := _first((block < 0) | (block >= len(graph.blocks)))) is not None:
            _fail("calls_in_range", f"call {row} of {where}", f"names block {int(block[row])}")
        low, high, count = (np.array(v)[block] for v in zip(*map(_extent, graph.blocks), strict=True))
        bad = (begin < low) | (end > high) | (end < begin) | (instance < 0) | (instance >= count)
        if (row := _first(bad | (micro_batch < 0) | (micro_batch >= 2**24))) is not None:
            _fail("calls_in_range", f"call {row} of {where}", "is outside its block, or names no instance of it")
        order = Schedule(graph, program).order
        bad = (begin[order[1:]] < end[order[:-1]]) | (order[1:] < order[:-1])
        for column in (block, instance, micro_batch):
            ordered = column[order]
            bad &= ordered[1:] == ordered[:-1]
        if (row := _first(bad)) is not None:
            _fail(
                "calls_in_range",
                f"call {int(order[row + 1])} of {where}",
                "runs operations again or out of order",
            )


def _extent(block: Block) -> tuple[int, int, int]:
    return block.ops.start, block.ops.stop, len(block.instances)


def totals_fit(graph: Graph) -> None:
    """What all programs do together is within 2^63 FLOPs and bytes, so sums over a step do not overflow."""
    for name in ("flops", "bytes_read", "bytes_written", "nbytes"):
        column: Any = getattr(graph.ops, name)
        before = np.concatenate([[0.0], np.cumsum(column, dtype=np.float64)])
        total = sum(float((before[p.calls[:, 2]] - before[p.calls[:, 1]]).sum()) for p in graph.programs)
        if max(total, before[-1]) > MAX_TOTAL:
            _fail("totals_fit", "the graph", f"has {total:.3g} {name} in all, beyond 2^63")


def calls_in_order(graph: Graph) -> None:
    """A call runs after the calls that make what it reads."""
    if isinstance(graph, JobGraph) and len(graph.programs) > 1 and len(graph.blocks) == 1:
        return  # an imported job: each rank runs its own slice of the main block, checked by made_before_read
    outside: dict[tuple[int, int], Int64] = {}
    cuts = distinct(np.concatenate([program.calls[:, 1:3].ravel() for program in graph.programs]))
    for number, program in enumerate(graph.programs):
        if not len(program.calls):
            continue
        # Calls that differ in micro-batch only read the same.
        spans = equal_rows(program.calls[:, 1] * (len(graph.ops) + 1) + program.calls[:, 2])
        one, which = equal_rows(program.calls[:, 3] * len(spans.first) + spans.of)
        common, alike = program.calls[one], np.bincount(which)
        for _, begin, end, _, _ in common.tolist():
            if (begin, end) not in outside:
                outside[begin, end] = _reads_from_outside(graph, begin, end)
        reads = [outside[begin, end] for begin, end in common[:, 1:3].tolist()]
        of = np.repeat(np.arange(len(reads)), [len(rows) for rows in reads])
        tensor = np.concatenate(reads)
        _, instance, value = graph.ports.value(common[of, 0], common[of, 3], tensor)
        kept = _apart(graph, cuts, of, instance, value)
        of, tensor, instance, value = of[kept], tensor[kept], instance[kept], value[kept]
        by_kind = ascending(which)
        read = np.repeat(np.arange(len(of)), alike[of])
        first = np.cumsum(alike)[of] - np.cumsum(alike[of])
        call = by_kind[np.arange(len(read)) + first[read]]
        late = _first(_runs_too_early(graph, Schedule(graph, program), call, instance, value, read))
        if late is not None:
            row = int(tensor[read[late]])
            what = f"reads tensor {row} ({graph.tensors[row].name}) before it is made"
            _fail("calls_in_order", f"call {int(call[late])} of program {number}", what)


def _reads_from_outside(graph: Graph, begin: int, end: int) -> Int64:
    inputs = graph.ops.inputs
    read = graph.origin[inputs.values[inputs.offsets[begin] : inputs.offsets[end]]]
    makers = graph.maker[read]
    return distinct(read[(makers < begin) & ((makers != NONE) | graph.tensors.port[read])])


def _apart(graph: Graph, cuts: Int64, kind: Int64, instance: Int64, value: Int64) -> Int64:
    """The first of those reads of a kind of call whose values are made together, by operations that no call parts.

    Args:
        graph: the graph.
        cuts: where calls begin or end, ascending.
        kind: for every read, the kind of call.
        instance: where its value is made.
        value: the tensor that is made there.
    """
    maker = graph.maker[value]
    stretch = np.where(maker == NONE, NONE, np.searchsorted(cuts, maker, side="right"))
    persists = np.isin(graph.tensors.role[value], [role for role in t.TensorRole if role.persistent])
    key = kind
    for column in (instance, stretch + 1, persists):
        key = key * (int(column.max(initial=0)) + 1) + column
    return np.sort(np.unique(key, return_index=True)[1])


def _runs_too_early(
    graph: Graph, schedule: Schedule, call: Int64, instance: Int64, value: Int64, read: Int64
) -> Any:
    """Which calls begin before a value that they read is made, in their micro-batch or, if it persists, in any.

    Args:
        graph: the graph.
        schedule: of the program.
        call: for every read of every call, the call.
        instance: for every kind of read, where its value is made.
        value: for every kind of read, the tensor that is made there.
        read: for every read of every call, its kind.
    """
    op = graph.maker[value]
    made = schedule.position(instance[read], schedule.calls[call, 4], op[read])
    early = (op[read] != NONE) & ((made == NONE) | (made >= schedule.starts[call]))
    doubtful = np.flatnonzero(early)
    persistent = np.isin(graph.tensors.role[value[read[doubtful]]], [r for r in t.TensorRole if r.persistent])
    doubtful = doubtful[persistent]
    kinds, which = np.unique(read[doubtful], return_inverse=True)
    runs = schedule.position(instance[kinds][:, None], schedule.micro_batches[None], op[kinds][:, None])
    earliest = np.where(runs == NONE, np.iinfo(np.int64).max, runs).min(axis=1, initial=np.iinfo(np.int64).max)
    early[doubtful] = schedule.starts[call[doubtful]] <= earliest[which]
    return early


def _op(graph: Graph, row: int) -> str:
    return f"operation {int(row)} ({graph.strings[graph.ops.name[int(row)]]})"


def _block_bounds(graph: Graph, rows: Any) -> tuple[Any, Any]:
    starts = np.array([b.tensors.start for b in graph.blocks])[graph.block_of_op[rows]]
    stops = np.array([b.tensors.stop for b in graph.blocks])[graph.block_of_op[rows]]
    return starts, stops


# -- communications -------------------------------------------------------------------------------------------
# What a job's communications keep: who takes part in one is in its group, and a message has two ends.
#
# Ranks of a role do the same, so a role is checked once, by its coordinates, whatever the number of its
# ranks; only groups that list ranks are checked rank by rank. The operations are columns: an imported job
# runs millions.


MAX_ROLES = 2**20
"""Parts that programs which fix different axes may be cut into to be compared; beyond it a job is refused."""

_Place = Mapping[str, int]


def groups_sound(graph: Graph) -> None:
    """A group does not list ranks beside its axes, and positions ascend along one axis."""
    sizes = {axis.name: axis.size for axis in graph.mesh}
    for group in graph.groups:
        if group.axes and group.ranks:
            _fail("groups_sound", f"group '{group.name}'", "has axes and ranks, of which it needs one")
        size = sizes[group.axes[0]] if len(group.axes) == 1 else 0
        ascend = all(one < following for one, following in pairwise(group.positions))
        if group.positions and not (ascend and 0 <= group.positions[0] <= group.positions[-1] < size):
            what = "has positions that do not ascend within the extent of one axis"
            _fail("groups_sound", f"group '{group.name}'", what)


def programs_apart(graph: Graph) -> None:
    """No rank runs two programs."""
    if not isinstance(graph, JobGraph):
        return
    if not graph.mesh:
        ranks = sorted(rank for program in graph.programs for rank in program.ranks)
        twice = next((one for one, following in pairwise(ranks) if one == following), None)
        if twice is not None:
            _fail("programs_apart", f"rank {twice}", "runs two programs")
        return
    seen: dict[tuple[int, ...], int] = {}
    for role in _Roles(graph).all:
        first = seen.setdefault(tuple(role.place.values()), role.program)
        if first != role.program:
            what = f"runs programs {first} and {role.program}"
            _fail("programs_apart", f"rank {_rank(graph, role.place)}", what)


def members_only(graph: Graph) -> None:
    """Every rank that runs a communication is in its group."""
    if not isinstance(graph, JobGraph):
        return
    members: dict[int, frozenset[int]] = {}
    for number, rows, _ in _Uses(graph).of_programs():
        groups, first = np.unique(graph.ops.group[rows], return_index=True)
        for index, row in zip(groups.tolist(), rows[first].tolist(), strict=True):
            group, program = graph.groups[index], graph.programs[number]
            if group.positions:
                stranger = _off_position(graph, program, group)
            elif group.ranks:
                known = members.setdefault(index, frozenset(group.ranks))
                stranger = next((rank for rank in _ranks(graph, number) if rank not in known), None)
            else:
                continue
            if stranger is not None:
                what = f"is run by rank {stranger}, which is not in its group '{group.name}'"
                _fail("members_only", _op(graph, row), what)


def _off_position(graph: Graph, program: Program, group: Group) -> int | None:
    (axis,) = group.axes
    size = next(a.size for a in graph.mesh if a.name == axis)
    places = [program.coordinates[axis]] if axis in program.coordinates else range(size)
    missing = next((place for place in places if place not in group.positions), None)
    return None if missing is None else _rank(graph, {**program.coordinates, axis: missing})


def messages_meet(graph: Graph) -> None:
    """What is sent is received: as often, over the same group, between the same two, with the same tag."""
    if isinstance(graph, JobGraph) and np.isin(graph.ops.kind, (OpKind.SEND, OpKind.RECV)).any():
        _Messages(graph).check()


class _Uses:
    """Which communications the programs run, and how often."""

    def __init__(self, graph: Graph, kinds: Iterable[OpKind] = COMMUNICATIONS) -> None:
        self.graph = graph
        self.rows: Int64 = np.flatnonzero(np.isin(graph.ops.kind, list(kinds)))

    def of_programs(self) -> Iterator[tuple[int, Int64, Int64]]:
        """Of every program its number, the rows that it runs, ascending, and how often it runs each."""
        known: dict[int, tuple[Int64, Int64]] = {}
        for number, program in enumerate(self.graph.programs):
            if id(program.calls) not in known:
                known[id(program.calls)] = self._of(program.calls)
            rows, counts = known[id(program.calls)]
            if len(rows):
                yield number, rows, counts

    def _of(self, calls: Int64) -> tuple[Int64, Int64]:
        begin, end = np.searchsorted(self.rows, calls[:, 1]), np.searchsorted(self.rows, calls[:, 2])
        spans, often = np.unique((begin * (len(self.rows) + 1) + end)[begin < end], return_counts=True)
        begin, end = np.divmod(spans, len(self.rows) + 1)
        span, places = enumerate_ranges(begin, end)
        found, which = np.unique(places, return_inverse=True)
        return self.rows[found], np.bincount(which, often[span], len(found)).astype(np.int64)


class _Role(NamedTuple):
    """Some or all of a program's ranks: those at a place of the mesh."""

    program: int
    place: _Place


class _Roles:
    """The programs of a job with a mesh, cut so that all fix the same axes.

    Raises:
        GraphError: that makes too many.
    """

    def __init__(self, graph: Graph) -> None:
        fixed = {axis for program in graph.programs for axis in program.coordinates}
        self.axes = [axis for axis in graph.mesh if axis.name in fixed]
        total = sum(prod(a.size for a in self.axes if a.name not in p.coordinates) for p in graph.programs)
        if total > MAX_ROLES:
            _fail(
                "programs_apart", "the programs", f"fix different axes, with {total:,} places: fix the same ones"
            )
        self.graph = graph

    @property
    def all(self) -> Iterator[_Role]:
        """All parts, with their places in the order of the mesh."""
        for number in range(len(self.graph.programs)):
            yield from self.of(number)

    def of(self, number: int) -> Iterator[_Role]:
        """The parts of a program."""
        own = self.graph.programs[number].coordinates
        names = [axis.name for axis in self.axes]
        for place in product(*([own[a.name]] if a.name in own else range(a.size) for a in self.axes)):
            yield _Role(number, dict(zip(names, place, strict=True)))


class _Messages:
    """Both ends of all messages, as columns: group, set, sender, receiver, tag."""

    def __init__(self, graph: JobGraph) -> None:
        self.graph = graph
        self.sets: dict[tuple[int, ...], int] = {}
        self.listed: dict[int, dict[int, int]] = {}
        self.columns: list[list[Int64]] = []

    def check(self) -> None:
        """Compares the two sides.

        Raises:
            GraphError: one has more, or an end is beyond its group.
        """
        graph, roles = self.graph, _Roles(self.graph)
        for number, rows, counts in _Uses(graph, (OpKind.SEND, OpKind.RECV)).of_programs():
            of_rows = graph.ops.group[rows]
            for index in np.unique(of_rows).tolist():
                mine = of_rows == index
                # A list says its ranks itself, however the program is cut.
                for role in [_Role(number, {})] if graph.groups[index].ranks else roles.of(number):
                    self._add(role, index, rows[mine], counts[mine])
        if not self.columns:  # no program runs what the blocks have
            return
        *keys, rows, counts = (np.concatenate(column) for column in zip(*self.columns, strict=True))
        if not len(rows):
            return
        order = np.lexsort(keys)
        ends = np.stack([key[order] for key in keys])
        starts = np.flatnonzero(np.concatenate([[True], (ends[:, 1:] != ends[:, :-1]).any(axis=0)]))
        balance = np.add.reduceat(counts[order], starts)
        if len(odd := np.flatnonzero(balance)):
            row = int(np.minimum.reduceat(rows[order], starts)[odd].min())
            self._refuse(row)

    def _refuse(self, row: int) -> NoReturn:
        sends = self.graph.ops.kind[row] == OpKind.SEND
        what = "sends what is not received as often" if sends else "receives what is not sent as often"
        group = self.graph.groups[int(self.graph.ops.group[row])].name
        _fail("messages_meet", _op(self.graph, row), f"{what}, in group '{group}' with its tag")

    def _add(self, role: _Role, index: int, rows: Int64, counts: Int64) -> None:
        """Adds what a role sends and receives in a group: the one counts up, the other down."""
        ops, group = self.graph.ops, self.graph.groups[index]
        size = self.graph.group_size(group)
        peer, sends = ops.peer[rows].astype(np.int64), ops.kind[rows] == OpKind.SEND
        if len(beyond := np.flatnonzero(abs(peer) >= size)):
            row = int(rows[beyond[0]])
            _fail("messages_meet", _op(self.graph, row), f"names peer {ops.peer[row]:+} in a group of {size}")
        others = [value for axis, value in role.place.items() if axis not in group.axes]
        number = self.sets.setdefault((index, *others), len(self.sets))
        for here in self._positions(role, index):
            if here == NONE:  # all are there: each sends as far as it receives from
                ends = np.full(len(rows), NONE), np.where(sends, peer, -peer) % size
            else:
                there = (here + peer) % size
                ends = np.where(sends, here, there), np.where(sends, there, here)
            signed = np.where(sends, counts, -counts)
            column = [np.full(len(rows), number), *ends, ops.tag[rows], rows, signed]
            kept = self._run_there(group, there) if group.ranks and here != NONE else slice(None)
            self.columns.append([values[kept] for values in column])

    def _positions(self, role: _Role, index: int) -> Iterable[int]:
        """The positions of a role's ranks in their sets of a group; `NONE` for all of them."""
        group = self.graph.groups[index]
        if group.ranks:
            if index not in self.listed:
                self.listed[index] = {rank: position for position, rank in enumerate(group.ranks)}
            return [self.listed[index][rank] for rank in _ranks(self.graph, role.program)]
        axes = [axis for axis in self.graph.mesh if axis.name in group.axes]
        if not any(axis.name in role.place for axis in axes):
            return [NONE]
        several = prod(axis.size for axis in axes if axis.name not in role.place)
        if several > MAX_ROLES:
            what = f"has {several:,} ranks of one program that exchange messages: make it a group of fewer axes"
            _fail("messages_meet", f"group '{group.name}'", what)
        places = np.zeros(1, np.int64)
        for axis in axes:
            along = [role.place[axis.name]] if axis.name in role.place else range(axis.size)
            places = (places[:, None] * axis.size + np.array(along)).ravel()
        return [group.positions.index(int(places[0]))] if group.positions else places.tolist()

    def _run_there(self, group: Group, positions: Int64) -> np.ndarray:
        """Which positions hold ranks that run a program; a recording may lack those of the others."""
        return np.isin(np.array(group.ranks)[positions], self._recorded)

    @cached_property
    def _recorded(self) -> Int64:
        graph = self.graph
        if not graph.mesh:
            return np.array([rank for number in range(len(graph.programs)) for rank in _ranks(graph, number)])
        listed = sorted({rank for group in graph.groups for rank in group.ranks})
        return np.array([rank for rank in listed if _is_run(graph, rank)], np.int64)


def _ranks(graph: Graph, number: int) -> Iterator[int]:
    """The ranks that run a program, ascending in a mesh."""
    if not graph.mesh:
        yield from graph.programs[number].ranks or (number,)
        return
    own = graph.programs[number].coordinates
    free = [axis for axis in graph.mesh if axis.name not in own]
    # One by one: who asks may have heard enough after a few of a million million.
    for number in range(prod(axis.size for axis in free)):
        place = dict(own)
        for axis in reversed(free):
            number, place[axis.name] = divmod(number, axis.size)
        yield _rank(graph, place)


def _is_run(graph: Graph, rank: int) -> bool:
    """Whether a rank of the mesh runs a program."""
    place: dict[str, int] = {}
    for axis in reversed(graph.mesh):
        rank, place[axis.name] = divmod(rank, axis.size)
    return any(program.coordinates.items() <= place.items() for program in graph.programs)


def _rank(graph: Graph, place: _Place) -> int:
    """The rank at a place, 0 along axes that it does not name."""
    rank = 0
    for axis in graph.mesh:
        rank = rank * axis.size + place.get(axis.name, 0)
    return rank


CHECKS: tuple[Callable[[Graph], None], ...] = (
    strings_in_range,
    enumerations_known,
    blocks_cover_tables,
    sizes_sane,
    shards_in_mesh,
    tensors_in_block,
    aliases_point_back,
    one_maker,
    made_before_read,
    forward_ops_earlier,
    streams_and_groups,
    groups_sound,
    instances_bound,
    calls_in_range,
    totals_fit,
    calls_in_order,
    programs_apart,
    members_only,
    messages_meet,
)

"""What every graph keeps: one function an invariant, each with its own error.

The checks run in order, and a later one relies on the earlier ones: after the ranges hold, the columns may be
used to index each other. They are written on columns, so millions of operations take a second or two, and they
accept any numbers at all: a corrupted file ends here in one line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import numpy as np

from echograph.errors import GraphError
from echograph.ir import types as t
from echograph.ir.columns import NONE, Int64, distinct
from echograph.ir.graph import Block, Graph, JobGraph, StepGraph
from echograph.ir.schedule import Schedule
from echograph.ir.verify_meetings import groups_sound, members_only, messages_meet, programs_apart

MAX_TENSOR_BYTES = 2**60
MAX_RANKS = 2**40
MAX_TOTAL = 2.0**63
COMMUNICATIONS = (t.OpKind.COLLECTIVE, t.OpKind.SEND, t.OpKind.RECV)


def verify(graph: Graph) -> None:
    """Checks every invariant.

    Raises:
        GraphError: names the invariant, and the operation, tensor, block or program that breaks it.
    """
    for check in CHECKS:
        check(graph)


def _fail(invariant: str, where: str, what: str) -> None:
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
        order = np.lexsort((begin, micro_batch, instance, block))
        follows = np.all(program.calls[order[1:]][:, [0, 3, 4]] == program.calls[order[:-1]][:, [0, 3, 4]], axis=1)
        bad = follows & ((begin[order[1:]] < end[order[:-1]]) | (order[1:] < order[:-1]))
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
        spans, span = np.unique(
            program.calls[:, 1] * (len(graph.ops) + 1) + program.calls[:, 2], return_inverse=True
        )
        key = program.calls[:, 3] * len(spans) + span
        _, one, which, alike = np.unique(key, return_index=True, return_inverse=True, return_counts=True)
        common = program.calls[one]
        for _, begin, end, _, _ in common.tolist():
            if (begin, end) not in outside:
                outside[begin, end] = _reads_from_outside(graph, begin, end)
        reads = [outside[begin, end] for begin, end in common[:, 1:3].tolist()]
        of = np.repeat(np.arange(len(reads)), [len(rows) for rows in reads])
        tensor = np.concatenate(reads)
        _, instance, value = graph.ports.value(common[of, 0], common[of, 3], tensor)
        kept = _apart(graph, cuts, of, instance, value)
        of, tensor, instance, value = of[kept], tensor[kept], instance[kept], value[kept]
        by_kind = np.argsort(which, kind="stable")
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

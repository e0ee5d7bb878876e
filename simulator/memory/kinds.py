"""The memories of a job: what its operations allocate, by number, with size, kind and stream.

A *memory* is what one allocation holds: a tensor that owns its storage, the buffer of a collective that names no
tensor for it, or the workspace of a kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from echograph.errors import SimulationError
from echograph.ir.columns import NONE, Bools, Int64, distinct
from echograph.ir.graph import JobGraph
from echograph.ir.types import CollectiveKind, DType, OpKind, Payload, Phase, TensorRole

COMMUNICATION, WORKSPACE = 7, 8
ROLES = {
    **{int(role): role.name.lower() for role in TensorRole},
    COMMUNICATION: "communication",
    WORKSPACE: "workspace",
}
_BEFORE_THE_STEP = (TensorRole.PARAMETER, TensorRole.OPTIMIZER_STATE, TensorRole.BUFFER)


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """What a collective's buffer, or the parameters that it gathers, wait for before they are given back.

    Attributes:
        op: the collective.
        users: tensors that are given back no later.
        buffer: whether it is the buffer that waits; else the users wait for each other.
        before: an operation before which they are given back at the earliest; -1: none.
    """

    op: int
    users: Int64
    buffer: bool
    before: int = NONE


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Span:
    """What operations of a block touch, the same in all instances.

    Attributes:
        what: ascending; rows of tensors that own their memory or are ports, then buffers, then workspaces, each by
            the row of its operation.
        first: offset of the first operation that touches each.
        last: offset of the last one.
        made: 1 where one of them makes it.
    """

    what: Int64
    first: Int64
    last: Int64
    made: Int64


class Memories:
    """All memories of a job, by number: tensors first, then buffers and workspaces of operations.

    Attributes:
        size: bytes of each; 0 for a tensor that shares another's memory.
        role: a `TensorRole`, `COMMUNICATION` or `WORKSPACE`.
        stream: stream of the operation that takes it; the first for what exists before the step.
        made: whether an operation makes it, rather than writes into what is there.
        fresh: for every output of the job's operations, whether it is made, not an input written in place.
        spans: what operations touch, by block and rows, as far as it is known already.

    Raises:
        SimulationError: they take so many bytes together that their sum is beyond 64 bits.
    """

    def __init__(self, job: JobGraph) -> None:
        self.job = job
        buffers, workspaces = buffer_bytes(job), _workspace_bytes(job)
        self.fresh = _fresh(job)
        maker = np.full(len(job.tensors), NONE, np.int64)
        maker[job.root[job.ops.outputs.values[self.fresh]]] = job.ops.outputs.rows[self.fresh]
        streams = np.where(maker == NONE, 0, job.ops.stream[maker]) if len(job.ops) else maker
        parts: list[tuple[Int64, ...]] = []
        for block in job.blocks:
            rows = block.tensors.start + np.flatnonzero(
                ~job.tensors.port[block.tensors.start : block.tensors.stop]
            )
            size = np.where(job.tensors.alias_of[rows] == NONE, job.tensors.nbytes[rows], 0)
            of_one = (size, job.tensors.role[rows], streams[rows], maker[rows] != NONE)
            parts.append(tuple(np.tile(column, len(block.instances)) for column in of_one))
        for role, size in ((COMMUNICATION, buffers), (WORKSPACE, workspaces)):
            for block in job.blocks:
                rows = np.arange(block.ops.start, block.ops.stop)
                of_one = (size[rows], np.full(len(rows), role), job.ops.stream[rows], np.ones(len(rows), np.bool_))
                parts.append(tuple(np.tile(column, len(block.instances)) for column in of_one))
        self.size, self.role, self.stream, self.made = (
            np.concatenate([part[i] for part in parts]).astype(np.int64) for i in range(4)
        )
        # Each micro-batch has its own; a gradient may stand beside the one that it is added to.
        often = len(distinct(np.concatenate([program.calls[:, 4] for program in job.programs])))
        if not 2.0 * often * float(self.size.sum(dtype=np.float64)) < 2**63:
            raise SimulationError("a step's tensors are beyond 2^62 bytes together: check their shapes")
        self.tensors = sum(
            count * len(b.instances) for (_, count), b in zip(job.tensor_bases, job.blocks, strict=True)
        )
        self.ops = sum(count * len(b.instances) for (_, count), b in zip(job.op_bases, job.blocks, strict=True))
        self._buffered, self._working = np.flatnonzero(buffers), np.flatnonzero(workspaces)
        self.spans: dict[tuple[int, int, int], Span] = {}

    @cached_property
    def held(self) -> dict[int, list[Held]]:
        """By block, what collectives hold longer than its readers need it."""
        return _held(self.job)

    @cached_property
    def before(self) -> Bools:
        """Whether each exists before the step and outlives it."""
        outlives = np.isin(self.role, _BEFORE_THE_STEP) | ((self.role == TensorRole.GRADIENT) & (self.made == 0))
        return np.asarray(outlives & (self.size > 0))

    def of_tensors(self, block: int, instance: int | Int64, tensors: Int64) -> Int64:
        """The memory behind each of some rows of the tensor table, in one instance or [instances, 1] of them."""
        base, count = self.job.tensor_bases[block]
        roots = self.job.root[tensors]
        position = self.job.local_position[roots]
        memory = np.asarray(base + instance * count + position)
        ports = np.flatnonzero(position == NONE)
        if len(ports):
            memory[..., ports] = self._behind[
                self.job.ports.slot(np.asarray(block), np.asarray(instance), roots[ports])
            ]
        return memory

    @cached_property
    def _behind(self) -> Int64:
        """The memory behind every slot of a port."""
        job, last = self.job, self.job.ports.last(self.job.root)
        block, instance, row = (column[last] for column in job.ports.located)
        base, count = np.array(job.tensor_bases, np.int64).reshape(-1, 2).T
        memory: Int64 = base[block] + instance * count[block] + job.local_position[job.root[row]]
        return memory

    def of_op(self, block: int, instance: int, op: int, role: int) -> int:
        """The buffer or workspace of an operation."""
        return self.tensors + (self.ops if role == WORKSPACE else 0) + self.job.op_id(block, instance, op)

    def span(self, block: int, begin: int, end: int) -> Span:
        """What operations of a block touch."""
        key = (block, begin, end)
        if key not in self.spans:
            self.spans[key] = self._find_span(begin, end)
        return self.spans[key]

    def of_span(self, block: int, span: Span, instances: Int64) -> Int64:
        """Int64 [instances, what the span touches]: the memories."""
        job, rows = self.job, len(self.job.tensors)
        base, count = job.op_bases[block]
        of_ops = span.what >= rows
        memory = np.empty((len(instances), len(span.what)), np.int64)
        memory[:, ~of_ops] = self.of_tensors(block, instances[:, None], span.what[~of_ops])
        working, op = np.divmod(span.what[of_ops] - rows, max(1, len(job.ops)))
        first = self.tensors + working * self.ops + base + op - job.blocks[block].ops.start
        memory[:, of_ops] = first + instances[:, None] * count
        return memory

    def _find_span(self, begin: int, end: int) -> Span:
        rows, what, made = self._touched
        low, high = np.searchsorted(rows, (begin, end))
        length = max(1, end - begin)
        every, at = np.divmod(np.sort(what[low:high] * length + rows[low:high] - begin), length)
        first = np.flatnonzero(np.diff(every, prepend=NONE))
        found, makes = every[first], np.zeros(len(first), np.int64)
        makes[np.searchsorted(found, what[low:high][made[low:high]])] = 1
        return Span(what=found, first=at[first], last=at[np.append(first, len(at))[1:] - 1], made=makes)

    @cached_property
    def _touched(self) -> tuple[Int64, Int64, Bools]:
        """All that operations touch, in their order: operation, root tensor or buffer, whether it is made."""
        ops, tensors = self.job.ops, len(self.job.tensors)
        users, used = ops.deps.rows, np.asarray(ops.deps.values, np.int64)
        of_used, of_user = np.isin(used, self._buffered), np.isin(users, self._buffered)
        touches = (
            (ops.inputs.rows, self.job.root[ops.inputs.values]),
            (ops.outputs.rows, self.job.root[ops.outputs.values]),
            (self._working, tensors + len(ops) + self._working),
            (self._buffered, tensors + self._buffered),
            (users[of_used], tensors + used[of_used]),
            (used[of_user], tensors + users[of_user]),
        )
        rows, what = (np.concatenate([touch[i] for touch in touches]) for i in (0, 1))
        made = np.zeros(len(rows), np.bool_)
        made[len(touches[0][0]) :][: len(self.fresh)] = self.fresh
        order = np.argsort(rows, kind="stable")
        return rows[order], what[order], made[order]


def _fresh(job: JobGraph) -> Bools:
    """For every output, whether its operation takes memory for it.

    It does not where it reads the same memory, nor where it writes over (part of) a gradient that no operation
    makes as a whole: that is a buffer which was there before.
    """
    keys = [
        ragged.rows * len(job.tensors) + job.root[ragged.values] for ragged in (job.ops.inputs, job.ops.outputs)
    ]
    read = distinct(keys[0])
    unread = np.append(read, NONE)[np.searchsorted(read, keys[1])] != keys[1]
    made = job.ops.outputs.values
    there = (job.tensors.role == TensorRole.GRADIENT) & ~job.tensors.port
    there[made] = False
    return np.asarray(unread & ~there[job.root[made]])


def buffer_bytes(job: JobGraph) -> Int64:
    """Bytes of the buffer of each collective whose larger side no tensor stands for."""
    ops = job.ops
    unnamed_in, unnamed_out = ops.inputs.lengths == 0, ops.outputs.lengths == 0
    missing = unnamed_in & unnamed_out
    missing |= unnamed_out & (ops.variant == CollectiveKind.ALL_GATHER)
    missing |= unnamed_in & (ops.variant == CollectiveKind.REDUCE_SCATTER)
    return np.asarray(np.where((ops.kind == OpKind.COLLECTIVE) & missing, ops.nbytes, 0))


def _workspace_bytes(job: JobGraph) -> Int64:
    """Bytes that kernels need besides their tensors.

    FlashAttention's backward adds up the queries' gradient in fp32 (Dao 2023, arXiv:2307.08691, section 3.1.2: the
    blocks of keys add to dQ by atomics), before it is written in the type of the model.
    """
    ops, workspace, numel = job.ops, np.zeros(len(job.ops), np.int64), job.tensors.numel
    for row in np.flatnonzero(ops.outputs.lengths > 0).tolist():
        if "flash_attention_backward" in ops.strings[ops.name[row]]:
            workspace[row] = 4 * numel[ops.outputs.row(row)[0]]
    return workspace


def _held(job: JobGraph) -> dict[int, list[Held]]:
    """What the collectives of each block hold longer than its readers need it.

    A unit of FSDP2 drops its gathered parameters all at once: after forward those that it gathers again, all
    others just before it reduces its gradients. (A gather that names what it makes, as captured ones do, is held
    by its readers alone.) The buffer of a collective lives as long as the token (one element of type bool) that
    tells others that it is done; that of a gather in forward until the next gather is told so, since FSDP2 holds
    it to overlap the two.
    """
    ops, tensors, buffers, numel = job.ops, job.tensors, buffer_bytes(job), job.tensors.numel
    found: dict[int, list[Held]] = {}
    for block, collectives in _by_block(job, ops.kind == OpKind.COLLECTIVE):
        gathers = _of_kind(job, collectives, CollectiveKind.ALL_GATHER, Payload.PARAMETER)
        dropped = _dropped(job, collectives, gathers)
        for op in collectives:
            makers = [op, *(ops.deps.rows[ops.deps.values == op].tolist() if op in gathers else ())]
            made = np.concatenate([ops.outputs[maker] for maker in makers]).astype(np.int64)
            made = made[np.array([not TensorRole(int(role)).persistent for role in tensors.role[made]], np.bool_)]
            token = (tensors.dtype[made] == DType.BOOL) & (numel[made] == 1)
            if op in gathers and not (token.all() or len(ops.outputs.row(op))):
                found.setdefault(block, []).append(Held(op, made[~token], False, dropped[op]))
            if buffers[op] and token.any() and (ops.phase[op] == Phase.FORWARD or op not in gathers):
                found.setdefault(block, []).append(Held(op, made[token], True))
    return found


def _dropped(job: JobGraph, collectives: list[int], gathers: list[int]) -> dict[int, int]:
    """The operation before which the parameters of each gather are dropped, where its readers do not say."""
    ops = job.ops
    reduces = _of_kind(job, collectives, CollectiveKind.REDUCE_SCATTER, Payload.GRADIENT)
    begins = [min([op, *ops.deps.row(op)]) for op in reduces]
    forward = [op for op in gathers if ops.phase[op] == Phase.FORWARD]
    # The root is gathered first, and not again; it is reduced last.
    once = set(forward[: 2 * len(forward) - len(gathers)])
    dropped = dict.fromkeys(gathers, NONE)
    for op in gathers:
        after = [begin for begin in begins if begin > op]
        if after and (op in once or ops.phase[op] != Phase.FORWARD):
            dropped[op] = after[-1] if op in once else after[0]
    return dropped


def _of_kind(job: JobGraph, rows: list[int], kind: CollectiveKind, payload: Payload) -> list[int]:
    return [op for op in rows if job.ops.variant[op] == kind and job.ops.payload[op] == payload]


def _by_block(job: JobGraph, chosen: Bools) -> Iterator[tuple[int, list[int]]]:
    for block in distinct(job.block_of_op[chosen]).tolist():
        rows = job.blocks[block].ops
        yield block, (rows.start + np.flatnonzero(chosen[rows.start : rows.stop])).tolist()

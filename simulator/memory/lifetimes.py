"""The allocations of a job, and between which operations of each program they live.

An *allocation* is a tensor that owns its storage, the buffer of a collective that names no tensor for it, or the
workspace of a kernel.

What belongs to a micro-batch (activations, inputs, buffers, workspaces) is allocated by the operation that makes
it and freed after its last reader, as reference counting does: autograd keeps a tensor for exactly the backward
operations that read it. Micro-batches that make the same calls in the same order allocate and free alike, so that
sequence of calls is worked out once for all.

Gradients are allocated when the first micro-batch makes them and live until the step's end (`zero_grad` sets them
to None); later micro-batches make theirs beside them and add it at once. A gradient that no operation makes, a
buffer to add up in, exists before the step, as parameters and optimizer state do.

What one micro-batch makes and another one uses (what is put off until the pipeline drains) is a buffer too, and
lives from the operation that makes it until its last reader in the order of the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from operator import itemgetter

import numpy as np

from echograph.errors import SimulationError
from echograph.ir.columns import NONE, Bools, Int64, ascending, distinct, equal_rows
from echograph.ir.graph import JobGraph
from echograph.ir.types import CollectiveKind, DType, OpKind, Payload, Phase, TensorRole

COMMUNICATION, WORKSPACE = 7, 8
_BEFORE_THE_STEP = (TensorRole.PARAMETER, TensorRole.OPTIMIZER_STATE, TensorRole.BUFFER)


@dataclass(frozen=True, slots=True, eq=False)
class DeferredFree:
    """What a collective's buffer, or the parameters that it gathers, wait for before they are freed.

    Attributes:
        op: the collective.
        users: tensors that are freed no later.
        buffer: whether it is the buffer that waits; else the users wait for each other.
        before: an operation before which they are freed at the earliest; -1: none.
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


class Allocations:
    """All allocations of a job, by number: tensors first, then buffers and workspaces of operations.

    Attributes:
        size: bytes of each; 0 for a tensor that shares another's.
        role: a `TensorRole`, `COMMUNICATION` or `WORKSPACE`.
        stream: stream of the operation that allocates it; the first for what exists before the step.
        made: whether an operation makes it, rather than writes into what is there.
        begins: whether an operation makes the tensor itself, so that it is not there before.
        fresh: for every output of the job's operations, whether it is made, not an input written in place.
        spans: what operations touch, by block and rows, as far as it is known already.

    Raises:
        SimulationError: they take so many bytes together that their sum is beyond 64 bits.
    """

    def __init__(self, job: JobGraph) -> None:
        self.job = job
        buffers, workspaces = collective_buffer_bytes(job), _workspace_bytes(job)
        self.fresh = _fresh(job)
        maker = np.full(len(job.tensors), NONE, np.int64)
        maker[job.root[job.ops.outputs.values[self.fresh]]] = job.ops.outputs.rows[self.fresh]
        streams = np.where(maker == NONE, 0, job.ops.stream[maker]) if len(job.ops) else maker
        parts: list[tuple[Int64, ...]] = []
        nbytes = np.where(job.tensors.alias_of == NONE, job.tensors.nbytes, 0)
        for block in job.blocks:
            rows = block.tensors.start + np.flatnonzero(
                ~job.tensors.port[block.tensors.start : block.tensors.stop]
            )
            made, begins = maker[rows] != NONE, np.asarray(job.maker)[rows] != NONE
            of_one = (nbytes[rows], job.tensors.role[rows], streams[rows], made, made & begins)
            parts.append(tuple(np.tile(column, len(block.instances)) for column in of_one))
        for role, size in ((COMMUNICATION, buffers), (WORKSPACE, workspaces)):
            for block in job.blocks:
                rows = np.arange(block.ops.start, block.ops.stop)
                made = np.ones(len(rows), np.bool_)
                of_one = (size[rows], np.full(len(rows), role), job.ops.stream[rows], made, made)
                parts.append(tuple(np.tile(column, len(block.instances)) for column in of_one))
        self.size, self.role, self.stream, self.made, begins = (
            np.concatenate([part[i] for part in parts]).astype(np.int64) for i in range(5)
        )
        self.begins: Bools = begins == 1
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
    def deferred_frees(self) -> dict[int, list[DeferredFree]]:
        """By block, what collectives hold longer than its readers need it."""
        return _deferred_frees(self.job)

    @cached_property
    def before(self) -> Bools:
        """Whether each exists before the step and outlives it."""
        outlives = np.isin(self.role, _BEFORE_THE_STEP) | ((self.role == TensorRole.GRADIENT) & (self.made == 0))
        return np.asarray(outlives & (self.size > 0))

    def of_tensors(self, block: int, instance: int | Int64, tensors: Int64) -> Int64:
        """The allocation behind each of some tensors, by row, in one instance or [instances, 1] of them."""
        base, count = self.job.tensor_bases[block]
        roots = self.job.root[tensors]
        position = self.job.local_position[roots]
        allocation = np.asarray(base + instance * count + position)
        ports = np.flatnonzero(position == NONE)
        if len(ports):
            allocation[..., ports] = self._behind[
                self.job.ports.slot(np.asarray(block), np.asarray(instance), roots[ports])
            ]
        return allocation

    @cached_property
    def _behind(self) -> Int64:
        """The allocation behind every slot of a port."""
        job, last = self.job, self.job.ports.last(self.job.root)
        block, instance, row = (column[last] for column in job.ports.located)
        base, count = np.array(job.tensor_bases, np.int64).reshape(-1, 2).T
        allocation: Int64 = base[block] + instance * count[block] + job.local_position[job.root[row]]
        return allocation

    def buffer_of(self, block: int, instance: int, op: int) -> int:
        """The buffer of a collective."""
        return self.tensors + self.job.op_id(block, instance, op)

    def span(self, block: int, begin: int, end: int) -> Span:
        """What operations of a block touch."""
        key = (block, begin, end)
        if key not in self.spans:
            self.spans[key] = self._find_span(begin, end)
        return self.spans[key]

    def of_span(self, block: int, span: Span, instances: Int64) -> Int64:
        """Int64 [instances, what the span touches]: the allocations."""
        job, rows = self.job, len(self.job.tensors)
        base, count = job.op_bases[block]
        of_ops = span.what >= rows
        allocation = np.empty((len(instances), len(span.what)), np.int64)
        allocation[:, ~of_ops] = self.of_tensors(block, instances[:, None], span.what[~of_ops])
        working, op = np.divmod(span.what[of_ops] - rows, max(1, len(job.ops)))
        first = self.tensors + working * self.ops + base + op - job.blocks[block].ops.start
        allocation[:, of_ops] = first + instances[:, None] * count
        return allocation

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
    """For every output, whether its operation allocates it.

    It does not where it reads the same allocation, nor where it writes over (part of) a gradient that no operation
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


def collective_buffer_bytes(job: JobGraph) -> Int64:
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


def _deferred_frees(job: JobGraph) -> dict[int, list[DeferredFree]]:
    """What the collectives of each block hold longer than its readers need it.

    A unit of FSDP2 drops its gathered parameters all at once: after forward those that it gathers again, all
    others just before it reduces its gradients. (A gather that names what it makes, as captured ones do, is kept
    by its readers alone.) The buffer of a collective lives as long as the token (one element of type bool) that
    tells others that it is done; that of a gather in forward until the next gather is told so, since FSDP2 holds
    it to overlap the two.
    """
    ops, tensors, buffers, numel = job.ops, job.tensors, collective_buffer_bytes(job), job.tensors.numel
    found: dict[int, list[DeferredFree]] = {}
    for block, collectives in _by_block(job, ops.kind == OpKind.COLLECTIVE):
        gathers = _of_kind(job, collectives, CollectiveKind.ALL_GATHER, Payload.PARAMETER)
        dropped = _dropped(job, collectives, gathers)
        for op in collectives:
            makers = [op, *(ops.deps.rows[ops.deps.values == op].tolist() if op in gathers else ())]
            made = np.concatenate([ops.outputs[maker] for maker in makers]).astype(np.int64)
            made = made[np.array([not TensorRole(int(role)).persistent for role in tensors.role[made]], np.bool_)]
            token = (tensors.dtype[made] == DType.BOOL) & (numel[made] == 1)
            if op in gathers and not (token.all() or len(ops.outputs.row(op))):
                found.setdefault(block, []).append(DeferredFree(op, made[~token], False, dropped[op]))
            if buffers[op] and token.any() and (ops.phase[op] == Phase.FORWARD or op not in gathers):
                found.setdefault(block, []).append(DeferredFree(op, made[token], True))
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


_EMPTY = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CallEvents:
    """What one call of a sequence allocates and frees.

    Attributes:
        allocated: allocations, in the order in which its operations make them.
        allocated_at: offset of that operation within the call.
        freed: allocations that it frees.
        freed_at: offset of the operation after which.
        gradients: gradients that the call touches.
        gradients_at: offset of the operation that does so first.
        gradients_made: 1 where that operation makes the gradient, 0 where it reads or adds to it.
    """

    allocated: Int64 = field(default_factory=lambda: _EMPTY)
    allocated_at: Int64 = field(default_factory=lambda: _EMPTY)
    freed: Int64 = field(default_factory=lambda: _EMPTY)
    freed_at: Int64 = field(default_factory=lambda: _EMPTY)
    gradients: Int64 = field(default_factory=lambda: _EMPTY)
    gradients_at: Int64 = field(default_factory=lambda: _EMPTY)
    gradients_made: Int64 = field(default_factory=lambda: _EMPTY)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CallSequence:
    """The calls of a micro-batch in order, and what lives from one to another.

    Attributes:
        events: one for each call.
        allocation: those of the micro-batch.
        allocated: position of the call that makes each.
        freed: position of the call that frees each.
    """

    events: tuple[CallEvents, ...]
    allocation: Int64
    allocated: Int64
    freed: Int64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Crossings:
    """What one micro-batch makes and another one uses.

    Attributes:
        allocation: their numbers.
        allocated: call that makes each.
        allocated_at: offset of the operation that does.
        freed: call that frees each.
        freed_at: offset of the operation after which.
    """

    allocation: Int64 = field(default_factory=lambda: _EMPTY)
    allocated: Int64 = field(default_factory=lambda: _EMPTY)
    allocated_at: Int64 = field(default_factory=lambda: _EMPTY)
    freed: Int64 = field(default_factory=lambda: _EMPTY)
    freed_at: Int64 = field(default_factory=lambda: _EMPTY)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Touches:
    """Allocations that a call touches, offsets of the first and last operation that does, whether one makes it."""

    allocation: Int64
    first: Int64
    last: Int64
    made: Int64


class Lifetimes:
    """The allocations of one program over its calls.

    Attributes:
        allocations: of the job.
        calls: of the program.
        sequence: number of the sequence of each call.
        position: position of each call in its sequence.
        sequences: the different sequences.
        crossings: what no sequence has, since several use it.
    """

    def __init__(self, allocations: Allocations, program: int) -> None:
        self.allocations, self.job = allocations, allocations.job
        self.calls = self.job.programs[program].calls
        key, self._keys = _kinds(self.calls, len(self.job.ops))
        self._touched = self._find_touches()
        self.crossings = self._find_crossings(key)
        self.sequence, self.position, sequences = _sequences(key, self.calls[:, 4])
        self.sequences = tuple(self._work_out(sequence) for sequence in sequences)
        ends = np.concatenate([self.crossings.allocated, self.crossings.freed])
        self._crossed = {call: self._with_crossings(call) for call in distinct(ends).tolist()}

    @cached_property
    def before(self) -> Int64:
        """Allocations that exist before the step, largest first.

        A job with one program has all of the graph's but gradients, of which each program has what it touches; of
        several programs each has what it touches.
        """
        allocations, owned = self.allocations, self.allocations.before
        touched = np.zeros(len(owned), np.bool_)
        for its in self._touched:
            touched[its.allocation] = True
        if len(self.job.programs) == 1:
            touched |= allocations.role != TensorRole.GRADIENT
        owned = owned & touched
        owned[self.crossings.allocation] = False
        found = np.flatnonzero(owned)
        return np.asarray(found[np.lexsort((found, -self.allocations.size[found]))])

    def events(self, call: int) -> CallEvents:
        """What a call allocates and frees."""
        return self._crossed.get(call) or self._of_sequence(call)

    def _of_sequence(self, call: int) -> CallEvents:
        return self.sequences[int(self.sequence[call])].events[int(self.position[call])]

    def _with_crossings(self, call: int) -> CallEvents:
        own, crossings = self._of_sequence(call), self.crossings
        take, free = crossings.allocated == call, crossings.freed == call
        return replace(
            own,
            allocated=np.concatenate([own.allocated, crossings.allocation[take]]),
            allocated_at=np.concatenate([own.allocated_at, crossings.allocated_at[take]]),
            freed=np.concatenate([own.freed, crossings.allocation[free]]),
            freed_at=np.concatenate([own.freed_at, crossings.freed_at[free]]),
        )

    def _find_crossings(self, kind: Int64) -> Crossings:
        """Buffers that an operation makes before another reads them, in calls that are like no other.

        Args:
            kind: of each call.
        """
        allocations = self.allocations
        within = (allocations.role == TensorRole.BUFFER) & allocations.begins & (allocations.size > 0)
        if not within.any():
            return Crossings()
        call, often = np.unique(kind, return_index=True, return_counts=True)[1:]
        chosen = [within[its.allocation] for its in self._touched]
        allocation, first, last, made = (
            np.concatenate([_EMPTY, *(getattr(its, of)[c] for its, c in zip(self._touched, chosen, strict=True))])
            for of in ("allocation", "first", "last", "made")
        )
        number = np.repeat(np.arange(len(chosen)), [int(c.sum()) for c in chosen])
        order = np.lexsort((call[number], allocation))
        allocation, first, last, made, number = (c[order] for c in (allocation, first, last, made, number))
        begin = np.flatnonzero(np.diff(allocation, prepend=NONE))
        if not len(begin):
            return Crossings()
        end = np.append(begin[1:], len(allocation)) - 1
        known = np.logical_and.reduceat(often[number] == 1, begin) & (made[begin] == 1)
        begin, end = begin[known], end[known]
        return Crossings(
            allocation=allocation[begin], allocated=call[number[begin]], allocated_at=first[begin],
            freed=call[number[end]], freed_at=last[end],
        )  # fmt: skip

    def _work_out(self, sequence: tuple[int, ...]) -> CallSequence:
        touches = [self._touched[number] for number in sequence]
        lengths = [len(t.allocation) for t in touches]
        allocation = np.concatenate([_EMPTY, *(t.allocation for t in touches)])
        position = np.repeat(np.arange(len(sequence)), lengths)
        first = np.concatenate([_EMPTY, *(t.first for t in touches)])
        last = np.concatenate([_EMPTY, *(t.last for t in touches)])
        unique, at = np.unique(allocation, return_index=True)
        _, from_end = np.unique(allocation[::-1], return_index=True)
        end = len(allocation) - 1 - from_end
        allocated, allocated_at, freed, freed_at = position[at], first[at], position[end], last[end]
        self._extend(sequence, unique, freed, freed_at)
        role, outlives = self.allocations.role[unique], self.allocations.before[unique]
        outlives = outlives | np.isin(unique, self.crossings.allocation)
        own = (role != TensorRole.GRADIENT) & ~outlives
        gradient = (role == TensorRole.GRADIENT) & ~outlives
        made = np.concatenate([_EMPTY, *(t.made for t in touches)])
        own_at, gradient_at = np.flatnonzero(own), np.flatnonzero(gradient[np.searchsorted(unique, allocation)])
        takes = _by_call(len(sequence), allocated[own], allocated_at[own])
        frees = _by_call(len(sequence), freed[own], freed_at[own])
        gradients = _by_call(len(sequence), position[gradient_at], first[gradient_at])
        events = tuple(
            CallEvents(
                allocated=unique[own_at[take]], allocated_at=allocated_at[own_at[take]],
                freed=unique[own_at[free]], freed_at=freed_at[own_at[free]],
                gradients=allocation[gradient_at[touch]], gradients_at=first[gradient_at[touch]],
                gradients_made=made[gradient_at[touch]],
            )
            for take, free, touch in zip(takes, frees, gradients, strict=True)
        )  # fmt: skip
        return CallSequence(events=events, allocation=unique[own], allocated=allocated[own], freed=freed[own])

    def _extend(self, sequence: tuple[int, ...], unique: Int64, freed: Int64, freed_at: Int64) -> None:
        """Moves the end of what is freed later than after its last reader."""
        places = [self._keys[number] for number in sequence]
        calls = np.array(places, np.int64).reshape(-1, 4)
        for block, begin, end, instance in dict.fromkeys(places):
            all_deferred = self.allocations.deferred_frees.get(block, ())
            if not all_deferred:
                continue
            its = np.flatnonzero((calls[:, 0] == block) & (calls[:, 3] == instance))
            firsts, lasts = calls[its, 1], calls[its, 2]
            for deferred in all_deferred:
                if not begin <= deferred.op < end:
                    continue
                users = np.searchsorted(unique, self.allocations.of_tensors(block, instance, deferred.users))
                ends = list(zip(freed[users].tolist(), freed_at[users].tolist(), strict=True))
                runs = np.flatnonzero((firsts <= deferred.before) & (deferred.before < lasts)).tolist()
                ends += [(int(its[at]), deferred.before - int(firsts[at]) - 1) for at in runs[-1:]]
                buffer = self.allocations.buffer_of(block, instance, deferred.op)
                moved = np.searchsorted(unique, buffer) if deferred.buffer else users
                freed[moved], freed_at[moved] = max(ends)

    def _find_touches(self) -> list[_Touches]:
        """What each kind of call touches; those that differ in instance only are worked out together."""
        found: list[_Touches] = []
        for (block, begin, end), alike in groupby(self._keys, key=itemgetter(0, 1, 2)):
            span = self.allocations.span(block, begin, end)
            instances = np.array([instance for *_, instance in alike], np.int64)
            allocation = self.allocations.of_span(block, span, instances)
            order = np.argsort(allocation, axis=1, kind="stable")
            allocation = np.sort(allocation, axis=1)
            twice = (allocation[:, 1:] == allocation[:, :-1]).any(axis=1).tolist()
            for its, where, several in zip(allocation, order, twice, strict=True):
                touches = _Touches(
                    allocation=its, first=span.first[where], last=span.last[where], made=span.made[where]
                )
                found.append(_joined(touches) if several else touches)
        return found


def _kinds(calls: Int64, ops: int) -> tuple[Int64, list[tuple[int, int, int, int]]]:
    """For every call its kind, and the kinds: block, begin, end, instance, ascending."""
    block, begin, end, instance, _ = calls.T
    span = equal_rows(begin * (ops + 1) + end).of
    several = int(instance.max(initial=0)) + 1
    key = (block * (int(span.max(initial=0)) + 1) + span) * several + instance
    first, kind = equal_rows(key)
    return kind, list(map(tuple, calls[first, :4].tolist()))


def _joined(touches: _Touches) -> _Touches:
    """One entry an allocation, where tensors of a call share one through their ports."""
    begin = np.flatnonzero(np.diff(touches.allocation, prepend=-1))
    return _Touches(
        allocation=touches.allocation[begin],
        first=np.minimum.reduceat(touches.first, begin),
        last=np.maximum.reduceat(touches.last, begin),
        made=np.maximum.reduceat(touches.made, begin),
    )


def _sequences(kind: Int64, micro_batch: Int64) -> tuple[Int64, Int64, list[tuple[int, ...]]]:
    """For every call the number of its sequence and its position there, and the sequences, as kinds of calls."""
    order, found = ascending(micro_batch), list[tuple[int, ...]]()
    begin = np.flatnonzero(np.diff(micro_batch[order], prepend=NONE))
    length = np.diff(begin, append=len(order))
    sequence, position = np.empty_like(kind), np.empty_like(kind)
    position[order] = np.arange(len(order)) - np.repeat(begin, length)
    for size in distinct(length).tolist():
        calls = order[begin[length == size, None] + np.arange(size)]
        first, of = equal_rows(kind[calls])
        sequence[calls] = len(found) + of[:, None]
        found += map(tuple, kind[calls[first]].tolist())
    return sequence, position, found


def _by_call(calls: int, call: Int64, offset: Int64) -> list[Int64]:
    """For each call, its rows in the order of their offsets."""
    order = np.lexsort((offset, call))
    return np.split(order, np.searchsorted(call[order], np.arange(1, calls)))

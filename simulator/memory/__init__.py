"""Device memory of every rank role over the step: what lives at the peak, what it reserves, and whether it fits.

Three figures, as three tools report them:

- *allocated* (`torch.cuda.max_memory_allocated`): tensors, communication buffers and workspaces that live;
- *reserved* (`max_memory_reserved`): the segments of PyTorch's caching allocator behind them, its rules replayed;
- *device* (nvidia-smi): reserved, and what never goes through that allocator: the CUDA context and NCCL's buffers.

A *memory* is what one allocation holds: a tensor that owns its storage, the buffer of a collective that names no
tensor for it, or the workspace of a kernel.

What belongs to a micro-batch (activations, inputs, buffers, workspaces) is taken by the operation that makes it
and given back after its last reader, as reference counting does: autograd keeps a tensor for exactly the backward
operations that read it. Micro-batches that make the same calls in the same order take and give back alike, so that
order, their *course*, is worked out once for all.

Gradients are taken when the first micro-batch makes them and live until the step's end (`zero_grad` sets them to
None); later micro-batches make theirs beside them and add it at once. A gradient that no operation makes, a buffer
to add up in, exists before the step, as parameters and optimizer state do.

What one micro-batch makes and another one uses (what is put off until the pipeline drains) is a buffer too, and
lives from the operation that makes it until its last reader in the order of the step.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from math import prod
from operator import itemgetter
from typing import Any

import numpy as np

from echograph.errors import SimulationError
from echograph.ir.columns import NONE, Bools, Int64, ascending, distinct, equal_rows
from echograph.ir.graph import BETWEEN_STEPS, JobGraph, Program
from echograph.ir.types import COMMUNICATIONS, CollectiveKind, DType, OpKind, Payload, Phase, TensorRole
from echograph.simulator.memory.allocator import BLOCK, CachedBlock, CachingAllocator
from echograph.units import MIB, format_bytes

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
        begins: whether an operation makes the tensor itself, so that it is not there before.
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


_EMPTY = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CallEvents:
    """What one call of a course takes and gives back.

    Attributes:
        taken: memories, in the order in which its operations take them.
        taken_at: offset of that operation within the call.
        freed: memories given back.
        freed_at: offset of the operation after which.
        gradients: gradients that the call touches.
        gradients_at: offset of the operation that does so first.
        gradients_made: 1 where that operation makes the gradient, 0 where it reads or adds to it.
    """

    taken: Int64 = field(default_factory=lambda: _EMPTY)
    taken_at: Int64 = field(default_factory=lambda: _EMPTY)
    freed: Int64 = field(default_factory=lambda: _EMPTY)
    freed_at: Int64 = field(default_factory=lambda: _EMPTY)
    gradients: Int64 = field(default_factory=lambda: _EMPTY)
    gradients_at: Int64 = field(default_factory=lambda: _EMPTY)
    gradients_made: Int64 = field(default_factory=lambda: _EMPTY)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Course:
    """The calls of a micro-batch in order, and what lives from one to another.

    Attributes:
        events: one for each call.
        memory: memories of the micro-batch.
        taken: position of the call that takes each.
        freed: position of the call that gives each back.
    """

    events: tuple[CallEvents, ...]
    memory: Int64
    taken: Int64
    freed: Int64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Crossings:
    """What one micro-batch makes and another one uses.

    Attributes:
        memory: memories.
        taken: call that takes each.
        taken_at: offset of the operation that does.
        freed: call that gives each back.
        freed_at: offset of the operation after which.
    """

    memory: Int64 = field(default_factory=lambda: _EMPTY)
    taken: Int64 = field(default_factory=lambda: _EMPTY)
    taken_at: Int64 = field(default_factory=lambda: _EMPTY)
    freed: Int64 = field(default_factory=lambda: _EMPTY)
    freed_at: Int64 = field(default_factory=lambda: _EMPTY)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Touches:
    """Memories that a call touches, offsets of the first and last operation that does, whether one makes it."""

    memory: Int64
    first: Int64
    last: Int64
    made: Int64


class Lifetimes:
    """The memories of one program over its calls.

    Attributes:
        memories: of the job.
        calls: of the program.
        course: number of the course of each call.
        position: position of each call in its course.
        courses: the different courses.
        crossings: what no course has, since several use it.
    """

    def __init__(self, memories: Memories, program: int) -> None:
        self.memories, self.job = memories, memories.job
        self.calls = self.job.programs[program].calls
        key, self._keys = _kinds(self.calls, len(self.job.ops))
        self._touched = self._find_touches()
        self.crossings = self._find_crossings(key)
        self.course, self.position, courses = _courses(key, self.calls[:, 4])
        self.courses = tuple(self._work_out(course) for course in courses)
        ends = np.concatenate([self.crossings.taken, self.crossings.freed])
        self._crossed = {call: self._with_crossings(call) for call in distinct(ends).tolist()}

    @cached_property
    def before(self) -> Int64:
        """Memories that exist before the step, largest first.

        A job with one program has all of the graph's but gradients, of which each program has what it touches; of
        several programs each has what it touches.
        """
        memories, owned = self.memories, self.memories.before
        touched = np.zeros(len(owned), np.bool_)
        for its in self._touched:
            touched[its.memory] = True
        if len(self.job.programs) == 1:
            touched |= memories.role != TensorRole.GRADIENT
        owned = owned & touched
        owned[self.crossings.memory] = False
        found = np.flatnonzero(owned)
        return np.asarray(found[np.lexsort((found, -self.memories.size[found]))])

    def events(self, call: int) -> CallEvents:
        """What a call takes and gives back."""
        return self._crossed.get(call) or self._of_course(call)

    def _of_course(self, call: int) -> CallEvents:
        return self.courses[int(self.course[call])].events[int(self.position[call])]

    def _with_crossings(self, call: int) -> CallEvents:
        own, crossings = self._of_course(call), self.crossings
        take, free = crossings.taken == call, crossings.freed == call
        return replace(
            own,
            taken=np.concatenate([own.taken, crossings.memory[take]]),
            taken_at=np.concatenate([own.taken_at, crossings.taken_at[take]]),
            freed=np.concatenate([own.freed, crossings.memory[free]]),
            freed_at=np.concatenate([own.freed_at, crossings.freed_at[free]]),
        )

    def _find_crossings(self, kind: Int64) -> Crossings:
        """Buffers that an operation makes before another reads them, in calls that are like no other.

        Args:
            kind: of each call.
        """
        memories = self.memories
        within = (memories.role == TensorRole.BUFFER) & memories.begins & (memories.size > 0)
        if not within.any():
            return Crossings()
        call, often = np.unique(kind, return_index=True, return_counts=True)[1:]
        chosen = [within[its.memory] for its in self._touched]
        memory, first, last, made = (
            np.concatenate([_EMPTY, *(getattr(its, of)[c] for its, c in zip(self._touched, chosen, strict=True))])
            for of in ("memory", "first", "last", "made")
        )
        number = np.repeat(np.arange(len(chosen)), [int(c.sum()) for c in chosen])
        order = np.lexsort((call[number], memory))
        memory, first, last, made, number = (c[order] for c in (memory, first, last, made, number))
        begin = np.flatnonzero(np.diff(memory, prepend=NONE))
        if not len(begin):
            return Crossings()
        end = np.append(begin[1:], len(memory)) - 1
        known = np.logical_and.reduceat(often[number] == 1, begin) & (made[begin] == 1)
        begin, end = begin[known], end[known]
        return Crossings(
            memory=memory[begin], taken=call[number[begin]], taken_at=first[begin],
            freed=call[number[end]], freed_at=last[end],
        )  # fmt: skip

    def _work_out(self, course: tuple[int, ...]) -> Course:
        touches = [self._touched[number] for number in course]
        lengths = [len(t.memory) for t in touches]
        memory = np.concatenate([_EMPTY, *(t.memory for t in touches)])
        position = np.repeat(np.arange(len(course)), lengths)
        first = np.concatenate([_EMPTY, *(t.first for t in touches)])
        last = np.concatenate([_EMPTY, *(t.last for t in touches)])
        unique, at = np.unique(memory, return_index=True)
        _, from_end = np.unique(memory[::-1], return_index=True)
        end = len(memory) - 1 - from_end
        taken, taken_at, freed, freed_at = position[at], first[at], position[end], last[end]
        self._extend(course, unique, freed, freed_at)
        role, outlives = self.memories.role[unique], self.memories.before[unique]
        outlives = outlives | np.isin(unique, self.crossings.memory)
        own = (role != TensorRole.GRADIENT) & ~outlives
        gradient = (role == TensorRole.GRADIENT) & ~outlives
        made = np.concatenate([_EMPTY, *(t.made for t in touches)])
        own_at, gradient_at = np.flatnonzero(own), np.flatnonzero(gradient[np.searchsorted(unique, memory)])
        takes = _by_call(len(course), taken[own], taken_at[own])
        frees = _by_call(len(course), freed[own], freed_at[own])
        gradients = _by_call(len(course), position[gradient_at], first[gradient_at])
        events = tuple(
            CallEvents(
                taken=unique[own_at[take]], taken_at=taken_at[own_at[take]],
                freed=unique[own_at[free]], freed_at=freed_at[own_at[free]],
                gradients=memory[gradient_at[touch]], gradients_at=first[gradient_at[touch]],
                gradients_made=made[gradient_at[touch]],
            )
            for take, free, touch in zip(takes, frees, gradients, strict=True)
        )  # fmt: skip
        return Course(events=events, memory=unique[own], taken=taken[own], freed=freed[own])

    def _extend(self, course: tuple[int, ...], unique: Int64, freed: Int64, freed_at: Int64) -> None:
        """Moves the end of what is held longer than its readers need it."""
        places = [self._keys[number] for number in course]
        for block, begin, end, instance in dict.fromkeys(places):
            for held in self.memories.held.get(block, ()):
                if not begin <= held.op < end:
                    continue
                users = np.searchsorted(unique, self.memories.of_tensors(block, instance, held.users))
                ends = list(zip(freed[users].tolist(), freed_at[users].tolist(), strict=True))
                for position, (other, first, last, which) in enumerate(places):
                    if (other, which) == (block, instance) and first <= held.before < last:
                        ends.append((position, held.before - first - 1))
                buffer = self.memories.buffer_of(block, instance, held.op)
                moved = np.searchsorted(unique, buffer) if held.buffer else users
                freed[moved], freed_at[moved] = max(ends)

    def _find_touches(self) -> list[_Touches]:
        """What each kind of call touches; those that differ in instance only are worked out together."""
        found: list[_Touches] = []
        for (block, begin, end), alike in groupby(self._keys, key=itemgetter(0, 1, 2)):
            span = self.memories.span(block, begin, end)
            instances = np.array([instance for *_, instance in alike], np.int64)
            memory = self.memories.of_span(block, span, instances)
            order = np.argsort(memory, axis=1, kind="stable")
            memory = np.sort(memory, axis=1)
            twice = (memory[:, 1:] == memory[:, :-1]).any(axis=1).tolist()
            for its, where, several in zip(memory, order, twice, strict=True):
                touches = _Touches(
                    memory=its, first=span.first[where], last=span.last[where], made=span.made[where]
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
    """One entry a memory, where tensors of a call share one through their ports."""
    begin = np.flatnonzero(np.diff(touches.memory, prepend=-1))
    return _Touches(
        memory=touches.memory[begin],
        first=np.minimum.reduceat(touches.first, begin),
        last=np.maximum.reduceat(touches.last, begin),
        made=np.maximum.reduceat(touches.made, begin),
    )


def _courses(kind: Int64, micro_batch: Int64) -> tuple[Int64, Int64, list[tuple[int, ...]]]:
    """For every call the number of its course and its position there, and the courses, as kinds of calls."""
    order, found = ascending(micro_batch), list[tuple[int, ...]]()
    begin = np.flatnonzero(np.diff(micro_batch[order], prepend=NONE))
    length = np.diff(begin, append=len(order))
    course, position = np.empty_like(kind), np.empty_like(kind)
    position[order] = np.arange(len(order)) - np.repeat(begin, length)
    for size in distinct(length).tolist():
        calls = order[begin[length == size, None] + np.arange(size)]
        first, of = equal_rows(kind[calls])
        course[calls] = len(found) + of[:, None]
        found += map(tuple, kind[calls[first]].tolist())
    return course, position, found


def _by_call(calls: int, call: Int64, offset: Int64) -> list[Int64]:
    """For each call, its rows in the order of their offsets."""
    order = np.lexsort((offset, call))
    return np.split(order, np.searchsorted(call[order], np.arange(1, calls)))


MAX_REPLAYED = 4_000_000
_TAKE, _FREE, _MAKE_GRADIENT, _TOUCH_GRADIENT = range(4)


class Usage:
    """Bytes of one program, each memory in whole blocks of the allocator."""

    def __init__(self, lifetimes: Lifetimes) -> None:
        self.lifetimes = lifetimes
        self.calls = lifetimes.calls
        size = lifetimes.memories.size
        self.size = -(-size // BLOCK) * BLOCK
        self.before_bytes = int(self.size[lifetimes.before].sum())
        # Call in which each gradient is made first; calls after it make theirs beside it.
        self.gradient_from: dict[int, int] = {}
        self.net, self.peak, self.at = self._levels()

    def _levels(self) -> tuple[Int64, Int64, Int64]:
        """For each call: bytes before it, the most during it, and the offset of the operation where."""
        count = len(self.calls)
        if not count:
            return (np.zeros(0, np.int64),) * 3
        course, position = self.lifetimes.course, self.lifetimes.position
        first, kind = equal_rows(course * (int(position.max()) + 1) + position)
        profiles = np.zeros((2, len(first), 3), np.int64)
        # The first call of a kind may make gradients which the later ones find.
        for number in np.argsort(first).tolist():
            call = int(first[number])
            events = self.lifetimes.events(call)
            new = [m for m in events.gradients.tolist() if m not in self.gradient_from]
            self.gradient_from.update(dict.fromkeys(new, call))
            length = int(self.calls[call, 2] - self.calls[call, 1])
            profiles[:, number] = self._profile(length, events, np.isin(events.gradients, new) if new else None)
            if new:
                profiles[1, number] = self._profile(length, events, None)
        later = np.ones(count, np.int64)
        later[first] = 0
        net, peak, at = profiles[later, kind].T
        start = self.before_bytes + np.concatenate([[0], np.cumsum(net)[:-1]])
        return start, start + peak, at

    def _profile(self, length: int, events: CallEvents, new: Bools | None) -> tuple[int, int, int]:
        """A call's bytes relative to those before it: what it leaves, the most on the way, and where that is."""
        of_gradients, at = self.size[events.gradients], events.gradients_at
        new = np.zeros(len(at), np.bool_) if new is None else new
        beside = ~new & (events.gradients_made == 1)
        change = np.zeros(length + 1, np.int64)
        np.add.at(
            change,
            np.concatenate([events.taken_at, events.freed_at + 1, at[new], at[beside], at[beside] + 1]),
            np.concatenate(
                [
                    self.size[events.taken],
                    -self.size[events.freed],
                    of_gradients[new],
                    of_gradients[beside],
                    -of_gradients[beside],
                ]
            ),
        )
        level = np.cumsum(change)
        most = int(np.argmax(level[:length])) if length else 0
        return int(level[-1]), max(0, int(level[most])), most

    @property
    def peak_bytes(self) -> int:
        """The most that lives at one time."""
        return max(self.before_bytes, int(self.peak.max(initial=0)))

    @property
    def top(self) -> tuple[int, int] | None:
        """The call of the peak and the offset of its operation; None: the step takes no more than was there."""
        if not len(self.calls) or self.peak_bytes == self.before_bytes:
            return None
        call = int(np.argmax(self.peak))
        return call, int(self.at[call])

    @cached_property
    def alive(self) -> Int64:
        """Memories that live at the peak; one of several micro-batches stands once for each."""
        found = [self.lifetimes.before]
        if self.top is None:
            return found[0]
        top, offset = self.top
        found += [self._gradients_alive(top, offset), self._crossing(top, offset)]
        micro_batch = self.calls[:, 4]
        for number in distinct(micro_batch).tolist():
            rows = np.flatnonzero(micro_batch == number)
            if rows[0] <= top <= rows[-1]:
                found.append(self._alive_of(int(np.searchsorted(rows, top)), rows, top, offset))
        return np.concatenate(found)

    def _gradients_alive(self, top: int, offset: int) -> Int64:
        events = self.lifetimes.events(top)
        touched = zip(events.gradients.tolist(), events.gradients_at.tolist(), events.gradients_made, strict=True)
        now = {memory: (at, made) for memory, at, made in touched}
        alive = []
        for memory, call in self.gradient_from.items():
            if call < top or (call == top and now[memory][0] <= offset):
                alive.append(memory)
            if call < top and now.get(memory) == (offset, 1):
                alive.append(memory)
        return np.array(alive, np.int64)

    def _crossing(self, top: int, offset: int) -> Int64:
        its = self.lifetimes.crossings
        taken = (its.taken < top) | ((its.taken == top) & (its.taken_at <= offset))
        freed = (its.freed < top) | ((its.freed == top) & (its.freed_at < offset))
        return np.asarray(its.memory[taken & ~freed])

    def _alive_of(self, position: int, rows: Int64, top: int, offset: int) -> Int64:
        """Of one micro-batch whose call number `position` is the one at the peak, or the next after it."""
        course = self.lifetimes.courses[self.lifetimes.course[rows[0]]]
        across: Int64 = course.memory[(course.taken < position) & (course.freed >= position)]
        if rows[position] != top:
            return across
        events = course.events[position]
        gone = events.freed[events.freed_at < offset]
        kept = np.concatenate([across, events.taken[events.taken_at <= offset]])
        return np.asarray(kept[~np.isin(kept, gone)])

    def curve(self, points: int) -> tuple[tuple[int, int], ...]:
        """(operations run before, most bytes until the next point), at most so many points."""
        if not len(self.calls):
            return ()
        first = np.concatenate([[0], np.cumsum(self.calls[:, 2] - self.calls[:, 1])[:-1]])
        cuts = distinct(np.linspace(0, len(first), points + 1)[:-1].astype(np.int64))
        return tuple(zip(first[cuts].tolist(), np.maximum.reduceat(self.peak, cuts).tolist(), strict=True))

    # -- the allocator --------------------------------------------------------------------------------------

    def replay(self, allocator: CachingAllocator, also: tuple[int, ...] = ()) -> bool | None:
        """Runs the step through an allocator; False if that is out of memory, None if the step is too long.

        Between the micro-batches that fill the program and those that drain it, all do the same: as many of
        either are run as are ever under way at once, and one more. A second step finds all it needs.

        Args:
            allocator: a fresh one.
            also: further allocations that stand from the beginning.
        """
        calls = self._chosen()
        if int((self.calls[calls, 2] - self.calls[calls, 1]).sum()) > MAX_REPLAYED:
            return None
        held: dict[tuple[int, int], CachedBlock] = {}
        crossing = set(self.lifetimes.crossings.memory.tolist())
        size, stream = self.lifetimes.memories.size, self.lifetimes.memories.stream
        for nbytes in (*size[self.lifetimes.before].tolist(), *also):
            if nbytes and allocator.allocate(nbytes) is None:
                return False
        steps: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}
        for call in calls.tolist():
            key = (int(self.lifetimes.course[call]), int(self.lifetimes.position[call]))
            if key not in steps:
                steps[key] = self._in_order(self.lifetimes.events(call), size, stream)
            micro_batch = int(self.calls[call, 4])
            for kind, memory, nbytes, where in steps[key]:
                whose = NONE if memory in crossing else micro_batch
                if kind == _FREE:
                    # The micro-batch that took what crosses may not be among those that are replayed.
                    if whose != NONE or (memory, whose) in held:
                        allocator.free(held.pop((memory, whose)))
                elif kind != _TOUCH_GRADIENT or self.gradient_from[memory] == call:
                    block = allocator.allocate(nbytes, where)
                    if block is None:
                        return False
                    if kind == _TAKE:
                        held[memory, whose] = block
                    elif self.gradient_from[memory] != call:
                        allocator.free(block)
        return True

    def _in_order(self, events: CallEvents, size: Int64, stream: Int64) -> list[tuple[int, int, int, int]]:
        """(kind, memory, bytes, stream) in the order in which the operations of a call do it."""
        memory = np.concatenate([events.taken, events.gradients, events.freed])
        at = np.concatenate([events.taken_at, events.gradients_at, events.freed_at])
        kind = np.concatenate(
            [
                np.full(len(events.taken), _TAKE),
                np.where(events.gradients_made == 1, _MAKE_GRADIENT, _TOUCH_GRADIENT),
                np.full(len(events.freed), _FREE),
            ]
        )
        order = np.lexsort((kind == _FREE, at))
        order = order[size[memory[order]] > 0]
        rows = (kind, memory, size[memory], stream[memory])
        return list(zip(*(column[order].tolist() for column in rows), strict=True))

    def _chosen(self) -> Int64:
        """Calls of the micro-batches to replay."""
        numbers, first = np.unique(self.calls[:, 4], return_index=True)
        _, from_end = np.unique(self.calls[::-1, 4], return_index=True)
        last = len(self.calls) - 1 - from_end
        change = np.zeros(len(self.calls) + 1, np.int64)
        np.add.at(change, first, 1)
        np.add.at(change, last + 1, -1)
        several = int(np.cumsum(change).max(initial=0)) + 1
        kept = numbers if len(numbers) <= 2 * several else np.concatenate([numbers[:several], numbers[-several:]])
        return np.flatnonzero(np.isin(self.calls[:, 4], kept))


CONTRIBUTORS, TENSORS, POINTS = 12, 24, 512
# Architectures before Hopper (compute capability 9), of which libraries think that small workspaces do.
_SMALL_WORKSPACES = ("volta", "ampere", "ada")
_ENGINE = "transformer_engine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """What a framework takes of the device besides a graph's tensors, and how it allocates.

    Attributes:
        expandable_segments: PyTorch's allocator option of that name; off, as by default.
        cublas_workspace_bytes: of the forward and of the backward thread's cuBLAS handle, 32 MiB each: NVIDIA's
            recommendation for Hopper (cuBLAS documentation, cublasSetWorkspace), which PyTorch follows; on older
            devices it takes two buffers of 4 MiB and eight of 16 KiB (aten/src/ATen/cuda/CublasHandlePool.cpp,
            parseChosenWorkspaceSize). A program that says what cuBLAS holds has that.
        engine_workspace_bytes: of Transformer Engine, each of those that a program has: 32 MiB and 1 KiB from
            Hopper on, 4 MiB on older devices (its cpp_extensions/gemm.py, get_cublas_workspace_size_bytes).
        cuda_context_bytes: CUDA context and loaded kernels. Assumed for lazily loaded kernels (the default since
            CUDA 11.7); without, 1.2 to 1.6 GiB were seen (BigScience, tr11-176B-ml chronicles, on V100 and A100).
        nccl_pair_bytes: buffers of a communicator of two ranks, as a user measured on A100 (NVIDIA/nccl on
            GitHub, 964).
        nccl_bytes: the same of more ranks; their number does not matter (there, and 986).
        other_communicators: those that a framework opens beside the ones of a step's tensors, each by the axes
            of the mesh that it is along: "dp-pp-tp" of all ranks for a barrier, "pp" of a pipeline for the loss.
    """

    expandable_segments: bool = False
    cublas_workspace_bytes: tuple[int, ...] = (32 * MIB, 32 * MIB)
    engine_workspace_bytes: int = 32 * MIB + 1024
    cuda_context_bytes: int = 512 * MIB
    nccl_pair_bytes: int = 544 * MIB
    nccl_bytes: int = 688 * MIB
    other_communicators: tuple[str, ...] = ()

    @classmethod
    def on(cls, architecture: str) -> Runtime:
        """That of a device, by the name of its architecture ("ampere"); "" or one unknown here: as on Hopper."""
        if architecture not in _SMALL_WORKSPACES:
            return cls()
        each = 2 * 4 * MIB + 8 * MIB // 64
        return cls(cublas_workspace_bytes=(each, each), engine_workspace_bytes=4 * MIB)

    def workspaces(self, program: Program) -> tuple[int, ...]:
        """Bytes that libraries hold throughout a step, allocation by allocation."""
        held = {by: nbytes for by, nbytes in program.held.items() if by != BETWEEN_STEPS}
        of_cublas = (held.pop("cublas"),) if "cublas" in held else self.cublas_workspace_bytes
        if _ENGINE in held:
            held[_ENGINE] = held[_ENGINE] * self.engine_workspace_bytes // Runtime().engine_workspace_bytes
        return (*of_cublas, *held.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Contributor:
    """A part of what lives at the peak.

    Attributes:
        role: a tensor role, "communication" or "workspace".
        where: the module that holds or makes it, layers as `*`; the operator where no module does.
        nbytes: its bytes.
    """

    role: str
    where: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTensor:
    """Tensors that live at the peak and are alike: made by one operator, in one module, of one shape.

    Attributes:
        role: a tensor role, "communication" or "workspace".
        where: module that makes it, layers as `*`; of what lives through the step its name.
        operator: that makes it; "" for what exists before the step.
        phase: of that operation; "" likewise.
        shape: extents; none of a buffer or workspace.
        dtype: element type; "" likewise.
        count: how many there are, each micro-batch's own.
        nbytes: bytes of all together.
    """

    role: str
    where: str
    operator: str = ""
    phase: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    count: int
    nbytes: int

    def __str__(self) -> str:
        made = f" by {self.operator} ({self.phase})" if self.operator else ""
        what = f" {self.dtype}{list(self.shape)}" if self.dtype else ""
        return f"{format_bytes(self.nbytes)}  {self.count} x{what} {self.role} of {self.where}{made}"

    def to_json(self) -> dict[str, Any]:
        """For results."""
        return {
            "role": self.role, "where": self.where, "operator": self.operator, "phase": self.phase,
            "shape": list(self.shape), "dtype": self.dtype, "count": self.count, "bytes": self.nbytes,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of one rank.

    Attributes:
        program: role of the rank.
        peak_bytes: the most that is allocated at one time.
        at_rest_bytes: what is allocated between steps: parameters, optimizer state, gradients that are buffers,
            workspaces, and what the script keeps from one step and drops within the next.
        peak_at: operation of the peak: "operator", "module", "phase" and "micro_batch"; empty where the step takes
            no more than there is before it.
        reserved_bytes: the most that the allocator holds; None where the step is too long to replay.
        overhead_bytes: what does not go through the allocator, by name.
        capacity_bytes: memory of the device.
        fits: whether the step runs: the allocator never asks for more than the device has left.
        by_role: bytes at the peak, by role.
        contributors: the largest parts of the peak, largest first.
        tensors: the largest tensors of the peak, those alike together, largest first.
        curve: (operations run, most bytes allocated until the next point), over the step.
        programs: peak of every program of the job, where this one stands for all.
        at_rest: at rest, of every program.
    """

    program: str = ""
    peak_bytes: int
    at_rest_bytes: int = 0
    peak_at: dict[str, Any] = field(default_factory=dict)
    reserved_bytes: int | None
    overhead_bytes: dict[str, int]
    capacity_bytes: int
    fits: bool
    by_role: dict[str, int]
    contributors: tuple[Contributor, ...]
    tensors: tuple[LiveTensor, ...] = ()
    curve: tuple[tuple[int, int], ...] = field(default=(), repr=False, compare=False)
    programs: dict[str, int] = field(default_factory=dict)
    at_rest: dict[str, int] = field(default_factory=dict)

    @property
    def device_bytes(self) -> int:
        """What nvidia-smi would show."""
        held = self.peak_bytes if self.reserved_bytes is None else self.reserved_bytes
        return held + sum(self.overhead_bytes.values())

    def lines(self, count: int = 5) -> list[str]:
        """The largest contributors, one line each."""
        return [
            f"{format_bytes(c.nbytes)} ({c.nbytes / max(1, self.peak_bytes):.0%}) {c.role} of {c.where}"
            for c in self.contributors[:count]
        ]

    def listed(self, count: int) -> list[str]:
        """The operation of the peak and its largest tensors, one line each."""
        at = self.peak_at
        where = f", at {at['operator']} of {at['module'] or 'the step'} ({at['phase']})" if at else ""
        rank = f" of {self.program}" if self.program else ""
        levels = f"{format_bytes(self.peak_bytes)}; at rest {format_bytes(self.at_rest_bytes)}"
        return [f"at the peak{rank}{where}, {levels}", *(f"  {tensor}" for tensor in self.tensors[:count])]

    def to_json(self) -> dict[str, Any]:
        """For results."""
        return {
            "peak_bytes": self.peak_bytes,
            "at_rest_bytes": self.at_rest_bytes,
            "reserved_bytes": self.reserved_bytes,
            "device_bytes": self.device_bytes,
            "capacity_bytes": self.capacity_bytes,
            "fits": self.fits,
            "program": self.program,
            "at_peak_bytes": self.by_role,
            "overhead_bytes": self.overhead_bytes,
            "contributors": [{"role": c.role, "where": c.where, "bytes": c.nbytes} for c in self.contributors],
            "tensors": [tensor.to_json() for tensor in self.tensors],
            "peak_at": self.peak_at,
            "peak_bytes_by_program": self.programs,
            "at_rest_bytes_by_program": self.at_rest,
        }


def memory(
    job: JobGraph,
    program: int,
    capacity_bytes: int,
    runtime: Runtime | None = None,
    memories: Memories | None = None,
    reserve: bool = True,
) -> Memory | None:
    """Memory of one program.

    Args:
        job: the job.
        program: number of the program.
        capacity_bytes: memory of the device.
        runtime: what the framework takes besides.
        memories: of the job, where they are at hand already.
        reserve: whether to replay the allocator, which takes most of the time; without, `reserved_bytes` is None.

    Returns:
        None for a job that has no tensors (an imported trace).
    """
    if not len(job.tensors):
        return None
    usage = Usage(Lifetimes(memories or Memories(job), program))
    return _of(usage, job, program, capacity_bytes, runtime or Runtime(), reserve=reserve)


def _of(
    usage: Usage, job: JobGraph, program: int, capacity_bytes: int, runtime: Runtime, *, reserve: bool
) -> Memory:
    workspaces = runtime.workspaces(job.programs[program])
    overhead = {
        "CUDA context (assumed)": runtime.cuda_context_bytes,
        "NCCL buffers": _nccl_bytes(job, program, runtime),
    }
    limit = capacity_bytes - sum(overhead.values())
    needed = usage.peak_bytes + sum(workspaces)
    reserved, fits = _reserve(usage, runtime, workspaces, limit) if reserve else (None, needed <= limit)
    by_role, contributors, tensors = _at_peak(usage)
    by_role["workspace"] += sum(workspaces)
    return Memory(
        program=job.programs[program].role,
        peak_bytes=needed,
        at_rest_bytes=_at_rest(usage, job.programs[program], workspaces),
        peak_at=_peak_at(usage),
        reserved_bytes=reserved,
        overhead_bytes={name: nbytes for name, nbytes in overhead.items() if nbytes},
        capacity_bytes=capacity_bytes,
        fits=fits,
        by_role=by_role,
        contributors=contributors,
        tensors=tensors,
        curve=usage.curve(POINTS),
    )


def _at_rest(usage: Usage, program: Program, workspaces: tuple[int, ...]) -> int:
    return usage.before_bytes + sum(workspaces) + program.held.get(BETWEEN_STEPS, 0)


def _peak_at(usage: Usage) -> dict[str, Any]:
    """The operation of the peak."""
    if usage.top is None:
        return {}
    job, (call, offset) = usage.lifetimes.job, usage.top
    op = int(usage.calls[call, 1]) + offset
    return {
        "operator": job.strings[job.ops.name[op]],
        "module": job.strings[job.ops.module[op]],
        "phase": Phase(int(job.ops.phase[op])).name.lower(),
        "micro_batch": int(usage.calls[call, 4]),
    }


def _reserve(usage: Usage, runtime: Runtime, workspaces: tuple[int, ...], limit: int) -> tuple[int | None, bool]:
    """Bytes that the allocator reserves, and whether they are within a limit, where it gives back what is free."""
    allocator = CachingAllocator(expandable_segments=runtime.expandable_segments)
    if usage.replay(allocator, workspaces) is None:
        return None, usage.peak_bytes + sum(workspaces) <= limit
    reserved = allocator.peak_reserved_bytes
    if reserved <= limit or usage.peak_bytes > limit:
        return reserved, reserved <= limit
    allocator = CachingAllocator(expandable_segments=runtime.expandable_segments, limit_bytes=limit)
    fits = bool(usage.replay(allocator, workspaces))
    return (allocator.peak_reserved_bytes if fits else reserved), fits


def _nccl_bytes(job: JobGraph, program: int, runtime: Runtime) -> int:
    """Buffers of the communicators that a program uses, and that its framework opens beside them."""
    communicates = np.isin(job.ops.kind, COMMUNICATIONS) & (job.run_counts(program) > 0)
    groups = distinct(job.ops.group[communicates]).tolist()
    sizes = [job.group_size(job.groups[number]) for number in groups]
    along = [set(name.split("-")) for name in runtime.other_communicators]
    sizes += [prod(axis.size for axis in job.mesh if axis.name in axes) for axes in along]
    return sum(0 if n < 2 else runtime.nccl_pair_bytes if n == 2 else runtime.nccl_bytes for n in sizes)


def _at_peak(usage: Usage) -> tuple[dict[str, int], tuple[Contributor, ...], tuple[LiveTensor, ...]]:
    """Bytes by role, the largest parts, and the largest tensors."""
    memories, alive = usage.lifetimes.memories, usage.alive
    by_role = Counter(dict.fromkeys(ROLES.values(), 0))
    parts: Counter[tuple[str, str]] = Counter()
    alike: dict[LiveTensor, list[int]] = {}
    known: dict[int, str] = {}
    likes: dict[tuple[int, int, bool, str], LiveTensor] = {}
    for number, count in zip(*np.unique(alive, return_counts=True), strict=True):
        role = ROLES[int(memories.role[number])]
        nbytes = int(usage.size[number]) * int(count)
        by_role[role] += nbytes
        parts[role, _where(memories, int(number), known)] += nbytes
        found = alike.setdefault(_alike(memories, int(number), role, likes), [0, 0])
        found[0] += int(count)
        found[1] += nbytes
    largest = sorted(parts.items(), key=lambda item: (-item[1], item[0]))[:CONTRIBUTORS]
    tensors = [replace(like, count=count, nbytes=nbytes) for like, (count, nbytes) in alike.items() if nbytes]
    tensors.sort(key=lambda tensor: (-tensor.nbytes, str(tensor)))
    contributors = tuple(Contributor(role=r, where=w, nbytes=n) for (r, w), n in largest if n)
    return dict(by_role), contributors, tuple(tensors[:TENSORS])


def _alike(
    memories: Memories, number: int, role: str, known: dict[tuple[int, int, bool, str], LiveTensor]
) -> LiveTensor:
    """What a memory has in common with those like it, kept by what tells them: those of all instances are one."""
    job = memories.job
    if number >= memories.tensors:
        op, row = job.locate_op((number - memories.tensors) % memories.ops)[2], NONE
    else:
        row = job.locate_tensor(number)[2]
        op = int(job.maker[row])
    key = op, row, op != NONE and bool(memories.made[number]), role
    if key not in known:
        known[key] = _like(job, *key)
    return known[key]


def _like(job: JobGraph, op: int, row: int, made: bool, role: str) -> LiveTensor:
    """A memory of an operation, or of a tensor."""
    like = LiveTensor(role=role, where="", count=0, nbytes=0)
    if row != NONE:
        tensor = job.tensors[row]
        like = replace(like, where=_layers(tensor.name), shape=tensor.shape, dtype=tensor.dtype.text)
    if made:
        where, phase = _layers(job.strings[job.ops.module[op]]), Phase(int(job.ops.phase[op])).name.lower()
        like = replace(like, where=where or like.where, operator=job.strings[job.ops.name[op]], phase=phase)
    return like


def _where(memories: Memories, number: int, known: dict[int, str]) -> str:
    """What holds a memory: for what lives through the step the layer, for the rest the module that makes it."""
    job = memories.job
    if number >= memories.tensors:
        op = job.locate_op((number - memories.tensors) % memories.ops)[2]
        named = job.ops.name if memories.role[number] == COMMUNICATION else job.ops.module
        return _layers(job.strings[named[op]])
    row = job.locate_tensor(number)[2]
    if row not in known:
        known[row] = _whose(job, row)
    return known[row]


def _whose(job: JobGraph, row: int) -> str:
    tensor, maker = job.tensors[row], int(job.maker[row])
    if tensor.role.persistent:
        name = _layers(tensor.name)
        if "*" in name:
            return name[: name.index("*") + 1]
        drop = 1 if tensor.role in (TensorRole.PARAMETER, TensorRole.BUFFER) else 2
        return ".".join(name.split(".")[:-drop]) or name
    if maker == NONE:
        return _layers(tensor.name)
    return _layers(job.strings[job.ops.module[maker]]) or job.strings[job.ops.name[maker]]


def _layers(name: str) -> str:
    """A dotted path with its numbers as `*`."""
    return re.sub(r"(?<![^.])(\d+|\{\})(?![^.])", "*", name)


def largest_memory(job: JobGraph, capacity_bytes: int, runtime: Runtime | None = None) -> Memory | None:
    """Memory of the program that has most allocated at its peak, with the peaks of all.

    Args:
        job: the job.
        capacity_bytes: memory of the device.
        runtime: what the framework takes besides.

    Returns:
        None for a job that has no tensors (an imported trace).
    """
    if not len(job.tensors):
        return None
    runtime, memories = runtime or Runtime(), Memories(job)
    most, needed, largest, peaks, rests = 0, NONE, None, dict[str, int](), dict[str, int]()
    for number, program in enumerate(job.programs):
        usage, also = Usage(Lifetimes(memories, number)), runtime.workspaces(program)
        name, peak = program.role or str(number), usage.peak_bytes + sum(also)
        peaks[name], rests[name] = peak, _at_rest(usage, program, also)
        # One is kept: what lives when is as large as the calls of a program.
        if (its := peak + _nccl_bytes(job, number, runtime)) > needed:
            most, needed, largest = number, its, usage
    assert largest is not None
    found = _of(largest, job, most, capacity_bytes, runtime, reserve=True)
    return replace(found, programs=peaks, at_rest=rests)

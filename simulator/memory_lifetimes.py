"""When each memory of a program is taken and given back, call by call.

What belongs to a micro-batch (activations, inputs, buffers, workspaces) is taken by the operation that makes it
and given back after its last reader, as reference counting does: autograd keeps a tensor for exactly the backward
operations that read it. Micro-batches that make the same calls in the same order take and give back alike, so that
order, their *course*, is worked out once for all.

Gradients are taken when the first micro-batch makes them and live until the step's end (`zero_grad` sets them to
None); later micro-batches make theirs beside them and add it at once. A gradient that no operation makes, a buffer
to add up in, exists before the step, as parameters and optimizer state do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from echograph.ir.columns import Int64
from echograph.ir.types import TensorRole
from echograph.simulator.memory_kinds import COMMUNICATION, WORKSPACE, Memories

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
    """

    def __init__(self, memories: Memories, program: int) -> None:
        self.memories, self.job = memories, memories.job
        self.calls = self.job.programs[program].calls
        keys, key = np.unique(self.calls[:, :4], axis=0, return_inverse=True)
        self._keys: list[tuple[int, int, int, int]] = list(map(tuple, keys.tolist()))
        self._touched: dict[int, _Touches] = {}
        self.course = np.zeros(len(self.calls), np.int64)
        self.position = np.zeros(len(self.calls), np.int64)
        known: dict[tuple[int, ...], int] = {}
        for rows in _by_value(self.calls[:, 4]):
            course = tuple(key.reshape(-1)[rows].tolist())
            self.course[rows] = known.setdefault(course, len(known))
            self.position[rows] = np.arange(len(rows))
        self.courses = tuple(self._work_out(course) for course in known)

    @cached_property
    def before(self) -> Int64:
        """Memories that exist before the step, largest first.

        A job with one program has all of the graph's but gradients, of which each program has what it touches; of
        several programs each has what it touches.
        """
        memories, owned = self.memories, self.memories.before
        touched = np.zeros(len(owned), np.bool_)
        for number in range(len(self._keys)):
            touched[self._touches(number).memory] = True
        if len(self.job.programs) == 1:
            touched |= memories.role != TensorRole.GRADIENT
        owned = owned & touched
        found = np.flatnonzero(owned)
        return np.asarray(found[np.lexsort((found, -self.memories.size[found]))])

    def events(self, call: int) -> CallEvents:
        """What a call takes and gives back."""
        return self.courses[int(self.course[call])].events[int(self.position[call])]

    def _work_out(self, course: tuple[int, ...]) -> Course:
        touches = [self._touches(number) for number in course]
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
        own = (role != TensorRole.GRADIENT) & ~outlives
        gradient = (role == TensorRole.GRADIENT) & ~outlives
        made = np.concatenate([_EMPTY, *(t.made for t in touches)])
        own_at, gradient_at = np.flatnonzero(own), np.flatnonzero(np.isin(memory, unique[gradient]))
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
                buffer = self.memories.of_op(block, instance, held.op, COMMUNICATION)
                moved = np.searchsorted(unique, buffer) if held.buffer else users
                freed[moved], freed_at[moved] = max(ends)

    def _touches(self, number: int) -> _Touches:
        if number not in self._touched:
            self._touched[number] = self._find_touches(*self._keys[number])
        return self._touched[number]

    def _find_touches(self, block: int, begin: int, end: int, instance: int) -> _Touches:
        ops = self.job.ops
        found, offsets = [_EMPTY], [_EMPTY]
        for ragged in (ops.inputs, ops.outputs):
            low, high = int(ragged.offsets[begin]), int(ragged.offsets[end])
            tensors = ragged.values[low:high]
            found.append(self.memories.of_tensors(block, instance, tensors))
            offsets.append(np.repeat(np.arange(end - begin), ragged.lengths[begin:end]))
        made = found[-1][self.memories.fresh[low:high]]
        for op in _within(self.memories.working, begin, end):
            found.append(np.array([self.memories.of_op(block, instance, op, WORKSPACE)]))
            offsets.append(np.array([op - begin]))
        rows = self.job.blocks[block].ops
        for op in _within(self.memories.buffered, rows.start, rows.stop):
            users = np.array([op, *ops.deps.row(op), *ops.deps.rows[ops.deps.values == op].tolist()])
            users = users[(begin <= users) & (users < end)]
            found.append(np.full(len(users), self.memories.of_op(block, instance, op, COMMUNICATION)))
            offsets.append(users - begin)
        every, where = np.concatenate(found), np.concatenate(offsets)
        order = np.lexsort((np.arange(len(every)), where))
        every, where = every[order], where[order]
        unique, at = np.unique(every, return_index=True)
        _, from_end = np.unique(every[::-1], return_index=True)
        return _Touches(
            memory=unique,
            first=where[at],
            last=where[len(every) - 1 - from_end],
            made=np.isin(unique, made).astype(np.int64),
        )


def _within(rows: Int64, begin: int, end: int) -> list[int]:
    low, high = np.searchsorted(rows, (begin, end))
    found: list[int] = rows[low:high].tolist()
    return found


def _by_value(values: Int64) -> Iterator[Int64]:
    """Rows of each distinct value, in order."""
    order = np.argsort(values, kind="stable")
    cuts = np.flatnonzero(np.diff(values[order])) + 1
    yield from (np.split(order, cuts) if len(order) else ())


def _by_call(calls: int, call: Int64, offset: Int64) -> list[Int64]:
    """For each call, its rows in the order of their offsets."""
    order = np.lexsort((offset, call))
    return np.split(order, np.searchsorted(call[order], np.arange(1, calls)))

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
from itertools import groupby
from operator import itemgetter

import numpy as np

from echograph.ir.columns import Int64
from echograph.ir.types import TensorRole
from echograph.simulator.memory_kinds import COMMUNICATION, Memories

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
        key, self._keys = _kinds(self.calls, len(self.job.ops))
        self._touched = self._find_touches()
        self.course = np.zeros(len(self.calls), np.int64)
        self.position = np.zeros(len(self.calls), np.int64)
        known: dict[tuple[int, ...], int] = {}
        for rows in _by_value(self.calls[:, 4]):
            course = tuple(key[rows].tolist())
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
        for its in self._touched:
            touched[its.memory] = True
        if len(self.job.programs) == 1:
            touched |= memories.role != TensorRole.GRADIENT
        owned = owned & touched
        found = np.flatnonzero(owned)
        return np.asarray(found[np.lexsort((found, -self.memories.size[found]))])

    def events(self, call: int) -> CallEvents:
        """What a call takes and gives back."""
        return self.courses[int(self.course[call])].events[int(self.position[call])]

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
                buffer = self.memories.of_op(block, instance, held.op, COMMUNICATION)
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
    span = np.unique(begin * (ops + 1) + end, return_inverse=True)[1]
    several = int(instance.max(initial=0)) + 1
    key = (block * (int(span.max(initial=0)) + 1) + span) * several + instance
    _, first, kind = np.unique(key, return_index=True, return_inverse=True)
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


def _by_value(values: Int64) -> Iterator[Int64]:
    """Rows of each distinct value, in order."""
    order = np.argsort(values, kind="stable")
    cuts = np.flatnonzero(np.diff(values[order])) + 1
    yield from (np.split(order, cuts) if len(order) else ())


def _by_call(calls: int, call: Int64, offset: Int64) -> list[Int64]:
    """For each call, its rows in the order of their offsets."""
    order = np.lexsort((offset, call))
    return np.split(order, np.searchsorted(call[order], np.arange(1, calls)))

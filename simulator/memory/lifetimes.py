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

from echograph.ir.columns import Bools, Int64, distinct
from echograph.ir.types import TensorRole
from echograph.simulator.memory.allocator import BLOCK, CachedBlock, CachingAllocator
from echograph.simulator.memory.kinds import COMMUNICATION, Memories

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
        _, first, kind = np.unique(
            course * (int(position.max()) + 1) + position, return_index=True, return_inverse=True
        )
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

    @cached_property
    def alive(self) -> Int64:
        """Memories that live at the peak; one of several micro-batches stands once for each."""
        found = [self.lifetimes.before]
        if not len(self.calls) or self.peak_bytes == self.before_bytes:
            return found[0]
        top = int(np.argmax(self.peak))
        offset = int(self.at[top])
        found.append(self._gradients_alive(top, offset))
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
                if kind == _FREE:
                    allocator.free(held.pop((memory, micro_batch)))
                elif kind != _TOUCH_GRADIENT or self.gradient_from[memory] == call:
                    block = allocator.allocate(nbytes, where)
                    if block is None:
                        return False
                    if kind == _TAKE:
                        held[memory, micro_batch] = block
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

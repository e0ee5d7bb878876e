"""How much of a program's memory lives when: over its calls, at the peak, and in the allocator's segments."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from echograph.ir.columns import Int64, distinct
from echograph.simulator.memory_allocator import BLOCK, Block, CachingAllocator
from echograph.simulator.memory_kinds import Flags
from echograph.simulator.memory_lifetimes import CallEvents, Lifetimes

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

    def _profile(self, length: int, events: CallEvents, new: Flags | None) -> tuple[int, int, int]:
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
        held: dict[tuple[int, int], Block] = {}
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

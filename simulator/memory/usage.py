"""Bytes of a program over its step: at each operation, at the peak, and as the caching allocator reserves them."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from echograph.ir.columns import NONE, Bools, Int64, distinct, equal_rows
from echograph.simulator.memory.allocator import BLOCK, CachedBlock, CachingAllocator
from echograph.simulator.memory.lifetimes import CallEvents, Lifetimes

MAX_REPLAYED = 4_000_000
_ALLOCATE, _FREE, _MAKE_GRADIENT, _TOUCH_GRADIENT = range(4)


class Usage:
    """Bytes of one program, each allocation in whole blocks of the allocator."""

    def __init__(self, lifetimes: Lifetimes) -> None:
        self.lifetimes = lifetimes
        self.calls = lifetimes.calls
        size = lifetimes.allocations.size
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
        sequence, position = self.lifetimes.sequence, self.lifetimes.position
        first, kind = equal_rows(sequence * (int(position.max()) + 1) + position)
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
            np.concatenate([events.allocated_at, events.freed_at + 1, at[new], at[beside], at[beside] + 1]),
            np.concatenate(
                [
                    self.size[events.allocated],
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
        """The call of the peak and the offset of its operation; None: the step needs no more than was there."""
        if not len(self.calls) or self.peak_bytes == self.before_bytes:
            return None
        call = int(np.argmax(self.peak))
        return call, int(self.at[call])

    @cached_property
    def alive(self) -> Int64:
        """Allocations that live at the peak; one of several micro-batches stands once for each."""
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
        now = {allocation: (at, made) for allocation, at, made in touched}
        alive = []
        for allocation, call in self.gradient_from.items():
            if call < top or (call == top and now[allocation][0] <= offset):
                alive.append(allocation)
            if call < top and now.get(allocation) == (offset, 1):
                alive.append(allocation)
        return np.array(alive, np.int64)

    def _crossing(self, top: int, offset: int) -> Int64:
        its = self.lifetimes.crossings
        allocated = (its.allocated < top) | ((its.allocated == top) & (its.allocated_at <= offset))
        freed = (its.freed < top) | ((its.freed == top) & (its.freed_at < offset))
        return np.asarray(its.allocation[allocated & ~freed])

    def _alive_of(self, position: int, rows: Int64, top: int, offset: int) -> Int64:
        """Of one micro-batch whose call number `position` is the one at the peak, or the next after it."""
        sequence = self.lifetimes.sequences[self.lifetimes.sequence[rows[0]]]
        across: Int64 = sequence.allocation[(sequence.allocated < position) & (sequence.freed >= position)]
        if rows[position] != top:
            return across
        events = sequence.events[position]
        gone = events.freed[events.freed_at < offset]
        kept = np.concatenate([across, events.allocated[events.allocated_at <= offset]])
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
        blocks: dict[tuple[int, int], CachedBlock] = {}
        crossing = set(self.lifetimes.crossings.allocation.tolist())
        size, stream = self.lifetimes.allocations.size, self.lifetimes.allocations.stream
        for nbytes in (*size[self.lifetimes.before].tolist(), *also):
            if nbytes and allocator.allocate(nbytes) is None:
                return False
        steps: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}
        for call in calls.tolist():
            key = (int(self.lifetimes.sequence[call]), int(self.lifetimes.position[call]))
            if key not in steps:
                steps[key] = self._in_order(self.lifetimes.events(call), size, stream)
            micro_batch = int(self.calls[call, 4])
            for kind, allocation, nbytes, where in steps[key]:
                whose = NONE if allocation in crossing else micro_batch
                if kind == _FREE:
                    # The micro-batch that allocated what crosses may not be among those that are replayed.
                    if whose != NONE or (allocation, whose) in blocks:
                        allocator.free(blocks.pop((allocation, whose)))
                elif kind != _TOUCH_GRADIENT or self.gradient_from[allocation] == call:
                    block = allocator.allocate(nbytes, where)
                    if block is None:
                        return False
                    if kind == _ALLOCATE:
                        blocks[allocation, whose] = block
                    elif self.gradient_from[allocation] != call:
                        allocator.free(block)
        return True

    def _in_order(self, events: CallEvents, size: Int64, stream: Int64) -> list[tuple[int, int, int, int]]:
        """(kind, allocation, bytes, stream) in the order in which the operations of a call do it."""
        allocation = np.concatenate([events.allocated, events.gradients, events.freed])
        at = np.concatenate([events.allocated_at, events.gradients_at, events.freed_at])
        kind = np.concatenate(
            [
                np.full(len(events.allocated), _ALLOCATE),
                np.where(events.gradients_made == 1, _MAKE_GRADIENT, _TOUCH_GRADIENT),
                np.full(len(events.freed), _FREE),
            ]
        )
        order = np.lexsort((kind == _FREE, at))
        order = order[size[allocation[order]] > 0]
        rows = (kind, allocation, size[allocation], stream[allocation])
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

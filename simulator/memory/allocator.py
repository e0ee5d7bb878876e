"""PyTorch's caching allocator: what a sequence of allocations makes it reserve.

The rules are those of torch's CUDA allocator (c10/cuda/CUDACachingAllocator.cpp; "Memory management" in torch's
CUDA notes). Sizes are rounded up to 512 bytes. Requests up to 1 MiB come from segments of 2 MiB, those below 10
MiB from segments of 20 MiB, larger ones from segments of their own size, rounded up to 2 MiB. The smallest free
block that is large enough serves a request, and is split if more than 1 MiB would be left (in segments of 2 MiB:
512 bytes). Neighbours that are free merge. Each stream has blocks of its own. When the device has no more,
segments that are wholly free are given back, and only then is it out of memory.

With *expandable segments* a stream has one segment of each kind that grows by whole pages, so that its free blocks
merge; what is given back are whole free pages.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from echograph.units import MIB

BLOCK = 512
SMALL_REQUEST, SMALL_SEGMENT = 1 * MIB, 2 * MIB
MEDIUM_REQUEST, MEDIUM_SEGMENT = 10 * MIB, 20 * MIB
ROUNDING = 2 * MIB
# Address space is plentiful: each segment that grows has a range that no other reaches, of whole pages.
_RANGE = 2**26 * MEDIUM_SEGMENT


def rounded(nbytes: int) -> int:
    """Bytes that a request takes."""
    return max(BLOCK, -(-nbytes // BLOCK) * BLOCK)


@dataclass(slots=True, eq=False)
class CachedBlock:
    """A part of a segment, taken or free."""

    start: int
    size: int
    pool: _Pool
    before: CachedBlock | None = None
    after: CachedBlock | None = None
    taken: bool = True


@dataclass(slots=True, eq=False)
class _Pool:
    """The blocks of one stream that serve small or large requests; free ones by size, then by address."""

    small: bool
    free: list[tuple[int, int]] = field(default_factory=list)
    at: dict[int, CachedBlock] = field(default_factory=dict)
    tail: CachedBlock | None = None

    def put(self, block: CachedBlock) -> None:
        block.taken = False
        insort(self.free, (block.size, block.start))
        self.at[block.start] = block

    def remove(self, block: CachedBlock) -> None:
        del self.free[bisect_left(self.free, (block.size, block.start))]
        del self.at[block.start]

    def smallest(self, size: int) -> CachedBlock | None:
        """The smallest free block that is large enough."""
        at = bisect_left(self.free, (size, 0))
        return self.at[self.free[at][1]] if at < len(self.free) else None


class CachingAllocator:
    """The allocator of one device.

    Args:
        expandable_segments: the option of that name (PYTORCH_CUDA_ALLOC_CONF).
        limit_bytes: what it may reserve; None: any amount.

    Attributes:
        reserved_bytes: in segments now.
        peak_reserved_bytes: the most that was.
        allocated_bytes: in taken blocks now.
        peak_allocated_bytes: the most that was.
        releases: how often segments had to be given back to make room.
    """

    def __init__(self, *, expandable_segments: bool = False, limit_bytes: int | None = None) -> None:
        self.expandable_segments, self.limit_bytes = expandable_segments, limit_bytes
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.releases = 0
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._address = 0

    def allocate(self, nbytes: int, stream: int = 0) -> CachedBlock | None:
        """A block for a request; None when the device is out of memory."""
        size = rounded(nbytes)
        small = size <= SMALL_REQUEST
        pool = self._pools.get((stream, small))
        if pool is None:
            pool = self._pools[stream, small] = _Pool(small)
        block = pool.smallest(size)
        if block is None:
            block = self._reserve(pool, size)
            if block is None:
                return None
        else:
            pool.remove(block)
        self._split(pool, block, size)
        block.taken = True
        self.allocated_bytes += block.size
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        return block

    def free(self, block: CachedBlock) -> None:
        """Gives a block back to its stream."""
        self.allocated_bytes -= block.size
        pool, before, after = block.pool, block.before, block.after
        if after is not None and not after.taken:
            pool.remove(after)
            self._merge(block, after)
        if before is not None and not before.taken:
            pool.remove(before)
            self._merge(before, block)
            block = before
        pool.put(block)

    def _merge(self, block: CachedBlock, after: CachedBlock) -> None:
        block.size += after.size
        block.after = after.after
        if after.after is not None:
            after.after.before = block
        if block.pool.tail is after:
            block.pool.tail = block

    def _split(self, pool: _Pool, block: CachedBlock, size: int) -> None:
        left = block.size - size
        if left < BLOCK if pool.small or self.expandable_segments else left <= SMALL_REQUEST:
            return
        rest = CachedBlock(block.start + size, left, pool, before=block, after=block.after)
        if block.after is not None:
            block.after.before = rest
        block.size, block.after = size, rest
        if pool.tail is block:
            pool.tail = rest
        pool.put(rest)

    def _reserve(self, pool: _Pool, size: int) -> CachedBlock | None:
        """A block of new memory that is at least as large; it is in no list of free ones."""
        grown = self._growth(pool, size)
        if self.limit_bytes is not None and self.reserved_bytes + grown > self.limit_bytes:
            self._release()
            grown = self._growth(pool, size)
            if self.reserved_bytes + grown > self.limit_bytes:
                return None
        self.reserved_bytes += grown
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        tail = pool.tail
        block = CachedBlock(self._address, grown, pool)
        if self.expandable_segments:
            if tail is not None and not tail.taken:
                pool.remove(tail)
                tail.size += grown
                return tail
            block.start = self._address if tail is None else tail.start + tail.size
            self._address += _RANGE if tail is None else 0
            block.before, pool.tail = tail, block
            if tail is not None:
                tail.after = block
        else:
            self._address += grown
        return block

    def _growth(self, pool: _Pool, size: int) -> int:
        """Bytes to reserve so that a request can be served."""
        if self.expandable_segments:
            page = SMALL_SEGMENT if pool.small else MEDIUM_SEGMENT
            there = 0 if pool.tail is None or pool.tail.taken else pool.tail.size
            return -(-(size - there) // page) * page
        if pool.small:
            return SMALL_SEGMENT
        return MEDIUM_SEGMENT if size < MEDIUM_REQUEST else -(-size // ROUNDING) * ROUNDING

    def _release(self) -> None:
        """Gives back what no taken block is part of."""
        self.releases += 1
        for pool in self._pools.values():
            for block in list(pool.at.values()):
                if self.expandable_segments:
                    self._unmap(pool, block)
                elif block.before is None and block.after is None:
                    pool.remove(block)
                    self.reserved_bytes -= block.size

    def _unmap(self, pool: _Pool, block: CachedBlock) -> None:
        """Gives back the whole pages of a free block; what is left on either side is no neighbour any more."""
        page = SMALL_SEGMENT if pool.small else MEDIUM_SEGMENT
        low, high = -(-block.start // page) * page, (block.start + block.size) // page * page
        if high <= low:
            return
        pool.remove(block)
        self.reserved_bytes -= high - low
        end = block.start + block.size
        is_tail = pool.tail is block
        for start, stop, before, after in ((block.start, low, block.before, None), (high, end, None, block.after)):
            piece = CachedBlock(start, stop - start, pool, before=before, after=after) if stop > start else None
            if before is not None:
                before.after = piece
            if after is not None:
                after.before = piece
            if piece is not None:
                pool.put(piece)
        if is_tail:
            # What follows grows from here again, at an address of its own.
            pool.tail = None

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echograph.simulator.memory.allocator import CachedBlock, CachingAllocator, rounded

KIB, MIB = 2**10, 2**20


@pytest.mark.parametrize(
    ("nbytes", "taken"), [(1, 512), (512, 512), (513, 1024), (40_000, 40_448), (8_519_680, 8_519_680)]
)
def test_requests_are_rounded_to_512_bytes(nbytes: int, taken: int) -> None:
    assert rounded(nbytes) == taken


@pytest.mark.parametrize(
    ("nbytes", "reserved"),
    [
        (1, 2 * MIB), (MIB, 2 * MIB), (MIB + 1, 20 * MIB), (8_519_680, 20 * MIB), (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB), (11 * MIB, 12 * MIB), (100 * MIB + 1, 102 * MIB),
    ],
)  # fmt: skip
def test_a_first_request_reserves_the_documented_segment(nbytes: int, reserved: int) -> None:
    allocator = CachingAllocator()
    assert allocator.allocate(nbytes) is not None
    assert allocator.reserved_bytes == reserved


def test_a_recorded_snapshot_of_a_real_allocator() -> None:
    # Two matrices, two vectors and a cuBLAS workspace, as torch.cuda.memory_snapshot() showed them
    # (discuss.pytorch.org/t/178671): one small segment with 45,568 bytes taken, one of 20 MiB with 8,519,680.
    allocator = CachingAllocator()
    for nbytes in (40_000, 40, 4_000, 40):
        allocator.allocate(nbytes)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (40_448 + 512 + 4_096 + 512, 2 * MIB)
    allocator.allocate(8_519_680)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (45_568 + 8_519_680, 22 * MIB)


def test_what_is_free_serves_the_next_request_that_fits() -> None:
    allocator = CachingAllocator()
    first, second = allocator.allocate(30 * MIB), allocator.allocate(40 * MIB)
    assert first is not None and second is not None
    allocator.free(first)
    allocator.free(second)
    assert allocator.allocate(29 * MIB) is first, "the smallest that is large enough"
    assert allocator.allocate(35 * MIB) is second
    assert allocator.reserved_bytes == 70 * MIB


def test_a_large_block_keeps_a_rest_of_up_to_one_mebibyte() -> None:
    allocator = CachingAllocator()
    block = allocator.allocate(31 * MIB)  # a segment of 32 MiB, whose rest is not split off
    assert block is not None
    assert (block.size, allocator.allocated_bytes) == (32 * MIB, 32 * MIB)
    expandable = CachingAllocator(expandable_segments=True)
    assert expandable.allocate(31 * MIB).size == 31 * MIB  # type: ignore[union-attr]
    assert expandable.reserved_bytes == 40 * MIB


def test_streams_do_not_share_blocks() -> None:
    allocator = CachingAllocator()
    block = allocator.allocate(30 * MIB, stream=0)
    assert block is not None
    allocator.free(block)
    assert allocator.allocate(30 * MIB, stream=1) is not block
    assert allocator.reserved_bytes == 60 * MIB


def test_growing_sizes_fragment_segments_but_not_one_that_expands() -> None:
    reserved = {}
    for expandable in (False, True):
        allocator = CachingAllocator(expandable_segments=expandable)
        for size in range(20, 60, 2):
            block = allocator.allocate(size * MIB)
            assert block is not None
            allocator.free(block)
        reserved[expandable] = allocator.reserved_bytes
    assert reserved == {False: sum(range(20, 60, 2)) * MIB, True: 60 * MIB}


@pytest.mark.parametrize("expandable", [False, True])
def test_free_segments_are_given_back_before_the_device_is_out_of_memory(expandable: bool) -> None:
    allocator = CachingAllocator(expandable_segments=expandable, limit_bytes=100 * MIB)
    blocks = [allocator.allocate(20 * MIB, stream) for stream in range(3)]
    for block in blocks:
        assert block is not None
        allocator.free(block)
    assert allocator.allocate(80 * MIB) is not None
    assert allocator.releases >= 1
    assert allocator.reserved_bytes <= 100 * MIB
    assert allocator.allocate(40 * MIB) is None


@st.composite
def _traffic(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """(bytes, stream, which of the living to free first) of each request; 0 bytes: only free."""
    size = st.one_of(st.integers(0, 4 * KIB), st.integers(0, 3 * MIB), st.integers(0, 64 * MIB))
    return draw(st.lists(st.tuples(size, st.integers(0, 2), st.integers(-1, 20)), min_size=1, max_size=60))


@given(_traffic(), st.booleans(), st.one_of(st.none(), st.integers(20, 400)))
def test_blocks_never_overlap_and_nothing_is_lost(
    traffic: list[tuple[int, int, int]], expandable: bool, limit_mib: int | None
) -> None:
    limit = None if limit_mib is None else limit_mib * MIB
    allocator = CachingAllocator(expandable_segments=expandable, limit_bytes=limit)
    living: list[tuple[CachedBlock, int]] = []
    for nbytes, stream, which in traffic:
        if 0 <= which < len(living):
            allocator.free(living.pop(which)[0])
        if nbytes:
            block = allocator.allocate(nbytes, stream)
            if block is None:
                assert limit is not None
                continue
            living.append((block, nbytes))
        assert all(block.taken and block.size >= nbytes for block, nbytes in living)
        spans = sorted((block.start, block.start + block.size) for block, _ in living)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert allocator.allocated_bytes == sum(block.size for block, _ in living) <= allocator.reserved_bytes
        assert limit is None or allocator.reserved_bytes <= limit
    for block, _ in living:
        allocator.free(block)
    assert allocator.allocated_bytes == 0
    if limit is None:
        assert allocator.reserved_bytes == allocator.peak_reserved_bytes

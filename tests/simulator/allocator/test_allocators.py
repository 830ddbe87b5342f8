"""Tests of the simulated allocators: single rules, and random requests."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.simulator.allocator import (
    Block,
    CachingAllocator,
    Expandable,
    Native,
    Pages,
    rounded,
)
from tests.strategies import examples

KIB, MIB = 2**10, 2**20
KINDS: tuple[type[CachingAllocator], ...] = (Native, Expandable, Pages)


def given_out(allocator: CachingAllocator, nbytes: int) -> Block:
    block = allocator.allocate(nbytes)
    assert block is not None
    allocator.check()
    return block


# These cases follow from constants and conditions in c10/cuda/CUDACachingAllocator.cpp.


@pytest.mark.parametrize(
    ("nbytes", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),  # the largest small request: size <= kSmallSize
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),  # size < kMinLargeAlloc
        (10 * MIB - 511, 10 * MIB, 10 * MIB),  # the pool is chosen by the rounded size
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (25 * MIB, 25 * MIB, 26 * MIB),
    ],
)
def test_allocator_rounds_request_and_chooses_segment_size(
    nbytes: int, block: int, segment: int
) -> None:
    assert rounded(nbytes) == block
    native = Native()
    assert native.from_device(nbytes) == segment
    found = given_out(native, nbytes)
    assert native.reserved == segment
    # In a large segment, a remainder of 1 MiB or less stays part of the block (should_split).
    whole = segment > 2 * MIB and segment - block <= MIB
    assert found.nbytes == (segment if whole else block)


def test_allocator_serves_small_and_large_requests_separately() -> None:
    for allocator in (Native(), Expandable()):
        small, large = given_out(allocator, MIB), given_out(allocator, MIB + 512)
        assert small.pool is allocator.small
        assert large.pool is allocator.large
        assert allocator.reserved == 22 * MIB


def test_allocator_chooses_smallest_then_lowest_fitting_block() -> None:
    native = Native()
    first = [given_out(native, 3 * MIB) for _ in range(6)]
    for block in first[0], first[2], first[3]:
        native.free(block)
        native.check()
    assert given_out(native, 2 * MIB + 512).address == first[0].address
    # Freeing 3 MiB is not enough: the hole has 6 MiB, and the 2 MiB at the end are too small.
    assert given_out(native, 4 * MIB).address == first[2].address


def test_expandable_allocator_splits_off_remainder_of_1_mib() -> None:
    for allocator, nbytes in (Native(), 3 * MIB), (Expandable(), 2 * MIB):
        blocks = [given_out(allocator, 3 * MIB), given_out(allocator, 3 * MIB)]
        allocator.free(blocks[0])
        assert given_out(allocator, 2 * MIB).nbytes == nbytes


def test_allocator_releases_free_segments_before_it_fails() -> None:
    native = Native(limit=44 * MIB)
    kept, freed = given_out(native, 12 * MIB), given_out(native, 32 * MIB)
    native.free(freed)
    assert native.reserved == 44 * MIB  # the freed segment stays reserved
    assert given_out(native, 20 * MIB).address == freed.address  # 12 MiB of the segment are left
    # No free block has 14 MiB, and segments with a block in use cannot be returned to the device.
    assert native.allocate(14 * MIB) is None
    native.check()
    native.free(kept)
    assert given_out(native, 8 * MIB).address == kept.address
    assert native.allocate(14 * MIB) is None


@pytest.mark.parametrize("kind", KINDS)
def test_only_native_allocator_joins_no_distant_free_pages(
    kind: type[CachingAllocator],
) -> None:
    allocator = kind(limit=80 * MIB)
    for block in [given_out(allocator, 40 * MIB) for _ in range(2)]:
        allocator.free(block)
    quarters = [given_out(allocator, 20 * MIB) for _ in range(4)]
    for block in quarters[1::2]:
        allocator.free(block)
    assert (allocator.allocate(40 * MIB) is None) == (kind is Native)
    allocator.check()


def test_expandable_allocator_maps_pages_at_lowest_gap() -> None:
    expandable = Expandable(limit=80 * MIB)
    first = given_out(expandable, 30 * MIB)
    assert expandable.reserved == 40 * MIB
    second = given_out(expandable, 10 * MIB)  # the remainder of the second page
    assert (expandable.reserved, second.address) == (40 * MIB, first.end)
    third = given_out(expandable, 35 * MIB)
    assert (expandable.reserved, third.address) == (80 * MIB, second.end)
    expandable.free(first)  # frees one page completely, and half of the other one
    assert expandable.allocate(31 * MIB) is None
    expandable.check()
    assert expandable.reserved == 60 * MIB
    assert given_out(expandable, 30 * MIB).address == first.address
    assert expandable.reserved == 80 * MIB


def test_expandable_allocator_prefers_block_that_cannot_grow() -> None:
    """The block at the end can grow into unmapped memory, so it is kept for larger requests."""
    expandable = Expandable()
    blocks = [given_out(expandable, nbytes * MIB) for nbytes in (9, 5, 4)]
    # frees 9 MiB; the free block at the end has 2 MiB, but can grow into unmapped memory
    expandable.free(blocks[0])
    assert given_out(expandable, 2 * MIB).address == blocks[0].address


def test_eviction_for_expandable_allocator_frees_cheapest_pages() -> None:
    """Each of four blocks has one page. A request for two pages may use any two of them.

    The allocator can map free pages next to each other, so the two cheapest are evicted.
    """
    losses = (1.0, 5.0, 2.0, 6.0)
    expandable = Expandable(limit=80 * MIB)
    blocks = [given_out(expandable, 20 * MIB) for _ in losses]
    loss = dict(zip(blocks, losses, strict=True))
    going = expandable.cheapest(40 * MIB, loss.__getitem__)
    assert going == [blocks[0], blocks[2]]
    for block in going:
        expandable.free(block)
    assert given_out(expandable, 40 * MIB).address == blocks[3].end

    native = Native(limit=80 * MIB)
    blocks = [given_out(native, 40 * MIB) for _ in range(2)]
    assert native.cheapest(20 * MIB, dict(zip(blocks, losses, strict=False)).get) == blocks[:1]
    assert native.cheapest(80 * MIB, lambda block: 1.0) == blocks
    assert native.cheapest(82 * MIB, lambda block: 1.0) == []
    assert native.cheapest(20 * MIB, lambda block: None) == []


def test_pages_allocator_rounds_large_blocks_to_pages_of_2_mib() -> None:
    pages = Pages()
    sizes = (MIB, MIB + 512, 2 * MIB, 2 * MIB + 1)
    blocks = [given_out(pages, nbytes) for nbytes in sizes]
    assert [block.nbytes for block in blocks] == [MIB, 2 * MIB, 2 * MIB, 4 * MIB]
    assert pages.reserved == (2 + 2 + 2 + 4) * MIB
    assert given_out(pages, 512).address == blocks[0].end  # small blocks share a page
    pages.free(blocks[3])
    assert pages.reserved == 6 * MIB


def test_pages_allocator_uses_free_pages_for_blocks_of_any_size() -> None:
    pages = Pages(limit=20 * MIB)
    small, *large = [given_out(pages, nbytes * MIB) for nbytes in (1, 3, 6, 5, 2)]
    assert pages.reserved == 20 * MIB
    assert pages.allocate(2 * MIB) is None
    for block in large[0], large[2]:  # 4 and 6 MiB, with a block in use between them
        pages.free(block)
    assert given_out(pages, 8 * MIB + 512).nbytes == 10 * MIB
    pages.free(small)
    assert pages.reserved == 20 * MIB  # the page of small blocks stays, until it is needed
    assert given_out(pages, 2 * MIB).nbytes == 2 * MIB
    assert pages.allocate(512) is None


def _overlaps(allocator: Native) -> None:
    next(allocator.segments()).nbytes += 512


def _miscounts(allocator: Native) -> None:
    allocator.allocated += 512


def _loses_a_free_block(allocator: Native) -> None:
    allocator.large.take(next(allocator.large.free()))


def _does_not_merge(allocator: Native) -> None:
    block = next(allocator.large.free())
    allocator.large.take(block)
    rest = block.cut(block.nbytes // 2)
    rest.used = True
    allocator.large.put(block)
    block.used, rest.used = True, False
    allocator.large.put(rest)
    block.used = False


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (_overlaps, "does not touch"),
        (_miscounts, "allocated is miscounted"),
        (_loses_a_free_block, "the index of free blocks is wrong"),
        (_does_not_merge, "are not merged"),
    ],
)
def test_allocator_check_finds_corrupted_state(
    spoil: Callable[[Native], None], complaint: str
) -> None:
    native = Native()
    given_out(native, 2 * MIB)
    spoil(native)
    with pytest.raises(AssertionError, match=complaint):
        native.check()


SIZES = st.one_of(
    st.integers(1, 3 * KIB),
    st.integers(MIB - 600, MIB + 600),
    st.integers(10 * MIB - 600, 10 * MIB + 600),
    st.integers(1, 45).map(lambda mebibytes: mebibytes * MIB),
)


@pytest.mark.parametrize("kind", KINDS)
@given(
    steps=st.lists(st.one_of(SIZES, st.integers(-40, -1)), max_size=60),
    limit=st.one_of(st.none(), st.integers(40, 160).map(lambda mebibytes: mebibytes * MIB)),
)
@examples(150)
def test_allocator_keeps_invariants_on_random_requests(
    kind: type[CachingAllocator], steps: list[int], limit: int | None
) -> None:
    """A positive number in `steps` requests so many bytes. A negative number frees some block."""
    allocator = kind(limit)
    living: list[Block] = []
    for step in steps:
        if step > 0:
            block = allocator.allocate(step)
            allocator.check()
            assert limit is None or allocator.reserved <= limit
            if block is None:
                assert limit is not None
                assert _nowhere(allocator, step)
                continue
            assert block.nbytes >= rounded(step)
            assert block.pool.small == (rounded(step) <= MIB)
            living.append(block)
        elif living:
            allocator.free(living.pop(step % len(living)))
            allocator.check()
        assert allocator.allocated == sum(block.nbytes for block in living)
        spans = sorted((block.address, block.end) for block in living)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
        if kind is Pages:
            _check_pages(allocator, living)
    for block in living:
        allocator.free(block)
        allocator.check()
    assert allocator.allocated == 0
    if kind is Native:
        assert all(first.whole for first in allocator.segments())
    allocator.release()
    allocator.check()
    assert allocator.reserved == 0


def _nowhere(allocator: CachingAllocator, nbytes: int) -> bool:
    """Return True if neither a free block nor the rest of the device is large enough."""
    pool = allocator.pool_for(nbytes)
    none_free = all(block.nbytes < rounded(nbytes) for block in pool.free())
    if isinstance(allocator, Expandable):
        return none_free and rounded(nbytes) > allocator.available - 40 * MIB
    return none_free and allocator.from_device(nbytes) > allocator.available


def _check_pages(allocator: CachingAllocator, living: list[Block]) -> None:
    """Assert that no page has two large blocks, and that `reserved` is the bytes of all pages."""
    page = 2 * MIB
    large = [
        number
        for block in living
        if not block.pool.small
        for number in range(block.address // page, -(-block.end // page))
    ]
    small = {block.address // page for block in living if block.pool.small}
    assert len({*large}) == len(large)
    assert small.isdisjoint(large)
    assert allocator.reserved == page * (len(large) + len(allocator.small.segments))
    assert len(allocator.small.segments) >= len(small)

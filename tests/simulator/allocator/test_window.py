"""Tests of the search for the cheapest window: adjacent blocks to evict, so that a request fits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rekindle.simulator.allocator import Block, Pool, cheapest_release, cheapest_window
from tests.strategies import examples

Piece = tuple[int, float | None, str]  # bytes, cost of eviction (None: pinned), kind


def blocks_of(pieces: list[Piece]) -> tuple[list[Block], dict[Block, float | None]]:
    pool, address = Pool(small=False), 0
    blocks: list[Block] = []
    for nbytes, _, kind in pieces:
        block = Block(pool, address, nbytes, mapped=kind != "unmapped")
        block.used = kind == "used"
        blocks.append(block)
        address = block.end
    return blocks, dict(zip(blocks, (loss for _, loss, _ in pieces), strict=True))


def test_cheapest_window_has_least_cost_and_free_blocks_cost_0() -> None:
    pieces: list[Piece] = [
        (4, 1.0, "used"), (4, 9.0, "used"), (6, None, "free"), (2, 2.0, "used"), (4, 3.0, "used"),
    ]  # fmt: skip
    blocks, losses = blocks_of(pieces)
    assert cheapest_window(blocks, 8, losses.__getitem__) == (2.0, [blocks[3]])
    assert cheapest_window(blocks, 12, losses.__getitem__) == (5.0, blocks[3:])
    assert cheapest_window(blocks, 21, losses.__getitem__) is None


def test_cheapest_window_contains_no_pinned_or_unmapped_block() -> None:
    pieces: list[Piece] = [
        (4, 1.0, "used"), (4, None, "used"), (4, 1.0, "used"), (4, None, "unmapped"),
        (4, 7.0, "used"), (4, 7.0, "used"),
    ]  # fmt: skip
    blocks, losses = blocks_of(pieces)
    assert cheapest_window(blocks, 8, losses.__getitem__) == (14.0, blocks[4:])
    assert cheapest_window(blocks, 9, losses.__getitem__) is None


@given(
    pieces=st.lists(
        st.tuples(
            st.integers(1, 6),
            st.one_of(st.none(), st.integers(0, 9).map(float)),
            st.sampled_from(("used", "used", "free", "unmapped")),
        ),
        max_size=14,
    ),
    nbytes=st.integers(1, 20),
)
@examples(300)
def test_cheapest_window_equals_search_of_all_windows(pieces: list[Piece], nbytes: int) -> None:
    blocks, losses = blocks_of(pieces)

    def stays(block: Block) -> bool:
        return not block.mapped or (block.used and losses[block] is None)

    starts = range(len(blocks))
    windows = [blocks[first : last + 1] for first in starts for last in starts[first:]]
    sums = [
        sum(losses[block] or 0.0 for block in window if block.used)
        for window in windows
        if sum(block.nbytes for block in window) >= nbytes and not any(map(stays, window))
    ]
    found = cheapest_window(blocks, nbytes, losses.__getitem__)
    assert (found is None) == (not sums)
    if found is not None:
        assert found[0] == min(sums) == sum(losses[block] or 0.0 for block in found[1])


def test_cheapest_release_chooses_segments_by_cost_per_byte() -> None:
    one, of_one = blocks_of([(4, 1.0, "used"), (4, None, "free")])
    two, of_two = blocks_of([(20, 2.0, "used")])
    stays, of_stays = blocks_of([(4, None, "used"), (16, 0.0, "used")])
    losses = of_one | of_two | of_stays
    segments = [(8, one[:1]), (20, two), (20, stays)]
    assert cheapest_release(segments, 8, losses.__getitem__) == (2.0, two)
    assert cheapest_release(segments, 21, losses.__getitem__) == (3.0, [*two, one[0]])
    assert cheapest_release(segments, 29, losses.__getitem__) is None
    assert cheapest_release(segments, 0, losses.__getitem__) == (0.0, [])


def test_cheapest_release_counts_block_on_two_pages_once() -> None:
    (wide, other), losses = blocks_of([(16, 6.0, "used"), (4, 4.0, "used")])
    pages = [(10, [wide]), (10, [wide, other])]
    assert cheapest_release(pages, 10, losses.__getitem__) == (6.0, [wide])
    assert cheapest_release(pages, 20, losses.__getitem__) == (10.0, [wide, other])

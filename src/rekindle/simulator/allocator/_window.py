"""Select adjacent blocks of memory to evict, so that a request for contiguous bytes fits.

This is the sliding window of Coop (Zhang, Ma, Liu, Yuan: Coop: Memory is not a Commodity, NeurIPS
2023, arXiv 2311.00591, section 4.1). Two pointers, to the first and the last block of the window,
move over the blocks of a segment by address. A free block costs nothing. A block that cannot be
evicted ends the window, and a new window begins after it. Of all windows that are wide enough, the
one with the least sum of losses wins. The search takes linear time in the number of blocks, apart
from the sums.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from rekindle._types import Bytes
from rekindle.simulator.allocator._blocks import Block

Loss = Callable[[Block], float | None]
"""Function that returns the cost of evicting the storage in a block, or None if it must stay."""

Choice = tuple[float, list[Block]]
"""A choice of blocks: the sum of their losses, and the blocks to evict."""


Part = tuple[Bytes, Sequence[Block]]
"""A segment or a page: its bytes, and the blocks in use that overlap it."""


def cheapest_window(blocks: Iterable[Block], nbytes: Bytes, loss: Loss) -> Choice | None:
    """Find adjacent blocks of at least `nbytes` in total that cost the least to evict.

    Args:
        blocks: The blocks of one segment, in order of address.
        nbytes: The size of the window.
        loss: A function from a block to the loss of evicting its storage.

    Returns:
        The sum of losses and the blocks in use within the window, or None if no window is possible.
    """
    best: Choice | None = None
    window: deque[tuple[Block, float]] = deque()
    for block in blocks:
        price = loss(block) if block.used else 0.0
        if price is None or not block.mapped:
            window.clear()
            continue
        window.append((block, price))
        while window and block.end - window[0][0].address >= nbytes:
            # A running sum would accumulate rounding errors, so each window is summed from zero.
            total = sum(price for _, price in window)
            if best is None or total < best[0]:
                best = total, [each for each, _ in window if each.used]
            window.popleft()
    return best


def cheapest_release(parts: Iterable[Part], nbytes: Bytes | float, loss: Loss) -> Choice | None:
    """Select blocks to evict so that at least `nbytes` can be returned to the device.

    Only whole segments or pages can be returned. The segments or pages with the least loss per byte
    are chosen first (greedy), so the sum of losses is not always minimal.

    Args:
        parts: The segments or pages.
        nbytes: The bytes to return.
        loss: A function from a block to the loss of evicting its storage.

    Returns:
        The sum of losses and the blocks, or None if not enough bytes can be returned.
    """
    offers: list[tuple[float, Bytes, dict[Block, float]]] = []
    for width, blocks in parts:
        prices = {block: price for block in blocks if (price := loss(block)) is not None}
        if len(prices) == len(blocks):
            offers.append((sum(prices.values()) / width, width, prices))
    offers.sort(key=lambda offer: offer[0])
    going: dict[Block, float] = {}
    for _, width, prices in offers:
        if nbytes <= 0:
            break
        nbytes -= width
        going |= prices
    return (sum(going.values()), [*going]) if nbytes <= 0 else None

"""Select the neighbors in memory to evict so that one request fits.

The sliding window of Coop (Zhang, Ma, Liu, Yuan: Coop: Memory is not a Commodity, NeurIPS 2023,
arXiv 2311.00591, section 4.1): two pointers over the blocks of a segment by address. A free block
costs nothing; a block that cannot be evicted restarts the window. Of all windows that are wide
enough, the one with the least sum of losses wins. The time is linear in the number of blocks,
except for the sums.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from rekindle._types import Bytes
from rekindle.simulator.allocator._blocks import Block

Loss = Callable[[Block], float | None]
"""Loss of evicting the storage in a block; None if it cannot be evicted."""

Choice = tuple[float, list[Block]]
"""Blocks to evict, after the sum of their losses."""


def cheapest_window(blocks: Iterable[Block], nbytes: Bytes, loss: Loss) -> Choice | None:
    """Find the window of `nbytes` whose blocks cost least to evict.

    Args:
        blocks: The blocks of one segment, in order of address.
        nbytes: The size of the window.
        loss: The loss of evicting a block.

    Returns:
        The sum of losses and the blocks in use within the window, or None without such a window.
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
            # A running sum would accumulate rounding errors, so each sum is computed afresh.
            total = sum(price for _, price in window)
            if best is None or total < best[0]:
                best = total, [each for each, _ in window if each.used]
            window.popleft()
    return best


def cheapest_release(
    parts: Iterable[tuple[Bytes, Sequence[Block]]], nbytes: Bytes | float, loss: Loss
) -> Choice | None:
    """Select blocks to evict so that at least `nbytes` can be returned to the device.

    The choice is greedy: parts with the least loss per byte come first. The sum of losses is not
    always minimal.

    Args:
        parts: Segments or pages: the bytes of each, and the blocks in use that lie there, at least
            in part.
        nbytes: The bytes to return.
        loss: The loss of evicting a block.

    Returns:
        The sum of losses and the blocks, or None if not enough can be returned.
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

"""Which neighbors in memory to let go so that one request fits.

The sliding window of Coop (Zhang, Ma, Liu, Yuan: Coop: Memory is not a Commodity, NeurIPS 2023,
arXiv 2311.00591, section 4.1): two pointers over the blocks of a segment by address. What is free
costs nothing, what must stay restarts the window, and of all windows that are wide enough the one
with the least sum wins. Linear in the number of blocks, but for the sums.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from rekindle._types import Bytes
from rekindle.simulator.allocator._blocks import Block

Loss = Callable[[Block], float | None]
"""Of letting go what is in a block; None: it stays."""

Choice = tuple[float, list[Block]]
"""What goes, and the sum of its losses."""


def cheapest_window(blocks: Iterable[Block], nbytes: Bytes, loss: Loss) -> Choice | None:
    """The neighbors in use that are to go so that a window of `nbytes` is free, if there are such.

    blocks: those of one segment, in order.
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
            total = sum(price for _, price in window)  # no difference of sums, which would drift
            if best is None or total < best[0]:
                best = total, [each for each, _ in window if each.used]
            window.popleft()
    return best


def cheapest_release(
    parts: Iterable[tuple[Bytes, Sequence[Block]]], nbytes: Bytes | float, loss: Loss
) -> Choice | None:
    """What is to go so that parts of `nbytes` in all can be given back to the device, if it can.

    parts: segments or pages, by their bytes and the blocks in use that lie there, at least in part.
    Those that cost least for a byte go first, until it is enough: greedy, not the least sum.
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

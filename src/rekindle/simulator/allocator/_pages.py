"""Model an allocator that gives large blocks whole pages of the device's memory, wherever they are.

On CUDA, the driver can map any free pages next to each other (`cuMemMap`), so a large block fits
whenever enough pages are free. Only the rest of its last page is lost. Small blocks share segments
of one page, as in PyTorch's small pool. GMLake (ASPLOS 2024, arXiv 2401.08156) maps pages in this
way. This module is only a model: Rekindle has no such allocator for a device. The time to map pages
is not modeled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, final

from rekindle._types import Bytes
from rekindle.simulator.allocator._blocks import Block, Pool
from rekindle.simulator.allocator._caching import GRAIN, SMALL_SEGMENT, CachingAllocator
from rekindle.simulator.allocator._window import Choice, Loss

PAGE: Final = SMALL_SEGMENT  #: the smallest piece of memory that CUDA's driver maps


@final
class Pages(CachingAllocator):
    """Allocator in which each large block is a segment of whole pages, returned when it is free.

    Addresses are those of the mappings. `reserved` counts the pages behind them.
    """

    def free(self, block: Block) -> None:
        """Free a block, and return the pages of a large one."""
        super().free(block)
        if not block.pool.small:
            self._remove(block)

    def ways(self, nbytes: Bytes, loss: Loss) -> Iterator[Choice | None]:
        """Yield nothing: any pages will do, so the policy evicts one block after another."""
        return iter(())

    def from_device(self, nbytes: Bytes) -> Bytes:
        """Return the bytes of the pages that a request needs."""
        return -(-nbytes // PAGE) * PAGE

    def _splits(self, pool: Pool, rest: Bytes) -> bool:
        return pool.small and rest >= GRAIN

"""What to let go where the device has no room in one piece: the cheapest neighbors in memory.

The sliding window of Coop (Zhang, Ma, Liu, Yuan; NeurIPS 2023, arXiv 2311.00591), over the blocks
that the device's allocator tells of, with the policy's score without the size as the loss.

Missing: whole segments that would go for less, and that a request finds its place among the blocks
of its own stream and pool only. Where the window does not help, room is made by the sum.
"""

from __future__ import annotations

import torch

from rekindle._types import Bytes
from rekindle.engine import Engine, Storage
from rekindle.pytorch.devices import accelerator
from rekindle.pytorch.tensors import Memory
from rekindle.simulator.allocator import Block, Choice, Pool, cheapest_window


def cheapest_neighbors(engine: Engine, device: torch.device, nbytes: Bytes) -> list[Storage]:
    """Storages side by side on `device` that go for the least loss so that `nbytes` are free in one
    piece; none where what may go does not make such a place."""
    at = {
        home.data_ptr(): storage
        for storage in engine.storages
        if storage.order >= 0 and (home := _home_of(storage)) is not None and home.device == device
    }

    def loss(block: Block) -> float | None:
        storage = at.get(block.address)
        return None if storage is None else engine.loss(storage)

    best: Choice | None = None
    for segment in accelerator.segments(device):
        found = cheapest_window(map(_block_of, segment), nbytes, loss)
        if found is not None and (best is None or found[0] < best[0]):
            best = found
    return [] if best is None else [at[block.address] for block in best[1]]


def _home_of(storage: Storage) -> torch.UntypedStorage | None:
    memory: Memory = storage.payload
    return None if memory.watch is None else memory.watch()


def _block_of(piece: accelerator.Piece) -> Block:
    block = Block(_ANY, piece.address, piece.nbytes)
    block.used = piece.used
    return block


_ANY = Pool(small=False)

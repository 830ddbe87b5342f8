"""Blocks: parts of the networks of random programs.

Each block reads `x` of the shape (batch, time, 8), and assigns a new `x` of that shape. `M` stands
for the block's own name: `M = ...` becomes an attribute of the network, and `M_a = ...` becomes
another one. Other names are variables of the network's `forward`, shared with the other blocks.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.pytorch.hunt.blocks.corners import CORNERS
from tests.pytorch.hunt.blocks.hooks import HOOKS
from tests.pytorch.hunt.blocks.layers import LAYERS
from tests.pytorch.hunt.blocks.operations import OPERATIONS


class Block(NamedTuple):
    forward: str
    build: str = ""


BLOCKS = {
    name: Block(**slots)
    for rows in (LAYERS, OPERATIONS, HOOKS, CORNERS)
    for name, slots in rows.items()
}

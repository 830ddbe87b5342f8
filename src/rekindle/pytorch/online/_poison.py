"""What is evicted is overwritten before it goes, to find a reader that comes too late.

A kernel of one's own that keeps an address, a stream that nobody waits for: what they read is there
as long as nothing else takes its place, which hides the mistake for most of the time. With
`REKINDLE_POISON=1` in the environment they read numbers that are none, at once.
"""

from __future__ import annotations

import os
from typing import Final

import torch

from rekindle.pytorch.tensors import privately, whole

POISONS: Final = os.environ.get("REKINDLE_POISON", "") not in ("", "0")


def poison(home: torch.UntypedStorage) -> None:
    """Every byte of `home` is 0xFF: NaN in every format of numbers with a point."""
    with privately(), torch.no_grad():
        whole(home).fill_(0xFF)

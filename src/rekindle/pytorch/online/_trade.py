"""Lets tensors change places, as modules do that convert their parameters by `swap_tensors`.

`torch.utils.swap_tensors` gives each of two tensors all that the other is, its memory included, and
refuses tensors that somebody has weak references to. The budget has one to the tensor by which the
program knows a memory: it steps back meanwhile, and follows who has that memory then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from rekindle.pytorch.online._handed_out import Current

#: While this lasts, the two may change places.
Trading = Callable[[Tensor, Tensor], AbstractContextManager[None]]


_told = Current[Trading]()


@contextmanager
def trades_seen(trading: Trading) -> Iterator[None]:
    """Inside, `torch.utils.swap_tensors` swaps within `trading`."""
    swap: Any = torch.utils.swap_tensors

    def seen(t1: Tensor, t2: Tensor) -> None:
        told = _told.now
        with nullcontext() if told is None else told(t1, t2):
            swap(t1, t2)

    torch.utils.swap_tensors = seen
    try:
        with _told.during(trading):
            yield
    finally:
        torch.utils.swap_tensors = swap

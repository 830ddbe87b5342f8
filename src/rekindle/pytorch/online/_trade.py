"""Lets tensors change places, as modules do that convert their parameters by `swap_tensors`.

`torch.utils.swap_tensors` gives each of two tensors all that the other is, its memory included, and
refuses tensors that somebody has weak references to. The budget has one to the tensor by which the
program knows a memory: it steps back meanwhile, and follows who has that memory then.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from rekindle.pytorch.online._driver import Driver
from rekindle.pytorch.online._handed_out import Current
from rekindle.pytorch.online._history import knowing
from rekindle.pytorch.tensors import Memory

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


@contextmanager
def trading(driver: Driver, t1: Tensor, t2: Tensor) -> Iterator[None]:
    """Inside, nothing follows the two; afterwards, what followed one follows the other, if they
    have changed places."""
    with driver.lock, driver.owners.without(t1, t2):
        driver.settle()
        followers = [_step_back(driver, tensor) for tensor in (t1, t2)]
        now = (t1, t2)
        try:
            yield
            now = (t2, t1)
        finally:
            for memories, tensor in zip(followers, now, strict=True):
                for memory in memories:
                    memory.origin = weakref.ref(tensor)


def _step_back(driver: Driver, tensor: Tensor) -> list[Memory]:
    """Nothing follows `tensor` any more. Returns what did."""
    memories: list[Memory] = [storage.payload for storage in knowing(driver.engine)]
    followers = [memory for memory in memories if memory.program_tensor() is tensor]
    for memory in followers:
        memory.origin = None
    return followers

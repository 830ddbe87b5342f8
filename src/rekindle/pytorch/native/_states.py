"""Counts the states of PyTorch's generator that a program keeps.

A state is 5,056 bytes that no operator makes. Programs that set the generator back, as checkpoints
do, keep one for each region. A state from `torch.Generator.get_state()`, a method of C's, counts
once an operator reads it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from rekindle._types import Bytes
from rekindle.pytorch.native._higher import is_seen
from rekindle.pytorch.online import replace


class StateKeeper(Protocol):
    """The driver."""

    def make_room(self, needed: Bytes, who: str) -> None:
        """Evicts until `needed` bytes fit, or raises `OutOfBudget`: `who` needs them."""
        ...

    def meet(self, tensor: Tensor) -> None:
        """The memory of `tensor` counts from now on."""
        ...


@contextmanager
def random_states_counted(driver: StateKeeper) -> Iterator[None]:
    """Inside, there is room for what `torch.get_rng_state` returns, which counts at once."""

    def counted(original: Any) -> Any:
        @functools.wraps(original)
        def state() -> Tensor:
            if not is_seen():
                return original()
            driver.make_room(_bytes_of_state(), "torch.get_rng_state")
            made: Tensor = original()
            driver.meet(made)
            return made

        return state

    with ExitStack() as stack:
        for module in (torch, torch.random):
            replace(stack, module, "get_rng_state", counted)
        yield


@functools.cache
def _bytes_of_state() -> Bytes:
    return torch.Generator().get_state().nbytes

"""Counts the states of PyTorch's generators that a program keeps, and brings back evicted ones.

A state is 5,056 bytes that no operator makes. Programs that set the generator back, as checkpoints
do, keep one for each region. All of them, those of `torch.get_rng_state()` and `fork_rng()` as
well, come from `torch.Generator.get_state()`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Final, Protocol

import torch
from torch import Tensor

from rekindle._types import Bytes
from rekindle.pytorch.native._higher import is_seen

_NAME: Final = "torch.Generator.get_state"


class StateKeeper(Protocol):
    """The driver."""

    core: ModuleType

    def make_room(self, needed: Bytes, who: str) -> None:
        """Evicts until `needed` bytes fit, or raises `OutOfBudget`: `who` needs them."""
        ...

    def bring_back(self, tensor: Tensor) -> None:
        """The memory of `tensor` is there."""
        ...

    def meet(self, tensor: Tensor) -> None:
        """The memory of `tensor` counts from now on."""
        ...


@contextmanager
def random_states_counted(driver: StateKeeper) -> Iterator[None]:
    """Inside, there is room for a state of a generator before it is taken, and it counts at once.

    For budgets of the CPU's memory, where all states are.
    """
    original = vars(torch.Generator)["get_state"]

    @functools.wraps(original)
    def get_state(generator: torch.Generator) -> Tensor:
        if not is_seen():
            return original(generator)
        driver.make_room(_bytes_of_state(generator.device.type, original), _NAME)
        state: Tensor = original(generator)
        driver.meet(state)
        return state

    setter = vars(torch.Generator)["set_state"]

    @functools.wraps(setter)
    def set_state(generator: torch.Generator, state: Tensor) -> torch.Generator:
        if is_seen() and isinstance(state, Tensor):
            driver.bring_back(state)  # it is read by no operator
        return setter(generator, state)

    put = driver.core.put_method  # the type is C's, and takes no attribute from Python
    put(torch.Generator, "get_state", get_state)
    put(torch.Generator, "set_state", set_state)
    try:
        yield
    finally:
        put(torch.Generator, "get_state", original)
        put(torch.Generator, "set_state", setter)


@functools.cache
def _bytes_of_state(kind: str, original: Callable[[torch.Generator], Tensor]) -> Bytes:
    return original(torch.Generator(kind)).nbytes

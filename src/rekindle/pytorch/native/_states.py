"""Count the states of random generators that a program keeps, and make evicted ones resident.

A state of the CPU's generator is a tensor of 5,056 bytes, which no operator makes. Programs that
reset the generator, such as checkpointing, keep one state per checkpointed region. All states come
from `torch.Generator.get_state()`, also those of `torch.get_rng_state()` and `fork_rng()`.
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
    """The methods of the driver that this file uses."""

    core: ModuleType

    def make_room(self, needed: Bytes, who: str) -> None:
        """Evict until `needed` bytes fit, or raise `OutOfBudget` in the name of `who`."""
        ...

    def bring_back(self, tensor: Tensor) -> None:
        """Make the memory of `tensor` resident."""
        ...

    def meet(self, tensor: Tensor) -> None:
        """Count the memory of `tensor` toward the budget from now on."""
        ...


@contextmanager
def random_states_counted(driver: StateKeeper) -> Iterator[None]:
    """Inside the block, make room for each new generator state, and count the state.

    Only for budgets of CPU memory, because all generator states are in CPU memory.
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
            # No operator reads the state, so the core does not see the access.
            driver.bring_back(state)
        return setter(generator, state)

    put = driver.core.put_method  # a C type, whose attributes Python cannot set
    put(torch.Generator, "get_state", get_state)
    put(torch.Generator, "set_state", set_state)
    try:
        yield
    finally:
        put(torch.Generator, "get_state", original)
        put(torch.Generator, "set_state", setter)


@functools.cache
def _bytes_of_state(kind: str, original: Callable[[torch.Generator], Tensor]) -> Bytes:
    """Return the size of a generator state on a device of this kind."""
    return original(torch.Generator(kind)).nbytes

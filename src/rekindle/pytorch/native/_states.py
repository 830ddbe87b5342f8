"""Count the states of random generators that a program keeps, and make evicted ones resident.

A state of the CPU's generator is a tensor of 5,056 bytes, which no operator makes. Programs that
reset the generator, such as checkpointing, keep one state per checkpointed region. All states come
from `torch.Generator.get_state()`, also those of `torch.get_rng_state()` and `fork_rng()`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

from rekindle._types import Bytes
from rekindle.pytorch.native._driver import Driver
from rekindle.pytorch.native._higher import is_seen
from rekindle.pytorch.online import Current, not_traced

_NAME: Final = "torch.Generator.get_state"

_driver = Current[Driver]()


@contextmanager
def random_states_counted(driver: Driver) -> Iterator[None]:
    """Inside the block, make room for each new generator state, and count the state.

    Only for budgets of CPU memory, because all generator states are in CPU memory.
    """
    original = vars(torch.Generator)["get_state"]

    @not_traced
    @functools.wraps(original)
    def get_state(generator: torch.Generator) -> Tensor:
        driver = _driver.now
        if driver is None or not is_seen():
            return original(generator)
        driver.make_room(_bytes_of_state(generator.device.type, original), _NAME)
        state: Tensor = original(generator)
        driver.register_tensors([state])
        return state

    setter = vars(torch.Generator)["set_state"]

    @not_traced
    @functools.wraps(setter)
    def set_state(generator: torch.Generator, state: Tensor) -> torch.Generator:
        driver = _driver.now
        if driver is not None and is_seen() and isinstance(state, Tensor):
            # The core does not see that the generator reads this state, because no operator reads
            # it. So make the state resident first.
            driver.core.bring_back(driver.handle, state)
        return setter(generator, state)

    # `torch.Generator` is a C type, whose attributes Python cannot set
    put = driver.core.put_method
    put(torch.Generator, "get_state", get_state)
    put(torch.Generator, "set_state", set_state)
    try:
        with _driver.during(driver):
            yield
    finally:
        put(torch.Generator, "get_state", original)
        put(torch.Generator, "set_state", setter)


@functools.cache
def _bytes_of_state(kind: str, original: Callable[[torch.Generator], Tensor]) -> Bytes:
    """Return the size of a generator state on a device of this kind."""
    return original(torch.Generator(kind)).nbytes

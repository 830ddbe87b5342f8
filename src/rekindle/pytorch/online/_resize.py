"""Sees storages change their size behind the dispatcher's back, as FSDP does to its parameters.

`fully_shard` gathers a layer's parameters before its forward pass and gives their memory back after
it by `UntypedStorage.resize_(0)`, which no dispatch mode sees; the backward pass gathers them into
the same storages again. To recomputation that is a constant that is overwritten (R4).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rekindle.pytorch.online._driver import Driver


@contextmanager
def resizes_seen(driver: Driver) -> Iterator[None]:
    """Inside, `driver` hears of every `UntypedStorage.resize_` before it happens."""
    resize: Any = torch.UntypedStorage.resize_
    own = "resize_" in vars(torch.UntypedStorage)

    def seen(home: torch.UntypedStorage, nbytes: int) -> Any:
        storage = None if driver.works else driver.about_to_resize(home, nbytes)
        result = resize(home, nbytes)
        if storage is not None:
            driver.resized(storage)
        return result

    torch.UntypedStorage.resize_ = seen  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        if own:
            torch.UntypedStorage.resize_ = resize
        else:
            del torch.UntypedStorage.resize_  # type: ignore[misc]

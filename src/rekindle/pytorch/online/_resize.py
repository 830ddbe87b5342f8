"""Sees storages change their size behind the dispatcher's back, as FSDP does to its parameters.

`fully_shard` gathers a layer's parameters before its forward pass and gives their memory back after
it by `UntypedStorage.resize_(0)`, which no dispatch mode sees; the backward pass gathers them into
the same storages again. To recomputation that is a constant that is overwritten (R4). Invertible
networks do so to activations, which they compute from the layer's output in the backward pass: a
write (R3), after which recomputation goes on with what was there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rekindle.engine import Storage
from rekindle.pytorch.online._driver import Driver
from rekindle.pytorch.online._recording import changed_unseen


@contextmanager
def resizes_seen(driver: Driver) -> Iterator[None]:
    """Inside, `driver` hears of every `UntypedStorage.resize_` before it happens."""
    resize: Any = torch.UntypedStorage.resize_
    own = "resize_" in vars(torch.UntypedStorage)

    def seen(home: torch.UntypedStorage, nbytes: int) -> Any:
        storage = None if driver.work.mine else _about_to_resize(driver, home, nbytes)
        if storage is not None and storage.replayable and nbytes != storage.nbytes:
            with driver.lock:
                storage = changed_unseen(driver, "resize_", storage)
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


def _about_to_resize(driver: Driver, home: torch.UntypedStorage, nbytes: int) -> Storage | None:
    """What is in `home` is about to be cut off, or to grow. Returns its storage, if known."""
    with driver.lock:
        driver.settle()
        watch = driver.table.watches.get(home._cdata)
        if watch is None:
            return None
        storage = driver.known_at(watch)
        more = nbytes - storage.nbytes
        if more < 0 and not storage.replayable and storage.consumers:
            driver.forget(storage)
        elif home.device.type == driver.device.type:
            driver.make_room(max(0, more), "resize_")
        return storage

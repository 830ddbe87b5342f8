"""Sees storages change their size behind the dispatcher's back, as FSDP does to its parameters.

`fully_shard` gathers a layer's parameters before its forward pass and gives their memory back after
it by `UntypedStorage.resize_(0)`, which no dispatch mode sees; the backward pass gathers them into
the same storages again. To recomputation that is a constant that is overwritten (R4). Invertible
networks do so to activations, which they compute from the layer's output in the backward pass: a
write (R3), after which recomputation goes on with what was there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from rekindle.pytorch.devices import rounded
from rekindle.pytorch.online._driver import Driver
from rekindle.pytorch.online._handed_out import Current
from rekindle.pytorch.online._recording import changed_unseen

#: Is told of the storage and the bytes that it is to have; says what to call when it has them.
AboutToResize = Callable[[torch.UntypedStorage, int], Callable[[], None] | None]


_told = Current[AboutToResize]()


@contextmanager
def resizes_seen(about_to_resize: AboutToResize) -> Iterator[None]:
    """Inside, `about_to_resize` hears of every `UntypedStorage.resize_` before it happens."""
    resize: Any = torch.UntypedStorage.resize_
    own = "resize_" in vars(torch.UntypedStorage)

    def seen(home: torch.UntypedStorage, nbytes: int) -> Any:
        told = _told.now
        resized = None if told is None else told(home, nbytes)
        result = resize(home, nbytes)
        if resized is not None:
            resized()
        return result

    torch.UntypedStorage.resize_ = seen  # type: ignore[method-assign, assignment]
    try:
        with _told.during(about_to_resize):
            yield
    finally:
        if own:
            torch.UntypedStorage.resize_ = resize
        else:
            del torch.UntypedStorage.resize_  # type: ignore[misc]


def about_to_resize(
    driver: Driver, home: torch.UntypedStorage, nbytes: int
) -> Callable[[], None] | None:
    """What is in `home` is about to be cut off, or to grow. Returns what to call when it has been,
    if it is known."""
    if driver.work.mine:
        return None
    with driver.lock:
        driver.settle()
        watch = driver.table.watch_at(home._cdata)
        if watch is None:
            return None
        storage = driver.known_at(watch)
        more = rounded(nbytes, driver.device) - storage.nbytes
        if more < 0 and not storage.replayable and storage.consumers:
            driver.forget(storage)
        elif home.device.type == driver.device.type:
            driver.make_room(max(0, more), "resize_")
        if storage.replayable and more:
            storage = changed_unseen(driver, "resize_", storage)
        return partial(driver.resized, storage)

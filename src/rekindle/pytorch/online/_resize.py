"""Sees storages change their size behind the dispatcher's back, as FSDP does to its parameters.

`fully_shard` gathers a layer's parameters before its forward pass and gives their memory back after
it by `UntypedStorage.resize_(0)`, which no dispatch key sees; the backward pass gathers them into
the same storages again. To recomputation that is a constant that is overwritten (R4). Invertible
networks do so to activations, which they compute from the layer's output in the backward pass: a
write (R3), after which recomputation goes on with what was there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rekindle.pytorch.online._handed_out import Current

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

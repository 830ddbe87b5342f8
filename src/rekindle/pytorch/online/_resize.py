"""Detect that a storage is resized by `UntypedStorage.resize_`, which bypasses the dispatcher.

`fully_shard` (FSDP) gathers a layer's parameters before the forward pass, and frees them afterwards
by `UntypedStorage.resize_(0)`. The backward pass gathers them into the same storages. The runtime
treats these parameters as a source that is overwritten (R4).

Invertible networks free activations in the same way, and recompute them in the backward pass from
the layer's output. The runtime treats that as an in-place write (R3): later recomputation uses the
new contents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rekindle.pytorch.online._handed_out import Current

#: Called with a storage and its new size (bytes) before a resize. Returns a function to call after
#: the resize, or None.
AboutToResize = Callable[[torch.UntypedStorage, int], Callable[[], None] | None]


_told = Current[AboutToResize]()


@contextmanager
def resizes_seen(about_to_resize: AboutToResize) -> Iterator[None]:
    """Inside the block, call `about_to_resize` before every `UntypedStorage.resize_`."""
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

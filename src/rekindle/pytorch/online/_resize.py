"""Detect that a storage is resized by `UntypedStorage.resize_`, which bypasses the dispatcher.

`fully_shard` (FSDP) gathers a layer's parameters before the forward pass, and frees them afterwards
by `UntypedStorage.resize_(0)`. The backward pass gathers them into the same storages. Values that
autograd saved in the layer keep their recipes, although these read the freed parameters
(`native/memory/sources/gathered.h`). If the program frees any other source (value without a
recipe), the runtime acts as if the program had overwritten it (R4, sources).

Invertible networks free activations in the same way, and recompute them in the backward pass from
the layer's output. The runtime treats that as an in-place write (R3, in-place writes): later
recomputation uses the new contents.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rekindle.pytorch.online._fsdp import NEVER, gathered_after
from rekindle.pytorch.online._handed_out import Current

#: Called before a storage is resized, with three arguments: the storage, its new size (bytes), and
#: the sequence number of the autograd node before which FSDP gathers the storage again
#: (`gathered_after`; `NEVER` if FSDP does not). Returns a function to call after the resize, or
#: None.
AboutToResize = Callable[[torch.UntypedStorage, int, int], Callable[[], None] | None]


_listener = Current[AboutToResize]()


@contextmanager
def resizes_seen(about_to_resize: AboutToResize) -> Iterator[None]:
    """Inside the block, call `about_to_resize` before every `UntypedStorage.resize_`."""
    resize: Any = torch.UntypedStorage.resize_
    own = "resize_" in vars(torch.UntypedStorage)

    def seen(home: torch.UntypedStorage, nbytes: int) -> Any:
        listener = _listener.now
        resized = None
        if listener is not None:
            newest = NEVER if nbytes else gathered_after(sys._getframe(1))
            resized = listener(home, nbytes, newest)
        result = resize(home, nbytes)
        if resized is not None:
            resized()
        return result

    torch.UntypedStorage.resize_ = seen  # type: ignore[method-assign, assignment]
    try:
        with _listener.during(about_to_resize):
            yield
    finally:
        if own:
            torch.UntypedStorage.resize_ = resize
        else:
            del torch.UntypedStorage.resize_  # type: ignore[misc]

"""Support `torch.utils.swap_tensors` inside a budget.

`swap_tensors` exchanges everything of two tensors, memory included, and refuses tensors with weak
references. The runtime holds a weak reference to one tensor of each storage, to track the storage.
It gives up this reference during the swap, and tracks the storage by the other tensor afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from rekindle.pytorch.online._handed_out import Current

#: Returns a context manager, inside which the two tensors have no weak references.
Trading = Callable[[Tensor, Tensor], AbstractContextManager[None]]


_listener = Current[Trading]()


@contextmanager
def trades_seen(trading: Trading) -> Iterator[None]:
    """Inside the block, run `torch.utils.swap_tensors` within the context `trading`."""
    swap: Any = torch.utils.swap_tensors

    def seen(t1: Tensor, t2: Tensor) -> None:
        listener = _listener.now
        with nullcontext() if listener is None else listener(t1, t2):
            swap(t1, t2)

    torch.utils.swap_tensors = seen
    try:
        with _listener.during(trading):
            yield
    finally:
        torch.utils.swap_tensors = swap

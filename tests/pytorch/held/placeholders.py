"""Find out which tensors are evicted, without recomputing them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from rekindle.pytorch.native._higher import hidden

#: The original methods of torch.Tensor. Within a budget they are replaced by methods that pin (keep
#: in memory) the tensor whose address or storage they return.
ADDRESS: Callable[[Tensor], int] = torch._C.TensorBase.data_ptr
HOME: Callable[[Tensor], torch.UntypedStorage] = torch._C.TensorBase.untyped_storage
#: Message of the error when evicted memory is read.
UNREADABLE = "evicted by rekindle"


def is_empty(tensor: Tensor) -> bool:
    """Return True if the memory of `tensor` is evicted."""
    try:
        ADDRESS(tensor)
    except RuntimeError:
        return True
    return False


def empty(tensors: Iterable[Tensor]) -> int:
    """Return how many of the tensors are evicted."""
    return sum(map(is_empty, tensors))


def unseen_by_the_core() -> AbstractContextManager[Any]:
    """Hide the operators of this thread from the native core while the context is open."""
    return hidden()

"""The bytes of a storage, and what is special about the content of a new one."""

from __future__ import annotations

import torch
from torch import Tensor

# What is special about the content of a memory, so that reading it needs a second look.
EXOTIC = 1  #: quantized, without memory, ...: an alias cannot be rebuilt from its geometry
UNWRITTEN = 2  #: made by `empty`, and no operator has written to it
ZEROED = 4  #: made by `zeros`, and no operator has written to it


def whole(home: torch.UntypedStorage) -> Tensor:
    """The bytes of `home` as a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=home.device).set_(home)  # type: ignore[call-overload]

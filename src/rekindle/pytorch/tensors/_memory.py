"""View a storage as bytes, and name the flags that describe a new storage."""

from __future__ import annotations

import torch
from torch import Tensor

# Flags that describe the contents of a new storage.
EXOTIC = 1  #: shape and strides do not fully describe its tensors, for example quantized ones
UNWRITTEN = 2  #: made by `torch.empty`, and not written since
ZEROED = 4  #: made by `torch.zeros`, and not written since


def whole(home: torch.UntypedStorage) -> Tensor:
    """Return a uint8 tensor that covers all bytes of the storage `home`."""
    return torch.empty(0, dtype=torch.uint8, device=home.device).set_(home)  # type: ignore[call-overload]

"""The bytes of a storage, and flags for special contents of a new one."""

from __future__ import annotations

import torch
from torch import Tensor

# Flags of contents that cannot be read as plain bytes without a closer look.
EXOTIC = 1  #: quantized, without memory, ...: geometry alone does not describe its tensors
UNWRITTEN = 2  #: made by `empty`, and not written since
ZEROED = 4  #: made by `zeros`, and not written since


def whole(home: torch.UntypedStorage) -> Tensor:
    """Return the bytes of `home` as a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=home.device).set_(home)  # type: ignore[call-overload]

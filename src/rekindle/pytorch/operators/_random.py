"""Which generators a call of a random operator draws from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from rekindle.pytorch.devices import accelerator, is_accelerator


def generator_of(
    tensors: Sequence[Tensor], extras: Iterable[Any], device: torch.device | None
) -> torch.Generator:
    """The generator that a random operator draws from; `device`: where its result is asked for.

    A number on the CPU may stand beside tensors of a device: the result is there.
    """
    for extra in extras:
        if type(extra) is torch.Generator:
            return extra
    if device is None:
        device = next((t.device for t in tensors if not t.is_cpu), torch.device("cpu"))
    return _default(device)


def _default(device: torch.device) -> torch.Generator:
    if is_accelerator(device):
        return accelerator.default_generator(device)
    return torch.default_generator

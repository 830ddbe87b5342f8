"""Find the generator of a random operator."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from rekindle.pytorch.devices import accelerator, is_accelerator


def generator_of(
    tensors: Sequence[Tensor], extras: Iterable[Any], device: torch.device | None
) -> torch.Generator:
    """Return the generator that a random operator draws from.

    Args:
        tensors: The tensors among its arguments. A number on the CPU may accompany tensors on a
            device; the result is on the device.
        extras: The other arguments, which may contain a generator.
        device: The device that the call requests for its result, or None.
    """
    for extra in extras:
        if type(extra) is torch.Generator:
            return extra
    if device is None:
        device = next((t.device for t in tensors if not t.is_cpu), torch.device("cpu"))
    return _default(device)


def _default(device: torch.device) -> torch.Generator:
    """Return the default generator of `device`."""
    if is_accelerator(device):
        return accelerator.default_generator(device)
    return torch.default_generator

"""Find the `torch.Generator` that a random operator draws from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from rekindle.pytorch.devices import accelerator, is_accelerator


def generator_of(
    tensors: Sequence[Tensor], extras: Iterable[Any], device: torch.device | None
) -> torch.Generator:
    """Return the generator that one call of a random operator draws from.

    Args:
        tensors: The tensors among the operator's arguments. If some of them are on an accelerator,
            the operator draws there, even if others are numbers on the CPU.
        extras: The other arguments, which may contain a generator.
        device: The argument `device=` of the call, or None.
    """
    for extra in extras:
        if type(extra) is torch.Generator:
            return extra
    if device is None:
        device = next((t.device for t in tensors if not t.is_cpu), torch.device("cpu"))
    return _default(device)


def _default(device: torch.device) -> torch.Generator:
    """Return PyTorch's default random generator of `device`."""
    if is_accelerator(device):
        return accelerator.default_generator(device)
    return torch.default_generator

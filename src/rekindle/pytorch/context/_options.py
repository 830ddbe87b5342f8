"""What `rekindle.budget(...)` takes, and what is refused."""

from __future__ import annotations

from typing import Final

import torch

from rekindle._errors import Unsupported
from rekindle.pytorch.held import flag_of_reading

#: What PyTorch itself refuses under a budget: a part of its message, and what to do instead.
REFUSED_BY_TORCH: Final = {
    "support saved tensor hooks": (
        "a torch.func transform (grad, vjp, jacrev, hessian) inside rekindle.budget(...), "
        "which works by saved tensor hooks: those transforms have none. Use "
        "loss.backward() or torch.autograd.grad(...), or leave the budget for it"
    ),
}


def check_anything(record: bool, learn: bool | str, swap: object) -> None:
    if swap is not None:
        raise Unsupported(
            'rekindle.budget(..., evict="anything", swap=...): what the program holds comes back '
            'by being computed again. Leave out swap, or write evict="saved"'
        )
    if record or learn:
        name = "record" if record else "learn"
        raise Unsupported(
            f'rekindle.budget(..., evict="anything", {name}={True}): traces know values that the '
            f'program holds as always there. Leave out {name}, or write evict="saved"'
        )
    flag_of_reading()


def device_of(device: str | torch.device | None) -> torch.device:
    """The device that is meant; None: CUDA if it is in use, else the CPU."""
    if device is not None:
        return torch.device(device)
    in_use = torch.cuda.is_available() and torch.cuda.is_initialized()
    return torch.device("cuda" if in_use else "cpu")

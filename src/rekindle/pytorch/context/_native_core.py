"""Load the native core (C++) for a budget, or raise an error that says how to get it."""

from __future__ import annotations

import torch

from rekindle._errors import Unsupported
from rekindle.pytorch.devices import is_accelerator
from rekindle.pytorch.native import Core, core, remedy, why_not


def native_core_for(device: torch.device) -> Core:
    """Return the native core for a budget on `device`; the first call may compile it.

    Raises:
        Unsupported: A budget cannot limit the memory of `device`, or there is no native core here.
    """
    check_device(device)
    found = core()
    if found is not None:
        return found
    raise Unsupported(
        "rekindle.budget(...) needs the native core (compiled C++), which is not available: "
        f"{why_not()}. {remedy()}. `rekindle doctor` shows what is installed and what is missing"
    )


def check_device(device: torch.device) -> None:
    """Raise `Unsupported` if a budget cannot limit the memory of `device`."""
    if device.type != "cpu" and not is_accelerator(device):
        raise Unsupported(
            f"rekindle.budget(..., device={str(device)!r}): a budget limits the memory of the CPU "
            f'or of CUDA, not of {device.type}; write device="cpu", or run the program without '
            "a budget"
        )

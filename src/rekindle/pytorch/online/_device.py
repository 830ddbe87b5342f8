"""Select and check the one device whose memory a budget counts."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from rekindle._errors import InvalidArgument, Unsupported
from rekindle.pytorch.devices import accelerator, is_accelerator


def device_of(device: str | torch.device | None) -> torch.device:
    """Return the device that the user means.

    Args:
        device: The argument `device=`. None: CUDA if it is in use, else the CPU.

    Raises:
        InvalidArgument: The device does not exist on this machine, or has no memory.
    """
    if device is None:
        return torch.device(accelerator.KIND if accelerator.in_use() else "cpu")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise _refused(device, "a name that is no device of PyTorch") from None
    if found.type == "meta":
        raise _refused(device, "a device without memory")
    if found.type == "cpu":
        return found
    module = getattr(torch.backends if found.type == "mps" else torch, found.type, None)
    if module is None or not module.is_available():
        raise _refused(device, "a device that PyTorch does not find on this machine")
    if is_accelerator(found) and (found.index or 0) >= accelerator.count():
        raise _refused(
            device,
            f"a number that is too large: this machine has {accelerator.count()}, from number 0 on",
        )
    return found


def device_of_program() -> torch.device | None:
    """Return the device that a program, which has not started yet, will probably use.

    That is the CUDA device of the process's local rank (`LOCAL_RANK`).

    Returns:
        The device, or None if there is no accelerator.
    """
    if not accelerator.available():
        return None
    rank = os.environ.get("LOCAL_RANK", "")
    if not rank.isdecimal():
        return torch.device(accelerator.KIND)
    return torch.device(accelerator.KIND, int(rank) % accelerator.count())


def _refused(device: object, got: str) -> InvalidArgument:
    """Return the error for an argument `device=` that is refused."""
    there = ["cpu", *([accelerator.KIND] if accelerator.available() else [])]
    write = " or ".join(f'device="{name}"' for name in there)
    return InvalidArgument(f"device={str(device)!r}: got {got}; write {write}")


def same_device(counted: torch.device, found: torch.device) -> None:
    """Check that a program uses the device that its budget counts.

    Args:
        counted: The device of the budget.
        found: The device of a tensor of the program.

    Raises:
        Unsupported: The tensor is on another accelerator.
    """
    if found == counted or found.type in ("cpu", "meta"):
        return
    if found.type == counted.type:
        raise Unsupported(
            f"this program makes tensors on {found}, but a budget limits the memory of one device, "
            f"here {counted}. Start one process per device, as torchrun does, each with a budget "
            "of its own (nn.DataParallel uses several devices in one process). To limit the "
            f'memory of {counted} alone, write rekindle.budget(..., device="{counted}")'
        )
    raise Unsupported(
        f"this program makes tensors on {found.type}, but its budget limits the memory of "
        f"{counted.type}, because {found.type} was not in use when the budget began. Write "
        f'rekindle.budget(..., device="{found.type}"), or device="{counted.type}" to limit the '
        f"memory of {counted.type} alone"
    )


def elsewhere(device: torch.device, used: Mapping[torch.device, bool]) -> str | None:
    """Return a warning if no tensor of the program was on the counted device.

    Args:
        device: The device of the budget.
        used: The devices of the program's tensors, each with True if it is the counted one.

    Returns:
        The warning, or None.
    """
    if not used or any(used.values()):
        return None
    same = any(other.type == device.type for other in used)
    others = ", ".join(sorted({str(other) if same else other.type for other in used}))
    counted = device if same else device.type
    return (
        f"no tensor of this run was on {counted}, whose memory the budget limits: all tensors "
        f"were on {others}, whose memory had no limit. Write rekindle.budget(..., "
        f'device="{others}")'
    )

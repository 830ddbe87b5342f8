"""The one device whose memory a budget is for: found, checked, and missed where it is another."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from rekindle._errors import InvalidArgument, Unsupported
from rekindle.pytorch.devices import accelerator, is_accelerator


def device_of(device: str | torch.device | None) -> torch.device:
    """The device that is meant; None: CUDA if it is in use, else the CPU.

    Raises `InvalidArgument` for one that is not there.
    """
    if device is None:
        return torch.device(accelerator.KIND if accelerator.in_use() else "cpu")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise _refused(device, "no device that PyTorch knows") from None
    if found.type == "meta":
        raise _refused(device, "a device without memory")
    if found.type == "cpu":
        return found
    module = getattr(torch.backends if found.type == "mps" else torch, found.type, None)
    if module is None or not module.is_available():
        raise _refused(device, "a device that this PyTorch does not find here")
    if is_accelerator(found) and (found.index or 0) >= accelerator.count():
        raise _refused(device, f"one of {accelerator.count()} that are here")
    return found


def device_of_program() -> torch.device | None:
    """For a program that has not begun, and so has not moved to CUDA yet: where there is CUDA, it
    will; of several devices to the one of its rank on this machine. None: nothing can be said."""
    if not accelerator.available():
        return None
    rank = os.environ.get("LOCAL_RANK", "")
    if not rank.isdecimal():
        return torch.device(accelerator.KIND)
    return torch.device(accelerator.KIND, int(rank) % accelerator.count())


def _refused(device: object, got: str) -> InvalidArgument:
    there = ["cpu", *([accelerator.KIND] if accelerator.available() else [])]
    write = " or ".join(f'device="{name}"' for name in there)
    return InvalidArgument(f"device={str(device)!r}: got {got}; write {write}")


def same_device(counted: torch.device, met: torch.device) -> None:
    """Raises `Unsupported` where a program moves to another device than the one assumed for it."""
    if met == counted or met.type in ("cpu", "meta"):
        return
    if met.type == counted.type:
        raise Unsupported(
            f"this program makes tensors on {met}, and a budget is for one device: memory on "
            f"{counted} is what would be counted. Start a process for each device, as torchrun "
            "does (nn.DataParallel keeps copies on all of them), each with a budget of its own. "
            f'If {counted} alone is what you mean: rekindle.budget(..., device="{counted}")'
        )
    raise Unsupported(
        f"this program makes tensors on {met.type}, which was not in use when its budget "
        f"began: memory on {counted.type} is what would be counted. Write "
        f'rekindle.budget(..., device="{met.type}"), or device="{counted.type}" if that is '
        "what you mean"
    )


def elsewhere(device: torch.device, met: Mapping[torch.device, bool]) -> str | None:
    """What to say if all tensors of a program were on other devices than the one counted."""
    if not met or any(met.values()):
        return None
    same = any(other.type == device.type for other in met)
    others = ", ".join(sorted({str(other) if same else other.type for other in met}))
    counted = device if same else device.type
    return (
        f"nothing in this budget was on {counted}, whose memory it counts: all tensors were "
        f'on {others}, without any limit. Write rekindle.budget(..., device="{others}")'
    )

"""Which core runs a budget, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final, get_args

import torch

from rekindle import _checks as checks
from rekindle._errors import Unsupported
from rekindle.pytorch.devices import is_accelerator
from rekindle.pytorch.native import core as native_core
from rekindle.pytorch.native import what_it_misses, why_not
from rekindle.pytorch.online import device_of

Core = Literal["auto", "native", "python"]

#: What "auto" takes on a CPU where both can be had.
PREFERRED: Core = "native"


@final
@dataclass(frozen=True, slots=True)
class Chosen:
    """One of the two, and the reason in a few words."""

    native: bool
    reason: str

    @property
    def name(self) -> Literal["native", "python"]:
        return "native" if self.native else "python"

    def __str__(self) -> str:
        return f"{self.name}, {self.reason}"


def chosen_core(asked: Core, device: torch.device) -> Chosen:
    """The core for these options. Raises `Unsupported` if the native one is asked for in vain."""
    checks.one_of(asked, get_args(Core), "rekindle.budget(..., core={})")
    if asked == "python":
        return Chosen(False, "as asked for")
    obstacle = _obstacle(device)
    if asked == "auto" and PREFERRED == "python":
        return Chosen(False, "the default for now")
    if not obstacle and asked == "auto" and is_accelerator(device):
        obstacle = "the default for now on a device"
    if not obstacle and native_core() is None:
        obstacle = why_not()
    if not obstacle and asked == "auto":
        obstacle = what_it_misses()
    if asked == "auto":
        return Chosen(not obstacle, obstacle or "the default")
    if obstacle:
        raise Unsupported(
            f'rekindle.budget(..., core="native"): {obstacle}. Write core="auto", which takes the '
            "core in Python where the native one cannot be had"
        )
    return Chosen(True, "as asked for")


def core_for(device: str | torch.device | None) -> Chosen:
    """Return the core of a budget of which nothing else is asked."""
    return chosen_core("auto", device_of(device))


def _obstacle(device: torch.device) -> str:
    """What the native core does not do, of all that is asked for; empty: nothing."""
    if device.type != "cpu" and not is_accelerator(device):
        return f"it works on the CPU and on CUDA, and the budget is for {device.type}"
    return ""

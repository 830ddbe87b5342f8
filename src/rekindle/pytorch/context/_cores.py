"""Which core runs a budget, and why."""

from __future__ import annotations

import warnings
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

#: What "auto" takes where both can be had.
PREFERRED: Core = "native"


_INSTALL = "`rekindle doctor` says what to install or change"
_UPGRADE = "Install torch 2.13"

_warned: set[Chosen] = set()


@final
@dataclass(frozen=True, slots=True)
class Chosen:
    """One of the two, and the reason in a few words.

    remedy: what to do to have the native core, where it is missing and somebody can do something.
    """

    native: bool
    reason: str
    remedy: str = ""

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
    remedy = ""
    if not obstacle and native_core() is None:
        obstacle, remedy = why_not(), _INSTALL
    if not obstacle and asked == "auto":
        obstacle, remedy = what_it_misses(), _UPGRADE
    if asked == "auto":
        return Chosen(not obstacle, obstacle or "the default", remedy if obstacle else "")
    if obstacle:
        raise Unsupported(
            f'rekindle.budget(..., core="native"): {obstacle}. Write core="auto", which takes the '
            "core in Python where the native one cannot be had"
        )
    return Chosen(True, "as asked for")


def warn_of_python(core: Chosen) -> None:
    """Warn once that the Python core runs where the native one is missing."""
    if core.native or not core.remedy or core in _warned:
        return
    _warned.add(core)
    warnings.warn(
        "rekindle.budget: the Python core runs, which takes about ten times as long for each "
        f'operator: {core.reason}. {core.remedy}; or write core="python" if that is meant',
        stacklevel=3,
    )


def core_for(device: str | torch.device | None) -> Chosen:
    """Return the core of a budget of which nothing else is asked."""
    return chosen_core("auto", device_of(device))


def _obstacle(device: torch.device) -> str:
    """What the native core does not do, of all that is asked for; empty: nothing."""
    if device.type != "cpu" and not is_accelerator(device):
        return f"it works on the CPU and on CUDA, and the budget is for {device.type}"
    return ""

"""What `rekindle.budget` was told: all of it checked where it is written, before anything runs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal, final

import torch

from rekindle import _checks as checks
from rekindle._errors import InvalidArgument, Unsupported
from rekindle._types import Bytes
from rekindle._units import parse_bytes
from rekindle.policies import Policy, Swap, policy_of
from rekindle.pytorch.context._auto import amount_of, is_auto
from rekindle.pytorch.context._cores import Chosen, Core, chosen_core
from rekindle.pytorch.devices import is_accelerator
from rekindle.pytorch.held import flag_of_reading, there_are_husks
from rekindle.pytorch.online import device_of
from rekindle.pytorch.swap import HostMemory, host_memory


@final
@dataclass(frozen=True, slots=True)
class Arguments:
    """Those of `rekindle.budget`. Raises for what cannot be; asks the device nothing yet."""

    amount: str | Bytes | None
    policy: Policy | type[Policy] | str | None
    device: str | torch.device | None
    record: bool
    learn: bool | Literal["wait"]
    swap: str | Bytes | Swap | None
    swap_directory: str | os.PathLike[str] | None
    evict: Literal["saved", "auto", "anything"]
    core: Core = "auto"
    cache: bool = True

    def __post_init__(self) -> None:
        if self.amount is not None and not is_auto(self.amount):
            parse_bytes(self.amount)
        policy_of(self.policy)
        if not (isinstance(self.learn, bool) or self.learn == "wait"):
            raise InvalidArgument(
                f"rekindle.budget(..., learn={self.learn!r}): write learn=True, learn=False, or "
                'learn="wait", which waits for schedules at the end of a step'
            )
        checks.switch(self.record, "rekindle.budget(..., record={})")
        checks.switch(self.cache, "rekindle.budget(..., cache={})")
        self._check_evict()
        self.host(device_of(self.device))
        if self.core != "auto":  # which may take a minute to build, once it is entered
            self.core_on(device_of(self.device))

    def _check_evict(self) -> None:
        if self.evict == "anything":
            _check_anything(self.record, self.learn, self.swap)
        elif self.evict not in ("auto", "saved"):
            raise InvalidArgument(
                f'rekindle.budget(..., evict={self.evict!r}): write evict="auto", which lets go of '
                'what your variables hold when nothing else is left, evict="saved", which never '
                'does, or evict="anything"'
            )

    @property
    def lends(self) -> bool:
        """Whether what variables hold may go when nothing else is left.

        Not where what was let go comes back by a copy, nor with a torch without the means.
        """
        return self.evict == "auto" and self.swap is None and there_are_husks()

    def bytes_on(self, device: torch.device) -> Bytes | None:
        """The amount; "auto" asks the device. None: no limit."""
        if self.amount is None:
            return None
        return amount_of(self.amount, device)

    def core_on(self, device: torch.device) -> Chosen:
        """The core that runs this. Raises if the native one is asked for in vain."""
        needs_python = {
            "swap on a device": self.swap is not None and is_accelerator(device),
            'evict="anything"': self.evict == "anything",
        }
        return chosen_core(self.core, policy_of(self.policy), device, needs_python)

    def host(self, device: torch.device) -> HostMemory | None:
        """Where swapped values go; None: nowhere."""
        return host_memory(self.swap, self.swap_directory, device)


def _check_anything(record: bool, learn: bool | str, swap: Any) -> None:
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

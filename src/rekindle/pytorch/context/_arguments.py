"""What `rekindle.budget` was told: all of it checked where it is written, before anything runs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal, final

import torch

from rekindle import _checks as checks
from rekindle._errors import InvalidArgument, InvalidBudget, Unsupported
from rekindle._types import Bytes
from rekindle._units import parse_bytes
from rekindle.policies import DEFAULT, Policy, Swap, policy_of
from rekindle.pytorch.context._auto import amount_of, is_auto, resolved
from rekindle.pytorch.context._native_core import check_device
from rekindle.pytorch.held import flag_of_reading, there_are_husks
from rekindle.pytorch.online import device_of
from rekindle.pytorch.swap import HostMemory, host_memory

#: Less than what one parameter takes: a smaller number is one of GiB whose unit was forgotten.
_LEAST_WITHOUT_UNIT = 100


@final
@dataclass(frozen=True, slots=True)
class Arguments:
    """Those of `rekindle.budget`. Raises for what cannot be; asks the device nothing yet."""

    amount: str | Bytes | None
    policy: Policy | type[Policy] | str | None
    device: str | torch.device | None
    record: bool
    learn: bool | Literal["auto", "wait"]
    swap: str | Bytes | Swap | None
    swap_directory: str | os.PathLike[str] | None
    evict: Literal["saved", "auto", "anything"]
    of: Literal["allocated", "reserved"] = "allocated"
    cache: bool = True
    arena: bool = True

    def __post_init__(self) -> None:
        found = resolved(self.amount)
        if found is not None and not is_auto(found):
            parse_bytes(found)
            _check_unit(found)
        policy_of(self.policy)
        if not (isinstance(self.learn, bool) or self.learn in ("auto", "wait")):
            raise InvalidArgument(
                f"rekindle.budget(..., learn={self.learn!r}): write learn=True, learn=False, "
                'learn="wait", which waits for schedules at the end of a step, or learn="auto", '
                "which makes some once steps seem to go on alike"
            )
        checks.switch(self.record, "rekindle.budget(..., record={})")
        checks.switch(self.cache, "rekindle.budget(..., cache={})")
        checks.switch(self.arena, "rekindle.budget(..., arena={})")
        self._check_evict()
        checks.one_of(self.of, ("allocated", "reserved"), "rekindle.budget(..., of={})")
        device = device_of(self.device)
        check_device(device)
        self.host(device)

    def _check_evict(self) -> None:
        if self.evict == "anything":
            self._check_anything()
        elif self.evict not in ("auto", "saved"):
            raise InvalidArgument(
                f'rekindle.budget(..., evict={self.evict!r}): write evict="auto", which lets go of '
                'what your variables hold when nothing else is left, evict="saved", which never '
                'does, or evict="anything"'
            )

    def _check_anything(self) -> None:
        if self.swap is not None:
            raise Unsupported(
                'rekindle.budget(..., evict="anything", swap=...): what the program holds comes '
                'back by being computed again. Leave out swap, or write evict="saved"'
            )
        flag_of_reading()

    @property
    def asks_to_learn(self) -> bool:
        """Whether somebody said that schedules are to be made."""
        return bool(self.learn) and self.learn != "auto"

    @property
    def learns_by_itself(self) -> bool:
        """Whether they are made although nobody said so, once steps seem to go on alike.

        Not where decisions are written down, which are to be those of the policy, nor where another
        policy than the default is asked for, nor without what plans them.
        """
        unsaid = self.learn == "auto" and self.evict != "anything"
        unsaid = unsaid and policy_of(self.policy) == DEFAULT
        return unsaid and not self.record and find_spec("highspy") is not None

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

    def uses_arena(self, device: torch.device) -> bool:
        """Return whether memory comes from the arena: only within a limit, and on a CPU."""
        return self.arena and self.amount is not None and device.type == "cpu"

    def host(self, device: torch.device) -> HostMemory | None:
        """Where swapped values go; None: nowhere."""
        return host_memory(self.swap, self.swap_directory, device)


def _check_unit(amount: str | Bytes) -> None:
    """Refuse a bare number that was surely not meant as bytes: `rekindle.budget(24)`."""
    text = str(amount).strip()
    if text.isdecimal() and int(text) < _LEAST_WITHOUT_UNIT:
        written = f'"{text}"' if isinstance(amount, str) else text
        raise InvalidBudget(
            f"rekindle.budget({written}): got {text} bytes, wanted a unit for so small a number; "
            f'write rekindle.budget("{text}GiB"), or rekindle.budget("{text}B") if you mean bytes'
        )

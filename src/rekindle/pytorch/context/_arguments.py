"""Check the arguments of `rekindle.budget` when they are given, before anything runs.

`rekindle.budget` makes one `Arguments`. The class also derives settings that depend on several
arguments at once, for example if plans are learned.
"""

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
from rekindle.pytorch.held import can_make_placeholders, flag_of_reading
from rekindle.pytorch.online import device_of
from rekindle.pytorch.swap import HostMemory, host_memory

#: Bytes. A smaller number without a unit is refused: the user probably forgot the unit.
_LEAST_WITHOUT_UNIT = 100


@final
@dataclass(frozen=True, slots=True)
class Arguments:
    """The checked arguments of `rekindle.budget`. The check does not ask the device for memory."""

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
                f'rekindle.budget(..., evict={self.evict!r}): write evict="auto", which evicts '
                'values that your variables hold when nothing else is left, evict="saved", which '
                'never does, or evict="anything"'
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
        """True if the user asked for learned plans."""
        return bool(self.learn) and self.learn != "auto"

    @property
    def learns_by_itself(self) -> bool:
        """True if `learn="auto"` plans steps, once they look alike.

        It does not with `record`, which must show the decisions of the policy, nor with a policy
        other than the default, nor without the solver (highspy) that makes the plans.
        """
        unsaid = self.learn == "auto" and self.evict != "anything"
        unsaid = unsaid and policy_of(self.policy) == DEFAULT
        return unsaid and not self.record and find_spec("highspy") is not None

    @property
    def lends(self) -> bool:
        """True if user-held tensors may be evicted when nothing else is left (`evict="auto"`).

        False with `swap`, since swapped-in copies cannot restore such tensors. False also with a
        version of torch in which a tensor cannot keep a storage without memory.
        """
        return self.evict == "auto" and self.swap is None and can_make_placeholders()

    def bytes_on(self, device: torch.device) -> Bytes | None:
        """Return the budget in bytes, or None without a limit.

        For "auto", it asks `device` how much memory it has.
        """
        if self.amount is None:
            return None
        return amount_of(self.amount, device)

    def uses_arena(self, device: torch.device) -> bool:
        """Return True if CPU memory comes from Rekindle's arena: only with a limit, on a CPU."""
        return self.arena and self.amount is not None and device.type == "cpu"

    def host(self, device: torch.device) -> HostMemory | None:
        """Return the host memory for swapped values, or None without `swap`."""
        return host_memory(self.swap, self.swap_directory, device)


def _check_unit(amount: str | Bytes) -> None:
    """Refuse a bare number that is too small to be meant as bytes: `rekindle.budget(24)`."""
    text = str(amount).strip()
    if text.isdecimal() and int(text) < _LEAST_WITHOUT_UNIT:
        written = f'"{text}"' if isinstance(amount, str) else text
        raise InvalidBudget(
            f"rekindle.budget({written}): got {text} bytes, wanted a unit for so small a number; "
            f'write rekindle.budget("{text}GiB"), or rekindle.budget("{text}B") if you mean bytes'
        )

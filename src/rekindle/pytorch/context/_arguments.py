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
from rekindle.policies import DEFAULT, Policy, Swap, policy_of
from rekindle.pytorch.context._amount import Amount
from rekindle.pytorch.context._native_core import check_device
from rekindle.pytorch.held import can_make_placeholders, flag_of_reading
from rekindle.pytorch.online import device_of
from rekindle.pytorch.swap import HostMemory, host_memory


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
    split: Literal["equal", "never"] = "equal"

    def __post_init__(self) -> None:
        self.limit  # noqa: B018 - it checks the amount
        policy_of(self.policy)
        if not (isinstance(self.learn, bool) or self.learn in ("auto", "wait")):
            raise InvalidArgument(
                f"rekindle.budget(..., learn={self.learn!r}): write learn=True, learn=False, "
                'learn="wait" (waits for the plan at the end of a step) or learn="auto" '
                "(makes plans once steps repeat)"
            )
        checks.switch(self.record, "rekindle.budget(..., record={})")
        checks.switch(self.cache, "rekindle.budget(..., cache={})")
        checks.switch(self.arena, "rekindle.budget(..., arena={})")
        self._check_evict()
        checks.one_of(self.of, ("allocated", "reserved"), "rekindle.budget(..., of={})")
        checks.one_of(self.split, ("equal", "never"), "rekindle.budget(..., split={})")
        device = device_of(self.device)
        check_device(device)
        self.host(device)

    def _check_evict(self) -> None:
        if self.evict == "anything":
            self._check_anything()
        elif self.evict not in ("auto", "saved"):
            raise InvalidArgument(
                f'rekindle.budget(..., evict={self.evict!r}): write evict="auto" (evicts values '
                "that your variables hold only when nothing else is left to evict), "
                'evict="saved" (never evicts them) or evict="anything" (evicts them at any '
                "time)"
            )

    def _check_anything(self) -> None:
        refused = "learn" if self.asks_to_learn else "record" if self.record else None
        if self.swap is not None and refused is not None:
            raise Unsupported(
                f'rekindle.budget(..., evict="anything", swap=..., {refused}='
                f"{getattr(self, refused)!r}): no step can be recorded while weights and optimizer "
                f'state move to the host. Leave out {refused}=, or write evict="auto"'
            )
        flag_of_reading()

    @property
    def asks_to_learn(self) -> bool:
        """True if the user asked for learned plans."""
        return bool(self.learn) and self.learn != "auto"

    @property
    def learns_by_itself(self) -> bool:
        """True if `learn="auto"` plans steps, once they look alike.

        No steps are planned in three cases: with `record`, which must show the decisions of the
        policy; with a policy other than the default; without the solver (highspy) that makes the
        plans.
        """
        unsaid = self.learn == "auto" and self.evict != "anything"
        unsaid = unsaid and policy_of(self.policy) == DEFAULT
        return unsaid and not self.record and find_spec("highspy") is not None

    @property
    def evicts_held_last(self) -> bool:
        """True if user-held tensors may be evicted when nothing else is left (`evict="auto"`).

        False with `swap`, since swapped-in copies cannot restore such tensors. False also with a
        version of torch in which a tensor cannot keep a storage without memory.
        """
        return self.evict == "auto" and self.swap is None and can_make_placeholders()

    @property
    def limit(self) -> Amount | None:
        """The amount of memory that the budget may use, or None without a limit."""
        amount = self.amount
        if isinstance(amount, str) and amount.strip().lower() == "none":
            raise InvalidBudget(
                f"rekindle.budget({amount!r}): got text, wanted None to have no limit; write "
                "rekindle.budget(None)"
            )
        return None if amount is None else Amount(amount)

    def uses_arena(self, device: torch.device) -> bool:
        """Return True if CPU memory comes from Rekindle's arena: only with a limit, on a CPU."""
        return self.arena and self.amount is not None and device.type == "cpu"

    def runs_in_slices(self, device: torch.device) -> bool:
        """Return True if operators that do not fit may run in slices: only on a CPU.

        A tensor that the program's variables hold may then have no memory.
        """
        held = self.evicts_held_last or self.evict == "anything"
        return self.split == "equal" and held and device.type == "cpu"

    def host(self, device: torch.device) -> HostMemory | None:
        """Return the host memory for swapped values, or None without `swap`."""
        return host_memory(self.swap, self.swap_directory, device)

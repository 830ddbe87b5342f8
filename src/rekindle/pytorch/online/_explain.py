"""Says in words who holds the memory, and what to do when there is not enough."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, final

from rekindle._errors import OutOfBudget
from rekindle._types import Bytes, Nanoseconds, OpId, StorageId
from rekindle._units import format_bytes
from rekindle.engine import NoRoom
from rekindle.pytorch.online._too_small import too_small

PARAMETERS = "parameters"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer state"
INPUTS = "inputs and buffers"
PROGRAM = "held by your code"
SAVED = "saved for backward"
KEPT = "kept, cannot be recomputed"
IN_USE = "in use by the operator"
#: What the one budget is that an error names.
PAST_THIS = "The smallest budget that gets past this operator, a later one may need more"
PAST_MORE = "The last budget named was too small as well, this one has room for later operators"
CATEGORIES = (PARAMETERS, GRADIENTS, OPTIMIZER, INPUTS, PROGRAM, SAVED, KEPT, IN_USE)


class Holder(NamedTuple):
    """One storage at one moment, and where it belongs: to the operator that made it, and (what is
    a parameter, its gradient or the optimizer's state) to a parameter by its id, else 0."""

    category: str
    nbytes: Bytes
    op: OpId | None
    parameter: int


@final
@dataclass(slots=True)
class Snapshot:
    """Who held memory at one moment: bytes by category, and the operators that made the most."""

    memory: Bytes = 0
    clock: Nanoseconds = 0
    where: str = ""
    categories: dict[str, Bytes] = field(default_factory=dict)
    sites: list[tuple[str, Bytes]] = field(default_factory=list)
    holders: dict[StorageId, Holder] = field(default_factory=dict)
    resident: Bytes = 0  #: what the process took of the machine; 0: not known
    cached: Bytes = 0  #: of that, free in the arena


def out_of_budget(shortage: NoRoom, now: Snapshot, operator: str, evicted: Bytes) -> OutOfBudget:
    """Return the error for `shortage`: what was needed, who holds the rest, which budget would do.

    Args:
        shortage: What was asked for.
        now: Who holds memory now.
        operator: Who asked.
        evicted: Bytes of values that plain PyTorch would hold now. So no budget is named that is
            larger than its peak.
    """
    smallest = shortage.memory + shortage.needed
    worth_trying = too_small.beyond(shortage.budget, smallest, smallest + evicted)
    where = now.where
    needs = f"{operator or 'this program'} needs {format_bytes(shortage.needed)} more"
    if not shortage.needed:  # a smaller budget was set, or more was made than could be known
        needs = f"{operator or 'this program'} finds the budget exceeded"
    used = f"{format_bytes(shortage.memory)} of a budget of {format_bytes(shortage.budget)}"
    lines = [
        f"{needs}, and nothing is left to evict: {used} cannot be recomputed or is in use",
        f"  at {where}" if where else "  (in the backward pass)",
        *table_of(now.categories),
        "What whole steps need: error.rehearse(), or rekindle.profile(step).smallest_budget",
        f"{PAST_THIS if worth_trying == smallest else PAST_MORE}: rekindle.budget({worth_trying})",
    ]
    message = "\n".join(lines)
    return OutOfBudget(
        message,
        needed=shortage.needed,
        budget=shortage.budget,
        held=now.categories,
        smallest_budget=smallest,
        worth_trying=worth_trying,
        operator=operator,
        where=where,
    )


def out_of_memory(now: Snapshot) -> str:
    """What to add to the device's own error when it comes in spite of the budget."""
    lines = [
        f"Everything that may be evicted has been; {format_bytes(now.memory)} are left:",
        *table_of(now.categories),
        "The device has less room than the budget says: make the batch smaller",
    ]
    return "\n".join(lines)


def table_of(categories: Mapping[str, Bytes]) -> list[str]:
    """Aligned lines, one a category."""
    width = max((len(name) for name in categories), default=0)
    return [f"  {name:<{width}}  {format_bytes(n):>11}" for name, n in categories.items()]

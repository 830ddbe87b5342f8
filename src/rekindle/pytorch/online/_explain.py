"""Snapshots of what holds the memory (parameters, ...), and the texts of out-of-memory errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, final

from rekindle._errors import OutOfBudget, remedy_for
from rekindle._types import Bytes, Nanoseconds, OpId, StorageId
from rekindle._units import format_bytes
from rekindle.engine import NoRoom
from rekindle.pytorch.online._budget_history import too_small

PARAMETERS = "parameters"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer state"
INPUTS = "inputs and buffers"
PROGRAM = "held by your code"
SAVED = "saved for backward"
KEPT = "kept, cannot be recomputed"
IN_USE = "in use by the operator"
#: How the error text describes the budget that it suggests.
PAST_THIS = "The smallest budget that gets past this operator, a later one may need more"
PAST_MORE = "The last budget named was too small as well, this one has room for later operators"
CATEGORIES = (PARAMETERS, GRADIENTS, OPTIMIZER, INPUTS, PROGRAM, SAVED, KEPT, IN_USE)


class Holder(NamedTuple):
    """One storage in a snapshot.

    Attributes:
        category: One of `CATEGORIES`.
        nbytes: The size in bytes.
        op: The operator that made the storage, or None.
        parameter: The id of the parameter whose data, gradient or optimizer state the storage
            holds, else 0.
    """

    category: str
    nbytes: Bytes
    op: OpId | None
    parameter: int


@final
@dataclass(slots=True)
class Snapshot:
    """Memory at one moment: bytes by category, and the operators that made most of it."""

    memory: Bytes = 0
    clock: Nanoseconds = 0
    where: str = ""
    categories: dict[str, Bytes] = field(default_factory=dict)
    sites: list[tuple[str, Bytes]] = field(default_factory=list)
    holders: dict[StorageId, Holder] = field(default_factory=dict)
    resident: Bytes = 0  #: resident memory of the process; 0: unknown
    cached: Bytes = 0  #: part of `resident` that is free in the allocator


def out_of_budget(shortage: NoRoom, now: Snapshot, operator: str, evicted: Bytes) -> OutOfBudget:
    """Return the error for `shortage`, with the needed bytes, the holders and a larger budget.

    Args:
        shortage: The failed request.
        now: A snapshot of the memory now.
        operator: The operator that made the request.
        evicted: Bytes of evicted values, which plain PyTorch would hold now. The suggested budget
            is at most the memory that plain PyTorch would use.
    """
    smallest = shortage.memory + shortage.needed
    worth_trying = too_small.beyond(shortage.budget, smallest, smallest + evicted)
    where = now.where
    needs = f"{operator or 'this program'} needs {format_bytes(shortage.needed)} more"
    if not shortage.needed:  # the budget was lowered, or an operator made more than predicted
        needs = f"{operator or 'this program'} finds the budget exceeded"
    used = f"{format_bytes(shortage.memory)} of a budget of {format_bytes(shortage.budget)}"
    remedy = remedy_for(operator) if 4 * shortage.needed > shortage.budget else ""
    lines = [
        f"{needs}, and nothing is left to evict: {used} cannot be recomputed or is in use",
        f"  at {where}" if where else "  (in the backward pass)",
        *table_of(now.categories),
        *([remedy] if remedy else []),
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
    """Return a note for the device's own OOM error, raised in spite of the budget."""
    lines = [
        f"Everything that may be evicted has been; {format_bytes(now.memory)} are left:",
        *table_of(now.categories),
        "The device has less room than the budget says: make the batch smaller",
    ]
    return "\n".join(lines)


def table_of(categories: Mapping[str, Bytes]) -> list[str]:
    """Return one line per category, with aligned bytes."""
    width = max((len(name) for name in categories), default=0)
    return [f"  {name:<{width}}  {format_bytes(n):>11}" for name, n in categories.items()]

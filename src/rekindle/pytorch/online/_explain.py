"""Snapshots of what holds the memory (parameters, ...), and the texts of out-of-memory errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, final

from rekindle._errors import HOW_TO_REHEARSE, OutOfBudget, remedy_for
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
WAITING = "gradients in the backward pass"  #: which autograd keeps for nodes that run later
UNRECORDED = "made without gradients"  #: by operators that got no recipe
IN_USE = "in use by the operator"
#: How the text of `OutOfBudget` describes the budget that it suggests.
PAST_THIS = "The smallest budget with which this operator can run (a later operator may need more)"
PAST_WHOLE = (
    "A budget with which this operator can run as a whole (slices of it may need less, a later "
    "operator may need more)"
)
PAST_MORE = (
    "The last suggested budget was also too small, this one leaves memory for later operators"
)
NOT_MEASURED = "The workspace of this operator was never measured, a budget that may suffice for it"
#: The line of an error or a report on results that are never evicted, because it is not safe.
FOR_KEPT = (
    "If a custom autograd.Function made what is kept, Rekindle can recompute it: "
    "rekindle.recomputable(TheFunction)"
)
CATEGORIES = (
    PARAMETERS, GRADIENTS, OPTIMIZER, INPUTS, PROGRAM, SAVED, KEPT, WAITING, UNRECORDED, IN_USE,
)  # fmt: skip


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
    resident: Bytes = 0  #: resident set size (RSS) of the process; 0: unknown
    cached: Bytes = 0  #: part of `resident` that is free in Rekindle's CPU allocator


def out_of_budget(
    shortage: NoRoom,
    now: Snapshot,
    operator: str,
    *,
    evicted: Bytes,
    inside: Bytes = 0,
    likely: Bytes = 0,
    unevictable: Bytes | None = None,
    moves: bool = False,
    sliceable: bool = False,
) -> OutOfBudget:
    """Return the error for `shortage`: the bytes needed, what holds memory, a budget to try.

    Args:
        shortage: The failed request.
        now: A snapshot of the memory now.
        operator: The operator that made the request.
        evicted: Bytes of evicted values, which plain PyTorch would hold now.
        inside: The part of the request that is the operator's workspace.
        likely: If the operator's workspace was never measured, the request is a lower bound, and
            this is an estimate of what suffices; else 0. The suggested budget has room for it.
        unevictable: Bytes of the operator's arguments, which `evict="anything"` cannot evict. None:
            the budget has this mode.
        moves: True if weights, gradients and optimizer state may move to the host.
        sliceable: True if the operator may run in slices, which do not fit either.
    """
    smallest = shortage.memory + shortage.needed
    past_this = shortage.memory + max(shortage.needed, likely)
    worth_trying = too_small.suggest_after(
        shortage.budget, past_this, evicted, is_estimate=likely > shortage.needed
    )
    named = PAST_WHOLE if sliceable else PAST_THIS
    named = named if worth_trying == smallest else PAST_MORE
    where = now.where
    least = "at least " if likely else ""
    needs = f"{operator or 'this program'} needs {least}{format_bytes(shortage.needed)} more"
    # `needed` is 0 if the user lowered the budget, or if an operator made more bytes than
    # predicted.
    if not shortage.needed:
        needs = f"{operator or 'this program'} cannot run, because more than the budget is in use"
    used = f"{format_bytes(shortage.memory)} of a budget of {format_bytes(shortage.budget)}"
    if inside:
        needs += f", {format_bytes(inside)} of it as workspace"
    share = inside / max(1, shortage.needed)
    remedies = [
        remedy_for(operator, share) if 4 * shortage.needed > shortage.budget else "",
        FOR_KEPT if 4 * now.categories.get(KEPT, 0) > shortage.budget else "",
        "" if unevictable is None else _on_anything(shortage, now, unevictable),
        "" if moves else _on_moving(shortage, now),
    ]
    lines = [
        f"{needs}, and nothing is left to evict: {used} cannot be recomputed or is in use",
        f"  at {where}" if where else "  (in the backward pass)",
        *table_of(now.categories),
        *filter(None, remedies),
        HOW_TO_REHEARSE,
        f"{NOT_MEASURED if likely else named}: rekindle.budget({worth_trying})",
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


def _on_anything(shortage: NoRoom, now: Snapshot, unevictable: Bytes) -> str:
    """Return a line about `evict="anything"` if this operator would fit with it, else ""."""
    more = sum(now.categories.get(each, 0) for each in (WAITING, UNRECORDED)) - unevictable
    if more <= 0 or shortage.memory - more + shortage.needed > shortage.budget:
        return ""
    return (
        f'evict="anything" may also evict {format_bytes(more)} of this, so that this operator fits'
    )


def _on_moving(shortage: NoRoom, now: Snapshot) -> str:
    """Return a line about moving state to the host, if state takes most of the budget, else ""."""
    state = sum(now.categories.get(each, 0) for each in (PARAMETERS, GRADIENTS, OPTIMIZER))
    if 2 * state <= shortage.budget:
        return ""
    return (
        f"{format_bytes(state)} of this are weights, gradients and optimizer state, which "
        f'evict="anything" with swap="{format_bytes(4 * state).replace(" ", "")}" moves to a file '
        "on the host (to host memory, on CUDA)"
    )


def out_of_memory(now: Snapshot) -> str:
    """Return a note for the device's own OOM error, raised in spite of the budget."""
    lines = [
        f"All values that may be evicted are, but {format_bytes(now.memory)} are still in use:",
        *table_of(now.categories),
        "The device has less free memory than the budget allows: make the batch smaller",
    ]
    return "\n".join(lines)


def table_of(categories: Mapping[str, Bytes]) -> list[str]:
    """Return one line for each category of memory, with aligned bytes."""
    width = max((len(name) for name in categories), default=0)
    return [f"  {name:<{width}}  {format_bytes(n):>11}" for name, n in categories.items()]

"""Raise the budget of all ranks between two steps if one rank votes for a larger one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final
from weakref import WeakKeyDictionary

import torch.distributed as dist

from rekindle._errors import InvalidArgument, OutOfBudget
from rekindle._types import Bytes
from rekindle._units import format_bytes, parse_bytes
from rekindle.pytorch.context import Run
from rekindle.pytorch.distributed._common import gathered
from rekindle.pytorch.tensors import privately


@final
@dataclass(frozen=True, slots=True)
class _Vote:
    """The vote of one rank, as sent to the other ranks. All figures are bytes.

    Attributes:
        budget: The budget of this rank now.
        limit: The largest budget that this rank accepts.
        needed: The smallest budget that suffices for this rank; 0 if the present one does.
        wanted: The budget that this rank votes for; 0 if it asks for no larger one.
    """

    budget: Bytes
    limit: Bytes
    needed: Bytes
    wanted: Bytes


def agree(
    run: Run,
    *,
    limit: str | Bytes,
    failed: OutOfBudget | None = None,
    overhead: float = 0.5,
    growth: float = 1.25,
    group: dist.ProcessGroup | None = None,
) -> Bytes:
    """Raise the budget of all ranks if one of them needs more.

    All ranks call it after each step, when no other collective runs. A rank votes for a larger
    budget if it ran out of its budget. A rank also does so if it spent much of its last step on
    recomputation, because all other ranks wait for it. Budgets are raised, never lowered.

    Args:
        run: The `Run` of the budget of this rank.
        limit: The largest budget that a vote can lead to. The smallest limit of all ranks counts.
        failed: The `OutOfBudget` that ended the step of this rank, if one did. All ranks should
            then repeat the step.
        overhead: A rank votes for a larger budget if its time lost, divided by its compute time,
            was above this in its last step.
        growth: The factor by which a rank with too much recomputation votes to raise its budget.
        group: The process group. Default: all ranks. A gloo group does not wait for the device.

    Returns:
        A budget that every rank has now, or more; the same number on every rank.

    Raises:
        OutOfBudget: One rank needs more than the limit; raised on all ranks.

    Example:
        ```python
        with rekindle.budget(amount) as run:
            for batch in batches:
                step(batch)
                rekindle.distributed.agree(run, limit="70GiB")
        ```
    """
    most = parse_bytes(limit, line="rekindle.distributed.agree(run, limit={})")
    if not (overhead >= 0 and growth > 1):
        raise InvalidArgument(
            f"rekindle.distributed.agree(..., overhead={overhead!r}, growth={growth!r}): wanted "
            "overhead >= 0 (recomputation time over compute time, above which a rank votes for a "
            "larger budget), and growth > 1 (the factor by which it votes to raise its budget); "
            "write overhead=0.5, growth=1.25"
        )
    with privately():
        votes = gathered(_vote_of(run, most, failed, overhead, growth), group)
    most = min(vote.limit for vote in votes)
    neediest = max(range(len(votes)), key=lambda number: votes[number].needed)
    needed = votes[neediest].needed
    if needed > most:
        raise OutOfBudget(
            f"rank {neediest} needs a budget of {format_bytes(needed)}, but the smallest limit of "
            f"all ranks is {format_bytes(most)}. Write rekindle.distributed.agree(..., "
            f"limit={needed}), or give that rank less work",
            needed=needed,
            budget=most,
            held={},
            smallest_budget=needed,
        )
    wanted = min(most, max(vote.wanted for vote in votes))
    if run.budget is not None and run.budget < wanted:
        run.budget = wanted
    return max(wanted, min(vote.budget for vote in votes))


#: For each run, the number of the last step whose recomputation time this rank has judged, so that
#: one slow step leads to one vote only.
_judged: Final[WeakKeyDictionary[Run, int]] = WeakKeyDictionary()


def _vote_of(
    run: Run, most: Bytes, failed: OutOfBudget | None, overhead: float, growth: float
) -> _Vote:
    if run.budget is None:  # this rank's budget has no limit, so it need not be raised
        return _Vote(most, most, 0, 0)
    if failed is not None:
        needed = max(failed.smallest_budget, run.budget + 1)
        return _Vote(run.budget, most, needed, max(needed, failed.worth_trying))
    step, wanted = run.last_step, 0
    if step is not None and _judged.get(run) != step.number:
        _judged[run] = step.number
        wanted = int(growth * run.budget) if step.overhead > overhead else 0
    return _Vote(run.budget, most, 0, wanted)

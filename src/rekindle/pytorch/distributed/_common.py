"""Agree on one budget for all ranks before the first step.

All ranks wait for the slowest one, and a rank that runs out of its budget ends the step of all
ranks. So ranks compare their memory before they train, and use the same budget.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TypeVar, final

import torch
import torch.distributed as dist

from rekindle._errors import OutOfBudget
from rekindle._types import Bytes
from rekindle._units import format_bytes
from rekindle.pytorch.context import Amount
from rekindle.pytorch.devices import accelerator, is_accelerator
from rekindle.pytorch.observed import Estimate
from rekindle.pytorch.online import device_of

T = TypeVar("T")


@final
@dataclass(frozen=True, slots=True)
class _Rank:
    """The memory of one rank, as sent to the other ranks.

    Attributes:
        asked: The budget that the program of this rank asked for.
        place: Name of the host and device of this rank. Ranks with equal names share memory.
        least: Bytes of this rank that no eviction can free; 0 if not estimated.
    """

    asked: str | Bytes
    place: str
    least: Bytes


def common_budget(
    amount: str | Bytes = "auto",
    *,
    estimate: Estimate | None = None,
    device: str | torch.device | None = None,
    group: dist.ProcessGroup | None = None,
) -> Bytes:
    """Agree on one budget for all ranks: the smallest of the amounts that they can give.

    All ranks call it before training. It takes two collectives of a few bytes.

    Args:
        amount: The largest budget that this rank can give, in bytes or as text. "auto" asks the
            device; ranks on one device share its memory evenly.
        estimate: The `rekindle.estimate(...)` of this rank. With it, a budget below the memory
            that a rank cannot evict is refused before training.
        device: The device of this rank. Default: CUDA if the program uses it, else the CPU.
        group: The process group. Default: all ranks.

    Returns:
        The bytes for `rekindle.budget(...)`, the same on every rank.

    Raises:
        InvalidBudget: `amount` is not an amount of bytes.
        OutOfBudget: The budget is too small for one of the ranks; raised on all of them.
    """
    where = accelerator.with_index(device_of(device))
    # Check the amount before the first collective. A wrong one raises while no other rank waits.
    limit = Amount(amount, line="rekindle.distributed.common_budget({})")
    mine = _Rank(amount, _place_of(where), 0 if estimate is None else estimate.least)
    ranks = gathered(mine, group)
    sharing = sum(rank.place == mine.place for rank in ranks)
    budget = min(gathered(limit.on(where, sharing), group))
    neediest = max(range(len(ranks)), key=lambda number: ranks[number].least)
    least = ranks[neediest].least
    if least > budget:
        raise OutOfBudget(
            f"rank {neediest} needs {format_bytes(least)} for memory that cannot be evicted "
            "(parameters, gradients, optimizer state, inputs), but the smallest budget of all "
            f"ranks is {format_bytes(budget)}. Shard the parameters (fully_shard), or use an "
            "optimizer with less state",
            needed=least,
            budget=budget,
            held={},
            smallest_budget=least,
        )
    return budget


def _place_of(device: torch.device) -> str:
    what = accelerator.identity(device) if is_accelerator(device) else str(device)
    return f"{socket.gethostname()} {what}"


def gathered(mine: T, group: dist.ProcessGroup | None) -> list[T]:
    """Exchange `mine` with all ranks of `group`, and return their objects in order of rank.

    It takes two collectives of a few bytes. Without a process group it returns `[mine]`.
    """
    if not dist.is_initialized():
        return [mine]
    found: list[T] = [mine] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group)
    return found

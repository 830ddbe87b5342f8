"""Gather one object from each rank, on every rank."""

from __future__ import annotations

from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def gathered(mine: T, group: dist.ProcessGroup | None) -> list[T]:
    """Exchange `mine` with all ranks of `group`, and return their objects in order of rank.

    It takes two collectives of a few bytes. Without a process group it returns `[mine]`.
    """
    if not dist.is_initialized():
        return [mine]
    found: list[T] = [mine] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group)
    return found

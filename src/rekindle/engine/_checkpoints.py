"""Choose checkpoints for a long recomputation: positions at which all live values stay in memory.

A value is live between the call that makes it and the last call that reads it. A chain of evicted
values can need more memory than there is. A backward pass reads such a chain from its end, so
without checkpoints each read would recompute the chain from its beginning. With checkpoints, each
read recomputes only the calls since the checkpoint before it.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from itertools import accumulate

from rekindle._types import Bytes
from rekindle.engine._graph import Call, Storage


def choose_checkpoints(
    calls: Sequence[Call], free: Bytes, is_candidate: Callable[[Storage], bool]
) -> dict[Call, list[Storage]]:
    """Choose after which calls of a recomputation to keep which storages.

    Half of the free memory is for checkpoints, and the other half for the results of the calls
    between two of them. A checkpoint is placed where the fewest bytes are alive.

    Args:
        calls: The calls to recompute, in the order in which they run.
        free: Bytes that are free, or that evictable storages occupy.
        is_candidate: Returns True for a storage in memory that may be evicted.

    Returns:
        For each call after which a checkpoint is made: the storages that it keeps. They are made by
        earlier calls and read by later ones. Empty if the results of all calls fit, or if no
        memory is free.
    """
    half = free // 2
    # If memory already exceeds its limit, `half` is negative.
    if half <= 0 or sum(call.nbytes for call in calls) <= half:
        return {}
    lives = _lives(calls, is_candidate)
    change = [0] * (len(calls) + 1)
    for storage, (begin, end) in lives.items():
        change[begin] += storage.nbytes
        change[end] -= storage.nbytes
    alive = list(accumulate(change))
    spacing = half
    chosen = _positions(calls, alive, spacing)
    while sum(alive[index] for index in chosen) > half:
        spacing += spacing // 4 + 1
        chosen = _positions(calls, alive, spacing)
    return {
        calls[index]: [storage for storage, (begin, end) in lives.items() if begin <= index < end]
        for index in chosen
    }


def _lives(
    calls: Sequence[Call], is_candidate: Callable[[Storage], bool]
) -> dict[Storage, tuple[int, int]]:
    """Return for each evictable storage two indices of `calls`: its maker and its last reader."""
    ids = [call.id for call in calls]
    lives: dict[Storage, tuple[int, int]] = {}
    for index, call in enumerate(calls):
        for value in call.inputs:
            storage = value.storage
            if storage in lives:
                lives[storage] = (lives[storage][0], index)
            elif is_candidate(storage):
                lives[storage] = (bisect(ids, storage.values[0].call.id), index)
        for storage in call.made:
            lives.setdefault(storage, (index, index))
    return lives


def _positions(calls: Sequence[Call], alive: Sequence[Bytes], spacing: Bytes) -> list[int]:
    """Return the indices of the calls after which to make checkpoints.

    The results of the calls between two checkpoints take at most about `spacing` bytes. Each
    checkpoint is where few bytes are alive.
    """
    chosen: list[int] = []
    made = made_at_best = 0  # bytes that calls made since the last checkpoint
    # Index with the fewest live bytes, once calls have made half of `spacing`; -1: none yet.
    best = -1
    for index, call in enumerate(calls):
        made += call.nbytes
        if 2 * made >= spacing and (best < 0 or alive[index] <= alive[best]):
            best, made_at_best = index, made
        if made >= spacing:
            chosen.append(best)
            made -= made_at_best
            best = -1
    return chosen

"""The score of the DTR paper's curve for banishing (freeing for good), which differs from h_DTR.

    score(s) = (c0(s) + cost of e*(s)) / (m(s) * staleness)

Here c0(s) is the cost of the operator that made the storage s, e*(s) its evicted neighborhood, and
m(s) its size. The authors' simulator uses this score for the runtime that banishes (`DTRUnopt`).
The score differs from h_DTR in two points. A storage that is both ancestor and descendant counts
once. The staleness is that of the least stale storage among s and e*(s).

Use this policy only to reproduce that curve: it computes all scores again for each eviction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from rekindle._types import Nanoseconds
from rekindle.policies import Candidate, Chooser, Policy


@final
@dataclass(frozen=True, slots=True)
class Unoptimized(Policy):
    """Evict as h_DTR does, but with the least staleness in the whole neighborhood."""

    def bind(self) -> Chooser:
        return _Scan()


@final
class _Scan(Chooser):
    """Chooser that computes the scores of all candidates for each eviction."""

    def __init__(self) -> None:
        self._pool: dict[Candidate, None] = {}

    def add(self, storage: Candidate) -> None:
        self._pool[storage] = None

    def remove(self, storage: Candidate) -> None:
        del self._pool[storage]

    def choose(self, now: Nanoseconds) -> Candidate | None:
        least, chosen = math.inf, None
        for storage in self._pool:
            score = _score(storage, now)
            if score <= least:  # Of equal scores, the last one is chosen.
                least, chosen = score, storage
        return chosen


def _score(storage: Candidate, now: Nanoseconds) -> float:
    """Return the score of `storage` at `now`."""
    cost, last = storage.cost, storage.last_access
    for neighbor in evicted_neighborhood(storage):
        cost += neighbor.cost
        last = max(last, neighbor.last_access)
    weight = storage.nbytes * (now - last)
    return cost / weight if weight else math.inf


def evicted_neighborhood(storage: Candidate) -> set[Candidate]:
    """Return e*(s): the evicted ancestors and descendants of `storage`."""
    found: set[Candidate] = set()
    for upwards in (True, False):
        seen = {storage}
        stack = [storage]
        while stack:
            last = stack.pop()
            for other in last.parents() if upwards else last.children():
                if other not in seen and not other.resident:
                    seen.add(other)
                    stack.append(other)
        found |= seen
    return found - {storage}

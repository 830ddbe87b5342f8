"""A wrapper of a policy that first evicts storages which a plan does not need at the moment.

Advice changes which storage is chosen, never whether the result is correct. Without advice,
`Advised(policy)` chooses as `policy` does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

from rekindle._types import Bytes, Nanoseconds
from rekindle.policies._base import Candidate, Chooser, Policy


@final
@dataclass(frozen=True, slots=True)
class Advised(Policy):
    """Evict the storages that a plan has marked, in order, and then those that `policy` chooses."""

    policy: Policy

    def bind(self) -> AdvisedChooser:
        return AdvisedChooser(self.policy.bind())


@final
class AdvisedChooser(Chooser):
    """Chooses the storages that a plan has marked as not needed, and then those of a policy.

    The code that follows the plan calls `mark` and `unmark`.
    """

    def __init__(self, chooser: Chooser) -> None:
        self._chooser = chooser
        self._marked: dict[Candidate, None] = {}
        self._ready: dict[Candidate, None] = {}  # marked storages that may be evicted now
        self.spare: Bytes = 0  #: total size of the storages in `_ready`
        # True if `choose` has returned marked storages since the policy itself last chose.
        self._behind = False
        self.recompute_ns = chooser.recompute_ns
        self.loss = chooser.loss
        self.evicted = chooser.evicted
        self.returned = chooser.returned
        self.forgotten = chooser.forgotten
        self.touched = chooser.touched
        self.repriced = chooser.repriced

    def mark(self, storage: Candidate) -> None:
        """Mark `storage` for eviction: the plan does not need it until it calls `unmark`."""
        self._marked[storage] = None
        if storage.order >= 0:
            self._make_ready(storage)

    def unmark(self, storage: Candidate) -> None:
        """Record that the plan needs `storage` in memory from now on."""
        self._marked.pop(storage, None)
        self._unready(storage)

    def clear(self, now: Nanoseconds) -> None:
        """Remove all marks, so that the policy decides alone.

        A policy defers its updates until its next `choose`. `clear` calls `choose` once, so that
        the updates do not pile up.
        """
        if self._behind:
            self._chooser.choose(now)
            self._behind = False
        self._marked.clear()
        self._ready.clear()
        self.spare = 0

    def spare_beside(self, needed: Iterable[Candidate]) -> Bytes:
        """Return the total size of the marked candidates, without those in `needed`."""
        return self.spare - sum(each.nbytes for each in set(needed) & self._ready.keys())

    def _make_ready(self, storage: Candidate) -> None:
        """Record that `storage`, which is marked, became a candidate for eviction."""
        if storage not in self._ready:
            self._ready[storage] = None
            self.spare += storage.nbytes

    def _unready(self, storage: Candidate) -> None:
        """Record that `storage` lost its mark, or may not be evicted any more."""
        if storage in self._ready:
            del self._ready[storage]
            self.spare -= storage.nbytes

    def add(self, storage: Candidate) -> None:
        self._chooser.add(storage)
        if storage in self._marked:
            self._make_ready(storage)

    def remove(self, storage: Candidate) -> None:
        self._chooser.remove(storage)
        if self._ready:
            self._unready(storage)

    def choose(self, now: Nanoseconds) -> Candidate | None:
        if not self._ready:
            return self._chooser.choose(now)
        self._behind = True
        return next(iter(self._ready))

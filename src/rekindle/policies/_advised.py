"""Any policy, advised: what a plan has done with goes first, while there is such a thing.

Advice never changes what is correct, only what is chosen. Without any, `Advised(policy)` chooses as
`policy` does.
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
    """Lets go what has been marked first, in the order of the marks, else what `policy` says."""

    policy: Policy

    def bind(self) -> AdvisedChooser:
        return AdvisedChooser(self.policy.bind())


@final
class AdvisedChooser(Chooser):
    """The state of an advised policy. Whoever has the plan calls `mark` and `unmark`."""

    def __init__(self, chooser: Chooser) -> None:
        self._chooser = chooser
        self._marked: dict[Candidate, None] = {}
        self._ready: dict[Candidate, None] = {}  # those of them that may be evicted now
        self.spare: Bytes = 0  #: of those
        self._behind = False  # marks have answered since the policy was asked last
        self.recompute_ns = chooser.recompute_ns
        self.loss = chooser.loss
        self.expected = chooser.expected
        self.evicted = chooser.evicted
        self.returned = chooser.returned
        self.forgotten = chooser.forgotten
        self.watch = chooser.watch
        self.touched = chooser.touched
        self.repriced = chooser.repriced

    def mark(self, storage: Candidate) -> None:
        """The plan does not need `storage` until it has it computed again."""
        self._marked[storage] = None
        if storage.order >= 0:
            self._make_ready(storage)

    def unmark(self, storage: Candidate) -> None:
        """The plan needs `storage` from now on."""
        self._marked.pop(storage, None)
        self._unready(storage)

    def clear(self, now: Nanoseconds) -> None:
        """Nothing is marked any more: the policy decides alone.

        It catches up: what it was told is put off until it is asked, and would pile up.
        """
        if self._behind:
            self._chooser.choose(now)
            self._behind = False
        self._marked.clear()
        self._ready.clear()
        self.spare = 0

    def spare_beside(self, needed: Iterable[Candidate]) -> Bytes:
        """Bytes of what may be let go although nothing in `needed` may."""
        return self.spare - sum(each.nbytes for each in set(needed) & self._ready.keys())

    def _make_ready(self, storage: Candidate) -> None:
        if storage not in self._ready:
            self._ready[storage] = None
            self.spare += storage.nbytes

    def _unready(self, storage: Candidate) -> None:
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

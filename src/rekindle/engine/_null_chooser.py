"""Stand in for the policy's chooser until the first eviction.

While everything fits into the budget, no storage has to be chosen, so the policy need not be kept
up to date.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

from rekindle._types import Nanoseconds
from rekindle.engine._graph import Storage
from rekindle.policies import Candidate, Chooser


@final
class NullChooser(Chooser):
    """A chooser that ignores all events until it is activated.

    Most choosers need only the candidates, the order in which they became candidates, and the
    evicted storages. `activate` reads all of these from the engine's graph. A chooser with
    `remembers` set needs the events themselves, so it is never replaced by a `NullChooser`.
    """

    def __init__(self, chooser: Chooser) -> None:
        self._chooser = chooser

    def activate(self, storages: Iterable[Storage]) -> Chooser:
        """Report all `storages` of the graph to the real chooser.

        Returns:
            The real chooser, ready to choose.
        """
        candidates: list[Storage] = []
        for storage in storages:
            if storage.order >= 0:
                candidates.append(storage)
            elif storage.restorable and not storage.resident:
                self._chooser.evicted(storage)
        for storage in sorted(candidates, key=lambda candidate: candidate.order):
            self._chooser.add(storage)
        return self._chooser

    def add(self, storage: Candidate) -> None: ...

    def remove(self, storage: Candidate) -> None: ...

    def choose(self, now: Nanoseconds) -> Candidate | None:
        raise AssertionError("activate it first")

"""Where memory suffices nobody has to choose, so nobody has to prepare for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

from rekindle._types import Nanoseconds
from rekindle.engine._graph import Storage
from rekindle.policies import Candidate, Chooser


@final
class Asleep(Chooser):
    """In the place of a chooser until the first choice; hears nothing, for the graph remembers.

    What a chooser was told until then is what it finds when it wakes: the candidates, in the order
    in which they became such, and what is evicted. Not so one that `remembers`.
    """

    def __init__(self, chooser: Chooser) -> None:
        self._chooser = chooser

    def wake(self, storages: Iterable[Storage]) -> Chooser:
        """The chooser, told of all `storages` in the graph."""
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
        raise AssertionError("wake it first")

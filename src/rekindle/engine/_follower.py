"""Follows a route while the program agrees with it, by advice to the engine and nothing else.

Whatever is asked for is brought back as always, and whatever has to go goes as always: the route
only says what goes first, and what comes back before it is asked for, if there is room for it among
what the route has done with. So a wrong route costs time, and never correctness or memory over
the budget. But like another policy it may let go what takes more room to bring back than there is:
where the budget is tight, a program that leaves its route may run out of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, final

from rekindle._types import OpId
from rekindle.engine._engine import Engine
from rekindle.engine._graph import Storage
from rekindle.engine._route import Route
from rekindle.schedule import Action


class Host(Protocol):
    """What a follower asks of whoever owns the memory."""

    def poll(self) -> None:
        """Something is to be brought back: the program may have dropped what can be let go."""

    def current(self, storage: Storage) -> Storage:
        """Where references to `storage` went, if something took its place."""
        ...

    def own(self, storage: Storage) -> None:
        """The memory of `storage` stays although the program drops it."""

    def disown(self, storage: Storage) -> None:
        """And now it need not, unless others refer to it."""


@final
class Follower:
    """One run along `route`. The engine's policy must be `Advised`."""

    def __init__(self, engine: Engine, route: Route, host: Host) -> None:
        assert engine.advice is not None, "an engine follows advice if its policy is Advised(...)"
        self.route = route
        self.position = 0  #: moves taken so far
        self._engine = engine
        engine.listen()
        self._advice = engine.advice
        self._host = host
        self._to_keep = frozenset[int](route.kept)
        self._kept: dict[int, Storage] = {}  # one reference to each is ours
        restored = {storage for made in route.restores for storage in made}
        self._named = restored.union(route.kept, (~move for move in route.moves if move < 0))
        self._storages: dict[int, Storage] = {}

    def made(self, number: int, storage: Storage) -> None:
        """The program made `storage`, which is `number` on the route."""
        if number in self._named:
            self._storages[number] = storage
            if number in self._to_keep and storage.replayable:
                self._engine.retain(storage)
                self._host.own(storage)
                self._kept[number] = storage

    def skip(self, op: OpId) -> Iterator[Action]:
        """As if all moves before `op` had been taken, and room been made for none of them."""
        stop = self.route.stops[op]
        while self.position < stop:
            move = self.route.moves[self.position]
            self.position += 1
            if move < 0:
                self._mark(~move)
                yield from self._give_up(~move)
            else:
                self._unmark(move)

    def before(self, op: OpId) -> Iterator[Action]:
        """Takes the moves that come before the first run of `op`."""
        stop = self.route.stops[op]
        while self.position < stop:
            yield from self._move()

    def wanting(self, storage: Storage, op: OpId) -> Iterator[Action]:
        """The program asks for `storage` before `op`: takes the moves until it is there."""
        stop = self.route.stops[op]
        while self.position < stop and not storage.resident:
            yield from self._move()

    def end(self) -> Iterator[Action]:
        """The route ends, or the program left it: the policy decides alone from now on."""
        self._advice.clear(self._engine.clock)
        self._storages.clear()
        while self._kept:
            yield from self._give_up(next(iter(self._kept)))

    def _move(self) -> Iterator[Action]:
        move = self.route.moves[self.position]
        self.position += 1
        if move < 0:
            self._mark(~move)
            yield from self._give_up(~move)
            return
        for storage in self._unmark(move):
            if not storage.resident and self._fits(storage):
                yield from self._engine.require(storage.values[0])

    def _mark(self, number: int) -> None:
        storage = self._storages.get(number)
        if storage is not None:
            self._advice.mark(storage)

    def _give_up(self, number: int) -> Iterator[Action]:
        kept = self._kept.pop(number, None)
        if kept is not None:
            storage = self._host.current(kept)
            yield from self._engine.release(storage)
            self._host.disown(storage)

    def _unmark(self, move: int) -> list[Storage]:
        """Returns what the move is to bring back."""
        found = [self._storages.get(number) for number in self.route.restores[move]]
        storages = [storage for storage in found if storage is not None]
        for storage in storages:
            self._advice.unmark(storage)
        return storages

    def _fits(self, storage: Storage) -> bool:
        """Whether it can come back at once, without anything going that the route still needs."""
        if not storage.values or not storage.restorable:
            return False
        call = storage.values[0].call
        if storage.on_host:
            needed, inputs = storage.nbytes, ()
        else:
            needed, inputs = call.nbytes + call.workspace, call.inputs
        if not all(value.defined for value in inputs):
            return False
        over = self._engine.memory + needed - self._engine.budget
        if over > 0:
            self._host.poll()
            over = self._engine.memory + needed - self._engine.budget
        return over <= 0 or over <= self._advice.spare_beside(v.storage for v in inputs)

"""Follow a plan while the program runs, by giving advice to the engine.

The engine keeps working as without a plan: it brings a value back when the program uses it, and
its policy evicts when room is short. The plan only says which storages to evict first, and which to
bring back before the program uses them. Bringing a storage back early happens only if it fits into
free memory plus memory that the plan does not need now.

A wrong plan therefore costs time, but never correctness or memory above the budget. It may, like a
bad policy, evict a value that takes more memory to recompute than is free. If the budget is tight,
a program that deviates from its plan may run out of it.
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
    """The operations that a `Follower` needs from the driver, which owns the memory."""

    def poll(self) -> None:
        """Find out which storages the program no longer holds, and tell the engine."""

    def current(self, storage: Storage) -> Storage:
        """Return the storage that an in-place call made from `storage`, or `storage` itself."""
        ...

    def own(self, storage: Storage) -> None:
        """Keep the memory of `storage` although the program no longer refers to it."""

    def disown(self, storage: Storage) -> None:
        """Undo `own`: the memory is freed if no other references exist."""


@final
class Follower:
    """One run of a program along a plan. The engine's policy must be `Advised`."""

    def __init__(self, engine: Engine, route: Route, host: Host) -> None:
        assert engine.advice is not None, "an engine follows advice if its policy is Advised(...)"
        self.route = route
        self.position = 0  #: number of moves of the plan taken so far
        self._engine = engine
        engine.listen()
        engine.follow_plan(True)
        self._advice = engine.advice
        self._host = host
        self._to_keep = frozenset[int](route.kept)
        # storages to which this follower holds a reference in the engine
        self._kept: dict[int, Storage] = {}
        restored = {storage for made in route.restores for storage in made}
        copied = {max(number, ~number) for number in route.copies}
        freed = {~move for move in route.moves if move < 0}
        # numbers of all storages that the plan restores, keeps, copies or evicts
        self._named = restored.union(route.kept, copied, freed)
        self._storages: dict[int, Storage] = {}
        # storages whose swap-in is due by the plan, but which did not fit into memory yet
        self._late: list[int] = []

    def made(self, number: int, storage: Storage) -> None:
        """Register `storage`, which the program just made, as storage `number` of the plan."""
        if number in self._named:
            self._storages[number] = storage
            if number in self._to_keep and storage.replayable:
                self._engine.retain(storage)
                self._host.own(storage)
                self._kept[number] = storage

    def skip(self, op: OpId) -> Iterator[Action]:
        """Advance in the plan to `op`, without recomputing storages or swapping them in.

        The engine still gets the advice to evict the storages that the plan evicts before `op`.
        A caller uses this method when a step has run operators already before it turns out that
        the step matches the plan.
        """
        stop = self.route.stops[op]
        while self.position < stop:
            move = self.route.moves[self.position]
            self.position += 1
            if move < 0:
                yield from self._mark(~move)
                yield from self._give_up(~move)
            else:
                self._unmark(move)

    def before(self, op: OpId) -> Iterator[Action]:
        """Make all moves of the plan that come before the first run of `op`.

        A move advises the engine to evict a storage, or brings storages back, or begins a copy.
        """
        stop = self.route.stops[op]
        while self.position < stop:
            yield from self._move()
        if self._late:
            yield from self._fetch_late()

    def about_to_access(self, storage: Storage, op: OpId) -> Iterator[Action]:
        """Make the plan's moves that come before `op`, until `storage` is resident.

        The program is about to use `storage`.
        """
        stop = self.route.stops[op]
        while self.position < stop and not storage.resident:
            yield from self._move()

    def end(self) -> Iterator[Action]:
        """Leave the plan, because it ended or the program deviates. The policy decides alone."""
        self._advice.clear(self._engine.clock)
        self._engine.follow_plan(False)
        self._storages.clear()
        self._late.clear()
        while self._kept:
            yield from self._give_up(next(iter(self._kept)))

    def _move(self) -> Iterator[Action]:
        """Make the plan's next move: advise an eviction, begin a copy, or bring storages back.

        A storage is brought back only if it fits into memory.
        """
        move = self.route.moves[self.position]
        self.position += 1
        if move < 0:
            yield from self._mark(~move)
            yield from self._give_up(~move)
            return
        number = self._copy_of(move)
        if number is not None and number >= 0:
            storage = self._storages.get(number)
            if storage is not None:
                yield from self._engine.save(storage)
            return
        for storage in self._unmark(move):
            if storage.resident:
                continue
            if number is not None and _is_away(storage):
                self._late.append(~number)
            elif self._fits(storage):
                yield from self._engine.require(storage.values[0])
        if number is not None:
            yield from self._fetch_late()

    def _copy_of(self, move: int) -> int | None:
        """Return the entry of `Route.copies` that `move` begins, or None if it begins no copy."""
        index = move - len(self.route.restores)
        return self.route.copies[index] if index >= 0 else None

    def _fetch_late(self) -> Iterator[Action]:
        """Swap in the storages that are due, in their order, up to the first that does not fit."""
        while self._late:
            storage = self._storages.get(self._late[0])
            if storage is not None and _is_away(storage):
                if not self._fits(storage):
                    return
                yield from self._engine.fetch(storage)
            self._late.pop(0)

    def _mark(self, number: int) -> Iterator[Action]:
        """Advise the engine to evict storage `number` before others.

        If the plan contains copies, evict it at once. Memory of a swapped-out storage is freed only
        when its copy ends. Until then the plan assumes that the memory of all storages that it
        evicted without a copy is free.
        """
        storage = self._storages.get(number)
        if storage is not None:
            self._advice.mark(storage)
            if self.route.copies:
                yield from self._engine.evict([storage])

    def _give_up(self, number: int) -> Iterator[Action]:
        """Release this follower's reference to storage `number`, held for a later recomputation."""
        kept = self._kept.pop(number, None)
        if kept is not None:
            storage = self._host.current(kept)
            yield from self._engine.release(storage)
            self._host.disown(storage)

    def _unmark(self, move: int) -> list[Storage]:
        """Withdraw the advice to evict the storages that `move` brings back, and return them."""
        copied = self._copy_of(move)
        if copied is None:
            numbers: tuple[int, ...] = self.route.restores[move]
        else:
            numbers = (~copied,) if copied < 0 else ()
        found = [self._storages.get(number) for number in numbers]
        storages = [storage for storage in found if storage is not None]
        for storage in storages:
            self._advice.unmark(storage)
        return storages

    def _fits(self, storage: Storage) -> bool:
        """Return True if `storage` fits into memory without evicting anything the plan needs."""
        if not storage.values or not storage.restorable:
            return False
        call = storage.values[0].call
        if storage.on_host:
            needed, inputs = storage.nbytes, ()
        else:
            needed, inputs = call.nbytes + call.workspace, call.inputs
        if not all(value.defined and not value.storage.absent for value in inputs):
            return False
        over = self._engine.memory + needed - self._engine.budget
        if over > 0:
            self._host.poll()
            over = self._engine.memory + needed - self._engine.budget
        return over <= 0 or over <= self._advice.spare_beside(v.storage for v in inputs)


def _is_away(storage: Storage) -> bool:
    """Return True if `storage` still has values, and they exist only in host memory."""
    return bool(storage.values) and storage.on_host and not storage.resident

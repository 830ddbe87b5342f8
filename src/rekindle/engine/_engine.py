"""Dynamic Tensor Rematerialization: decides online what to let go and what to compute again.

Kirisame et al., ICLR 2021 (arXiv 2006.09616), section 3 and appendix C. Events come in as calls of
the methods below, actions go out: each method yields `Compute` and `Free`, and the driver performs
every action before it asks for the next. No torch, no clock, no input or output: the engine's clock
is the sum of the costs of what ran.

How this differs from the authors' prototype and simulator:

- The budget is a cap: room is made before an operator runs, not after.
- Memory that the program's own variables hold is no candidate (`held`).
- An operator that writes in place takes over memory (`Call.overwrites`). When it runs again it
  writes a private copy, or the recomputed input itself if nobody else can ask for that.
- If everything left is locked, the attempt is undone and repeated with locks as late as possible.
- Dead storages are evicted at once and leave the graph when nothing needs them to be recomputed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import final

from rekindle._types import Bytes, Nanoseconds
from rekindle.engine._frame import Frame, NoRoom, Thrashed
from rekindle.engine._graph import Call, Storage, Value
from rekindle.engine._ledger import Ledger
from rekindle.schedule import Action, Compute


@final
class Engine(Ledger):
    """Keeps `memory` within `budget` bytes. Events, and bringing back; a `Ledger` lets go."""

    # -- events ---------------------------------------------------------------------------------

    def call(self, call: Call, *, held: bool = False) -> Iterator[Action]:
        """The program runs `call` for the first time; its inputs are brought back if need be."""
        for _, source in call.overwrites:
            if not source.storage.replayable:
                yield from self.forget(source.storage)
        yield from self._materialize(call, None, held)

    def use(self, value: Value) -> Iterable[Action]:
        """The program reads `value`: it is brought back if need be, and is held from now on."""
        if not value.defined:
            return self._bring_back(value)
        self._touch(value.storage)
        self._hold(value.storage)
        return ()

    def _bring_back(self, value: Value) -> Iterator[Action]:
        yield from self.require(value)
        self._hold(value.storage)

    def pin(self, value: Value) -> Iterator[Action]:
        """`value` is brought back if need be, and stays until nobody needs it."""
        yield from self.require(value)
        value.storage.pinned = True
        self._classify(value.storage)

    def retain(self, storage: Storage) -> None:
        """One more reference that permits eviction."""
        storage.references += 1

    def release(self, storage: Storage) -> Iterable[Action]:
        """One reference less."""
        if self.rules.dead == "ignore":
            return ()
        storage.references -= 1
        return self._let_go(storage) if storage.dead else ()

    def drop(self, storage: Storage) -> Iterable[Action]:
        """The program's own variables hold the storage no longer."""
        storage.held = False
        self._classify(storage)
        return self._let_go(storage) if storage.dead else ()

    def gone(self, storage: Storage) -> list[Storage]:
        """The program has dropped `storage`, to which nobody else refers: its memory is free.

        Returns what is to be freed or is free: `storage`, and what it alone needed.
        """
        storage.held = False
        if not storage.resident:  # it was let go while the program held it
            return [storage, *self._prune(storage)]
        if not storage.consumers:
            return self._prune(storage)
        self.memory -= storage.nbytes
        self._vanish(storage)
        self._chooser.evicted(storage)
        return [storage]

    def forget(self, storage: Storage) -> Iterator[Action]:
        """The source `storage` is about to be overwritten: what still needs it is saved first.

        Wanted storages whose recomputation would read it are brought back; from then on nothing
        that was made from it can be recomputed.
        """
        needy = storage.made_through()
        saved = [made for made in needy if made.resident]  # these must not make way for the others
        for made in saved:
            self._lock(made)
        try:
            for made in needy:
                if not made.dead:
                    for value in made.values:
                        yield from self.require(value)
                    self._lock(made)
                    saved.append(made)
        finally:
            for made in saved:
                self._unlock(made)
        useless = [storage]
        while useless:
            bereft: list[Storage] = []
            for call in list(useless.pop().consumers):
                yield from self._free(self._lose_recipe(call, bereft))
            useless += [source for source in bereft if source.useless]

    def seal(self, storage: Storage) -> Iterator[Action]:
        """Nobody knows how the content of `storage`, which is resident, came about: it is kept."""
        for call in list(storage.makers):
            yield from self._free(self._lose_recipe(call))

    def spoil(self, storage: Storage) -> Iterator[Action]:
        """A call that was to overwrite `storage`, which is dead, failed half way: it is gone."""
        yield from self._evict(storage)

    # -- what drivers may ask for ---------------------------------------------------------------

    def admit(self, call: Call, *, held: bool) -> list[Storage]:
        """`call` ran for the first time, and room was made for it before. Links its outputs.

        Returns what it made superfluous: no longer in the graph, to be freed by the driver.
        """
        call.ran = True
        self.clock += call.cost
        self.compute_ns += call.cost
        for output, source in call.overwrites:
            self.memory -= self._take_over(output, source)
            call.replayable = call.replayable and source.storage.replayable
        self.memory += call.nbytes
        if self.memory > self.peak:
            self.peak = self.memory
        if not self.rules.quirks:
            self._link(call)
        for storage in call.made:
            storage.resident = True
            if self.rules.quirks:
                self._chooser.returned(storage)
        for value in call.outputs_but_last(None):
            storage = value.storage
            value.defined = True
            storage.last_access = self.clock
            if held:
                storage.held = True
            else:
                storage.references += 1
                self._classify(storage)
        if not call.overwrites:
            return []
        freed: list[Storage] = []
        for _, source in call.overwrites:
            freed += self._prune(source.storage)
        return freed

    def account(self, cost: Nanoseconds, nbytes: Bytes = 0) -> None:
        """An operator ran that made nothing, or `nbytes` that are only counted; negative: less."""
        self.clock += cost
        self.compute_ns += cost
        self.unlisted += nbytes
        self.memory += nbytes
        if self.memory > self.peak:
            self.peak = self.memory

    def resize(self, storage: Storage, nbytes: Bytes) -> None:
        """The program itself changed the size of `storage`, which it holds."""
        self.memory += nbytes - storage.nbytes
        self.peak = max(self.peak, self.memory)
        storage.nbytes = nbytes

    def _link(self, call: Call) -> None:
        """Enters `call` and what it makes into the graph."""
        for storage in call.made:
            self._storages[storage] = None
            storage.cost = call.cost
            storage.replayable = call.replayable
        if len(call.made) < len(call.outputs):  # views are part of what was there before
            for storage in call.storages():
                if storage.makers[0] is not call:
                    storage.cost += call.cost
                    storage.replayable = storage.replayable and call.replayable
                    self._chooser.repriced(storage)
        if call.replayable:
            call.consume()

    # -- bringing back --------------------------------------------------------------------------

    def require(self, value: Value) -> Iterator[Action]:
        """`value` is brought back if need be, for whoever will ask for it."""
        self._touch(value.storage)
        if not value.defined:
            yield from self._materialize(value.call, value, False)

    def _materialize(self, call: Call, wanted: Value | None, held: bool) -> Iterator[Action]:
        """Runs `call`, after whatever must run to have its inputs."""
        if self.rules.quirks and not call.ran:
            self._link(call)
            for storage in call.made:
                self._chooser.expected(storage)
        try:
            yield from self._climb(call, wanted, held, eager_locks=True)
        except NoRoom:
            if self.rules.quirks:  # the authors give up here
                raise
            yield from self.shrink(-1)  # what is locked may be in the way: once more, empty-handed
            yield from self._climb(call, wanted, held, eager_locks=False)

    def _climb(
        self, call: Call, wanted: Value | None, held: bool, *, eager_locks: bool
    ) -> Iterator[Action]:
        """Depth first over the inputs, in their order; a stack instead of recursion."""
        frames = [Frame(call, wanted)]
        self._open(frames[0], eager_locks)
        try:
            while frames:
                frame = frames[-1]
                missing = self._next_missing(frame)
                if missing is not None:
                    frames.append(Frame(missing.call, missing))
                    self._open(frames[-1], eager_locks)
                    continue
                yield from self._run(frame, held)
                frames.pop()
                self._close(frame)
                for value in frame.call.inputs:
                    yield from self._free(self._prune(value.storage))
        finally:
            for frame in reversed(frames):
                self._close(frame)

    def _open(self, frame: Frame, eager_locks: bool) -> None:
        for value in frame.call.inputs:
            storage = value.storage
            self._touch(storage)
            if eager_locks and value.defined:
                self._lock(storage)
                frame.locked.append(storage)
            else:
                frame.pending.append(value)
        frame.pending.reverse()

    def _next_missing(self, frame: Frame) -> Value | None:
        """Locks the inputs that are there, in order, up to the first that is not."""
        while frame.pending:
            if not frame.pending[-1].defined:
                return frame.pending[-1]
            value = frame.pending.pop()
            self._lock(value.storage)
            frame.locked.append(value.storage)
        return None

    def _close(self, frame: Frame) -> None:
        """Unlocks, in the order of the inputs if all are locked: they become candidates so."""
        done = not frame.pending
        locked = [value.storage for value in frame.call.inputs] if done else frame.locked
        for storage in locked:
            self._unlock(storage)

    def _run(self, frame: Frame, held: bool) -> Iterator[Action]:
        call = frame.call
        in_place = bool(call.overwrites) and (not call.ran or frame.may_consume())
        lent = sum(source.storage.nbytes for _, source in call.overwrites) if in_place else 0
        yield from self.make_room(call.nbytes - lent, call)
        self.subject = call
        yield Compute(call.id, in_place)
        if not call.ran:
            yield from self._free(self.admit(call, held=held))
        else:
            self._readmit(frame, in_place)
            unasked = [storage for storage in call.made if storage not in self._storages]
            for storage in unasked:  # brought back with its siblings
                storage.resident = False
                self.memory -= storage.nbytes
            yield from self._free(unasked)

    def _readmit(self, frame: Frame, in_place: bool) -> None:
        call = frame.call
        self.clock += call.cost
        self.recompute_ns += call.cost
        limit = self.rules.recompute_limit
        if limit is not None and self.recompute_ns > limit:
            raise Thrashed(f"recomputation took {self.recompute_ns} ns of at most {limit}")
        self.memory += call.nbytes
        if in_place:
            for output, source in call.overwrites:
                self.memory -= self._take_over(output, source)
        if self.memory > self.peak:
            self.peak = self.memory
        for storage in call.made:
            if storage.resident:  # the second copy is given back at once
                self.memory -= storage.nbytes
            else:
                storage.resident = True
                if storage in self._storages:
                    self._chooser.returned(storage)
        for value in call.outputs:
            value.defined = value.storage.resident
        for value in call.outputs_but_last(frame.wanted):
            if value.storage in self._storages:
                self._classify(value.storage)

    def _take_over(self, output: Value, source: Value) -> Bytes:
        """The memory of `source` now holds `output`. Returns its size."""
        old, new = source.storage, output.storage
        new.held, old.held = new.held or old.held, False  # it may be held already, and let go
        new.pinned, old.pinned = old.pinned, False
        self._vanish(old)
        if old.replayable:
            self._chooser.evicted(old)
        return old.nbytes

"""Dynamic Tensor Rematerialization: decides online what to let go and what to compute again.

Kirisame et al., ICLR 2021 (arXiv 2006.09616), section 3 and appendix C. Events come in as calls of
the methods below, actions go out: each method yields what is to be done, and the driver performs
every action before it asks for the next. No torch, no clock, no input or output: the engine's clock
is the sum of the costs of what ran.

How this differs from the authors' prototype and simulator:

- The budget is a cap: room is made before an operator runs, not after, and for what it takes
  inside itself as well (`Call.workspace`).
- Memory that the program's own variables hold is no candidate (`held`).
- An operator that writes in place takes over memory (`Call.overwrites`). When it runs again it
  writes a private copy, or the recomputed input itself if nobody else can ask for that.
- If everything left is locked, the attempt is undone and repeated with locks as late as possible.
- Dead storages are evicted at once and leave the graph when nothing needs them to be recomputed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, final

from rekindle._types import Bytes, Nanoseconds
from rekindle.engine._exchange import Exchange
from rekindle.engine._frame import Cyclic, Frame, NoRoom, Thrashed
from rekindle.engine._graph import Call, Storage, Value
from rekindle.engine._host import HostMemory
from rekindle.schedule import Action, Compute, SwapIn

_LEFT_FREE: Final = 1 / 16  # of the budget, beside what is brought back ahead


@final
class Engine(Exchange):
    """Keeps `memory` within `budget` bytes. Events, and bringing back; an `Exchange` lets go."""

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

        Returns what is to be freed or is free: `storage` if it was there, and what it alone needed.
        """
        storage.held = False
        if not storage.resident or not storage.consumers:  # it may have been let go before
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
            known = len(self._bereft)
            for call in list(useless.pop().consumers):
                yield from self._free(self._lose_recipe(call))
            useless += [source for source in self._bereft[known:] if source.useless]

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
        if self.memory + call.workspace > self.peak:
            self.peak = self.memory + call.workspace
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

    def account(self, cost: Nanoseconds, nbytes: Bytes = 0, workspace: Bytes = 0) -> None:
        """An operator ran that made nothing, or `nbytes` that are only counted; negative: less."""
        self.clock += cost
        self.compute_ns += cost
        self.unlisted += nbytes
        self.memory += nbytes
        if self.memory + workspace > self.peak:
            self.peak = self.memory + workspace

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
                    if not storage.on_host:
                        storage.cost += call.cost
                    storage.replayable = storage.replayable and call.replayable
                    self._chooser.repriced(storage)
        if call.replayable:
            call.consume()
        elif self.host is not None:
            for storage in call.storages():
                self._renew(storage)

    # -- bringing back --------------------------------------------------------------------------

    def require(self, value: Value) -> Iterator[Action]:
        """`value` is brought back if need be, for whoever will ask for it."""
        storage = value.storage
        self._touch(storage)
        if self._copies(value):
            yield from self._swap_in(storage)
        if not value.defined:
            yield from self._materialize(value.call, value, False)

    def _copies(self, value: Value) -> bool:
        """Whether `value`, which is missing, comes back by a copy: not if computing is quicker."""
        storage, host = value.storage, self.host
        if host is None or not storage.on_host or storage.resident:
            return False
        if host.only or not storage.replayable:
            return True
        waiting = host.ways.waiting_now(storage.nbytes, self.clock)
        return waiting <= self._climb_ns(value, waiting, host)

    def _climb_ns(self, value: Value, limit: Nanoseconds, host: HostMemory) -> Nanoseconds:
        """What it takes to compute `value`, and at least copies of what that reads; not beyond
        `limit`."""
        total = value.call.cost
        calls = {value.call}
        stack = [value.call]
        while stack and total < limit:
            for source in stack.pop().inputs:
                if source.defined or source.call in calls:
                    continue
                calls.add(source.call)
                if source.storage.on_host:
                    total += host.ways.in_ns(source.storage.nbytes)
                else:
                    total += source.call.cost
                    stack.append(source.call)
        return total

    def _swap_in(self, storage: Storage) -> Iterator[Action]:
        """Brings `storage` back from the host; if the driver cannot, it is as good as evicted."""
        yield from self.make_room(storage.nbytes, storage.values[0].call)
        self.subject = storage
        yield SwapIn(storage.id)
        host = self.host
        assert host is not None
        if not storage.on_host:
            return
        host.swapped_in += storage.nbytes
        host.ways.fetch(storage.nbytes, self.clock)
        self.memory += storage.nbytes
        self.peak = max(self.peak, self.memory)
        self._appear(storage)
        self._chooser.returned(storage)
        self._classify(storage)

    def swap_in_failed(self, storage: Storage) -> bool:
        """The driver could not do the `SwapIn` of `storage` that it just got.

        Its copy is forgotten. Returns whether it will be computed again; else it is lost, and the
        driver should raise.
        """
        host = self.host
        assert host is not None
        self._chooser.returned(storage)
        host.drop(storage)
        if not storage.replayable:
            return False
        self._reprice(storage)
        self._chooser.evicted(storage)
        return True

    def copy_lost(self, storage: Storage) -> None:
        """A copy that the driver had reported as made never arrived. Between any two actions.

        What is not in memory has to be computed again. As after `swap_out_failed`, as much as is on
        the host now is all that may be there from now on.
        """
        host = self.host
        if host is None or not storage.on_host:
            return
        if host.saving.pop(storage, None) is not None:
            self._unlock(storage)
        if storage in self.discarded:
            self.discarded.remove(storage)
            host.drop(storage)
        elif storage.resident:
            host.drop(storage)
            self._renew(storage)
        else:
            self.swap_in_failed(storage)
        host.limit = host.nbytes

    def prefetch(self, room: Bytes | float = float("inf")) -> Iterator[Action]:
        """Brings back what is on the host while there is room for it, what was used last first.

        For drivers, after an operator of a backward pass: what was saved last is wanted first.
        Takes no more than `room` bytes, nothing has to go for it, and some room is left for what
        comes next. What came stays until it is used, unless nothing else is left to let go.
        """
        host = self.host
        if host is None:
            return
        yield from self._arrived(host)
        while host.ways.idle_in(self.clock):
            storage = host.next_back(self.clock)
            room = min(room, self.budget - self.memory)
            if storage is None or storage.nbytes > room - self.budget * _LEFT_FREE:
                return
            room -= storage.nbytes
            self._touch(storage)
            yield from self._swap_in(storage)
            if storage.resident:
                self._lock(storage)
                host.coming[storage] = storage.last_access

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
        calls = {call}
        self._open(frames[0], eager_locks)
        try:
            while frames:
                frame = frames[-1]
                missing = self._next_missing(frame)
                comes = missing is not None and self._copies(missing)
                if missing is not None and not comes:
                    if missing.call in calls:
                        raise Cyclic
                    calls.add(missing.call)
                    frames.append(Frame(missing.call, missing))
                    self._open(frames[-1], eager_locks)
                    continue
                try:
                    if missing is not None:
                        yield from self._swap_in(missing.storage)
                    else:
                        yield from self._run(frame, held)
                except NoRoom:
                    outer = [other for other in frames[:-1] if other.locked and not other.gave_up]
                    if eager_locks or self.host is None or not outer:
                        raise
                    yield from self._give_up(outer, self.host)
                    continue
                if comes:
                    continue
                frames.pop()
                calls.remove(frame.call)
                self._close(frame)
                for value in frame.call.inputs:
                    yield from self._free(self._prune(value.storage))
        finally:
            for frame in reversed(frames):
                self._close(frame)

    def _give_up(self, frames: list[Frame], host: HostMemory) -> Iterator[Action]:
        """What calls in progress wait with goes to the host, to make room for what they wait for.

        Each does so once: when it is its turn again it gathers its inputs for good.
        """
        for frame in frames:
            frame.gave_up = True
            locked, frame.locked = frame.locked, []
            frame.pending = [*reversed(frame.call.inputs)]
            for storage in locked:
                self._unlock(storage)
            for storage in dict.fromkeys(locked):
                if storage.order >= 0 and not storage.on_host and host.lacks(storage.nbytes) <= 0:
                    yield from self._swap_out(storage, host)

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
        yield from self.make_room(call.nbytes - lent + call.workspace, call)
        self.subject = call
        yield Compute(call.id, in_place)
        if not call.ran:
            yield from self._free(self.admit(call, held=held))
        else:
            wanted = frame.wanted.storage if frame.wanted else None
            copied = [s for s in call.made if s.on_host and not s.resident and s is not wanted]
            self._readmit(frame, in_place)
            unasked = [storage for storage in call.made if storage not in self._storages]
            for storage in unasked:  # brought back with its siblings
                storage.resident = False
                self.memory -= storage.nbytes
            yield from self._free(unasked)
            for storage in copied:  # likewise, and the copy stays
                if storage in self._storages:
                    yield from self._evict(storage)

    def _readmit(self, frame: Frame, in_place: bool) -> None:
        call = frame.call
        self.clock += call.cost
        self.recompute_ns += call.cost
        limit = self.rules.recompute_limit
        if limit is not None and self.recompute_ns > limit:
            raise Thrashed(self.recompute_ns, limit)
        self.memory += call.nbytes
        if in_place:
            for output, source in call.overwrites:
                self.memory -= self._take_over(output, source)
        if self.memory + call.workspace > self.peak:
            self.peak = self.memory + call.workspace
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
        if old.restorable:
            self._chooser.evicted(old)
        return old.nbytes

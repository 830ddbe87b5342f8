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
from rekindle.engine._graph import Call, Storage, Value
from rekindle.policies import Policy
from rekindle.schedule import Action, Compute, Free


@final
class NoRoom(Exception):
    """Everything that may be let go has been, and `needed` bytes do not fit."""

    def __init__(self, needed: Bytes, memory: Bytes, budget: Bytes, call: Call | None) -> None:
        super().__init__(f"{needed} bytes needed, {memory} of {budget} in use, none can be let go")
        self.needed = needed
        self.memory = memory
        self.budget = budget
        self.call = call


@final
class Engine:
    """Keeps `memory` within `budget` bytes. `budget` None: no limit."""

    def __init__(self, budget: Bytes | None, policy: Policy) -> None:
        self.budget: Bytes | float = float("inf") if budget is None else budget
        self.memory: Bytes = 0
        self.peak: Bytes = 0
        self.clock: Nanoseconds = 0
        self.compute_ns: Nanoseconds = 0  #: first executions
        self.recompute_ns: Nanoseconds = 0  #: all others
        self.subject: Storage | Call | None = None  #: what the action just yielded is about
        self.idle: list[Storage] = []  #: held, but nothing that was made from them remains
        self._chooser = policy.bind()
        self._order = 0
        self._storages: dict[Storage, None] = {}  # all that are in the graph or resident

    # -- events ---------------------------------------------------------------------------------

    def call(self, call: Call, *, held: bool = False) -> Iterator[Action]:
        """The program runs `call` for the first time; its inputs are brought back if need be."""
        for _, source in call.overwrites:
            if not source.storage.replayable:
                yield from self.forget(source.storage)
        yield from self._materialize(call, None, held)

    def use(self, value: Value) -> Iterator[Action]:
        """The program reads `value`: it is brought back if need be, and is held from now on."""
        yield from self._require(value)
        value.storage.held = True
        self._classify(value.storage)

    def pin(self, value: Value) -> Iterator[Action]:
        """`value` is brought back if need be, and stays until nobody needs it."""
        yield from self._require(value)
        value.storage.pinned = True
        self._classify(value.storage)

    def retain(self, storage: Storage) -> None:
        """One more reference that permits eviction."""
        storage.references += 1

    def release(self, storage: Storage) -> Iterator[Action]:
        """One reference less."""
        storage.references -= 1
        yield from self._let_go_if_dead(storage)

    def drop(self, storage: Storage) -> Iterator[Action]:
        """The program's own variables hold the storage no longer."""
        storage.held = False
        self._classify(storage)
        yield from self._let_go_if_dead(storage)

    def forget(self, storage: Storage) -> Iterator[Action]:
        """The source `storage` is about to be overwritten: what still needs it is saved first.

        Wanted storages whose recomputation would read it are brought back; from then on nothing
        that was made from it can be recomputed.
        """
        needy = self._made_through(storage)
        saved = [made for made in needy if made.resident]  # these must not make way for the others
        for made in saved:
            self._lock(made)
        try:
            for made in needy:
                if not made.dead:
                    for value in made.values:
                        yield from self._require(value)
                    self._lock(made)
                    saved.append(made)
        finally:
            for made in saved:
                self._unlock(made)
        for call in list(storage.consumers):
            yield from self._free(self._lose_recipe(call))

    def seal(self, storage: Storage) -> Iterator[Action]:
        """Nobody knows how the content of `storage`, which is resident, came about: it is kept."""
        for call in list(storage.makers):
            yield from self._free(self._lose_recipe(call))

    # -- what drivers may ask for ---------------------------------------------------------------

    def make_room(self, nbytes: Bytes, call: Call | None = None) -> Iterator[Action]:
        """Lets go until `nbytes` more fit. Raises `NoRoom` when nothing is left to let go."""
        while self.memory + nbytes > self.budget:
            victim = self._chooser.choose(self.clock)
            if victim is None:
                raise NoRoom(nbytes, self.memory, int(self.budget), call)
            assert isinstance(victim, Storage)
            yield from self._evict(victim)

    def admit(self, call: Call, *, held: bool) -> list[Storage]:
        """`call` ran for the first time, and room was made for it before. Links its outputs.

        Returns what it made superfluous: no longer in the graph, to be freed by the driver.
        """
        call.ran = True
        self.clock += call.cost
        self.compute_ns += call.cost
        lent = 0
        for output, source in call.overwrites:
            lent += self._take_over(output, source)
            call.replayable = call.replayable and source.storage.replayable
        self.memory += call.nbytes - lent
        if self.memory > self.peak:
            self.peak = self.memory
        for storage in call.made:
            storage.resident = True
            self._storages[storage] = None
        if call.replayable:
            made = {value.storage for value in call.outputs}
            for value in call.inputs:
                if value.storage not in made:
                    value.storage.consumers[call] = None
        for value in call.outputs:
            storage = value.storage
            value.defined = True
            storage.cost += call.cost
            storage.last_access = self.clock
            storage.replayable = storage.replayable and call.replayable
            if held:
                storage.held = True
            else:
                storage.references += 1
            if storage.makers[0] is not call:
                self._chooser.repriced(storage)
            self._classify(storage)
        freed: list[Storage] = []
        for _, source in call.overwrites:
            freed += self._prune(source.storage)
        return freed

    def resize(self, storage: Storage, nbytes: Bytes) -> None:
        """The program itself changed the size of `storage`, which it holds."""
        self.memory += nbytes - storage.nbytes
        self.peak = max(self.peak, self.memory)
        storage.nbytes = nbytes

    @property
    def storages(self) -> Iterator[Storage]:
        """Every storage that is resident or may be recomputed."""
        return iter(self._storages)

    # -- bringing back --------------------------------------------------------------------------

    def _require(self, value: Value) -> Iterator[Action]:
        value.storage.last_access = self.clock
        if not value.defined:
            yield from self._materialize(value.call, value, False)

    def _materialize(self, call: Call, wanted: Value | None, held: bool) -> Iterator[Action]:
        """Runs `call`, after whatever must run to have its inputs."""
        try:
            yield from self._climb(call, wanted, held, eager_locks=True)
        except NoRoom:
            # What is locked may be in the way of what must come first. Once more, empty-handed.
            while (victim := self._chooser.choose(self.clock)) is not None:
                assert isinstance(victim, Storage)
                yield from self._evict(victim)
            yield from self._climb(call, wanted, held, eager_locks=False)

    def _climb(
        self, call: Call, wanted: Value | None, held: bool, *, eager_locks: bool
    ) -> Iterator[Action]:
        """Depth first over the inputs, in their order; a stack instead of recursion."""
        frames = [_Frame(call, wanted)]
        self._open(frames[0], eager_locks)
        try:
            while frames:
                frame = frames[-1]
                missing = self._next_missing(frame)
                if missing is not None:
                    frames.append(_Frame(missing.call, missing))
                    self._open(frames[-1], eager_locks)
                    continue
                yield from self._run(frame, held)
                frames.pop()
                read = tuple(frame.locked)
                self._close(frame)
                for storage in read:
                    yield from self._free(self._prune(storage))
        finally:
            for frame in reversed(frames):
                self._close(frame)

    def _open(self, frame: _Frame, eager_locks: bool) -> None:
        for value in frame.call.inputs:
            value.storage.last_access = self.clock
            if eager_locks and value.defined:
                self._lock(value.storage)
                frame.locked.append(value.storage)
            else:
                frame.pending.append(value)
        frame.pending.reverse()

    def _next_missing(self, frame: _Frame) -> Value | None:
        """Locks the inputs that are there, in order, up to the first that is not."""
        while frame.pending:
            if not frame.pending[-1].defined:
                return frame.pending[-1]
            value = frame.pending.pop()
            self._lock(value.storage)
            frame.locked.append(value.storage)
        return None

    def _close(self, frame: _Frame) -> None:
        for storage in frame.locked:
            self._unlock(storage)
        frame.locked.clear()

    def _run(self, frame: _Frame, held: bool) -> Iterator[Action]:
        call = frame.call
        in_place = bool(call.overwrites) and (not call.ran or self._may_consume(frame))
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

    def _may_consume(self, frame: _Frame) -> bool:
        """Whether nobody but this call can ask for the inputs that it overwrites."""
        for output, source in frame.call.overwrites:
            storage = source.storage
            mine = frame.locked.count(storage)
            kept = storage.held or storage.pinned or not storage.dead or not storage.replayable
            if kept or storage.locks > mine or output.storage.resident:
                return False
        return True

    def _readmit(self, frame: _Frame, in_place: bool) -> None:
        call = frame.call
        self.clock += call.cost
        self.recompute_ns += call.cost
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
        for value in call.outputs:  # siblings first, then what was asked for
            if value is not frame.wanted and value.storage in self._storages:
                self._classify(value.storage)
        if frame.wanted is not None:
            self._classify(frame.wanted.storage)

    def _take_over(self, output: Value, source: Value) -> Bytes:
        """The memory of `source` now holds `output`. Returns its size."""
        old, new = source.storage, output.storage
        new.held, old.held = old.held, False
        new.pinned, old.pinned = old.pinned, False
        self._vanish(old)
        return old.nbytes

    # -- letting go -----------------------------------------------------------------------------

    def _evict(self, storage: Storage) -> Iterator[Action]:
        self.memory -= storage.nbytes
        self._vanish(storage)
        yield from self._free([storage])
        yield from self._free(self._prune(storage))

    def _free(self, storages: Iterable[Storage]) -> Iterator[Action]:
        for storage in storages:
            self.subject = storage
            yield Free(storage.id)

    def _vanish(self, storage: Storage) -> None:
        storage.resident = False
        for value in storage.values:
            value.defined = False
        self._classify(storage)
        if storage.replayable:
            self._chooser.evicted(storage)

    def _let_go_if_dead(self, storage: Storage) -> Iterator[Action]:
        if storage.dead:
            if self._is_candidate(storage):
                yield from self._evict(storage)
            else:
                yield from self._free(self._prune(storage))

    def _prune(self, storage: Storage) -> list[Storage]:
        """Takes `storage` out of the graph if it will never be needed, and what it alone needed.

        A dead source, or one that is pinned, stays as long as something was made from it. Returns
        those that were resident, for the driver to free.
        """
        freed: list[Storage] = []
        unneeded = [storage]
        while unneeded:
            storage = unneeded.pop()
            if storage.consumers or storage not in self._storages:
                continue
            if not storage.dead:
                if storage.held and not storage.references:
                    self.idle.append(storage)
                continue
            if storage.resident:
                if storage.locks:
                    continue
                self.memory -= storage.nbytes
                self._vanish(storage)
                freed.append(storage)
            del self._storages[storage]
            if storage.replayable:
                self._chooser.forgotten(storage)
            for call in storage.makers:
                if any(made in self._storages for made in call.made):
                    continue  # a sibling may still need the call
                for value in call.inputs:
                    value.storage.consumers.pop(call, None)
                    unneeded.append(value.storage)
            storage.makers.clear()
            storage.values.clear()
        return freed

    def _made_through(self, source: Storage) -> list[Storage]:
        """What cannot be recomputed without `source` unless a resident helps; oldest first."""
        found: dict[Storage, None] = {}
        stack = [source]
        while stack:
            for child in stack.pop().children():
                if child not in found:
                    found[child] = None
                    if not child.resident:
                        stack.append(child)
        return sorted(found, key=lambda made: made.id)

    def _lose_recipe(self, call: Call) -> list[Storage]:
        """`call` can never run again, nor what can only be had through it."""
        freed: list[Storage] = []
        lost = [call]
        while lost:
            call = lost.pop()
            call.replayable = False
            for value in call.inputs:
                value.storage.consumers.pop(call, None)
            for storage in {value.storage: None for value in call.outputs}:
                if not storage.resident:
                    lost.extend(storage.consumers)
                    if storage.replayable:
                        self._chooser.forgotten(storage)
                storage.replayable = False
                self._classify(storage)
                freed += self._prune(storage)
            for value in call.inputs:
                freed += self._prune(value.storage)
        return freed

    # -- candidates -----------------------------------------------------------------------------

    def _lock(self, storage: Storage) -> None:
        storage.locks += 1
        if storage.locks == 1:
            self._classify(storage)

    def _unlock(self, storage: Storage) -> None:
        storage.locks -= 1
        if storage.locks == 0:
            self._classify(storage)

    def _is_candidate(self, storage: Storage) -> bool:
        return (
            storage.resident
            and storage.replayable
            and storage.locks == 0
            and not storage.held
            and not storage.pinned
            and storage.nbytes > 0
        )

    def _classify(self, storage: Storage) -> None:
        """Brings the policy's view of `storage` up to date."""
        candidate = self._is_candidate(storage)
        if candidate and storage.order < 0:
            self._order += 1
            storage.order = self._order
            self._chooser.add(storage)
        elif not candidate and storage.order >= 0:
            storage.order = -1
            self._chooser.remove(storage)

    def check(self) -> None:
        """Asserts every invariant; between events, not during one."""
        resident = [storage for storage in self._storages if storage.resident]
        assert self.memory == sum(storage.nbytes for storage in resident), "memory is miscounted"
        assert self.memory <= self.budget, f"{self.memory} bytes over a budget of {self.budget}"
        assert self.peak <= self.budget, "the peak was over the budget"
        for storage in self._storages:
            assert storage.locks == 0, f"{storage} is still locked"
            assert (storage.order >= 0) == self._is_candidate(storage), (
                f"{storage} is misclassified"
            )
            assert storage.references >= 0, f"{storage}"
            for value in storage.values:
                assert storage.resident or not value.defined, f"{storage} is gone, its value not"
            assert storage.resident or not storage.dead or storage.consumers, f"{storage} leaks"
            if storage.replayable:
                for call in storage.makers:
                    for value in call.inputs:
                        at_home = value.storage in self._storages
                        assert at_home, f"{storage} needs {value.storage}, which is gone"


class _Frame:
    """A call in progress: its inputs still to be had (last first), and those locked for it."""

    __slots__ = ("call", "locked", "pending", "wanted")

    def __init__(self, call: Call, wanted: Value | None) -> None:
        self.call = call
        self.wanted = wanted
        self.pending: list[Value] = []
        self.locked: list[Storage] = []

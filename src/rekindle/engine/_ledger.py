"""Count memory: which storages are resident, which may be evicted, and which leave the graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rekindle._types import Bytes, Nanoseconds
from rekindle.engine._frame import NoRoom
from rekindle.engine._graph import Call, Storage
from rekindle.engine._null_chooser import NullChooser
from rekindle.policies import AdvisedChooser, Chooser, Policy
from rekindle.schedule import Action, Free


class Ledger:
    """Count memory and evict storages chosen by the policy.

    `Exchange` adds swapping, and `Engine` adds recomputation.
    """

    def __init__(
        self,
        budget: Bytes | None,
        policy: Policy,
        recompute_limit: Nanoseconds | None,
    ) -> None:
        self._recompute_limit = recompute_limit
        self.budget: Bytes | float = float("inf") if budget is None else budget
        self.memory: Bytes = 0
        self.unlisted: Bytes = 0  #: part of `memory` in storages outside the graph
        self.peak: Bytes = 0
        self.clock: Nanoseconds = 0
        self.compute_ns: Nanoseconds = 0  #: time (ns) that first executions of calls took
        self.recompute_ns: Nanoseconds = 0  #: time (ns) that recomputations took
        #: the storage or the call that the action just yielded is about
        self.subject: Storage | Call | None = None
        #: User-held storages from which nothing in the graph is computed. In the native core, the
        #: driver then releases its own references to them.
        self.idle: list[Storage] = []
        # storages that lost their recipe since `Engine.forget` last looked
        self._unrecomputable: list[Storage] = []
        self._chooser: Chooser = policy.bind()
        self.advice = self._chooser if isinstance(self._chooser, AdvisedChooser) else None
        if not self._chooser.remembers:
            self._chooser = NullChooser(self._chooser)
        #: user-held storages that may be evicted only as a last resort
        self.reserve: dict[Storage, None] = {}
        #: Resident storages at which later recomputations start. They are evicted only if no other
        #: storage can be evicted.
        self.checkpoints: dict[Storage, None] = {}
        # True once a storage was evicted to which the program or autograd still referred.
        self._evicted_wanted = False
        # True while a recomputation is attempted without evicting checkpoints.
        self._spares_checkpoints = False
        self._order = 0  # number of times so far that a storage became a candidate for eviction
        # All storages that are resident or may be recomputed.
        self._storages: dict[Storage, None] = {}

    @property
    def storages(self) -> list[Storage]:
        """A snapshot of all storages that are resident or may be recomputed.

        It is a copy, because storages may leave the graph while a caller iterates.
        """
        return list(self._storages)

    def make_room(self, nbytes: Bytes, call: Call | None = None) -> Iterator[Action]:
        """Evict until `nbytes` more fit into the budget.

        Raises:
            NoRoom: Nothing evictable is left, and `nbytes` do not fit.
        """
        yield from self.shrink(self.budget - nbytes)
        if self.memory + nbytes > self.budget and self.reserve:
            self._give_up_reserve()
            yield from self.shrink(self.budget - nbytes)
        if self.memory + nbytes > self.budget and not self._spares_checkpoints:
            self._give_up_checkpoints()
            yield from self.shrink(self.budget - nbytes)
        if self.memory + nbytes > self.budget:
            raise NoRoom(nbytes, self.memory, int(self.budget), call)

    def shrink(self, nbytes: Bytes | float) -> Iterator[Action]:
        """Evict until at most `nbytes` are in use or nothing evictable is left."""
        while self.memory > nbytes:
            victim = self._choose()
            if victim is None:
                return
            yield from self._evict(victim)

    def evict(self, storages: Iterable[Storage]) -> Iterator[Action]:
        """Evict each of `storages` that is a candidate.

        Drivers that need a particular address range to be free call this method. They may do so
        between any two actions.
        """
        for storage in storages:
            if storage.order >= 0:
                yield from self._evict(storage)

    def loss(self, storage: Storage) -> float | None:
        """Return what it costs to evict `storage` now, by the policy's estimate.

        The cost is not divided by the size of `storage`. Its unit depends on the policy.

        Returns:
            The cost, or None if `storage` may not be evicted.
        """
        if storage.order < 0:
            return None
        self.listen()
        return self._chooser.loss(storage, self.clock)

    def _give_up_reserve(self) -> None:
        """Make the storages in `reserve`, the last resort, ordinary candidates for eviction."""
        reserve, self.reserve = self.reserve, {}
        for storage in reserve:
            self._classify(storage)

    def _keep_checkpoint(self, storages: Iterable[Storage]) -> None:
        """Keep those of `storages` that are resident as checkpoints."""
        for storage in storages:
            if storage.resident and storage in self._storages:
                self.checkpoints[storage] = None
                self._classify(storage)

    def _give_up_checkpoints(self) -> None:
        """Make the checkpoints ordinary candidates for eviction."""
        checkpoints, self.checkpoints = self.checkpoints, {}
        for storage in checkpoints:
            self._classify(storage)

    def _free_bytes(self) -> Bytes:
        """Return the bytes of the budget that are free or occupied by candidates for eviction."""
        evictable = sum(s.nbytes for s in self._storages if self.is_candidate(s))
        return int(min(self.budget, 2**63 - 1)) - self.memory + evictable

    def _choose(self) -> Storage | None:
        """Return the candidate that the policy would evict next, or None if there is none."""
        self.listen()
        victim = self._chooser.choose(self.clock)
        assert victim is None or isinstance(victim, Storage)
        return victim

    def listen(self) -> None:
        """Report all events to the policy from now on.

        Without this call the policy gets no events before the first eviction, to save time.
        """
        if isinstance(self._chooser, NullChooser):
            self._chooser = self._chooser.activate(self._storages)

    # -- evicting -------------------------------------------------------------------------------

    def _evict(self, storage: Storage) -> Iterator[Action]:
        """Evict `storage`, and remove storages from the graph that nothing needs any more."""
        self.memory -= storage.nbytes
        self._vanish(storage)
        self._chooser.evicted(storage)
        yield from self._free([storage])
        yield from self._free(self._prune(storage))

    def _free(self, storages: Iterable[Storage]) -> Iterator[Action]:
        """Yield a `Free` action for each of `storages`."""
        for storage in storages:
            self.subject = storage
            yield Free(storage.id)

    def _vanish(self, storage: Storage) -> None:
        """Mark `storage` and all values in it as not resident."""
        storage.resident = False
        self._evicted_wanted |= not storage.dead
        self.checkpoints.pop(storage, None)
        for value in storage.values:
            value.defined = False
        if storage.order >= 0:
            self._classify(storage)

    def _evict_or_remove(self, storage: Storage, *, may_stay: bool = True) -> Iterable[Action]:
        """Evict `storage` if it is dead and only recomputations may need it.

        Else remove it, if nothing needs it.

        Args:
            storage: The storage.
            may_stay: Let a dead storage stay in memory while an evicted value that the program can
                reach is recomputed from it. The policy may evict it meanwhile, like any candidate.
        """
        kept = storage.locks or storage.pinned or storage in self.checkpoints
        evictable = storage.dead and storage.consumers and storage.resident and not kept
        if evictable and storage.restorable:
            return () if may_stay and storage.feeds_evicted else self._evict(storage)
        freed = self._prune(storage)
        return self._free(freed) if freed else ()

    def _done_with(self, storage: Storage) -> Iterable[Action]:
        """Evict or free `storage`, which a recomputed call has read, if nothing needs it now."""
        return self._evict_or_remove(storage)

    def _prune(self, storage: Storage) -> list[Storage]:
        """Remove `storage` from the graph if nothing needs it, and the inputs that only it needed.

        A storage is needed while the program or autograd refers to it, and while values computed
        from it are in the graph.

        Returns:
            The removed storages that were resident, for the driver to free.
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
            if storage.locks and not self._abandon_copy(storage):
                continue
            if storage.resident:
                freed.append(storage)
            unneeded += self._leave_graph(storage)
        return freed

    def _leave_graph(self, storage: Storage) -> list[Storage]:
        """Remove `storage` from the graph. Return its inputs, which nothing may need any more."""
        del self._storages[storage]
        self.reserve.pop(storage, None)
        if storage.resident:
            self.memory -= storage.nbytes
            self._vanish(storage)
        elif storage.restorable:
            self._chooser.forgotten(storage)
        self._left(storage)
        less_needed: list[Storage] = []
        for call in storage.makers:
            if len(call.made) > 1 and any(made in self._storages for made in call.made):
                continue  # the call may still have to recompute another of its outputs
            for value in call.inputs:
                value.storage.consumers.pop(call, None)
                less_needed.append(value.storage)
            call.dissolve()
        storage.makers.clear()
        storage.values.clear()
        return less_needed

    def _lose_recipe(self, call: Call) -> list[Storage]:
        """Make `call` unrecomputable, with every evicted value whose recomputation needs `call`.

        Outputs that are resident or on the host stay, as sources (storages without a recipe).

        Returns:
            The resident storages that left the graph, for the driver to free.
        """
        freed: list[Storage] = []
        lost = [call]
        while lost:
            call = lost.pop()
            for storage in call.disown():
                if storage.resident or storage.on_host:
                    self._unrecomputable.append(storage)
                else:
                    lost.extend(storage.consumers)
                    if storage.replayable:
                        self._chooser.forgotten(storage)
                storage.replayable = False
                self._renew(storage)
                freed += self._prune(storage)
            for value in call.inputs:
                freed += self._prune(value.storage)
        return freed

    def _touch(self, storage: Storage) -> None:
        """Set the last access of `storage` to the engine's clock."""
        storage.last_access = self.clock
        # A storage that a call reads is still a candidate if one of its views is missing, or if
        # inputs are locked late.
        if storage.order >= 0:
            self._chooser.touched(storage)

    # -- candidates -----------------------------------------------------------------------------

    def _lock(self, storage: Storage) -> None:
        """Count one more reader of `storage`. A storage with readers is not evicted."""
        storage.locks += 1
        if storage.locks == 1:
            self._classify(storage)

    def set_evictable_while_held(
        self, storage: Storage, evictable: bool, *, last: bool = False
    ) -> None:
        """Set whether `storage` may be evicted while the program holds it.

        Args:
            storage: The storage.
            evictable: True if it may be evicted while held.
            last: Evict it only if there is no other candidate.
        """
        storage.evictable_while_held = evictable
        if last:
            self.reserve[storage] = None
        self._classify(storage)

    def lock(self, storage: Storage) -> None:
        """Keep the resident `storage` in memory until `unlock`, because the program reads it."""
        self._touch(storage)
        self._lock(storage)

    def unlock(self, storage: Storage) -> Iterable[Action]:
        """Undo one `lock` of `storage`.

        The storage is evicted or freed if it has no other lock and the program cannot reach it.
        """
        self._unlock(storage)
        return self._evict_or_remove(storage) if storage.dead and not storage.locks else ()

    def _hold(self, storage: Storage) -> None:
        """Mark `storage` as held by variables of the program."""
        storage.held = True
        if storage.order >= 0:
            self._classify(storage)

    def _unlock(self, storage: Storage) -> None:
        """Count one reader of `storage` less. Without readers it may be evicted again."""
        storage.locks -= 1
        if storage.locks == 0:
            self._classify(storage)

    def is_candidate(self, storage: Storage) -> bool:
        """Return True if the policy may choose `storage` for eviction."""
        return (
            storage.resident
            and (storage.replayable or self._swappable(storage))
            and storage.locks == 0
            and storage not in self.checkpoints
            and (not storage.held or (storage.evictable_while_held and storage not in self.reserve))
            and not storage.pinned
            and storage.nbytes > 0
        )

    def _swappable(self, storage: Storage) -> bool:
        """Return True if `storage`, which has no recipe, can be evicted to a copy on the host."""
        return False

    def _classify(self, storage: Storage) -> None:
        """Add `storage` to the policy's candidates or remove it, as its state requires."""
        candidate = self.is_candidate(storage)
        if candidate and storage.order < 0:
            self._order += 1
            storage.order = self._order
            self._chooser.add(storage)
        elif not candidate and storage.order >= 0:
            storage.order = -1
            self._chooser.remove(storage)

    # -- hooks for `Exchange` ----------------------------------------------------------------------

    def _abandon_copy(self, storage: Storage) -> bool:
        """Remove the locks that transfers to and from the host hold on `storage`.

        Returns:
            True if no other lock is left.
        """
        return False

    def _left(self, storage: Storage) -> None:
        """Do nothing. Subclasses override this method; it runs after `storage` left the graph."""

    def _renew(self, storage: Storage) -> None:
        """Update whether the policy may choose `storage`, which has lost its recipe."""
        self._classify(storage)

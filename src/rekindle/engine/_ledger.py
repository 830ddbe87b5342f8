"""What is in memory, what may be let go, and what leaves the graph for good."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rekindle._types import Bytes, Nanoseconds
from rekindle.engine._asleep import Asleep
from rekindle.engine._frame import NoRoom
from rekindle.engine._graph import Call, Storage
from rekindle.engine._rules import RIGHT, Rules
from rekindle.policies import AdvisedChooser, Chooser, Policy
from rekindle.schedule import Action, Free


class Ledger:
    """Counts memory and evicts. An `Exchange` swaps as well, and the `Engine` brings back."""

    def __init__(
        self,
        budget: Bytes | None,
        policy: Policy,
        rules: Rules = RIGHT,
    ) -> None:
        self.rules = rules
        self.budget: Bytes | float = float("inf") if budget is None else budget
        self.memory: Bytes = 0
        self.unlisted: Bytes = 0  #: of `memory`: what is counted, and in no storage of the graph
        self.peak: Bytes = 0
        self.clock: Nanoseconds = 0
        self.compute_ns: Nanoseconds = 0  #: first executions
        self.recompute_ns: Nanoseconds = 0  #: all others
        self.subject: Storage | Call | None = None  #: what the action just yielded is about
        self.idle: list[Storage] = []  #: held, but nothing that was made from them remains
        self._bereft: list[Storage] = []  # in memory or on the host, and their recipe is lost
        self._chooser: Chooser = policy.bind()
        self.advice = self._chooser if isinstance(self._chooser, AdvisedChooser) else None
        if not (self._chooser.remembers or rules.quirks):
            self._chooser = Asleep(self._chooser)
        self.reserve: dict[Storage, None] = {}  #: while held, let go when nothing else is left
        self._order = 0
        self._storages: dict[Storage, None] = {}  # all that are in the graph or resident

    @property
    def storages(self) -> list[Storage]:
        """Every storage that is resident or may be recomputed, as of now: some may go while one
        looks at the others."""
        return list(self._storages)

    def make_room(self, nbytes: Bytes, call: Call | None = None) -> Iterator[Action]:
        """Lets go until `nbytes` more fit. Raises `NoRoom` when nothing is left to let go."""
        yield from self.shrink(self.budget - nbytes)
        if self.memory + nbytes > self.budget and self.reserve:
            self._give_up_reserve()
            yield from self.shrink(self.budget - nbytes)
        if self.memory + nbytes > self.budget:
            raise NoRoom(nbytes, self.memory, int(self.budget), call)

    def has_room(self, nbytes: Bytes) -> bool:
        """Whether `nbytes` more would fit if all that may be let go went; nothing does."""
        least = self.memory + nbytes - self.budget
        for storage in self._storages if least > 0 else ():
            if self.is_candidate(storage):
                least -= storage.nbytes
                if least <= 0:
                    break
        return least <= 0

    def shrink(self, nbytes: Bytes | float) -> Iterator[Action]:
        """Lets go until no more than `nbytes` are in use, or nothing is left to let go."""
        while self.memory > nbytes:
            victim = self._choose()
            if victim is None:
                return
            yield from self._evict(victim)

    def evict(self, storages: Iterable[Storage]) -> Iterator[Action]:
        """Lets go of just these, for a driver to whom it matters where memory is free.

        Between any two actions. What may not be let go, or went with one before it, is left alone.
        """
        for storage in storages:
            if storage.order >= 0:
                yield from self._evict(storage)

    def loss(self, storage: Storage) -> float | None:
        """What letting go of `storage` would cost now, whatever its size, in the policy's own
        terms; None: it has to stay."""
        if storage.order < 0:
            return None
        self.listen()
        return self._chooser.loss(storage, self.clock)

    def _give_up_reserve(self) -> None:
        """From now on it may be let go like everything else."""
        reserve, self.reserve = self.reserve, {}
        for storage in reserve:
            self._classify(storage)

    def _choose(self) -> Storage | None:
        """What the policy lets go next."""
        self.listen()
        victim = self._chooser.choose(self.clock)
        assert victim is None or isinstance(victim, Storage)
        return victim

    def listen(self) -> None:
        """From now on the policy hears what becomes a candidate, though nothing has to go yet."""
        if isinstance(self._chooser, Asleep):
            self._chooser = self._chooser.wake(self._storages)

    # -- letting go -----------------------------------------------------------------------------

    def _evict(self, storage: Storage) -> Iterator[Action]:
        self.memory -= storage.nbytes
        self._vanish(storage)
        self._chooser.evicted(storage)
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
        if storage.order >= 0:
            self._classify(storage)

    def _let_go(self, storage: Storage) -> Iterable[Action]:
        """`storage` is dead: evicted if it may still be needed, else out of the graph."""
        useful = storage.consumers or self.rules.quirks
        free = storage.resident and storage.locks == 0 and not storage.pinned
        if useful and free and storage.restorable and self.rules.dead == "evict":
            return self._evict(storage)
        freed = self._prune(storage)
        return self._free(freed) if freed else ()

    def _prune(self, storage: Storage) -> list[Storage]:
        """Takes `storage` out of the graph if it will never be needed, and what it alone needed.

        A dead source, or one that is pinned, stays as long as something was made from it. Returns
        those that were resident, for the driver to free.
        """
        if self.rules.dead == "banish":
            return self._banish(storage)
        freed: list[Storage] = []
        if self.rules.quirks:
            return freed  # the authors' graph only grows
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
        """Returns what one thing less needs."""
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
                continue  # a sibling may still need the call
            for value in call.inputs:
                value.storage.consumers.pop(call, None)
                less_needed.append(value.storage)
            call.dissolve()
        storage.makers.clear()
        storage.values.clear()
        return less_needed

    def _banish(self, storage: Storage) -> list[Storage]:
        """Frees `storage` for good if it is dead and nothing evicted needs it; then what it needed.

        What was made from it loses its recipe.
        """
        freed: list[Storage] = []
        unneeded = [storage]
        while unneeded:
            storage = unneeded.pop()
            if not storage.dead or storage.locks or storage not in self._storages:
                continue
            if any(not v.defined for call in storage.consumers for v in call.living_outputs()):
                continue
            for call in list(storage.consumers):
                for child in call.disown():
                    child.replayable = False
                    self._classify(child)
            if storage.resident:
                freed.append(storage)
            parents = self._leave_graph(storage)
            if not self.rules.quirks:  # the authors forget to look at those
                unneeded += parents
        return freed

    def _lose_recipe(self, call: Call) -> list[Storage]:
        """`call` can never run again, nor what can only be had through it.

        What it made and is there is bereft: a source from now on.
        """
        freed: list[Storage] = []
        lost = [call]
        while lost:
            call = lost.pop()
            for storage in call.disown():
                if storage.resident or storage.on_host:
                    self._bereft.append(storage)
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

    def take_bereft(self) -> list[Storage]:
        """What became a source since this was last asked, and others are made from."""
        if not self._bereft:
            return []
        bereft, self._bereft = self._bereft, []
        return [storage for storage in bereft if storage.consumers and storage.resident]

    def _touch(self, storage: Storage) -> None:
        if self.rules.dead == "banish" and self.rules.quirks and not storage.references:
            return
        storage.last_access = self.clock
        if storage.order >= 0:  # it may stay a candidate: its view is gone, or locks come late
            self._chooser.touched(storage)

    # -- candidates -----------------------------------------------------------------------------

    def _lock(self, storage: Storage) -> None:
        storage.locks += 1
        if storage.locks == 1:
            self._classify(storage)

    def let_return(self, storage: Storage, returns: bool, *, last: bool = False) -> None:
        """Whether `storage` may be let go while the program holds it; `last`: if nothing else is
        left to let go."""
        storage.returns = returns
        if last:
            self.reserve[storage] = None
        self._classify(storage)

    def lock(self, storage: Storage) -> None:
        """The program reads `storage`, which is resident: it stays until `unlock`."""
        self._touch(storage)
        self._lock(storage)

    def unlock(self, storage: Storage) -> Iterable[Action]:
        """The inverse of `lock`; what died meanwhile is let go."""
        self._unlock(storage)
        return self._let_go(storage) if storage.dead and not storage.locks else ()

    def _hold(self, storage: Storage) -> None:
        storage.held = True
        if storage.order >= 0:
            self._classify(storage)

    def _unlock(self, storage: Storage) -> None:
        storage.locks -= 1
        if storage.locks == 0:
            self._classify(storage)

    def is_candidate(self, storage: Storage) -> bool:
        """Whether the policy may choose `storage`."""
        return (
            storage.resident
            and (storage.replayable or self._swappable(storage))
            and storage.locks == 0
            and (not storage.held or (storage.returns and storage not in self.reserve))
            and not storage.pinned
            and (storage.nbytes > 0 or self.rules.quirks)  # the authors' let go nothing, too
        )

    def _swappable(self, storage: Storage) -> bool:
        """Whether `storage`, which has no recipe, can be had again."""
        return False

    def _classify(self, storage: Storage) -> None:
        """Brings the policy's view of `storage` up to date."""
        candidate = self.is_candidate(storage)
        if candidate and storage.order < 0:
            self._order += 1
            storage.order = self._order
            self._chooser.add(storage)
        elif not candidate and storage.order >= 0:
            storage.order = -1
            self._chooser.remove(storage)

    # -- what an `Exchange` adds ----------------------------------------------------------------

    def _abandon_copy(self, storage: Storage) -> bool:
        """Unlocks `storage` if a copy in progress locks it. Returns whether nothing else does."""
        return False

    def _left(self, storage: Storage) -> None:
        """`storage` is out of the graph."""

    def _renew(self, storage: Storage) -> None:
        """`storage` lost its recipe, and maybe with it its place among the candidates."""
        self._classify(storage)

"""What is in memory, what may be let go, and what leaves the graph for good."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rekindle._types import Bytes, Nanoseconds
from rekindle.engine._asleep import Asleep
from rekindle.engine._check import check
from rekindle.engine._frame import NoRoom
from rekindle.engine._graph import Call, Storage
from rekindle.engine._host import HostMemory
from rekindle.engine._rules import RIGHT, Rules
from rekindle.policies import AdvisedChooser, Chooser, Policy, Swap
from rekindle.schedule import Action, Discard, Free, SwapOut


class Ledger:
    """Counts memory and lets go of it. `Engine` is the other half, which brings back."""

    def __init__(
        self,
        budget: Bytes | None,
        policy: Policy,
        rules: Rules = RIGHT,
        swap: Swap | None = None,
    ) -> None:
        """With `swap` what has to go may go to the host; needs the default `rules`."""
        assert swap is None or (rules.dead == "evict" and not rules.quirks), "swap needs RIGHT"
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
        self.host = None if swap is None else HostMemory(swap)
        self.discarded: list[Storage] = []  #: nobody needs their copies on the host any more
        self.reserve: dict[Storage, None] = {}  #: while held, let go when nothing else is left
        self._order = 0
        self._storages: dict[Storage, None] = {}  # all that are in the graph or resident

    @property
    def storages(self) -> Iterator[Storage]:
        """Every storage that is resident or may be recomputed."""
        return iter(self._storages)

    def check(self) -> None:
        """Asserts every invariant; between events, not during one."""
        check(self)

    def make_room(self, nbytes: Bytes, call: Call | None = None) -> Iterator[Action]:
        """Lets go until `nbytes` more fit. Raises `NoRoom` when nothing is left to let go."""
        yield from self.shrink(self.budget - nbytes)
        if self.memory + nbytes > self.budget and self.reserve:
            self._give_up_reserve()
            yield from self.shrink(self.budget - nbytes)
        if self.memory + nbytes > self.budget:
            raise NoRoom(nbytes, self.memory, int(self.budget), call)

    def shrink(self, nbytes: Bytes | float) -> Iterator[Action]:
        """Lets go until no more than `nbytes` are in use, or nothing is left to let go."""
        while self.memory > nbytes:
            victim, host = self._choose(), self.host
            if host is not None and victim is not None:
                yield from self._send(victim, host)
            elif host is not None and (host.saving or host.coming):  # all the rest is in use
                yield from self._land(host, all_of_them=True)
                yield from self._arrived(host, all_of_them=True)
            elif victim is not None:
                yield from self._evict(victim)
            else:
                return

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

    # -- swapping out ---------------------------------------------------------------------------

    def _send(self, victim: Storage, host: HostMemory) -> Iterator[Action]:
        """Lets go of `victim` by the cheaper way, or by the only one that there is."""
        if not victim.on_host and self._pays(victim, host, ahead=False):
            yield from self._make_host_room(victim.nbytes, host)
            if host.lacks(victim.nbytes) <= 0:
                yield from self._swap_out(victim, host)
                return
        if victim.restorable:
            yield from self._evict(victim)
        else:
            self._refuse(victim, host)

    def _pays(self, victim: Storage, host: HostMemory, *, ahead: bool) -> bool:
        """Whether swapping `victim` out is better than computing it again."""
        if host.only or not victim.replayable:
            return True
        waiting = host.waiting(victim, self.clock, ahead=ahead)
        return waiting < self._chooser.recompute_ns(victim)

    def _make_host_room(self, nbytes: Bytes, host: HostMemory) -> Iterator[Action]:
        """Discards what is on the host in vain, if then `nbytes` more fit there."""
        yield from self.discards()
        for storage in host.spare(nbytes) or ():
            host.drop(storage)
            self._renew(storage)
            self.subject = storage
            yield Discard(storage.id)

    def _swap_out(self, storage: Storage, host: HostMemory) -> Iterator[Action]:
        self.memory -= storage.nbytes
        self._vanish(storage)
        host.take(storage)
        host.ways.send(storage.nbytes, self.clock)
        self._reprice(storage)
        self._chooser.evicted(storage)
        self.subject = storage
        yield SwapOut(storage.id)

    def swap_out_failed(self, storage: Storage) -> bool:
        """The driver could not do the `SwapOut` of `storage` that it just got (a full disk).

        Returns whether its memory must stay: it cannot be computed again, or was not to go yet. As
        much as is on the host now is all that may be there from now on.
        """
        host = self.host
        assert host is not None
        ahead = storage.resident
        if ahead:
            del host.saving[storage]
            host.failed(storage)
            self._reprice(storage)
            self._unlock(storage)
            return True
        self._chooser.returned(storage)
        host.failed(storage)
        self._reprice(storage)
        if storage.replayable:
            self._chooser.evicted(storage)
            return False
        self.memory += storage.nbytes
        self._appear(storage)
        self._refuse(storage, host)
        return True

    def _refuse(self, storage: Storage, host: HostMemory) -> None:
        """`storage` can only be swapped, and cannot be until there is more room on the host."""
        host.refused[storage] = None
        self._classify(storage)

    def ahead(self) -> Iterator[Action]:
        """Copies what will have to go next to the host while the way there is idle.

        For drivers, after an operator: what is let go later then need not wait for its copy. While
        less than half of the budget is in use nothing happens: nothing may ever have to go.
        """
        host = self.host
        if host is None:
            return
        yield from self._land(host)
        while 2 * self.memory > self.budget and host.ways.idle_out(self.clock):
            victim = self._worthiest(host)
            if victim is None:
                break
            yield from self._make_host_room(victim.nbytes, host)
            if host.lacks(victim.nbytes) > 0:
                break
            self._lock(victim)
            host.take(victim)
            host.saving[victim] = host.ways.send(victim.nbytes, self.clock)
            self._reprice(victim)
            self.subject = victim
            yield SwapOut(victim.id, keep=True)
        host.ways.asked(self.clock)
        host.turn = self.clock

    def _worthiest(self, host: HostMemory) -> Storage | None:
        """What a copy on the host saves most of, for its bytes: what is dearest to compute."""
        candidates = [
            storage
            for storage in self._storages
            if storage.order >= 0 and host.worth_copying(storage, self.clock)
        ]
        if host.only:
            return min(candidates, key=lambda storage: storage.last_access, default=None)
        return max(candidates, key=lambda storage: storage.cost / storage.nbytes, default=None)

    def _land(self, host: HostMemory, *, all_of_them: bool = False) -> Iterator[Action]:
        """What copies were made of ahead may be let go once these have ended."""
        landed = [s for s, end in host.saving.items() if all_of_them or end <= self.clock]
        for storage in landed:
            del host.saving[storage]
            self._unlock(storage)
            if storage.dead:
                yield from self._let_go(storage)

    def _arrived(self, host: HostMemory, *, all_of_them: bool = False) -> Iterator[Action]:
        """What came ahead and was used may be let go like everything else."""
        coming = host.coming.items()
        used = [s for s, since in coming if all_of_them or s.last_access > since or s.dead]
        for storage in used:
            del host.coming[storage]
            self._unlock(storage)
            if storage.dead:
                yield from self._let_go(storage)

    def _abandon_copy(self, storage: Storage) -> bool:
        """Unlocks `storage` if a copy in progress locks it. Returns whether nothing else does."""
        host = self.host
        if host is None:
            return False
        for ahead in (host.saving, host.coming):
            if ahead.pop(storage, None) is not None:
                self._unlock(storage)
        return storage.locks == 0

    def discards(self) -> Iterator[Action]:
        """Lets go of `discarded`, for drivers; before a copy needs the room it happens anyway."""
        if not self.discarded:
            return
        host = self.host
        assert host is not None
        while self.discarded:
            storage = self.discarded.pop()
            host.drop(storage)
            self.subject = storage
            yield Discard(storage.id)
        refused, host.refused = host.refused, {}
        for storage in refused:
            self._classify(storage)

    def _reprice(self, storage: Storage) -> None:
        """The cost of `storage` is that of its copy if there is one, or nothing else."""
        if storage.on_host or not storage.replayable:
            assert self.host is not None
            storage.cost = self.host.cost(storage)
        else:
            storage.cost = storage.recipe_ns
        if storage.resident:
            self._chooser.repriced(storage)

    def _renew(self, storage: Storage) -> None:
        """Its cost may have fallen: the policy sees it anew."""
        self._reprice(storage)
        if storage.order >= 0:
            storage.order = -1
            self._chooser.remove(storage)
        self._classify(storage)

    def _appear(self, storage: Storage) -> None:
        """All that `storage` held is in memory again."""
        storage.resident = True
        for value in storage.values:
            value.defined = value.call.ran

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
        if self.host is not None:
            self.host.refused.pop(storage, None)
            if storage.on_host:
                self.discarded.append(storage)
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
                if self.host is not None:
                    self._renew(storage)
                self._classify(storage)
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
        return self.host is not None and (storage.on_host or storage not in self.host.refused)

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

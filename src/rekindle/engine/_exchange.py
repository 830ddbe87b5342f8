"""What may go to the host, and when that is better than computing it again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rekindle._types import Bytes
from rekindle.engine._check import check
from rekindle.engine._graph import Storage
from rekindle.engine._host import HostMemory
from rekindle.engine._ledger import Ledger
from rekindle.engine._rules import RIGHT, Rules
from rekindle.policies import Policy, Swap
from rekindle.schedule import Action, Discard, SwapOut


class Exchange(Ledger):
    """A ledger that may send to the host what has to go, where there is one."""

    def __init__(
        self,
        budget: Bytes | None,
        policy: Policy,
        rules: Rules = RIGHT,
        swap: Swap | None = None,
    ) -> None:
        """With `swap` what has to go may go to the host; needs the default `rules`."""
        assert swap is None or (rules.dead == "evict" and not rules.quirks), "swap needs RIGHT"
        super().__init__(budget, policy, rules)
        self.host = None if swap is None else HostMemory(swap)
        self.discarded: list[Storage] = []  #: nobody needs their copies on the host any more

    def check(self) -> None:
        """Asserts every invariant; between events, not during one."""
        check(self)

    def shrink(self, nbytes: Bytes | float) -> Iterator[Action]:
        host = self.host
        return super().shrink(nbytes) if host is None else self._send_until(nbytes, host)

    def evict(self, storages: Iterable[Storage]) -> Iterator[Action]:
        host = self.host
        return super().evict(storages) if host is None else self._send_these(storages, host)

    def _send_these(self, storages: Iterable[Storage], host: HostMemory) -> Iterator[Action]:
        for storage in storages:
            if storage.order >= 0:
                yield from self._send(storage, host)

    def _send_until(self, nbytes: Bytes | float, host: HostMemory) -> Iterator[Action]:
        while self.memory > nbytes:
            victim = self._choose()
            if victim is not None:
                yield from self._send(victim, host)
            elif host.saving or host.coming:  # all the rest is in use
                yield from self._land(host, all_of_them=True)
                yield from self._arrived(host, all_of_them=True)
            else:
                return

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

    def _appear(self, storage: Storage) -> None:
        """All that `storage` held is in memory again."""
        storage.resident = True
        for value in storage.values:
            value.defined = value.call.ran

    # -- asked by the ledger --------------------------------------------------------------------

    def _abandon_copy(self, storage: Storage) -> bool:
        host = self.host
        if host is None:
            return False
        for ahead in (host.saving, host.coming):
            if ahead.pop(storage, None) is not None:
                self._unlock(storage)
        return storage.locks == 0

    def _left(self, storage: Storage) -> None:
        if self.host is not None:
            self.host.refused.pop(storage, None)
            if storage.on_host:
                self.discarded.append(storage)

    def _swappable(self, storage: Storage) -> bool:
        return self.host is not None and (storage.on_host or storage not in self.host.refused)

    def _renew(self, storage: Storage) -> None:
        """Its cost may have fallen: the policy sees it anew."""
        if self.host is not None:
            self._reprice(storage)
            if storage.order >= 0:
                storage.order = -1
                self._chooser.remove(storage)
        self._classify(storage)

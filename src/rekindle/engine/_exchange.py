"""Swapping: decide what to copy to the host, and when that is cheaper than recomputing.

Swapping is optional. Without `swap=` an `Exchange` only evicts, as its base class `Ledger` does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from rekindle._types import Bytes, Nanoseconds
from rekindle.engine._graph import Storage
from rekindle.engine._host import HostMemory
from rekindle.engine._ledger import Ledger
from rekindle.policies import Policy, Swap
from rekindle.schedule import Action, Discard, SwapOut


class Exchange(Ledger):
    """A ledger that can also swap storages out to the host, if there is one."""

    def __init__(
        self,
        budget: Bytes | None,
        policy: Policy,
        swap: Swap | None = None,
        recompute_limit: Nanoseconds | None = None,
    ) -> None:
        """Set up memory on the device, and on the host if `swap` is given.

        Args:
            budget: Bytes on the device. None: no limit.
            policy: Scores the candidates for eviction.
            swap: Host memory and bandwidth. None: never swap.
            recompute_limit: Raise `Thrashed` once recomputation took longer than this (ns). None:
                no limit.
        """
        super().__init__(budget, policy, recompute_limit)
        self.host = None if swap is None else HostMemory(swap)
        #: Storages that nothing refers to, whose copy on the host is not discarded yet.
        self.discarded: list[Storage] = []
        #: True while a plan decides what to copy: the engine copies only values without a recipe.
        self.planned = False

    def check(self) -> None:
        """Assert every invariant of the engine. Call this between two events, not during one.

        Raises:
            AssertionError: An invariant does not hold.
        """
        storages = dict.fromkeys(self.storages)
        resident = sum(storage.nbytes for storage in storages if storage.resident)
        assert self.memory == resident + self.unlisted, "memory is miscounted"
        assert self.memory <= self.budget, f"{self.memory} bytes over {self.budget}"
        copied = {storage for storage in storages if storage.on_host}
        host, ahead = self.host, Counter[Storage]()
        if host is not None:
            ahead = Counter([*host.saving, *host.coming])
            assert {*host.copies} == copied | {*self.discarded}, "host copies are miscounted"
            assert host.nbytes == sum(storage.nbytes for storage in host.copies)
            assert host.lacks(0) <= 0, "the host's limit is passed"
        else:
            assert not copied, "storages have host copies, but swapping is off"
        assert all(each.resident for each in self.checkpoints), "a checkpoint is not in memory"
        for storage in storages:
            assert storage.locks == ahead[storage], f"{storage} is still locked"
            assert (storage.order >= 0) == self.is_candidate(storage), f"{storage} is misclassified"
            assert storage.references >= 0, f"{storage}"
            for value in storage.values:
                assert storage.resident or not value.defined, f"{storage}: evicted, value defined"
            needed = storage.resident or storage.consumers or not storage.dead
            assert needed, f"{storage} leaks"
            if storage.replayable:
                for parent in storage.parents():
                    assert parent in storages, f"{storage} needs {parent}, which is gone"

    def shrink(self, nbytes: Bytes | float) -> Iterator[Action]:
        host = self.host
        return super().shrink(nbytes) if host is None else self._send_until(nbytes, host)

    def evict(self, storages: Iterable[Storage]) -> Iterator[Action]:
        host = self.host
        return super().evict(storages) if host is None else self._send_these(storages, host)

    def step(self) -> None:
        """Note that a step of the program has ended, so that the next one may be alike."""
        if self.host is not None:
            self.host.order.step()

    def _choose(self) -> Storage | None:
        """Let the policy choose. If it chooses a source, take the one that is used last."""
        victim, host = super()._choose(), self.host
        if victim is None or victim.replayable or host is None:
            return victim
        distance = host.order.distance(victim)
        return victim if distance is None else self._furthest(distance, host) or victim

    def _furthest(self, than: int, host: HostMemory) -> Storage | None:
        """Return the source among the candidates that is used last, after `than` calls, or None."""
        return host.order.furthest((each for each in self._storages if each.order >= 0), than)

    def _ran(self) -> None:
        """Count a call of the program."""
        if self.host is not None:
            self.host.order.place += 1

    def _touch(self, storage: Storage) -> None:
        super()._touch(storage)
        if not storage.replayable:
            self._used(storage)

    def _used(self, storage: Storage) -> None:
        """Note that the program makes or uses the source `storage` now."""
        if self.host is not None:
            self.host.order.used(storage)

    def _send_these(self, storages: Iterable[Storage], host: HostMemory) -> Iterator[Action]:
        """Evict or swap out each of `storages` that is a candidate."""
        for storage in storages:
            if storage.order >= 0:
                yield from self._send(storage, host)

    def _send_until(self, nbytes: Bytes | float, host: HostMemory) -> Iterator[Action]:
        """Evict or swap out until at most `nbytes` are in use or nothing evictable is left."""
        while self.memory > nbytes:
            victim = self._choose()
            if victim is not None:
                yield from self._send(victim, host)
            elif host.saving or host.coming:
                # Every storage that is not in transfer is in use. Wait for the transfers to or from
                # the host: a storage is locked until its transfer ends.
                yield from self._unlock_saved(host, all_of_them=True)
                yield from self._unlock_prefetched(host, all_of_them=True)
            else:
                return

    def _send(self, victim: Storage, host: HostMemory) -> Iterator[Action]:
        """Evict or swap out `victim`: the cheaper of the two, or the one that is possible."""
        if victim in host.outdated:
            yield from self._discard(victim, host)
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
        """Return True if swapping `victim` out takes less time than recomputing it later."""
        if host.only or not victim.replayable:
            return True
        if self.planned:
            return False
        waiting = host.waiting(victim, self.clock, ahead=ahead)
        return waiting < self._chooser.recompute_ns(victim)

    def _make_host_room(self, nbytes: Bytes, host: HostMemory) -> Iterator[Action]:
        """Discard host copies that are not needed, if that makes room on the host for `nbytes`.

        A copy is not needed if its storage is resident, or if the program cannot reach the storage.
        """
        yield from self.discards()
        for storage in host.spare(nbytes) or ():
            yield from self._discard(storage, host)

    def _discard(self, storage: Storage, host: HostMemory) -> Iterator[Action]:
        """Discard the host copy of `storage`, which may have left the graph."""
        host.drop(storage)
        if storage in self._storages:
            self._renew(storage)
        self.subject = storage
        yield Discard(storage.id)

    def _swap_out(self, storage: Storage, host: HostMemory) -> Iterator[Action]:
        """Move `storage` to the host: count the transfer, and yield the `SwapOut`."""
        self.memory -= storage.nbytes
        self._vanish(storage)
        host.take(storage)
        host.link.send(storage.nbytes, self.clock)
        self._reprice(storage)
        self._chooser.evicted(storage)
        self.subject = storage
        yield SwapOut(storage.id)

    def swap_out_failed(self, storage: Storage) -> bool:
        """Undo the `SwapOut` of `storage` just yielded, which failed in the driver (a full disk).

        The limit of the host becomes the bytes of the copies that it holds now.

        Returns:
            True if the driver must keep `storage` in memory: it cannot be recomputed, or the copy
            was made ahead of eviction.
        """
        host = self.host
        assert host is not None
        ahead = storage.resident
        if ahead:
            locked = host.saving.pop(storage, None) is not None
            host.failed(storage)
            self._reprice(storage)
            if locked:
                self._unlock(storage)
            else:
                self._classify(storage)
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

    def written(self, storage: Storage) -> Iterator[Action]:
        """Discard the host copy of the resident `storage`, which the program is about to overwrite.

        The copy has the old contents. Without a copy nothing happens.
        """
        host = self.host
        if host is None or not storage.on_host or not storage.resident:
            return
        self._abandon_copy(storage)
        yield from self._discard(storage, host)

    def _refuse(self, storage: Storage, host: HostMemory) -> None:
        """Exclude `storage`, which has no recipe, from eviction until the host has room for it."""
        host.refused[storage] = None
        self._classify(storage)

    def ahead(self) -> Iterator[Action]:
        """While the link is idle, copy storages to the host that are likely to be evicted next.

        Drivers call this method after an operator. A later eviction then need not wait for the
        copy. Nothing is copied while less than half of the budget is in use, because possibly
        nothing will ever be evicted.
        """
        host = self.host
        if host is None:
            return
        yield from self._unlock_saved(host)
        while not self.planned and 2 * self.memory > self.budget and host.link.idle_out(self.clock):
            victim = self._most_worth_copying(host)
            if victim is None:
                break
            yield from self._make_host_room(victim.nbytes, host)
            if host.lacks(victim.nbytes) > 0:
                break
            self._lock(victim)
            host.take(victim)
            host.saving[victim] = host.link.send(victim.nbytes, self.clock)
            self._reprice(victim)
            self.subject = victim
            yield SwapOut(victim.id, keep=True)
        host.link.asked(self.clock)
        host.turn = self.clock

    def follow_plan(self, follow: bool) -> None:
        """Let a plan decide from now on what to copy (True), or the engine (False).

        With `Swap.only` the engine always decides.
        """
        self.planned = follow and self.host is not None and not self.host.only

    def save(self, storage: Storage) -> Iterator[Action]:
        """Begin to copy `storage` to the host, because a plan says so. It stays resident.

        Unlike a copy of `ahead`, this copy does not lock `storage`: the plan decides when to evict.
        Nothing happens if `storage` is not resident or already copied, or the host has no room.
        """
        host = self.host
        if host is None or storage.on_host or not storage.resident or not storage.nbytes:
            return
        yield from self._make_host_room(storage.nbytes, host)
        if host.lacks(storage.nbytes) > 0:
            return
        host.take(storage)
        host.link.send(storage.nbytes, self.clock)
        self._reprice(storage)
        # the storage may have been excluded before, when the host had no room for its copy
        self._classify(storage)
        self.subject = storage
        yield SwapOut(storage.id, keep=True)

    def _most_worth_copying(self, host: HostMemory) -> Storage | None:
        """Return the storage to copy ahead of its eviction, or None if no copy is worth its cost.

        The storage is the one whose recomputation costs most per byte. If values are never
        recomputed (`Swap.only`), it is the least recently used one.
        """
        candidates = [
            storage
            for storage in self._storages
            if storage.order >= 0 and host.worth_copying(storage, self.clock)
        ]
        if host.only:
            return min(candidates, key=lambda storage: storage.last_access, default=None)
        return max(candidates, key=lambda storage: storage.cost / storage.nbytes, default=None)

    def _unlock_saved(self, host: HostMemory, *, all_of_them: bool = False) -> Iterator[Action]:
        """Unlock the storages whose copy to the host, made ahead of eviction, is complete."""
        landed = [s for s, end in host.saving.items() if all_of_them or end <= self.clock]
        for storage in landed:
            del host.saving[storage]
            self._unlock(storage)
            if storage.dead:
                yield from self._evict_or_remove(storage)

    def _unlock_prefetched(
        self, host: HostMemory, *, all_of_them: bool = False
    ) -> Iterator[Action]:
        """Unlock the prefetched storages that the program has used since, or all of them."""
        coming = host.coming.items()
        used = [s for s, since in coming if all_of_them or s.last_access > since or s.dead]
        for storage in used:
            del host.coming[storage]
            self._unlock(storage)
            if storage.dead:
                yield from self._evict_or_remove(storage)

    def discards(self) -> Iterator[Action]:
        """Discard the host copies of storages that the program cannot reach any more.

        Drivers call this method to free host memory early. The engine calls it before it makes
        another copy.
        """
        if not self.discarded:
            return
        host = self.host
        assert host is not None
        while self.discarded:
            yield from self._discard(self.discarded.pop(), host)
        refused, host.refused = host.refused, {}
        for storage in refused:
            self._classify(storage)

    def _reprice(self, storage: Storage) -> None:
        """Set the cost of `storage`: a transfer if it has a copy or no recipe, else recomputing."""
        if storage.on_host or not storage.replayable:
            assert self.host is not None
            storage.cost = self.host.cost(storage)
        else:
            storage.cost = storage.recipe_ns
        if storage.resident:
            self._chooser.repriced(storage)

    def _appear(self, storage: Storage) -> None:
        """Mark `storage` and all values in it as resident."""
        storage.resident = True
        for value in storage.values:
            value.defined = value.call.ran

    # -- hooks that the ledger calls --------------------------------------------------------------

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
        """Update whether `storage`, which lost its recipe or host copy, may be evicted."""
        if self.host is not None:
            # The cost of a storage on the host is that of its transfer already. Costs that the
            # policy has added up include it, so it stays until the storage is in memory again.
            if storage.resident or not storage.on_host:
                self._reprice(storage)
            if storage.order >= 0:
                storage.order = -1
                self._chooser.remove(storage)
        self._classify(storage)

"""Evicts memory that the program itself still holds, and brings it back when it is touched.

What the program holds are tensors, views and storages that share one storage. That storage is
emptied: its memory is exchanged for none (`_husk`), so that the tensors stay what and where they
are, and reading one raises. Whoever is about to read says so before (`present`, `bring`); then what
was there is computed again and put back. When that may happen to what is for those derived from
`Shells`: at any time (`_any_time`), or when nothing else is left (`_last_resort`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rekindle._errors import OutOfBudget
from rekindle.engine import Storage
from rekindle.pytorch.held._husk import exchange, husk
from rekindle.pytorch.online import Driver
from rekindle.pytorch.operators import STRIDED, is_plain
from rekindle.pytorch.tensors import Memory, parts_of


class Shells(ABC):
    """The storages of one driver that the program holds: emptied, and filled again."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.lock = driver.lock
        self.open = True
        self.empty = 0  #: how many there are now
        self._fresh: list[Storage] = []  # filled again, and not looked at since

    @property
    def busy(self) -> bool:
        """Whether the runtime's own operators run now, maybe one that waits for this thread; with
        the lock only."""
        return bool(self._driver.work.thread)

    # -- what the table asks for ----------------------------------------------------------------

    def emptied(self, storage: Storage) -> bool:
        """Frees the memory of `storage` under the tensors of the program; whether it has any."""
        if not (storage.held and storage.returns):
            return False
        memory: Memory = storage.payload
        assert memory.watch is not None
        memory.disown()
        shell = memory.watch()
        if shell is not None:  # else its death is announced, and will be acted on
            self._about_to_empty()
            exchange(shell, husk(shell.device))  # which takes the memory along
        self.empty += 1
        return True

    def refilled(self, storage: Storage, home: torch.UntypedStorage) -> bool:
        """The tensors of the program have what is in `home` again; whether there are any."""
        memory: Memory = storage.payload
        watch = memory.watch
        if watch is None:
            return False
        self.empty -= 1
        shell = watch()
        if shell is None:  # the program dropped the last one just now, and nobody knows yet
            self._driver.table.leave(watch)
            memory.origin, memory.version = None, 0
            self._driver.table.settle(storage, home, home._cdata)
            shell = home
        else:
            exchange(shell, home)
        memory.owned = shell  # until `_look_after`: the program may drop it amid recomputation
        self._fresh.append(storage)
        self._driver._held[storage] = None
        return True

    def dropped(self) -> None:
        """The program dropped one that is empty."""
        self.empty -= 1

    # -- touching -------------------------------------------------------------------------------

    @contextmanager
    def present(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Inside, the memory of `tensors` is there."""
        with self.lock:
            locked = self.bring(tensors)
        try:
            yield
        finally:
            with self.lock:
                self.done(locked)

    def bring(self, tensors: Iterable[Tensor]) -> list[Storage]:
        """Brings back what `tensors` need. It stays until `done` is called with the result."""
        driver = self._driver
        if driver.table.deaths or driver.table.released:
            driver.settle()
        self._about_to_bring()
        found = [self._storage_of(part) for each in tensors for part in (each, *parts_of(each))]
        wanted = [storage for storage in dict.fromkeys(found) if storage is not None]
        locked = [storage for storage in wanted if storage.resident]
        missing = [storage for storage in wanted if not storage.resident]
        for storage in locked:
            driver.engine.lock(storage)
        try:
            for storage in missing:
                if not storage.resident:  # else it came back on the way to another
                    driver.settle()  # garbage collection may have come by
                    driver.use(storage)
                driver.engine.lock(storage)
                locked.append(storage)
        except BaseException:
            self.done(locked)
            raise
        return locked

    def done(self, locked: list[Storage]) -> None:
        """The inverse of `bring`."""
        driver = self._driver
        for storage in locked:
            driver.perform(driver.engine.unlock(storage))
        self._look_after()

    def _storage_of(self, tensor: Tensor) -> Storage | None:
        """The storage of `tensor` if it may ever be let go."""
        if not is_plain(type(tensor)) or tensor.layout is not STRIDED:
            return None
        home = tensor.untyped_storage()
        watch = self._driver.table.watch_at(home._cdata)
        if watch is None or watch.storage is None:
            return None
        return watch.storage if watch.storage.replayable else None

    def _look_after(self) -> None:
        """What was filled again is kept by the program alone, unless autograd has it as well."""
        while self._fresh:
            storage = self._fresh.pop()
            if storage.resident:
                self._driver.disown(storage)

    # -- the end --------------------------------------------------------------------------------

    def close(self) -> None:
        """Everything is back, although it may not fit: the budget is over, and asks no more.

        What cannot be computed again stays empty, and raises where it is touched; so does this.
        """
        driver = self._driver
        engine = driver.engine
        with self.lock:
            driver.settle()
            peak = engine.peak
            failure: Exception | None = None
            self._before_all_is_back()
            missing = [each for each in engine.storages if each.held and not each.resident]
            if missing:
                driver.write_no_more()
            for storage in missing:
                engine.let_return(storage, False)
                try:
                    self._use_in_any_case(storage)
                except Exception as error:
                    failure = failure or error
            self._look_after()
            self._after_all_is_back()
            if missing:
                engine.budget, engine.peak = float("inf"), peak
            self.abandon()
            if failure is not None:
                raise failure

    def _use_in_any_case(self, storage: Storage) -> None:
        """The budget grows as far as it must, so that what is only on the way makes way."""
        while True:
            self._driver.settle()  # the program may have dropped it since it was found missing
            if storage.resident or not storage.held:
                return
            try:
                self._driver.use(storage)
            except OutOfBudget as error:
                self._driver.engine.budget = max(error.smallest_budget, error.budget + 1)

    def abandon(self) -> None:
        """Nothing is let go any more; what is empty stays so."""
        self.open = False
        self._driver.engine.reserve.clear()
        self._driver.table.shells = None

    # -- for those derived ----------------------------------------------------------------------

    @abstractmethod
    def _about_to_bring(self) -> None:
        """The program touches something; what died is known."""

    @abstractmethod
    def _about_to_empty(self) -> None:
        """Nobody may be reading what is let go; raises if somebody might."""

    @abstractmethod
    def _before_all_is_back(self) -> None:
        """Nothing may be let go any more."""

    @abstractmethod
    def _after_all_is_back(self) -> None:
        """What was noted to have it again is of no use."""


def tensors_within(*things: Any) -> Iterator[Tensor]:
    """The tensors in the arguments of an operator, or in a result."""
    for thing in things:
        if isinstance(thing, Tensor):
            yield thing
        elif isinstance(thing, list | tuple):
            yield from tensors_within(*thing)
        elif isinstance(thing, dict):
            yield from tensors_within(*thing.values())

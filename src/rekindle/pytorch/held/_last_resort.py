"""What variables of the program hold goes when nothing else is left (`evict="auto"`).

Before `OutOfBudget` would be raised, what was asked for is tried once more, and meanwhile what
variables hold may be let go. What is read meanwhile must not: the operands of the operator that
runs, and what `_lending` knows of. Only numbers that an operator made go, for nothing reads those
but operators (`Memory.returnable`). Twin of native/pytorch/held.h.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, final

from torch import Tensor, UntypedStorage

from rekindle._errors import OutOfBudget
from rekindle.engine import Storage
from rekindle.pytorch.held._lending import Lending
from rekindle.pytorch.held._shells import Shells, tensors_within
from rekindle.pytorch.online import Driver, given_away
from rekindle.pytorch.tensors import FOREIGN, UNSEEN, Memory, homes_of

Result = TypeVar("Result")


@final
class LastResort(Shells):
    """What the program holds may be let go while something is tried once more."""

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver)
        self.lending = Lending(weakref.proxy(self))  # else both wait for the collector
        self._operands: tuple[Any, ...] = ()  # of the operator that runs now

    # -- operators ------------------------------------------------------------------------------

    def around(self, run: Callable[..., Result], *args: Any) -> Result:
        """Runs an operator of the program by `run(*args)`: what is in `args` is there."""
        before, self._operands = self._operands, args
        locked = self._bring_operands() if self.empty else ()
        try:
            return run(*args)
        finally:
            self._operands = before
            if locked:
                with self.lock:
                    self.done(locked)

    def _bring_operands(self) -> list[Storage]:
        with self.lock:
            if self.busy:
                return []
            return self.bring(tensors_within(self._operands))

    def bring_back(self, tensor: Tensor) -> None:
        """The memory of `tensor` is there."""
        if self.empty:
            with self.lock:
                self.done(self.bring((tensor,)))

    def keep_there(self, tensor: Tensor) -> None:
        """Likewise, and it stays as long as the program has it."""
        self.bring_back(tensor)
        with self.lock:
            storage = self._storage_of(tensor)
            if storage is not None:
                storage.payload.returnable = False

    def give_away(self, home: UntypedStorage) -> None:
        """From now on others may write to `home`."""
        given_away(self._driver, home)

    # -- what the driver asks for ---------------------------------------------------------------

    def or_lending(self, step: Callable[[], Result]) -> Result:
        """What `step` gives; if there is no room for it then once more, with what variables
        hold."""
        try:
            return step()
        except OutOfBudget:
            with self._lent() as lent:
                if not lent:
                    raise
                self._driver.refused = None
                return step()

    @contextmanager
    def _lent(self) -> Iterator[bool]:
        """Inside, what variables hold may be let go; False: not now."""
        read = self.lending.what_is_read() if self.open and not self.busy else None
        if read is None:
            yield False
            return
        driver, engine = self._driver, self._driver.engine
        tensors, saved = read
        stay = {home._cdata for home in homes_of([*tensors, *tensors_within(self._operands)])}
        driver.poll()
        lent = [each for each in driver._held if _may_go(each, stay, but_saved=saved)]
        for storage in lent:
            engine.let_return(storage, True)
        try:
            yield True
        finally:
            for storage in lent:
                if storage.makers:  # else it is no longer in the graph
                    engine.let_return(storage, False)

    # -- what the others do ---------------------------------------------------------------------

    def _about_to_bring(self) -> None:
        """Nothing changes by a touch."""

    # -- the end --------------------------------------------------------------------------------

    def _about_to_empty(self) -> None:
        """Who reads what was found out before."""

    def _before_all_is_back(self) -> None:
        self._driver.resort = None

    def _after_all_is_back(self) -> None:
        """How it is made again autograd needs as before."""


def _may_go(storage: Storage, stay: set[int], *, but_saved: bool) -> bool:
    memory: Memory = storage.payload
    return (
        memory.returnable
        and storage.replayable
        and not storage.pinned
        and not memory.flags & (FOREIGN | UNSEEN)
        and storage.nbytes > 0
        and not (but_saved and storage.references)
        and memory.watch is not None
        and memory.watch.address not in stay
    )

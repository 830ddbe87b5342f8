"""Connect the native core with functions that access memory without running an operator.

The core makes values resident that operators read or autograd unpacks (in native/memory,
evict_held_last.h, held_eviction.h and readers.h). This file handles other accesses: it makes the
core lock the memory while it is read. So no thread evicts memory that another thread reads.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count
from typing import Any, final

from torch import Tensor

from rekindle.pytorch.held._threads import Threads
from rekindle.pytorch.native import Driver
from rekindle.pytorch.online import hand_out
from rekindle.pytorch.operators import is_plain


@final
class EvictHeld:
    """Restores evicted memory of the program, and knows its threads, for one native driver.

    It implements `KnowsThreads`.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.threads = Threads()
        self._numbers = count()
        self._arrays: dict[int, weakref.ref[Any]] = {}  # NumPy arrays of tensors, by number
        self._gone: deque[tuple[int, int]] = deque()  # number and storage of each array that died

    def all_threads_are_known(self) -> bool:
        """Return True if each thread was started within the budget or uses no tensors.

        The core does not see what other threads read, so it then evicts no user-held memory.
        """
        self._take_back()
        self.threads.changed()
        return not self.threads.unknown

    # -- for `escapes_seen` ---------------------------------------------------------------------

    @contextmanager
    def present(
        self, tensors: Iterable[Tensor], *, saved: bool = False, writes: bool = True
    ) -> Iterator[None]:
        """Make the memory of `tensors` resident inside the block.

        Args:
            tensors: The tensors.
            saved: Also keep values resident that autograd unpacks inside the block.
            writes: Code in the block may also write the tensors.
        """
        read = [each for each in tensors if is_plain(type(each))]
        number = self._driver.begin_reading(read, saved=saved, writes=writes)
        try:
            yield
        finally:
            self._driver.end_reading(number)

    @contextmanager
    def present_in_forward(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Make the memory of `tensors` resident during the forward of an `autograd.Function`.

        The function may write to tensors by kernels that the core does not see, and autograd
        changes their version counters only afterwards. So operators inside get no recipes.
        """
        self._driver.record_without_grad(False)
        try:
            with self.present(tensors):
                yield
        finally:
            self._driver.record_without_grad(True)

    @contextmanager
    def present_in_backward(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Make `tensors` and saved values resident during an `autograd.Function`'s backward."""
        with self.present(tensors, saved=True):
            yield

    def keep(self, tensor: Tensor) -> None:
        """Make the memory of `tensor` resident and pin it, because its address leaves PyTorch."""
        if is_plain(type(tensor)):
            self._driver.pin_exposed_address(tensor)

    def hand_out(self, tensor: Tensor) -> None:
        """Make the memory of `tensor` resident, pin it, and note that other code may write it."""
        self.keep(tensor)
        hand_out(self._driver.mark_externally_writable, tensor)

    def lend(self, tensor: Tensor, make: Callable[[], Any]) -> Any:
        """Do as `hand_out`, until the NumPy array of `tensor` that `make` returns is gone.

        Views of the array, and memoryviews, keep the array alive.
        """
        self._take_back()
        driver = self._driver
        lent = is_plain(type(tensor)) and driver.core.lend(driver.handle, tensor)
        hand_out(driver.mark_externally_writable, tensor)
        if not lent:
            return make()
        number, address = next(self._numbers), tensor.untyped_storage()._cdata
        gone = self._gone
        try:
            array = make()
        except BaseException:
            gone.append((number, address))
            raise
        # The array may be freed by any thread, which may hold the core's lock. So only note it.
        self._arrays[number] = weakref.ref(array, lambda _: gone.append((number, address)))
        return array

    def _take_back(self) -> None:
        """Tell the core which arrays are gone."""
        while self._gone:
            number, address = self._gone.popleft()
            self._arrays.pop(number, None)
            self._driver.core.take_back(self._driver.handle, address)


def thread_registered(held: object) -> AbstractContextManager[None]:
    """Inside the block, mark the current thread as one whose operators the core sees.

    Threads that start within a budget call this function.

    Args:
        held: The driver's `EvictHeld`, or None if user-held memory is not evicted.
    """
    return held.threads.this_one_known() if isinstance(held, EvictHeld) else nullcontext()

"""Connect the native core with functions that access memory without running an operator.

The core makes values resident that operators read or autograd unpacks (in native/memory,
evict_held_last.h, held_eviction.h and readers.h). This file handles other accesses: it makes the
core lock the memory while it is read. So no thread evicts memory that another thread reads.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import final

from torch import Tensor

from rekindle.pytorch.held._threads import OURS, Threads
from rekindle.pytorch.native import Driver
from rekindle.pytorch.online import hand_out
from rekindle.pytorch.operators import is_plain


@final
class EvictHeld:
    """Restores evicted memory of the program, and knows its threads, for one native driver."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.threads = Threads()

    def all_threads_are_known(self) -> bool:
        """Return True if each thread was started within the budget or uses no tensors.

        The core does not see what other threads read, so it then evicts no user-held memory.
        """
        self.threads.changed()
        unknown = self.threads.unknown
        if unknown:
            self._driver.unknown_threads.update(dict.fromkeys(unknown))
        return not unknown

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
        if _is_own_thread():
            yield
            return
        read = [each for each in tensors if is_plain(type(each))]
        core, handle = self._driver.core, self._driver.handle
        number = core.begin_reading(handle, read, saved, writes)
        try:
            yield
        finally:
            core.end_reading(handle, number)

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
        if is_plain(type(tensor)) and not _is_own_thread():
            self._driver.core.pin_exposed_address(self._driver.handle, tensor)

    def hand_out(self, tensor: Tensor) -> None:
        """Make the memory of `tensor` resident, pin it, and note that other code may write it."""
        self.keep(tensor)
        hand_out(self._driver.mark_externally_writable, tensor)


def _is_own_thread() -> bool:
    """Return True in a thread of Rekindle's own, such as one that copies values.

    Python's garbage collector may run a finalizer of the program there. It must not wait for the
    core, because a thread in the core may wait for the copy.
    """
    return threading.current_thread().name.startswith(OURS)


def thread_registered(held: object) -> AbstractContextManager[None]:
    """Inside the block, mark the current thread as one whose operators the core sees.

    Threads that start within a budget call this function.

    Args:
        held: The driver's `EvictHeld`, or None if user-held memory is not evicted.
    """
    return held.threads.this_one_known() if isinstance(held, EvictHeld) else nullcontext()

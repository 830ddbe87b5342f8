"""What the native core asks, and is told, where it evicts what variables hold.

The core itself brings back what operators read, and what autograd asks for: native/memory/held.h,
any_time.h and reader.h. What goes around the dispatcher is seen here, and noted there as long as
somebody reads it. So no thread evicts what another one reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, final

from torch import Tensor, UntypedStorage

from rekindle.pytorch.held._escapes import escapes_seen
from rekindle.pytorch.held._profilers import profilers_seen
from rekindle.pytorch.held._threads import Threads
from rekindle.pytorch.online import KnowsThreads, hand_out
from rekindle.pytorch.operators import is_plain


class NativeLender(Protocol):
    """The driver."""

    core: Any
    lending: KnowsThreads | None

    def lock_there(self, tensors: list[Tensor], *, saved: bool = False) -> int:
        """Keep the memory of `tensors` until `unlock_there` is called with what this returns.

        `saved`: keep what autograd saved as well.
        """
        ...

    def unlock_there(self, number: int) -> None:
        """The inverse of `lock_there`."""
        ...

    def record_without_grad(self, record: bool) -> None:
        """One reason less, or one more, that what is made with grad mode off has no recipe."""
        ...

    def keep_there(self, tensor: Tensor) -> None:
        """The memory of `tensor` is there, and stays as long as the program has it."""
        ...

    def give_away(self, home: UntypedStorage) -> None:
        """From now on others may write to `home`."""
        ...


@final
class Natively:
    """Around one native driver."""

    def __init__(self, driver: NativeLender) -> None:
        self._driver = driver
        self.threads = Threads()

    def all_threads_are_known(self) -> bool:
        """Return whether each thread either started within the budget or touches no tensor."""
        self.threads.changed()
        return not self.threads.unknown

    # -- what `escapes_seen` asks for -----------------------------------------------------------

    @contextmanager
    def present(self, tensors: Iterable[Tensor], *, saved: bool = False) -> Iterator[None]:
        """Inside, the memory of `tensors` is there; `saved`: what autograd saved stays as well."""
        read = [each for each in tensors if is_plain(type(each))]
        number = self._driver.lock_there(read, saved=saved)
        try:
            yield
        finally:
            self._driver.unlock_there(number)

    @contextmanager
    def present_in_forward(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Likewise. A function of one's own may write by kernels that nobody sees, and moves the
        version of what it wrote only when it is over: without autograd it leaves no recipes."""
        self._driver.record_without_grad(False)
        try:
            with self.present(tensors):
                yield
        finally:
            self._driver.record_without_grad(True)

    @contextmanager
    def present_in_backward(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Likewise, for the backward pass of a function of one's own, which asks for more."""
        with self.present(tensors, saved=True):
            yield

    def keep(self, tensor: Tensor) -> None:
        """Its address leaves PyTorch."""
        if is_plain(type(tensor)):
            self._driver.keep_there(tensor)

    def hand_out(self, tensor: Tensor) -> None:
        """Others get its memory, and may write there."""
        self.keep(tensor)
        hand_out(self._driver.give_away, tensor)


@contextmanager
def lending_natively(driver: NativeLender) -> Iterator[None]:
    """Inside, the driver, which may evict what variables hold, sees what gets around the
    dispatcher."""
    driver.lending = natively = Natively(driver)
    with escapes_seen(natively), profilers_seen(driver.core):
        yield


def known_natively(lending: object) -> AbstractContextManager[None]:
    """Inside, this thread, which started within the budget, is no unknown one to `lending`."""
    return lending.threads.this_one_known() if isinstance(lending, Natively) else nullcontext()

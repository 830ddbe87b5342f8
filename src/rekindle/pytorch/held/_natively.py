"""What the native core asks, and is told, where it lets go of anything (`evict="anything"`).

It brings back by itself what operators read, and what autograd asks for: native/pytorch/any_time.h.
What goes around the dispatcher is seen here, and locked there while somebody reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, final

from torch import Tensor, UntypedStorage

from rekindle.pytorch.held._escapes import escapes_seen
from rekindle.pytorch.held._threads import Threads
from rekindle.pytorch.online import hand_out
from rekindle.pytorch.operators import is_plain


class NativeLender(Protocol):
    """The driver."""

    lending: Natively | None

    def lock_there(self, tensors: list[Tensor]) -> int:
        """The memory of `tensors` is there until `unlock_there` is called with what this gives."""
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

    def what_is_read(self) -> tuple[list[Tensor], bool] | None:
        """Nothing beside what is locked; None: nobody knows, for there are threads of which nothing
        is known."""
        self.threads.changed()
        return None if self.threads.unknown else ([], False)

    # -- what `escapes_seen` asks for -----------------------------------------------------------

    @contextmanager
    def present(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Inside, the memory of `tensors` is there."""
        number = self._driver.lock_there([each for each in tensors if is_plain(type(each))])
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

    present_in_backward = present  # what autograd unpacked is the core's to keep

    def keep(self, tensor: Tensor) -> None:
        """Its address leaves PyTorch."""
        if is_plain(type(tensor)):
            self._driver.keep_there(tensor)

    def hand_out(self, tensor: Tensor) -> None:
        """Others get its memory, and may write there."""
        self.keep(tensor)
        hand_out(self._driver.give_away, tensor)


@contextmanager
def anything_natively(driver: NativeLender) -> Iterator[None]:
    """Inside, what gets around the dispatcher is seen by the driver, which lets go of anything."""
    driver.lending = natively = Natively(driver)
    with escapes_seen(natively):
        yield


def known_natively(lending: object) -> AbstractContextManager[None]:
    """Inside, this thread, which started within the budget, is no unknown one to `lending`."""
    return lending.threads.this_one_known() if isinstance(lending, Natively) else nullcontext()

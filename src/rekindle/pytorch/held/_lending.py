"""What variables of the program hold, and may be let go when nothing else is left (`evict="auto"`).

That nothing is let go which somebody reads: the operands of an operator are known to the core, and
what functions of one's own are called with, which kernels read unseen, is noted here. While another
thread runs that may be reading anything, nothing is let go.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol, final

from torch import Tensor, UntypedStorage

from rekindle.pytorch.held._threads import Threads
from rekindle.pytorch.online import hand_out
from rekindle.pytorch.operators import is_plain


class Lender(Protocol):
    """Who lets go of it."""

    def bring_back(self, tensor: Tensor) -> None:
        """The memory of `tensor` is there."""
        ...

    def keep_there(self, tensor: Tensor) -> None:
        """Likewise, and it stays as long as the program has it."""
        ...

    def give_away(self, home: UntypedStorage) -> None:
        """From now on others may write to `home`."""
        ...


@final
class Lending:
    """Around one driver: what it may not let go of now."""

    def __init__(self, lender: Lender) -> None:
        self._lender = lender
        self._threads = Threads()
        self._read: dict[int, list[Tensor]] = {}  # by functions of one's own that run now
        self._backward = 0  # how many of those are backward passes

    def what_is_read(self) -> tuple[list[Tensor], bool] | None:
        """The tensors that must stay, and whether what autograd saved must as well; None: all."""
        self._threads.changed()
        if self._threads.unknown:
            return None
        return [tensor for each in self._read.values() for tensor in each], self._backward > 0

    # -- what `escapes_seen` asks for -----------------------------------------------------------

    @contextmanager
    def present(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Inside, the memory of `tensors` is there."""
        read = [tensor for tensor in tensors if is_plain(type(tensor))]
        self._read[id(read)] = read
        try:
            for tensor in read:
                self._lender.bring_back(tensor)
            yield
        finally:
            del self._read[id(read)]

    present_in_forward = present  # with grad mode off there are no recipes

    @contextmanager
    def present_in_backward(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Likewise, for the backward pass of a function of one's own, which asks for more."""
        self._backward += 1
        try:
            with self.present(tensors):
                yield
        finally:
            self._backward -= 1

    def keep(self, tensor: Tensor) -> None:
        """Its address leaves PyTorch."""
        if is_plain(type(tensor)):
            self._lender.keep_there(tensor)

    def hand_out(self, tensor: Tensor) -> None:
        """Others get its memory, and may write there."""
        self.keep(tensor)
        hand_out(self._lender.give_away, tensor)

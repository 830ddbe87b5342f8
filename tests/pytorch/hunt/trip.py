"""Raise an exception at a chosen operator of a program, with or without a budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

import rekindle
from rekindle.pytorch.native import Runtime


class Interrupted(Exception):
    """An error that a device, a signal or a worker may raise inside an operator."""


class _Trip(TorchDispatchMode):
    """A dispatch mode that counts the program's operators, and raises in place of a chosen one.

    Recomputations are not counted, because dispatch modes do not see them.
    """

    supports_higher_order_operators = True

    def __init__(self, name: str, nth: int) -> None:
        super().__init__()
        self.chosen = (name, nth)
        self.thread = get_ident()
        self.counts: Counter[str] = Counter()
        self.order: list[tuple[str, int]] = []
        self.depth = 0  #: number of nested calls into Rekindle; operators inside are not counted

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not self.depth and self._meets(func):
            raise Interrupted(self.chosen)
        return func(*args, **(kwargs or {}))

    def _meets(self, func: Any) -> bool:
        """Count an operator of the program. Return True if it is the chosen one."""
        if get_ident() != self.thread:
            return False
        name = str(func)
        self.counts[name] += 1
        self.order.append((name, self.counts[name]))
        return self.order[-1] == self.chosen


@contextmanager
def interrupts(name: str = "", nth: int = 0) -> Iterator[_Trip]:
    """Raise `Interrupted` at the `nth` call of operator `name`. Never raise without a name."""
    trip = _Trip(name, nth)
    with _apart(trip), trip:
        yield trip


@contextmanager
def _apart(trip: _Trip) -> Iterator[None]:
    """Make `trip` ignore the operators that Rekindle itself runs."""

    def apart(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            trip.depth += 1
            try:
                return method(*args, **kwargs)
            finally:
                trip.depth -= 1

        return call

    context = rekindle.budget
    places = [(Runtime, "unseen"), (context, "__enter__"), (context, "__exit__")]
    before = [getattr(owner, name) for owner, name in places]
    for owner, name in places:
        setattr(owner, name, apart(getattr(owner, name)))
    try:
        yield
    finally:
        for (owner, name), method in zip(places, before, strict=True):
            setattr(owner, name, method)

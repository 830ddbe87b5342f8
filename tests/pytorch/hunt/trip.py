"""An exception at a chosen operator of a program, wherever it runs: plainly or within a budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

import rekindle
from rekindle.pytorch.native import NativeRuntime


class Interrupted(Exception):
    """An error that a device, a signal or a worker may raise inside an operator."""


class _Trip(TorchDispatchMode):
    """Counts the program's own operators, and raises in the place of one of them.

    Recomputations run below every mode: none is seen here.
    """

    supports_higher_order_operators = True

    def __init__(self, name: str, nth: int) -> None:
        super().__init__()
        self.chosen = (name, nth)
        self.thread = get_ident()
        self.counts: Counter[str] = Counter()
        self.order: list[tuple[str, int]] = []
        self.depth = 0  #: of calls within Rekindle, whose operators are not the program's

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not self.depth and self._meets(func):
            raise Interrupted(self.chosen)
        return func(*args, **(kwargs or {}))

    def _meets(self, func: Any) -> bool:
        """An operator of the program; whether it is the chosen one."""
        if get_ident() != self.thread:
            return False
        name = str(func)
        self.counts[name] += 1
        self.order.append((name, self.counts[name]))
        return self.order[-1] == self.chosen


@contextmanager
def interrupts(name: str = "", nth: int = 0) -> Iterator[_Trip]:
    """Inside, the `nth` call of the operator `name` raises `Interrupted`; without a name, none."""
    trip = _Trip(name, nth)
    with _apart(trip), trip:
        yield trip


@contextmanager
def _apart(trip: _Trip) -> Iterator[None]:
    """Inside, what Rekindle runs for itself does not count."""

    def apart(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            trip.depth += 1
            try:
                return method(*args, **kwargs)
            finally:
                trip.depth -= 1

        return call

    context = rekindle.budget
    places = [(NativeRuntime, "unseen"), (context, "__enter__"), (context, "__exit__")]
    before = [getattr(owner, name) for owner, name in places]
    for owner, name in places:
        setattr(owner, name, apart(getattr(owner, name)))
    try:
        yield
    finally:
        for (owner, name), method in zip(places, before, strict=True):
            setattr(owner, name, method)

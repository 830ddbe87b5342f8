"""An exception at a chosen operator of a program, wherever it runs: plainly or within a budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

import rekindle
from rekindle.pytorch.context import _budget
from rekindle.pytorch.online._runtime import Runtime


class Interrupted(Exception):
    """What a device, a signal or a worker may raise amid an operator."""


class _Trip(TorchDispatchMode):
    """Counts the program's own operators, and raises in the place of one of them.

    Within a budget it is the outer mode, which sees recomputations too: those it does not count.
    What it raises comes then from the first operator that is run on behalf of the chosen one, so
    that a recomputation may be what is interrupted.
    """

    supports_higher_order_operators = True

    def __init__(self, name: str, nth: int) -> None:
        super().__init__()
        self.chosen = (name, nth)
        self.thread = get_ident()
        self.counts: Counter[str] = Counter()
        self.order: list[tuple[str, int]] = []
        self.depth = 0
        self.armed = False

    def meets(self, func: Any) -> bool:
        """An operator of the program; whether it is the chosen one."""
        if get_ident() != self.thread:
            return False
        name = str(func)
        self.counts[name] += 1
        self.order.append((name, self.counts[name]))
        return self.order[-1] == self.chosen

    def forgets(self, func: Any) -> None:
        """It did not begin, and is maybe called once more when there is more room."""
        if get_ident() != self.thread:
            return
        self.counts[str(func)] -= 1
        self.order.pop()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        active = rekindle.budget._active
        # In an optimizer's step that nobody needs to see the budget's mode is away.
        passes = active is not None and active._runtime.interrupted is not None
        outside = not self.depth and (active is None or passes)
        if self.armed or (outside and self.meets(func)):
            self.armed = False
            raise Interrupted(self.chosen)
        return func(*args, **(kwargs or {}))


@contextmanager
def interrupts(name: str = "", nth: int = 0) -> Iterator[_Trip]:
    """Inside, the `nth` call of the operator `name` raises `Interrupted`; without a name, none."""
    trip = _Trip(name, nth)
    with _counted_by(trip), trip:
        yield trip


@contextmanager
def _counted_by(trip: _Trip) -> Iterator[None]:
    """Within a budget the program's operators are those that its mode is given while not busy."""
    mode, context = _budget.Mode, rekindle.budget
    dispatch = mode.__torch_dispatch__

    def counting(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        work = self.runtime.driver.work
        own = not (work.thread and work.mine)
        if own and trip.meets(func):
            trip.armed = True
        with aside():
            try:
                return dispatch(self, func, types, args, kwargs)
            except rekindle.OutOfBudget:
                if own:
                    trip.forgets(func)
                raise
            finally:
                trip.armed = False

    @contextmanager
    def aside() -> Iterator[None]:
        trip.depth += 1
        try:
            yield
        finally:
            trip.depth -= 1

    def apart(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with aside():
                return method(*args)

        return call

    places = [(Runtime, "pack"), (Runtime, "unpack"), (context, "__enter__"), (context, "__exit__")]
    before = [getattr(owner, name) for owner, name in places]
    mode.__torch_dispatch__ = counting  # type: ignore[method-assign]
    for owner, name in places:
        setattr(owner, name, apart(getattr(owner, name)))
    try:
        yield
    finally:
        mode.__torch_dispatch__ = dispatch  # type: ignore[method-assign]
        for (owner, name), method in zip(places, before, strict=True):
            setattr(owner, name, method)

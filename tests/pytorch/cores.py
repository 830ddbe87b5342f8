"""Count and configure the native drivers that tests create.

A driver is the object of the native core (Rekindle's C++ code) that implements one budget.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rekindle._types import Nanoseconds
from rekindle.pytorch.native import Driver, core

_made: list[weakref.ref[Driver]] = []  # drivers created since the test began
_tunings: list[Callable[[Driver], None]] = []


@contextmanager
def counting() -> Iterator[None]:
    """While open, make each new driver list the operators that it recomputes, and `tune` it."""
    with pytest.MonkeyPatch.context() as patch:
        make = Driver.__init__

        def counted(driver: Driver, *args: object) -> None:
            make(driver, *args)  # type: ignore[arg-type]
            driver.core.list_recomputed_ops(driver.handle)
            _made.append(weakref.ref(driver))
            for tune in _tunings:
                tune(driver)

        patch.setattr(Driver, "__init__", counted)
        try:
            yield
            module = core()
            assert module is None or module.underestimated() == 0  # type: ignore[attr-defined]
        finally:
            _made.clear()
            _tunings.clear()


def count_drivers() -> int:
    """Return how many native drivers were created so far."""
    return len(_made)


def ran_again(since: int) -> Counter[str]:
    """Return how often each operator was recomputed, by name.

    `since` is the number of drivers that existed before (`count_drivers`); they are not counted.
    """
    return Counter(
        name
        for reference in _made[since:]
        if (driver := reference()) is not None
        for name in recomputed(driver).elements()
    )


def recomputed(driver: Driver) -> Counter[str]:
    """Return how often one driver recomputed each operator, by name."""
    names = driver.core.recomputed_ops(driver.handle)
    return Counter(name.removeprefix("aten::") for name in names)


def tune(how: Callable[[Driver], None]) -> None:
    """Apply `how` to every native driver made from now on, to the end of the test."""
    _tunings.append(how)


def tune_no_more() -> None:
    _tunings.clear()


@contextmanager
def evicting_before_every_operator() -> Iterator[None]:
    """Evict all that may be evicted, before each operator and before autograd unpacks a value."""
    tune(lambda driver: driver.core.evict_before_every_op(driver.handle, True))
    try:
        yield
    finally:
        tune_no_more()


@contextmanager
def fixed_prices(cost: Nanoseconds = 1_000) -> Iterator[None]:
    """Forget all measured times of operators, and give each operator the same cost.

    Measured times differ from run to run. With fixed costs, evictions do not. The time lost is
    measured all the same: it exceeds a cost of 1 ns on any machine.
    """
    forget_signatures()
    _core().fix_costs(cost)
    try:
        yield
    finally:
        forget_signatures()


def forget_signatures() -> None:
    """Forget all operator signatures, so that every operator runs as if for the first time."""
    _core().fix_costs(-1)


def bytes_of_positions() -> int:
    """Return the bytes of all stored states of random generators.

    Recipes store them to draw the same random numbers again. A state in several recipes is counted
    once.
    """
    gc.collect()
    return _core().bytes_of_positions()


@contextmanager
def short_memory(longest: int) -> Iterator[None]:
    """Limit recomputation chains to `longest` calls while the context is open."""

    def tuned(driver: Driver) -> None:
        driver.core.longest_chain(driver.handle, longest)

    _tunings.append(tuned)
    try:
        yield
    finally:
        if tuned in _tunings:  # otherwise the test has ended, and no driver is left
            _tunings.remove(tuned)


def evict_all(driver: Driver) -> None:
    """Evict every storage that may be evicted now."""
    driver.core.evict_all(driver.handle)


def _core() -> Any:
    module = core()
    assert module is not None, "there is a native core"
    return module

"""Count and tune the native drivers that tests create."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rekindle.pytorch.native import NativeDriver, core

_made: list[weakref.ref[NativeDriver]] = []  # since the test began
_tunings: list[Callable[[NativeDriver], None]] = []


@contextmanager
def counting() -> Iterator[None]:
    """Inside, native drivers count what runs again, and are tuned."""
    with pytest.MonkeyPatch.context() as patch:
        make = NativeDriver.__init__

        def counted(driver: NativeDriver, *args: object) -> None:
            make(driver, *args)  # type: ignore[arg-type]
            driver.core.count_again(driver.handle)
            _made.append(weakref.ref(driver))
            for tune in _tunings:
                tune(driver)

        patch.setattr(NativeDriver, "__init__", counted)
        try:
            yield
        finally:
            _made.clear()
            _tunings.clear()


def count_drivers() -> int:
    """How many native drivers there were so far."""
    return len(_made)


def ran_again(since: int) -> Counter[str]:
    """The operators that ran again in native drivers made since then, by name."""
    return Counter(
        name.removeprefix("aten::")
        for reference in _made[since:]
        if (driver := reference()) is not None
        for name in driver.core.again(driver.handle)
    )


def tune(how: Callable[[NativeDriver], None]) -> None:
    """Every native driver made from now on, to the end of the test."""
    _tunings.append(how)


def tune_no_more() -> None:
    _tunings.clear()


@contextmanager
def fixed_prices() -> Iterator[None]:
    """Forget all operators, and give each the same cost.

    Evictions then do not depend on measured times, which differ from run to run.
    """
    forget_signatures()
    _core().fix_costs(1_000)
    try:
        yield
    finally:
        forget_signatures()


def forget_signatures() -> None:
    """Every operator is met for the first time."""
    _core().fix_costs(-1)


def bytes_of_positions() -> int:
    """Of all that recipes keep of where random number generators stood, each object once."""
    gc.collect()
    return _core().bytes_of_positions()


@contextmanager
def short_memory(longest: int) -> Iterator[None]:
    """Inside, `longest` calls that hang on each other are a long chain, and end."""

    def tuned(driver: NativeDriver) -> None:
        driver.core.longest_chain(driver.handle, longest)

    _tunings.append(tuned)
    try:
        yield
    finally:
        if tuned in _tunings:  # else the test is over
            _tunings.remove(tuned)


def let_go_now(driver: NativeDriver) -> None:
    """Whatever may be evicted now is."""
    driver.core.let_go_now(driver.handle)


def _core() -> Any:
    module = core()
    assert module is not None, "there is a native core"
    return module

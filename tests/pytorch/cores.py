"""Both cores under the same tests: which one "auto" means, and what only the native one knows."""

from __future__ import annotations

import gc
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Literal
from zlib import crc32

import pytest

from rekindle.pytorch.context import _cores
from rekindle.pytorch.native import NativeDriver, core, is_seen, what_it_misses, why_not
from rekindle.pytorch.online import _history, _runtime
from rekindle.pytorch.operators import Position, _signature

Name = Literal["python", "native"]
BOTH: tuple[Name, ...] = ("python", "native")
#: Tests run on the core that users have, and a sample on the one in Python as well.
#: `REKINDLE_TEST_CORE=both` runs all of them on both, `...=python` on that one alone. With
#: `...=native` a test fails where there is no native core, which is not tested otherwise.
ASKED_FOR = os.environ.get("REKINDLE_TEST_CORE")


def chosen() -> tuple[Name, ...]:
    """Return the cores for what is too long to run on both in CI."""
    if ASKED_FOR == "both":
        return BOTH
    return ("python",) if ASKED_FOR == "python" else ("native",)


_made: list[weakref.ref[NativeDriver]] = []  # since the test began
_tunings: list[Callable[[NativeDriver], None]] = []


@contextmanager
def taken(name: Name) -> Iterator[None]:
    """Inside, a budget that does not say has this core; native drivers count what runs again."""
    missing = pytest.fail if ASKED_FOR == "native" else pytest.skip
    if name == "native" and core() is None:
        missing(f"no native core: {why_not()}")
    if name == "native" and what_it_misses():
        missing(f"the native core has to be asked for: {what_it_misses()}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_cores, "PREFERRED", name)
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


def native() -> bool:
    """Whether a budget that does not say has the native core."""
    return _cores.PREFERRED == "native"


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
def fixed_prices(*, alike: bool = False) -> Iterator[None]:
    """Inside, operators are met for the first time, and those of the core in Python cost what their
    names say, those of the native one all the same: what is evicted does not hang on times, which
    differ from run to run. `alike`: all operators cost the same on both."""
    module = core() if native() else None
    sample = _signature.Signature.sample

    def priced(self: _signature.Signature, elapsed: int) -> None:
        by_name = 0 if alike else crc32(self.operator.name.encode()) % 10_000
        sample(self, 1_000 + by_name)

    with pytest.MonkeyPatch.context() as patch:
        forget_signatures()
        patch.setattr(_signature.Signature, "sample", priced)
        if module is not None:
            module.fix_costs(1_000)
        try:
            yield
        finally:
            forget_signatures()


def forget_signatures() -> None:
    """Every operator is met for the first time."""
    _signature._signatures.clear()
    module = core()
    if module is not None:
        module.fix_costs(-1)


def bytes_of_positions() -> int:
    """Of all that recipes keep of where random number generators stood, each object once."""
    gc.collect()
    module = core()
    positions = [each for each in gc.get_objects() if type(each) is Position]
    return bytes_of(positions) + (0 if module is None else module.bytes_of_positions())


def bytes_of(positions: Iterable[object]) -> int:
    """What they keep, each object once."""
    kept = {
        id(part): len(part)
        for position in positions
        for part in gc.get_referents(position)
        if type(part) is bytes
    }
    return sum(kept.values())


@contextmanager
def short_memory(longest: int) -> Iterator[None]:
    """Inside, `longest` calls that hang on each other are a long chain, and end."""

    def tuned(driver: NativeDriver) -> None:
        driver.core.longest_chain(driver.handle, longest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_history, "LONGEST_CHAIN", longest)
        patch.setattr(_runtime, "LONGEST_CHAIN", longest)
        _tunings.append(tuned)
        try:
            yield
        finally:
            if tuned in _tunings:  # else the test is over
                _tunings.remove(tuned)


def entered() -> bool:
    """Whether operators of this thread are seen by the native core."""
    return is_seen()


def let_go_now(driver: NativeDriver) -> None:
    """Whatever may be evicted now is."""
    driver.core.let_go_now(driver.handle)

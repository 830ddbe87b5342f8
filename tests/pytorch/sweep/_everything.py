"""The harshest setting: after each operator all that may be let go is let go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

import rekindle
from rekindle.engine import Call, NoRoom
from rekindle.pytorch import Run
from rekindle.pytorch.native import NativeDriver
from rekindle.pytorch.online import _driver

AMPLE = 1 << 40  #: bytes: nothing is let go for want of room
evict: Literal["saved", "auto", "anything"] = "saved"  #: as in `rekindle.budget`


def let_go(run: Run) -> None:
    """Evicts every storage that may be evicted now."""
    driver: Any = run._driver
    if isinstance(driver, NativeDriver):
        driver.core.let_go_now(driver.handle)
        return
    with driver.lock:
        driver.settle()
        driver.poll()
        engine, budget = driver.engine, driver.engine.budget
        engine.budget = -1
        resort, driver.resort = driver.resort, None
        try:
            driver.perform(_until_nothing_is_left(run))
            if resort is not None:
                with resort._lent():
                    driver.perform(_until_nothing_is_left(run))
        finally:
            engine.budget, driver.resort = budget, resort


def _until_nothing_is_left(run: Run) -> Iterator[Any]:
    try:
        yield from run._driver.engine.make_room(0)
    except NoRoom:
        return


class _LetGo(TorchDispatchMode):
    """Entered inside of a budget: lets everything go after each operator of the program.

    The native core recomputes below every mode, that in Python above this one.
    """

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(self._run._driver, NativeDriver) or not self._run._driver.work.mine:
            let_go(self._run)
        return result


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Which operators run again, and how often; those of the native core at the end."""
    again: Counter[str] = Counter()
    run_again, make = _driver.run_again, NativeDriver.__init__
    made: list[NativeDriver] = []

    def counting(call: Call, *, in_place: bool) -> Any:
        again[call.name.removeprefix("aten::")] += 1
        return run_again(call, in_place=in_place)

    def making(driver: NativeDriver, *args: Any) -> None:
        make(driver, *args)
        driver.core.count_again(driver.handle)
        made.append(driver)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_driver, "run_again", counting)
        patch.setattr(NativeDriver, "__init__", making)
        yield again
    for driver in made:
        again.update(name.removeprefix("aten::") for name in driver.core.again(driver.handle))


@contextmanager
def everything_recomputed() -> Iterator[tuple[Run, Counter[str]]]:
    """A budget that lets everything go at once, and which operators ran again how often."""
    with counted() as again, rekindle.budget(AMPLE, evict=evict) as run, _LetGo(run):
        yield run, again

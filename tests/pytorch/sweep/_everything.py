"""Evict everything that may be evicted after each operator, so that all of it is recomputed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

import rekindle
from rekindle import Run
from rekindle.pytorch.native import Driver

AMPLE = 1 << 40  #: budget in bytes, so large that it causes no evictions itself
evict: Literal["saved", "auto", "anything"] = "saved"  #: argument `evict` of `rekindle.budget`


def evict_all(run: Run) -> None:
    """Evict every storage that may be evicted now."""
    run._driver.core.evict_all(run._driver.handle)


class _EvictAll(TorchDispatchMode):
    """A dispatch mode that evicts everything after each operator of the program.

    Dispatch modes do not see recomputations, so nothing is evicted after those.
    """

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        evict_all(self._run)
        return result


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count how often each operator is recomputed. The counter is filled at the end."""
    again: Counter[str] = Counter()
    make = Driver.__init__
    made: list[Driver] = []

    def making(driver: Driver, *args: Any) -> None:
        make(driver, *args)
        driver.core.list_recomputed_ops(driver.handle)
        made.append(driver)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Driver, "__init__", making)
        yield again
    for driver in made:
        again.update(
            name.removeprefix("aten::") for name in driver.core.recomputed_ops(driver.handle)
        )


@contextmanager
def everything_recomputed() -> Iterator[tuple[Run, Counter[str]]]:
    """Enter a budget that evicts everything after each operator; count recomputed operators."""
    with counted() as again, rekindle.budget(AMPLE, evict=evict) as run, _EvictAll(run):
        yield run, again

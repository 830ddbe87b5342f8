"""Set up the harshest setting: after each operator everything that may be evicted is evicted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

import rekindle
from rekindle.pytorch import Run
from rekindle.pytorch.native import NativeDriver

AMPLE = 1 << 40  #: bytes: nothing is evicted for lack of room
evict: Literal["saved", "auto", "anything"] = "saved"  #: as in `rekindle.budget`


def let_go(run: Run) -> None:
    """Evicts every storage that may be evicted now."""
    run._driver.core.let_go_now(run._driver.handle)


class _LetGo(TorchDispatchMode):
    """Evict everything after each operator of the program, inside a budget.

    Recomputations run below every mode, so nothing is evicted after them.
    """

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        let_go(self._run)
        return result


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Which operators run again, and how often; filled in at the end."""
    again: Counter[str] = Counter()
    make = NativeDriver.__init__
    made: list[NativeDriver] = []

    def making(driver: NativeDriver, *args: Any) -> None:
        make(driver, *args)
        driver.core.count_again(driver.handle)
        made.append(driver)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NativeDriver, "__init__", making)
        yield again
    for driver in made:
        again.update(name.removeprefix("aten::") for name in driver.core.again(driver.handle))


@contextmanager
def everything_recomputed() -> Iterator[tuple[Run, Counter[str]]]:
    """A budget that lets everything go at once, and which operators ran again how often."""
    with counted() as again, rekindle.budget(AMPLE, evict=evict) as run, _LetGo(run):
        yield run, again

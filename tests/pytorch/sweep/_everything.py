"""Evict everything that may be evicted after each operator, so that all of it is recomputed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

import rekindle
from rekindle import Run
from tests.differ.modes import Evict, evicting

AMPLE = 1 << 40  #: budget in bytes, so large that it causes no evictions itself


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
def everything_recomputed(evict: Evict = "saved") -> Iterator[Run]:
    """Enter a budget that evicts everything after each operator."""
    with rekindle.budget(AMPLE, **evicting(evict)) as run, _EvictAll(run):
        if evict == "moved":  # small tensors move as well then
            run._driver.core.evict_before_every_op(run._driver.handle, True)
        yield run

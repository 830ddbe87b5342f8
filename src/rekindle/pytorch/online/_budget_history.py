"""Remember which budgets were too small, and compute the budget to suggest to the user next.

When a program runs out of its budget, only its memory up to that operator is known, and each
attempt may cost a whole step. If a suggested budget fails as well, the next suggestion adds half
the need, as in galloping search (Bentley and Yao, 1976). The number of attempts then grows with the
logarithm of the missing bytes. A rehearsal of the model
(`context/_ahead.py`) gives a better suggestion, where it can run.

Failures are stored in a file in the cache folder. A script that is started again and fails in the
same way gets the final suggestion of an earlier process at once.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, final

from rekindle._cache import cache_folder, store
from rekindle._types import Bytes


class Shortage(NamedTuple):
    """A budget that was too small for its program.

    Attributes:
        budget: The budget in bytes.
        smallest: The smallest budget that gets past the operator that failed.
        next: The budget that was suggested to the user instead.
    """

    budget: Bytes
    smallest: Bytes
    next: Bytes


@final
class BudgetHistory:
    """The budgets that were too small for the running program."""

    #: If a suggested budget fails, the next suggestion adds 1/GROWTH of the need.
    GROWTH = 2
    #: If a budget that a forecast suggested fails, the next suggestion adds a tenth of the need,
    #: and the later ones two tenths, and so on: forecasts that are too small are nearly right.
    AFTER_FORECAST = 10
    #: Users and the command line round suggestions up. A budget is taken for a suggestion that is
    #: at most 1/ROUNDED smaller: from 16 MiB on, that covers rounding to whole MiB.
    ROUNDED = 16
    MOST = 64  #: most programs to store, and most failed budgets for each

    def __init__(self) -> None:
        self._met: dict[Bytes, Shortage] = {}
        #: For each failed budget of this process, the number of failed suggestions that led to it.
        self._failed_before: dict[Bytes, int] = {}
        # Budgets that failed in earlier processes. None: the file is not read yet.
        self._before: dict[Bytes, Shortage] | None = None
        self._ignores = False

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """Inside the block, remember no budget: Rekindle itself tries budgets that may fail."""
        before, self._ignores = self._ignores, True
        try:
            yield
        finally:
            self._ignores = before

    def suggest_after(
        self, budget: Bytes, smallest: Bytes, evicted: Bytes = 0, *, is_estimate: bool = False
    ) -> Bytes:
        """Return the budget to suggest after `budget` failed.

        Args:
            budget: The budget that failed.
            smallest: The smallest budget that probably gets past this operator.
            evicted: Bytes of evicted values. With this much more, nothing has to be evicted up to
                this operator. If it is a considerable part of the need, no more is added.
            is_estimate: `smallest` is the estimate of an operator's need, which is often twice the
                real need. So nothing is added.
        """
        if self._ignores:
            return smallest
        failed = self._predecessors(budget)
        self._failed_before[budget] = len(failed)
        stride = 0 if is_estimate else self._stride(failed, smallest)
        if evicted > smallest // self.ROUNDED:
            stride = min(stride, evicted)
        worth_trying = smallest + stride
        self._met[budget] = Shortage(budget, smallest, worth_trying)
        while len(self._met) > self.MOST:
            oldest = next(iter(self._met))
            del self._met[oldest], self._failed_before[oldest]
        self._keep()
        return max(worth_trying, self._at_the_end(budget, smallest))

    def is_second_failure(self, budget: Bytes) -> bool:
        """Return True if `budget` was the first suggestion after a smaller budget failed."""
        return not self._ignores and self._failed_before.get(budget) == 1

    def replace_suggestion(self, budget: Bytes, forecast: Bytes) -> bool:
        """Replace the budget suggested after `budget` failed by one from a forecast.

        Returns:
            False if the forecast is known to be too small: then nothing is replaced.
        """
        found = self._met.get(budget)
        if found is None:
            return False
        if forecast <= max(found.smallest, self._at_the_end(budget, found.smallest)):
            return False
        self._met[budget] = found._replace(next=forecast)
        self._keep()
        return True

    def _stride(self, failed: list[Shortage], smallest: Bytes) -> Bytes:
        """Return the bytes to add to `smallest` after the suggestions of `failed` have failed."""
        if not failed:
            return 0
        # The first suggestion adds nothing to the need, unless it is a forecast.
        if failed[-1].next > failed[-1].smallest:
            return smallest * min(len(failed), self.AFTER_FORECAST) // self.AFTER_FORECAST
        return smallest // self.GROWTH

    def _predecessors(self, budget: Bytes) -> list[Shortage]:
        """Return the shortages that led to `budget`, the last first.

        After each, a budget was suggested that failed as well, perhaps rounded.
        """
        found: list[Shortage] = []
        for each in sorted((self._earlier() | self._met).values(), reverse=True):
            about = self._is_about(budget, each.smallest) or self._is_about(budget, each.next)
            if each.budget < budget and about:
                found.append(each)
                budget = each.budget
        return found

    def _is_about(self, budget: Bytes, suggested: Bytes) -> bool:
        return suggested <= budget <= suggested + suggested // self.ROUNDED

    def _at_the_end(self, budget: Bytes, smallest: Bytes) -> Bytes:
        """Return the last suggestion of an earlier process that failed in the same way, or 0."""
        before = self._earlier()
        found, best = before.get(budget), 0
        if found is None or found.smallest != smallest:
            return 0
        while found is not None and found.next > best:
            best = found.next
            failed = (each for each in before.values() if self._is_about(each.budget, best))
            found = max(failed, default=None)
        return best

    def _earlier(self) -> dict[Bytes, Shortage]:
        """Return the failures of this program in earlier processes, by the budget that failed."""
        if self._before is None:
            self._before = {each.budget: each for each in _read().get(_program(), [])}
        return self._before

    def _keep(self) -> None:
        """Write the failures to the file, for later processes. Errors of the file are ignored."""
        program, path = _program(), _path()
        if not program or path is None:
            return
        known = _read()
        met = {each.budget: each for each in known.pop(program, [])} | self._met
        known[program] = list(met.values())[-self.MOST :]
        store(path, json.dumps({name: known[name] for name in list(known)[-self.MOST :]}))


def _path() -> Path | None:
    """Return the path of the file of failures, or None if there is no cache folder."""
    folder = cache_folder()
    return None if folder is None else folder / "too-small.json"


def _program() -> str:
    """Return the path of the running script, or "" if there is none (a notebook)."""
    name = getattr(sys.modules.get("__main__"), "__file__", None)
    return os.path.abspath(name) if name else ""


def _read() -> dict[str, list[Shortage]]:
    """Return the stored failures by program; none if the file cannot be read."""
    path = _path()
    if path is None:
        return {}
    with suppress(OSError, ValueError, TypeError, AttributeError):
        content = json.loads(path.read_text(encoding="utf-8"))
        return {name: [Shortage(*map(int, row)) for row in rows] for name, rows in content.items()}
    return {}


too_small = BudgetHistory()

"""Remember which budgets were too small, and compute the budget to suggest to the user next.

When a program runs out of its budget, only its memory up to that operator is known, and each
attempt may cost a whole step. If a suggested budget fails as well, the next suggestion adds twice
as much as the last one, as in galloping search (Bentley and Yao, 1976). The number of attempts then
grows with the logarithm of the missing bytes.

Failures are stored in a file in the cache folder. A script that is started again and fails in the
same way gets the final suggestion of an earlier process at once.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
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

    CAP = 4  #: suggest at most a quarter (1/CAP) more than `smallest`
    #: If a budget that a forecast suggested fails, the next suggestion is a tenth (2 / FIRST)
    #: larger.
    FIRST = 20
    #: If a suggested budget fails, the next one is at least 1/SLACK above `smallest`, even if plain
    #: PyTorch holds less at this operator. Otherwise each retry might get only one small tensor
    #: further.
    SLACK = 64
    MOST = 64  #: most programs to store, and most failed budgets for each

    def __init__(self) -> None:
        # For each suggested budget, the bytes (stride) that the suggestion added to the failed
        # budget.
        self._named: dict[Bytes, Bytes] = {}
        self._met: dict[Bytes, Shortage] = {}
        # Budgets that failed in earlier processes. None: the file is not read yet.
        self._before: dict[Bytes, Shortage] | None = None

    def suggest_after(self, budget: Bytes, smallest: Bytes, most: Bytes) -> Bytes:
        """Return the budget to suggest after `budget` failed.

        Args:
            budget: The budget that failed.
            smallest: The smallest budget that probably gets past this operator.
            most: The largest budget to suggest. If a suggested budget failed, the next one may be
                larger by 1/`SLACK` of `smallest`.
        """
        before = self._named.get(budget, self._stride_before(budget))
        stride = 0
        if before is not None:
            stride = max(2 * before, smallest - budget, smallest // self.SLACK)
            most = max(most, smallest + smallest // self.SLACK)
        worth_trying = min(smallest + min(stride, smallest // self.CAP), most)
        self._met[budget] = Shortage(budget, smallest, worth_trying)
        worth_trying = max(worth_trying, self._at_the_end(budget, smallest))
        for named in (smallest, worth_trying):
            self._named.pop(named, None)
            self._named[named] = stride
        for remembered in (self._named, self._met):
            while len(remembered) > self.MOST:
                del remembered[next(iter(remembered))]
        self._keep()
        return worth_trying

    def replace_suggestion(self, budget: Bytes, worth_trying: Bytes) -> None:
        """Replace the budget suggested after `budget` failed by one from a forecast."""
        found = self._met.get(budget)
        if found is not None and worth_trying > found.next:
            self._met[budget] = found._replace(next=worth_trying)
            self._named[worth_trying] = worth_trying // self.FIRST
            self._keep()

    def _at_the_end(self, budget: Bytes, smallest: Bytes) -> Bytes:
        """Return the last suggestion of an earlier process that failed in the same way, or 0."""
        before = self._earlier()
        found, best = before.get(budget), 0
        if found is None or found.smallest != smallest:
            return 0
        while found is not None and found.next > best:
            best = found.next
            found = before.get(best)
        return best

    def _stride_before(self, budget: Bytes) -> Bytes | None:
        """Return the stride (see `_named`) if an earlier process suggested `budget`, or None."""
        named = (each for each in self._earlier().values() if budget in (each.smallest, each.next))
        return next((each.next - each.smallest for each in named), None)

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

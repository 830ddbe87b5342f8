"""Budgets that came too short: what to try after them, in this process and in the next.

What is known of a program ends where it ran out of its budget, and each attempt may cost a whole
step. So where budgets named before came too short as well, steps double, as in galloping search
(Bentley and Yao, 1976): their number grows as the logarithm of what is missing. A script that is
started again and fails in the same way is told at once what an earlier process came to.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, final

from rekindle._cache import cache_folder
from rekindle._types import Bytes


class Shortage(NamedTuple):
    """A budget that did not do, the smallest that gets past the operator, the one to try next."""

    budget: Bytes
    smallest: Bytes
    next: Bytes


@final
class TooSmall:
    """The budgets of one program that did not do, as this process met them."""

    CAP = 4  #: no more than a quarter is given away at the end
    FIRST = 20  #: a forecast that comes too short is missed by a tenth the next time
    MOST = 64  #: budgets that are remembered, and programs

    def __init__(self) -> None:
        self._named: dict[Bytes, Bytes] = {}  # budgets, and the stride that led to each
        self._met: dict[Bytes, Shortage] = {}
        self._before: dict[Bytes, Shortage] | None = None  # what earlier processes met

    def beyond(self, budget: Bytes, smallest: Bytes, most: Bytes) -> Bytes:
        """Return the budget to name, up to `most`, when `budget` was too small.

        `smallest` gets past this operator.
        """
        before = self._named.get(budget, self._stride_before(budget))
        stride = 0 if before is None else max(2 * before, smallest - budget)
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

    def rather(self, budget: Bytes, worth_trying: Bytes) -> None:
        """When `budget` did not do, this one was named after all: it is the next to be tried."""
        found = self._met.get(budget)
        if found is not None and worth_trying > found.next:
            self._met[budget] = found._replace(next=worth_trying)
            self._named[worth_trying] = worth_trying // self.FIRST
            self._keep()

    def _at_the_end(self, budget: Bytes, smallest: Bytes) -> Bytes:
        """What an earlier process came to that began with the very same failure; 0: none did."""
        before = self._earlier()
        found, best = before.get(budget), 0
        if found is None or found.smallest != smallest:
            return 0
        while found is not None and found.next > best:
            best = found.next
            found = before.get(best)
        return best

    def _stride_before(self, budget: Bytes) -> Bytes | None:
        """The stride by which an earlier process came to name `budget`; None: none did."""
        named = (each for each in self._earlier().values() if budget in (each.smallest, each.next))
        return next((each.next - each.smallest for each in named), None)

    def _earlier(self) -> dict[Bytes, Shortage]:
        if self._before is None:
            self._before = {each.budget: each for each in _read().get(_program(), [])}
        return self._before

    def _keep(self) -> None:
        """For the next process. A file that cannot be written is no reason to fail."""
        program, path = _program(), _path()
        if not program or path is None:
            return
        with suppress(OSError):
            known = _read()
            met = {each.budget: each for each in known.pop(program, [])} | self._met
            known[program] = list(met.values())[-self.MOST :]
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(f".{os.getpid()}")
            content = {name: known[name] for name in list(known)[-self.MOST :]}
            unfinished.write_text(json.dumps(content), encoding="utf-8")
            unfinished.replace(path)


def _path() -> Path | None:
    folder = cache_folder()
    return None if folder is None else folder / "too-small.json"


def _program() -> str:
    """The script that runs; empty where there is none, as in a notebook."""
    name = getattr(sys.modules.get("__main__"), "__file__", None)
    return os.path.abspath(name) if name else ""


def _read() -> dict[str, list[Shortage]]:
    path = _path()
    if path is None:
        return {}
    with suppress(OSError, ValueError, TypeError, AttributeError):
        content = json.loads(path.read_text(encoding="utf-8"))
        return {name: [Shortage(*map(int, row)) for row in rows] for name, rows in content.items()}
    return {}


too_small = TooSmall()

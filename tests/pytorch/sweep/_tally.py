"""Count verdicts over many cases, and list the complaints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.pytorch.sweep._exceptions import NOT_HERE, NOTHING_TO_RECOMPUTE, Exempt
from tests.pytorch.sweep._verdict import Case


@dataclass
class Tally:
    """Counts of cases of one entry of a database (such as one operator), or of several entries."""

    kinds: Counter[str] = field(default_factory=Counter)  #: number of each verdict
    #: number of recomputations of each operator
    again: Counter[str] = field(default_factory=Counter)
    recomputed: int = 0  #: number of cases in which an operator was recomputed
    failures: list[str] = field(default_factory=list)  #: complaints about cases that fail
    #: entries without a case that runs in plain PyTorch
    refused: set[str] = field(default_factory=set)
    idle: set[str] = field(default_factory=set)  #: entries in which no operator was ever recomputed

    def __iadd__(self, other: Tally) -> Tally:
        self.kinds += other.kinds
        self.again += other.again
        self.recomputed += other.recomputed
        self.failures += other.failures
        self.refused |= other.refused
        self.idle |= other.idle
        return self

    @property
    def tried(self) -> int:
        """Return the number of cases that run in plain PyTorch."""
        return self.kinds.total() - self.kinds["refused"]

    def as_data(self) -> dict[str, Any]:
        return {
            "tried": self.tried,
            "same": self.kinds["same"],
            "excepted": {k: n for k, n in sorted(self.kinds.items()) if k not in _NO_EXCEPTION},
            "different": self.kinds["different"],
            "refused_by_pytorch": self.kinds["refused"],
            "cases_with_recomputation": self.recomputed,
            "operators_that_ran_again": len(self.again),
            "recomputations": self.again.total(),
            "entries_refused_by_pytorch": sorted(self.refused),
            "entries_without_recomputation": sorted(self.idle),
        }

    def table(self) -> Iterator[str]:
        """Return lines to print."""
        for kind, number in self.as_data().items():
            yield f"{kind.replace('_', ' '):32} {_text(number)}"


_NO_EXCEPTION = ("same", "different", "refused")


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{number} {kind}" for kind, number in value.items()) or "0"
    if isinstance(value, list):
        return f"{len(value)}: {', '.join(map(str, value))}" if value else "0"
    return f"{value:,}" if isinstance(value, int) else str(value)


def tally(
    entry: str,
    cases: Iterable[Case],
    exempt: Mapping[str, Exempt],
    *,
    every: bool = True,
    evict: str = "saved",
) -> Tally:
    """Run the cases of one entry; `every`: True if these are all of its cases."""
    found = Tally()
    allowed = exempt[entry].kind if entry in exempt else "same"
    for case in cases:
        verdict = case.judge()
        found.kinds[verdict.kind] += 1
        found.again += verdict.again
        found.recomputed += bool(verdict.again)
        if verdict.kind not in ("same", "refused", allowed):
            found.failures.append(f"{case}: {verdict.kind}: {verdict.detail}")
    if found.tried == 0:
        found.refused.add(entry)
    elif not found.again:
        found.idle.add(entry)
    found.failures += [
        f"{entry}: {complaint}" for complaint in _unlisted(entry, found, every, evict)
    ]
    return found


def _unlisted(entry: str, found: Tally, every: bool, evict: str) -> Iterator[str]:
    """Yield complaints if the lists of entries without samples or recomputations are wrong."""
    if found.refused and every and entry not in NOT_HERE:
        yield "PyTorch refuses every sample"
    if found.tried and entry in NOT_HERE:
        yield "a sample runs: take it from NOT_HERE"
    if found.idle and every and entry not in NOTHING_TO_RECOMPUTE:
        yield "nothing was ever recomputed"
    if found.again and every and entry in NOTHING_TO_RECOMPUTE and evict == "saved":
        yield "something was recomputed: take it from NOTHING_TO_RECOMPUTE"

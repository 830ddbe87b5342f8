"""Count verdicts on programs, list the complaints, and write the file of results."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import _common

NAME = "sweeps"
RESULTS = f"benchmarks/results/{NAME}.json"
_NO_EXCEPTION = ("same", "different", "refused")


@dataclass
class Tally:
    """Counts of verdicts on one program or on several, such as all cases of an operator."""

    kinds: Counter[str] = field(default_factory=Counter)  #: number of each verdict
    modes: Counter[str] = field(default_factory=Counter)  #: number of runs in each mode
    excepted: Counter[str] = field(
        default_factory=Counter
    )  #: number of excepted programs, by reason
    #: number of recomputations of each operator
    again: Counter[str] = field(default_factory=Counter)
    recomputed: int = 0  #: number of cases in which an operator was recomputed
    failures: list[str] = field(default_factory=list)  #: complaints
    #: entries of a database without a case that runs in plain PyTorch
    refused: list[str] = field(default_factory=list)
    #: entries in which no operator was ever recomputed
    idle: list[str] = field(default_factory=list)

    def __iadd__(self, other: Tally) -> Tally:
        for name in vars(self):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        return self

    @staticmethod
    def of_row(row: dict[str, Any]) -> Tally:
        """Return a tally that another process wrote by `as_row`."""
        found = Tally(**row)
        for name in ("kinds", "modes", "excepted", "again"):
            setattr(found, name, Counter(getattr(found, name)))
        return found

    def as_row(self) -> dict[str, Any]:
        return vars(self)

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

    def summary(self, what: str) -> Iterator[str]:
        """Return lines to print about random programs; `what` says which."""
        yield f"{what}: {dict(self.kinds)}; runs by mode: {dict(self.modes)}"
        for reason, number in sorted(self.excepted.items()):
            yield f"{number:6}  excepted: {reason}"


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{number} {kind}" for kind, number in value.items()) or "0"
    if isinstance(value, list):
        return f"{len(value)}: {', '.join(map(str, value))}" if value else "0"
    return f"{value:,}" if isinstance(value, int) else str(value)


def results() -> dict[str, Any]:
    """Return the stored results, by source."""
    path = Path(_common.ROOT) / RESULTS
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write_results(label: str, command: str, counts: dict[str, Any], seconds: float) -> None:
    """Replace the stored results of `label` by `counts`."""
    conditions = {**_common.conditions(), "command": command, "seconds": round(seconds)}
    _common.write(NAME, {**results(), label: {**conditions, **counts}})


def write_seeds(label: str, words: str, seeds: range, total: Tally, seconds: float) -> None:
    """Write the counts of random programs.

    Add those of an earlier run, if it ended at the first seed and at the same commit.
    """
    kinds = total.kinds
    found: dict[str, Any] = {
        "tried": len(seeds),
        "same": kinds["same"],
        "excepted": dict(sorted(total.excepted.items())),
        "different": kinds["different"],
        "runs": dict(total.modes),
    }
    first, last = seeds[0], seeds[-1]
    before = results().get(label, {})
    commit = _common.conditions()["commit"]
    if (before.get("last_seed"), before.get("commit")) == (first - 1, commit):
        first = before["first_seed"]
        seconds += before["seconds"]
        for key in ("tried", "same", "different"):
            found[key] += before[key]
        for key in ("excepted", "runs"):
            found[key] = dict(Counter(found[key]) + Counter(before.get(key, {})))
    command = f"scripts/sweep {words} {last - first + 1} --seed {first}"
    write_results(label, command, {"first_seed": first, "last_seed": last, **found}, seconds)

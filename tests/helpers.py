"""Helpers that many tests share, and the list of all policies.

Every test of policies runs with each policy in this list.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Sequence
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

import pytest

from rekindle._cache import core_folder
from rekindle.policies import DTR, LRU, MSPS, Ablation, Largest, Policy, Random

ALL_POLICIES: tuple[Policy, ...] = (
    DTR(),
    DTR("classes"),
    DTR("local"),
    LRU(),
    Largest(),
    MSPS(),
    Random(seed=3),
    Ablation(staleness=True, size=False, cost="classes"),
)


def own_cache(folder: Path) -> Path:
    """Make `folder` a cache that contains nothing but the compiled native cores."""
    folder.mkdir(parents=True, exist_ok=True)
    cores, link = core_folder(), folder / "cores"
    cores.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not link.exists():
        link.symlink_to(cores.resolve())
    return folder


#: True if all parametrized cases run, as with `scripts/sweep tests`.
WHOLE = os.environ.get("REKINDLE_TEST_WHOLE") == "1"


def combined(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Combine each value of each argument with one value of every other argument.

    With `scripts/sweep tests`, return every combination.
    """
    if WHOLE:
        return list(product(*axes))
    return list(islice(zip(*map(cycle, axes), strict=False), max(map(len, axes))))


def sampled(values: Iterable[Any], most: int) -> list[Any]:
    """Draw at most `most` values with a fixed seed.

    With `scripts/sweep tests`, return all values.
    """
    values = list(values)
    return values if WHOLE else random.Random(20).sample(values, min(most, len(values)))


def name_of(value: object) -> str:
    """Return a readable test id for a parameter."""
    name = getattr(value, "name", None) or getattr(value, "__name__", None)
    return name if isinstance(name, str) else repr(value)


def others_slow(values: Iterable[object]) -> list[Any]:
    """Parametrize a long test: the first value always runs, the others are slow tests."""
    first, *others = values
    return [first, *(pytest.param(each, marks=pytest.mark.slow) for each in others)]


class Link:
    """A storage in a chain, as a policy sees it.

    The test fills `above` (storages that this one is computed from) and `below` (storages computed
    from it).
    """

    def __init__(self, nbytes: int, cost: int, last: int) -> None:
        self.nbytes, self.cost, self.last_access, self.order = nbytes, cost, last, last
        self.resident = True
        self.above: list[Link] = []
        self.below: list[Link] = []

    def parents(self) -> list[Link]:
        return self.above

    def children(self) -> list[Link]:
        return self.below

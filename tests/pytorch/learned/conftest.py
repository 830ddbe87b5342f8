"""Make the tests of learned plans deterministic.

A learned plan says which values the next training step evicts and recomputes. Tests wait until
planning has finished. Except in a few tests, a simulated run of a simple policy stands in for the
slow search for a plan. Plans of earlier processes are not loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from rekindle.engine import NoRoom, Route
from rekindle.policies import Swap, Thrifty
from rekindle.pytorch.learned import _step_plans, _step_times
from rekindle.pytorch.learned._background import Planning
from rekindle.simulator import replay
from rekindle.trace import Trace
from tests.helpers import own_cache
from tests.pytorch.plans import forget_plans


class AtOnce:
    """Planning in this process, at once: the plan is a simulated run of the policy `Thrifty`."""

    running = False
    made: ClassVar = 0

    def __init__(self, trace: Trace, budget: int, seconds: float, swap: Swap | None = None) -> None:
        AtOnce.made += 1
        try:
            record = replay(trace, budget=budget, policy=Thrifty(), swap=swap)
        except NoRoom as error:  # such traces arise if several threads run operators together
            raise OSError(str(error)) from None
        cost = record.recompute_ns
        self.route = replace(Route.of(trace, record.schedule), recompute_ns=cost)

    def newest(self) -> Route:
        return self.route

    def wait(self, timeout: float | None) -> bool:
        return True

    def stop(self) -> None: ...


@pytest.fixture(autouse=True)
def _afresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("REKINDLE_CACHE", str(own_cache(tmp_path / "cache")))
    monkeypatch.setattr(_step_plans, "Planning", AtOnce)
    # A plan of `AtOnce` may be slower than the budget without a plan, and a step of a test takes
    # less time than its recording. Tests follow and record nevertheless.
    monkeypatch.setattr(_step_times, "SLOWER", float("inf"))
    monkeypatch.setattr(_step_times, "LONGEST_INTERVAL", 10**9)
    monkeypatch.setattr(_step_times, "FIRST_INTERVAL", 10**9)
    monkeypatch.setattr(_step_times, "UPKEEP", float("inf"))
    monkeypatch.setattr(AtOnce, "made", 0)
    forget_plans()
    yield
    forget_plans()


@pytest.fixture
def for_real(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make plans by the real search in another process, with a short time limit."""
    monkeypatch.setattr(_step_plans, "Planning", Planning)
    monkeypatch.setattr(_step_plans, "SECONDS", 5.0)

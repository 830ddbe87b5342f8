"""Make the tests of learned plans deterministic.

Planning is waited for. Except in a few tests, a plan is the record of another policy, which is
ready at once. Plans of earlier processes are not loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from rekindle.engine import NoRoom, Route
from rekindle.policies import Thrifty
from rekindle.pytorch.learned import _step_plans
from rekindle.pytorch.learned._background import Planning
from rekindle.pytorch.learned._step_plans import forget_plans
from rekindle.simulator import replay
from rekindle.trace import Trace
from tests.helpers import own_cache


class AtOnce:
    """Planning without a process: the schedule of another policy."""

    running = False
    made: ClassVar = 0

    def __init__(self, trace: Trace, budget: int, seconds: float) -> None:
        AtOnce.made += 1
        try:
            record = replay(trace, budget=budget, policy=Thrifty())
        except NoRoom as error:  # as of threads that were in each other's way
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
    # The record of another policy may lose more time, but must be followed here.
    monkeypatch.setattr(_step_plans, "DEARER", float("inf"))
    monkeypatch.setattr(AtOnce, "made", 0)
    forget_plans()
    yield
    forget_plans()


@pytest.fixture
def for_real(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are made as they are outside of tests, but quickly."""
    monkeypatch.setattr(_step_plans, "Planning", Planning)
    monkeypatch.setattr(_step_plans, "SECONDS", 1.0)

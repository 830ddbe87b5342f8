"""Tests of `rekindle.simulate`."""

from __future__ import annotations

import pytest

import rekindle
from rekindle.policies import LRU
from rekindle.schedule import verify
from rekindle.trace import chain


def test_simulate_takes_budget_as_text() -> None:
    trace = chain(12, nbytes=1000)
    record = rekindle.simulate(trace, budget="5 kB", policy=LRU())
    assert record.peak <= 5000
    assert verify(trace, record.schedule, 5000).recomputations == record.recomputations > 0
    assert rekindle.simulate(trace).recomputations == 0


def test_simulate_with_impossible_budget_raises_out_of_budget() -> None:
    with pytest.raises(
        rekindle.OutOfBudget, match=r"needs 1000 B, but 2\.0 KiB of the 2\.0 KiB"
    ) as caught:
        rekindle.simulate(chain(12, nbytes=1000), budget=2000)
    assert (caught.value.needed, caught.value.smallest_budget) == (1000, 3000)
    with pytest.raises(rekindle.InvalidBudget, match=r"rekindle.simulate\(trace, budget="):
        rekindle.simulate(chain(3), budget="much")

"""Tests of `record=True` with `evict="anything"`.

A record lists all evictions and recomputations of a run. Plans may be learned from it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import rekindle
from rekindle import InvalidSchedule, Run
from rekindle.schedule import verify
from rekindle.trace import check_trace
from tests.pytorch.harsh import harshest
from tests.pytorch.held.placeholders import empty
from tests.pytorch.held.test_evict_anything import NBYTES, pipeline, skips
from tests.pytorch.tracker import Tracker, measure


def within(amount: int, **options: Any) -> rekindle.budget:
    return rekindle.budget(amount, evict="anything", **options)


def judged(run: Run) -> None:
    """Check that the record of a run is a valid schedule of its trace within the budget."""
    schedule, budget = run.record.schedule, run.budget
    cost = verify(run.trace, schedule, budget, evicts_held=True)
    assert cost.recomputations == run.record.recomputations > 0
    assert cost.recompute_ns == run.record.recompute_ns
    assert budget is not None
    assert cost.peak == run.record.peak <= budget
    with pytest.raises(InvalidSchedule, match="the program holds storage"):
        verify(run.trace, schedule, budget)


def test_recorded_run_with_evict_anything_is_valid_schedule() -> None:
    budget = harshest(skips, evict="anything").budget
    with within(budget, record=True) as run:
        skips()()
    judged(run)


def test_recorded_no_grad_run_may_exceed_budget_at_its_end() -> None:
    """At its end, a budget recomputes all user-held values, which may need more memory than it has.

    The record does not include these recomputations.
    """
    wanted = pipeline()
    with within(8 * NBYTES, record=True) as run:
        kept = pipeline()
        sums = [each.sum() for each in kept]
        assert empty(kept) > 0
    assert run.recomputations > run.record.recomputations
    assert all(torch.equal(*pair) for pair in zip(kept, wanted, strict=True))
    assert all(torch.equal(a, b.sum()) for a, b in zip(sums, wanted, strict=True))
    judged(run)


def test_trace_of_part_of_run_with_evict_anything_is_valid() -> None:
    step = skips()
    step()
    budget = harshest(skips, evict="anything").budget
    with within(2 * budget) as run:
        kept = pipeline(4)
        run.begin_trace()
        step()
        trace = run.end_trace()
        assert len(kept) == 4
    check_trace(trace)
    assert any(op.name.removeprefix("aten::") == "cat" for op in trace.ops)


def test_learned_plan_with_evict_anything_matches_pytorch() -> None:
    torch.manual_seed(1)
    step = skips()
    budget = int(0.75 * measure(step).peak)
    torch.manual_seed(1)
    step = skips()
    wanted = [step()[0] for _ in range(5)]
    torch.manual_seed(1)
    step = skips()
    with Tracker(resized=True) as tracker, within(budget, learn="wait") as run:
        losses = [step()[0] for _ in range(5)]
        assert tracker.peak <= budget
    assert all(torch.equal(*pair) for pair in zip(losses, wanted, strict=True))
    assert run.recomputations > 0


def test_learned_plan_for_evict_anything_evicts_user_held_values() -> None:
    def program() -> tuple[Callable[[], Tensor], Tensor]:
        torch.manual_seed(1)
        weight = torch.randn(200, 200, requires_grad=True)
        optimizer = torch.optim.SGD([weight], 0.01)

        def step() -> Tensor:
            optimizer.zero_grad()
            hidden = weight
            for _ in range(12):
                hidden = torch.tanh(hidden * 1.1)
            loss = hidden.square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step, weight

    step, plain = program()
    for _ in range(6):
        step()
    step, weight = program()
    with within(12 * weight.nbytes, learn="wait") as run:
        for _ in range(6):
            step()
    assert run.steps_followed > 0
    assert torch.equal(weight, plain)

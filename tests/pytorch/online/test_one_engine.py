"""Tests that a real run, replayed in the simulator, takes the same decisions."""

from __future__ import annotations

import pytest

import rekindle
from rekindle.policies import DEFAULT, DTR, LRU, Policy
from rekindle.pytorch import Run
from rekindle.schedule import Compute, verify
from rekindle.simulator import replay
from tests.helpers import combined, name_of
from tests.pytorch.models import ALL_CASES, Case
from tests.pytorch.test_models import plainly, train

OTHERS = (DTR("classes"), LRU())


def _feasible(case: Case, budget: int, policy: Policy) -> tuple[int, Run]:
    while True:
        workload = case.build()
        try:
            with rekindle.budget(budget, policy=policy, record=True, evict="saved") as run:
                train(workload)
        except rekindle.OutOfBudget as error:
            budget = error.smallest_budget
        else:
            return budget, run


@pytest.mark.parametrize(
    ("case", "policy"), combined(ALL_CASES, (DEFAULT, DTR(), *OTHERS)), ids=name_of
)
def test_the_simulator_decides_as_the_real_run_did(
    case: Case, policy: Policy, request: pytest.FixtureRequest
) -> None:
    if case.name == "mixture_of_experts" and policy == LRU():
        # An index and a product were last read by one operator. Which of the two goes first hangs
        # on when they became candidates, and there the native run and the simulator differ.
        request.node.add_marker(pytest.mark.xfail(strict=True, reason="a tie is broken otherwise"))
    with rekindle.budget.unlimited():  # what is guessed before the first call of an operator is in
        train(case.build())  # no trace
    budget, run = _feasible(case, plainly(case).measured.budget(0.5), policy)
    trace, record = run.trace, run.record
    cost = verify(trace, record.schedule, budget)
    assert cost.peak == record.peak
    assert cost.recomputations == record.recomputations > 0
    simulated = replay(trace, budget=budget, policy=policy)
    assert simulated.actions == record.actions
    assert simulated.recompute_ns == record.recompute_ns
    assert simulated.peak == record.peak
    assert any(isinstance(action, Compute) for action in record.actions)

"""Tests of whole models within a budget against plain PyTorch, bit for bit, with a memory tracker.

Each test makes three optimizer steps in one `rekindle.budget(...)`. The budget is the constant
memory (such as weights) and a fraction of the activation memory of plain PyTorch. If that is too
small, `OutOfBudget` suggests the smallest budget that gets past the failed operator. The test
follows the suggestions, from a fresh start each time, until one works.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import rekindle
from rekindle import Run
from rekindle.policies import Policy
from tests.differ.judge import smallest
from tests.helpers import ALL_POLICIES, combined, name_of, others_slow
from tests.pytorch.allocations import allocated
from tests.pytorch.bits import differing, everything, threads_set
from tests.pytorch.models import ALL_CASES, Case, Workload
from tests.pytorch.tracker import Measured, Tracker, measure

STEPS = 3
FRACTIONS = (1.0, 0.7, 0.5, 0.3)
MOST_ATTEMPTS = 12  # each suggested budget gets past one more operator that did not fit

each_case = pytest.mark.parametrize("case", ALL_CASES, ids=lambda case: case.name)
some_cases = pytest.mark.parametrize("case", others_slow(ALL_CASES), ids=lambda case: case.name)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Run on one thread, because several threads may split sums differently from run to run."""
    with threads_set(1):
        yield


def train(workload: Workload) -> list[Tensor]:
    return [loss for number in range(STEPS) for loss in workload.step(number)]


def left_by(workload: Workload, losses: list[Tensor]) -> dict[str, Any]:
    """Return copies of all that a training run leaves behind, by name."""
    return everything((losses, workload.model, [phase.optimizer for phase in workload.phases]))


@dataclass(frozen=True)
class Plain:
    measured: Measured
    outcome: dict[str, Any]


@functools.cache
def plainly(case: Case) -> Plain:
    """Return the results of plain PyTorch."""
    workload = case.build()
    losses: list[Tensor] = []
    measured = measure(lambda: losses.extend(train(workload)))
    return Plain(measured, left_by(workload, losses))


@dataclass(frozen=True)
class Within:
    """The result of a run within a budget, and the budgets that were too small before."""

    budget: int
    outcome: dict[str, Any]
    evictions: int
    recomputations: int
    refused: tuple[int, ...]


def within(case: Case, budget: int, policy: Policy | None = None) -> Within:
    """Train within the budget, or the first suggested budget that suffices.

    Every attempt must stay within its budget.
    """

    def attempt(budget: int) -> tuple[Workload, list[Tensor], Run]:
        workload = case.build()
        tracker = Tracker(resized=True)
        try:
            with tracker, rekindle.budget(budget, policy=policy) as run:
                losses = train(workload)
        finally:
            assert tracker.peak <= budget
        return workload, losses, run

    (workload, losses, run), budget, refused = smallest(
        attempt, budget, most=MOST_ATTEMPTS, suggestion="worth_trying"
    )
    outcome = left_by(workload, losses)
    return Within(budget, outcome, run.evictions, run.recomputations, tuple(refused))


@each_case
def test_sample_model_trained_twice_has_equal_bits(case: Case) -> None:
    workload = case.build()
    again = left_by(workload, train(workload))
    assert differing(again, plainly(case).outcome) == []
    values = [value for value in again.values() if isinstance(value, Tensor)]
    assert len(values) > 10
    assert all(value.isfinite().all() for value in values)


@each_case
def test_sample_model_uses_most_memory_for_activations(case: Case) -> None:
    parameters = sum(p.numel() * p.element_size() for p in case.build().model.parameters())
    assert plainly(case).measured.activations > 5 * parameters


@pytest.mark.parametrize(("case", "fraction"), combined(ALL_CASES, FRACTIONS), ids=name_of)
def test_sample_model_within_budget_matches_pytorch(
    case: Case,
    fraction: float,
    record_property: Callable[[str, object], None],
) -> None:
    plain = plainly(case)
    trained = within(case, plain.measured.budget(fraction))
    assert differing(trained.outcome, plain.outcome) == []
    record_property("refused", trained.refused)
    record_property("budget", trained.budget)


@functools.cache
def with_workspaces(case: Case) -> int:
    """Return the peak of a run in plain PyTorch by the allocator's events: with workspaces."""
    workload = case.build()
    there = [*workload.model.parameters(), *workload.model.buffers()]
    return sum(each.nbytes for each in there) + allocated(lambda: train(workload)).peak


@each_case
def test_sample_model_in_ample_budget_evicts_nothing(case: Case) -> None:
    # One percent above plain PyTorch, because Rekindle holds a constant, such as the zero that a
    # sum starts from, a little longer than autograd does.
    room = max(plainly(case).measured.budget(1.01), int(1.01 * with_workspaces(case)))
    within(case, room)  # measures the workspaces of operators, so that none is estimated below
    trained = within(case, room)
    assert (trained.refused, trained.evictions, trained.recomputations) == ((), 0, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "policy"), combined(ALL_CASES, ALL_POLICIES), ids=name_of)
def test_sample_model_with_each_policy_matches_pytorch(case: Case, policy: Policy) -> None:
    plain = plainly(case)
    # 0.7 and not 0.5, because with half of the memory the policy `Largest` takes minutes on the
    # LSTM, whose values have equal sizes.
    trained = within(case, plain.measured.budget(0.7), policy)
    assert differing(trained.outcome, plain.outcome) == []


def test_comparison_of_models_detects_one_changed_bit() -> None:
    """It also detects another dtype, and -0.0 in place of 0.0."""
    one = {"loss 0": torch.tensor([1.0, 2.0]), "generator": torch.tensor([3])}
    last_bit = torch.nextafter(one["loss 0"], torch.tensor(9.0))
    assert differing(dict(one), one) == []
    assert differing(one | {"loss 0": last_bit}, one) == ["loss 0"]
    assert differing({"zero": torch.tensor(-0.0)}, {"zero": torch.tensor(0.0)}) == ["zero"]
    assert differing(one | {"generator": torch.tensor([3.0])}, one) == ["generator"]

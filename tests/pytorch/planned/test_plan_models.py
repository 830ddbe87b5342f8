"""Tests of planned whole models against plain PyTorch, bit for bit, with a memory tracker.

Each test makes three optimizer steps. The planned model computes its loss, so that the plan covers
all memory. Budgets range from one without any recomputation to less than half of it, or to the
smallest for which the planner finds a plan. A model that cannot be traced is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

import rekindle
from rekindle.planners import ChenGreedy, Cuts, KeepAll
from tests.helpers import combined, name_of
from tests.pytorch.bits import differing
from tests.pytorch.models import ALL_CASES, Case, Workload
from tests.pytorch.networks import Residual
from tests.pytorch.planned.helpers import Onlooker, WithLoss
from tests.pytorch.test_models import left_by

STEPS = 3
CASES = {case.name: case for case in ALL_CASES}
TRACED = ["gpt", "resnet", "densenet", "unet"]
PLANNERS = {
    "keep-all": KeepAll(),
    "chen": ChenGreedy("all"),
    "cuts": Cuts(5, gap=0.05),
    "cuts, tight": Cuts(5, gap=0.05),
}
SHARES = {"keep-all": 2.0, "chen": 0.7, "cuts": 0.7, "cuts, tight": 0.45}


pytestmark = pytest.mark.usefixtures("prices_of_plans", "nothing_left_compiled")


def built(case: Case) -> Workload:
    """Build the model without stochastic depth, which chooses operators at random."""
    workload = case.build()
    for module in workload.model.modules():
        if isinstance(module, Residual):
            module.drop = 0.0
    return workload


def trained(workload: Workload, run: Callable[..., Tensor]) -> tuple[dict[str, Tensor], int]:
    """Return the results of training, and the peak of the forward and backward passes."""
    (phase,) = workload.phases
    losses, peak = [], 0
    for number in range(STEPS):
        batch = workload.data(number)
        phase.optimizer.zero_grad()
        with Onlooker() as onlooker:
            loss = run(*batch)
            loss.backward()
        losses.append(loss.detach())
        peak = max(peak, onlooker.peak)
        del loss
        phase.optimizer.step()
    return left_by(workload, losses), peak


@functools.cache
def plainly(name: str) -> tuple[dict[str, Tensor], int]:
    workload = built(CASES[name])
    return trained(workload, WithLoss.of(workload.model, workload.phases[0]))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "planner"), combined(TRACED, [*PLANNERS]), ids=name_of)
def test_planned_sample_model_matches_pytorch(name: str, planner: str) -> None:
    wanted, plain_peak = plainly(name)
    workload = built(CASES[name])
    model = WithLoss.of(workload.model, workload.phases[0])
    batch = workload.data(0)
    budget = int(SHARES[planner] * plain_peak)
    plan = rekindle.plan(model, batch, budget=budget, planner=PLANNERS[planner])
    if plan.peak is None:
        budget = plan.smallest_budget
        plan = rekindle.plan(model, batch, budget=budget, planner=PLANNERS[planner])
    assert plan.peak is not None
    assert bool(plan.overhead) == (planner != "keep-all")
    found, peak = trained(workload, plan.apply())
    assert differing(found, wanted) == []
    assert peak <= plan.peak <= budget
    # the memory tracker cannot see inside of operators
    unseen = max(op.workspace for op in plan.trace.ops)
    assert peak > 0.9 * plan.peak - unseen


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet", "gan", "mixture_of_experts"])
def test_plan_of_model_that_cannot_be_traced_is_refused(name: str) -> None:
    workload = CASES[name].build()
    batch = workload.data(0)

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = workload.model

        def forward(self, batch: Any) -> Tensor:
            return workload.phases[0].losses(self.model, batch)

    with pytest.raises(rekindle.Unsupported, match=r"write `with rekindle\.budget"):
        rekindle.plan(Step(), (batch,), budget="1GB", planner=KeepAll())

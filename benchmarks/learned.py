"""Compare how much is recomputed online, with a learned plan, and at the proven minimum.

    scripts/bench learned [--seconds 60] [--only NAME ...]

Each model trains twice: without learning, and with a plan that the run waits for. The budget is the
model's constants and a fraction of its activation memory, or the smallest feasible budget if that
is too small. All figures are the time of recomputed operators divided by the time of the operators'
first runs. `online` is without a plan. `promised` is what the plan predicts, `learned` what was
recomputed while the run followed the plan. `bound` is a proven minimum for the step
(`planners/cuts.py`).
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from _common import conditions, write
from tests.pytorch import models
from tests.pytorch.models import ALL_CASES, Case, Phase, Workload, next_token_loss, tokens
from tests.pytorch.networks import Residual
from tests.pytorch.plans import forget_plans
from tests.pytorch.test_models import plainly

import rekindle
from rekindle.cli._demo_training import GPT, Settings
from rekindle.pytorch.learned import _background, _step_plans

FRACTIONS = (0.5, 0.3)
BEFORE, AFTER = 3, 3  # number of steps to measure before a plan exists, and with the plan


def demo() -> Workload:
    """Return the GPT of `rekindle demo`, at its own size."""
    settings = Settings()
    model = GPT(settings)
    phase = Phase(next_token_loss, torch.optim.AdamW(model.parameters(), foreach=True))
    return Workload(model, tokens(100, settings.batch, settings.context), (phase,))


def always_deep() -> Workload:
    """Return the tests' residual network without stochastic depth, so that all steps are equal."""
    workload = models.resnet()
    for module in workload.model.modules():
        if isinstance(module, Residual):
            module.drop = 0.0
    return workload


CASES = [*ALL_CASES, Case("resnet_fixed", always_deep), Case("demo", demo)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--only", nargs="*", default=[case.name for case in CASES])
    arguments = parser.parse_args()
    _step_plans.SECONDS = arguments.seconds  # type: ignore[misc]
    _background.NICENESS = 0  # type: ignore[misc]  # waited for: nobody to stand back from
    results: dict[str, Any] = conditions()
    results["seconds_for_a_plan"] = arguments.seconds
    results["rows"] = rows = []
    print("              model  of it   online learned promised  bound  learned/bound  followed")
    for case in CASES:
        for fraction in FRACTIONS if case.name in arguments.only else ():
            row = measure(case, fraction)
            rows.append(row)
            print(_line(row), flush=True)
            write("learned", results)


def measure(case: Case, fraction: float) -> dict[str, Any]:
    wanted = plainly(case).measured.budget(fraction)
    budget = wanted
    while True:
        try:
            online = train(case, budget, learn=False)
            learned = train(case, budget, learn=True)
        except rekindle.OutOfBudget as error:
            budget = error.smallest_budget
        else:
            return {
                "model": case.name,
                "fraction": fraction,
                "budget": budget,
                "as_asked": budget == wanted,
                "online": online["share"],
                **{name: value for name, value in learned.items() if name != "share"},
                "learned": learned["share"],
            }


def train(case: Case, budget: int, *, learn: bool) -> dict[str, Any]:
    """Take a few steps that may teach a plan, then measure recomputation in a few more.

    Returns:
        `share`, the time of recomputed operators divided by the time of the operators' first runs
        in the measured steps, and further figures.
    """
    forget_plans()
    workload = case.build()
    with rekindle.budget(budget, learn="wait" if learn else False) as run:
        for number in range(BEFORE):
            workload.step(number)
        before = run.compute_ns, run.recompute_ns
        began = time.process_time()
        for number in range(BEFORE, BEFORE + AFTER):
            workload.step(number)
        seconds = time.process_time() - began
        compute_ns = run.compute_ns - before[0]
        found: dict[str, Any] = {
            "share": (run.recompute_ns - before[1]) / compute_ns,
            "cpu_seconds": seconds,
        }
    if not learn or run._learner is None:
        return found
    shapes = run._learner.plans.shapes
    routes = [plan.route for plan in shapes if plan.route is not None]
    found["steps_followed"], found["steps_left"] = run.steps_followed, run.steps_left
    found["shapes"], found["planned"] = len(shapes), len(routes)
    found["why"] = run._learner.why or run._learner.plans.note
    if routes:
        step_ns = compute_ns / AFTER
        found["promised"] = sum(route.recompute_ns for route in routes) / step_ns
        found["bound"] = sum(route.bound_ns for route in routes) / step_ns
    return found


def _line(row: dict[str, Any]) -> str:
    bound = row.get("bound", 0.0)
    times = f"{row['learned'] / bound:.2f}" if bound else "-"
    figures = [row["online"], row["learned"], row.get("promised"), row.get("bound")]
    shares = " ".join("      - " if f is None else f"{f:>7.2%} " for f in figures)
    budget = f"{row['fraction']:.1f}" if row["as_asked"] else "least"
    reported = f"{row['steps_followed']}, left {row['steps_left']}"
    return f"{row['model']:>19} {budget:>5} {shares} {times:>7}  {reported}"


if __name__ == "__main__":
    main()

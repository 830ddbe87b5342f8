"""Find the smallest budgets with `evict="saved"` and with `evict="anything"`.

    scripts/bench anything [--only NAME ...] [--steps 2]

For each of the tests' models, a bisection finds, to one percent, the smallest fraction of its
activation memory within which training steps run. A row also has the peak within that budget, as
the tests' tracker counts it, and says if losses, weights, gradients, buffers and random numbers
equal plain PyTorch's, bit for bit. The last row is a pipeline without autograd that keeps all its
intermediate results; its fractions are of the peak in plain PyTorch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, Literal

import torch
from _common import conditions, write
from tests.pytorch.bits import differing
from tests.pytorch.models import ALL_CASES, Case, Workload
from tests.pytorch.test_models import left_by
from tests.pytorch.tracker import Measured, Tracker, measure
from torch import Tensor

import rekindle

Evict = Literal["saved", "anything"]
MODES: tuple[Evict, ...] = ("saved", "anything")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=["unet", "lstm"])
    parser.add_argument("--steps", type=int, default=2)
    arguments = parser.parse_args()
    results: dict[str, Any] = {**conditions(), "steps": arguments.steps, "pipeline": {}, "rows": []}
    for evict in MODES:
        results["pipeline"][evict] = row = bisected(evict, *pipeline())
        print("pipeline", evict, row, flush=True)
    for case in ALL_CASES:
        for evict in MODES if case.name in arguments.only else ():
            row = {"model": case.name, "evict": evict, **trained(case, arguments.steps, evict)}
            results["rows"].append(row)
            print(row, flush=True)
            write("anything", results)


Attempt = Callable[[int, Evict], "dict[str, Any] | None"]


def bisected(evict: Evict, plain: Measured, attempt: Attempt) -> dict[str, Any]:
    """Return the smallest feasible fraction, to one percent, and figures of the run within it."""
    no, yes, found = 0, 100, attempt(plain.budget(1.01), evict)
    assert found is not None
    while yes - no > 1:
        middle = (no + yes) // 2
        now = attempt(plain.budget(middle / 100), evict)
        if now is None:
            no = middle
        else:
            yes, found = middle, now
    return {"fraction": yes / 100, **found}


def trained(case: Case, steps: int, evict: Evict) -> dict[str, Any]:
    def train(workload: Workload) -> list[Tensor]:
        return [loss for number in range(steps) for loss in workload.step(number)]

    workload = case.build()
    losses: list[Tensor] = []
    plain = measure(lambda: losses.extend(train(workload)))
    wanted = left_by(workload, losses)

    def attempt(budget: int, evict: Evict) -> dict[str, Any] | None:
        workload, tracker = case.build(), Tracker(resized=True)
        try:
            with tracker, rekindle.budget(budget, evict=evict) as run:
                losses = train(workload)
                peak = tracker.peak
        except rekindle.OutOfBudget:
            return None
        return {
            "within_budget": peak <= budget,
            "same": differing(left_by(workload, losses), wanted) == [],
            "recomputed": round(run.recompute_ns / run.compute_ns, 3),
        }

    return bisected(evict, plain, attempt)


def pipeline() -> tuple[Measured, Attempt]:
    """Twenty layers of inference that keep all results and read them at the end."""
    torch.manual_seed(20)
    layers = [torch.randn(128, 128) / 11 for _ in range(20)]
    batch = torch.randn(2048, 128)

    def step() -> tuple[list[Tensor], list[Tensor]]:
        x, kept = batch, []
        with torch.no_grad():
            for layer in layers:
                x = torch.tanh(x @ layer)
                kept.append(x)
            return kept, [each.sum() for each in kept]

    wanted = step()
    with Tracker() as tracker:
        step()
    constants = sum(each.nbytes for each in [batch, *layers])

    def attempt(budget: int, evict: Evict) -> dict[str, Any] | None:
        tracker = Tracker(resized=True)
        try:
            with tracker, rekindle.budget(budget, evict=evict) as run:
                got = step()
                peak = tracker.peak
        except rekindle.OutOfBudget:
            return None
        pairs = zip([*got[0], *got[1]], [*wanted[0], *wanted[1]], strict=True)
        return {
            "within_budget": peak <= budget,
            "same": all(torch.equal(*pair) for pair in pairs),
            "recomputed": round(run.recompute_ns / run.compute_ns, 3),
        }

    return Measured(tracker.peak, constants), attempt


if __name__ == "__main__":
    main()

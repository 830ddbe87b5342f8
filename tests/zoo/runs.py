"""Run one training step of an architecture plainly twice, then within a budget, and compare.

The budget is the constants and a part of the plain run's activation memory. If that is infeasible,
`OutOfBudget` names a larger one, which is tried from a fresh start each time. From the third try on
the budget grows by at least a twentieth of the activation memory.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import rekindle
from tests.pytorch.allocations import allocated
from tests.pytorch.harsh import Watch, differing, everything
from tests.pytorch.tracker import Measured
from tests.zoo.architectures import Architecture, loss_of

Program = Callable[[], Callable[[], Any]]
"""Builds model and data from fixed seeds; returns the step, whose result is compared."""

FRACTION = 0.3


@dataclass(frozen=True)
class Row:
    """How one program fared. Memory in bytes."""

    parameters: int
    operators: int
    plain_peak: int
    constants: int
    budget: int
    peak: int
    """Within the budget, by the independent tracker."""
    evictions: int
    recomputations: int
    refused: tuple[int, ...]
    """Smaller budgets that were infeasible."""
    unstable: tuple[str, ...]
    """Names that differ between two plain runs."""
    differing: tuple[str, ...]
    """Names that differ between the plain run and the one within the budget."""

    @property
    def fraction(self) -> float:
        """The budget above the constants, in activation memory of the plain run."""
        return (self.budget - self.constants) / (self.plain_peak - self.constants)

    @property
    def equal(self) -> bool:
        return not self.differing and not self.unstable and self.peak <= self.budget


def training_step(architecture: Architecture) -> Program:
    """Forward, backward and a step of SGD, with dropout on."""

    def build() -> Callable[[], Any]:
        model, batch = architecture.build()
        return step_of(model, lambda: loss_of(model(**batch)))

    return build


def step_of(model: nn.Module, loss_now: Callable[[], torch.Tensor]) -> Callable[[], Any]:
    """A training step; what it returns is compared, weights, gradients and buffers included."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.01)

    def step() -> Any:
        optimizer.zero_grad()
        loss = loss_now()
        loss.backward()
        optimizer.step()
        return loss.detach(), model

    return step


def compare(program: Program, fraction: float = FRACTION) -> Row:
    """Run `program` plainly, again, and within the budget or the smallest that is feasible."""
    watch = Watch()
    step = program()
    with watch:
        result = step()
        gc.collect()
    wanted, met = everything(result), watch.alive
    watch.see([*result[1].parameters(), *result[1].buffers()])  # a buffer without readers is there
    measured = Measured(watch.peak + watch.alive - met, watch.alive)
    parameters = sum(p.numel() for p in result[1].parameters())
    del step, result
    again: list[Any] = []
    taken = allocated(lambda: again.append(program()()))  # with what convolutions take inside
    unstable = tuple(differing(everything(again.pop()), wanted))
    enough = 1.05 * max(measured.peak, taken.peak)  # recipes keep a constant or two longer
    budget, refused = measured.budget(fraction), []
    while budget <= enough:
        step, inside = program(), Watch(resized=True)
        try:
            with inside, rekindle.budget(budget) as run:
                result = step()
        except rekindle.OutOfBudget as error:
            refused.append(budget)
            budget = error.smallest_budget
            if len(refused) > 2:
                further = refused[-1] + measured.activations // 20
                budget = max(budget, min(further, measured.peak))
            continue
        run._driver.engine.check()
        return Row(
            parameters,
            watch.operators.total(),
            measured.peak,
            measured.constants,
            budget,
            inside.peak,
            run.evictions,
            run.recomputations,
            tuple(refused),
            unstable,
            tuple(differing(everything(result), wanted)),
        )
    raise AssertionError(f"the smallest budget grew too often: {refused}")

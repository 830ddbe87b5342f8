"""Compare a training step of an architecture within a budget with two runs in plain PyTorch.

The budget is the constants (such as weights) and a part of the activation memory of the plain step.
If that is too small, the step starts again within the larger budget that `OutOfBudget` suggests.
From the third start on, the budget grows by at least a twentieth of the activation memory.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import rekindle
from tests.differ.judge import smallest
from tests.pytorch.allocations import allocated
from tests.pytorch.harsh import Watch, differing, everything
from tests.pytorch.tracker import Measured
from tests.zoo.architectures import Architecture, loss_of

Program = Callable[[], Callable[[], Any]]
"""A function that builds model and data from fixed seeds, and returns the step to compare."""

FRACTION = 0.3


@dataclass(frozen=True)
class Row:
    """The outcome of one program. Memory in bytes."""

    parameters: int
    operators: int
    plain_peak: int
    constants: int
    budget: int
    peak: int
    """The peak within the budget, by the independent tracker."""
    evictions: int
    recomputations: int
    refused: tuple[int, ...]
    """Smaller budgets that were infeasible."""
    unstable: tuple[str, ...]
    """Names of results that differ between two plain runs."""
    differing: tuple[str, ...]
    """Names of results that differ between the plain run and the run within the budget."""

    @property
    def fraction(self) -> float:
        """Return which part of the plain step's activation memory the budget allows."""
        return (self.budget - self.constants) / (self.plain_peak - self.constants)

    @property
    def equal(self) -> bool:
        return not self.differing and not self.unstable and self.peak <= self.budget


def training_step(architecture: Architecture) -> Program:
    """Return a program that makes one training step: forward, backward (with dropout), and SGD."""

    def build() -> Callable[[], Any]:
        model, batch = architecture.build()
        return step_of(model, lambda: loss_of(model(**batch)))

    return build


def step_of(model: nn.Module, loss_now: Callable[[], torch.Tensor]) -> Callable[[], Any]:
    """Return a training step whose result, weights, gradients and buffers are compared."""
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
    """Run `program` twice in plain PyTorch, then within a budget or the smallest that works."""
    watch = Watch()
    step = program()
    with watch:
        result = step()
        gc.collect()
    wanted, met = everything(result), watch.alive
    # count all buffers, also those that no operator reads
    watch.count([*result[1].parameters(), *result[1].buffers()])
    measured = Measured(watch.peak + watch.alive - met, watch.alive)
    parameters = sum(p.numel() for p in result[1].parameters())
    del step, result
    again: list[Any] = []
    taken = allocated(lambda: again.append(program()()))  # includes the workspace of convolutions
    unstable = tuple(differing(everything(again.pop()), wanted))
    enough = 1.05 * max(measured.peak, taken.peak)  # a budget holds one or two constants longer

    def attempt(budget: int) -> tuple[Any, rekindle.Run, Watch]:
        assert budget <= enough, f"needs {budget} bytes, and plain PyTorch {enough}"
        step, inside = program(), Watch(resized=True)
        with inside, rekindle.budget(budget) as run:
            result = step()
        return result, run, inside

    def larger(budget: int, refused: int) -> int:
        further = min(budget + measured.activations // 20, measured.peak)
        return further if refused > 2 else 0

    (result, run, inside), budget, refused = smallest(attempt, measured.budget(fraction), larger)
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

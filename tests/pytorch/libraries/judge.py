"""Train one program in plain PyTorch, with its memory measured, and within budgets.

The results of all runs are compared bit for bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

import rekindle
from tests.pytorch.bits import differing

#: A program: a function that trains and returns the values to compare.
Program = Callable[[], Sequence[Tensor]]
SHARES = (0.7, 0.45)  #: budgets, as shares of the peak
MOST_STARTS = 12  #: tries after `OutOfBudget`, each with the budget that the error suggests


@dataclass
class Outcome:
    """The verdict on a program: `wrong` is empty if all results are equal."""

    name: str
    deterministic: bool = True
    peak: int = 0
    wrong: list[str] = field(default_factory=list)
    budgets: list[dict[str, Any]] = field(default_factory=list)


def judge(name: str, program: Program, shares: Sequence[float] = SHARES) -> Outcome:
    """Run `program` twice in plain PyTorch, within `budget(None)`, and within parts of its peak."""
    outcome = Outcome(name)
    _, plain = _run(program, nullcontext())
    _, again = _run(program, nullcontext())
    outcome.deterministic = not _differing(plain, again)
    run, found = _run(program, rekindle.budget(None))
    outcome.peak = run.peak
    _compare(outcome, "unlimited", plain, found)
    for share in shares:
        amount = int(outcome.peak * share)
        for start in range(1, MOST_STARTS + 1):
            try:
                run, found = _run(program, rekindle.budget(amount))
            except rekindle.OutOfBudget as error:
                # If a library replaced the error by its own, it may suggest no larger budget.
                amount = max(error.worth_trying, int(amount * (1.02 if start < 6 else 1.2)))
                continue
            _compare(outcome, f"within {amount}", plain, found)
            if run.peak > amount:
                outcome.wrong.append(f"within {amount}: the peak was {run.peak}")
            figures = {"evictions": run.evictions, "recomputations": run.recomputations}
            outcome.budgets.append({"budget": amount, "starts": start, **figures})
            break
        else:
            outcome.wrong.append(
                f"{share} of the peak: refused {MOST_STARTS} times, up to {amount}"
            )
    return outcome


def _run(program: Program, context: AbstractContextManager[Any]) -> tuple[Any, Sequence[Tensor]]:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - libraries draw from the global generator
    with context as run:
        found = [each.detach().clone() for each in program()]
    return run, found


def _compare(outcome: Outcome, way: str, plain: Sequence[Tensor], found: Sequence[Tensor]) -> None:
    names = _differing(plain, found)
    if outcome.deterministic and names:
        outcome.wrong.append(f"{way}: {len(names)} of {len(plain)} results differ")


def _differing(some: Sequence[Tensor], others: Sequence[Tensor]) -> list[str]:
    return differing(_named(some), _named(others))


def _named(results: Sequence[Tensor]) -> dict[str, Tensor]:
    return {str(position): each for position, each in enumerate(results)}

"""Tests that raise `OutOfBudget` at each operator in turn, after which the step is repeated.

SQLite's tests do the same with memory: the first allocation fails, then the second, and so on.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import rekindle
from rekindle.pytorch.tensors import privately
from tests.helpers import WHOLE
from tests.pytorch import cores
from tests.pytorch.bits import differing
from tests.pytorch.left import behind, settings
from tests.pytorch.native.refused import PROGRAMS, Program

NEVER = 1 << 40
ROOMY = 1 << 30
SAMPLE = ("batch_norm", "checkpoint", "penalty")
STEP = 1 if WHOLE else 11  # `scripts/sweep tests` tries every operator
#: Optimizers whose failed steps Rekindle undoes from copies that the budget does not count. For a
#: moment a restored storage and its copy both exist, so the peak may exceed the budget.
UNDONE = ("lbfgs", "sparse")


class Run:
    """One run of a program within a budget, in which the operator `refuse_at` raises `OutOfBudget`.

    The phase of the program that failed is then repeated.
    """

    def __init__(self, name: str, budget: int, refuse_at: int, **how: Any) -> None:
        torch.manual_seed(0)
        program = PROGRAMS[name]()
        self.failed_in: int | None = None
        self.losses: list[Any] = []
        before = settings()
        with rekindle.budget(budget, learn=False, split="never", **how) as run:
            core, handle = run._driver.core, run._driver.handle
            core.refuse(handle, refuse_at)
            for number, phase in enumerate(program.phases):
                self._run(program, number, phase)
            self.operators = refuse_at - core.refuse(handle, -1)
            core.check(handle)
            gc.collect()
            self.memory, self.peak = run.memory, run.peak
        assert behind(before) == []
        self.largest = max(getattr(each, "nbytes", 0) for each in program.trained().values())
        self.state = program.trained() | program.rest() | program.gradients()
        self.state |= {f"loss {number}": loss for number, loss in enumerate(self.losses)}

    def _run(self, program: Program, number: int, phase: Any) -> None:
        with privately():
            trained, rest = program.trained(), program.rest()
        loss: Any = None
        try:
            loss = phase()
        except rekindle.OutOfBudget:
            assert self.failed_in is None
            self.failed_in = number
        # Not in the `except` block, where the error would keep the values of its frames alive.
        if loss is None:
            with privately():
                assert differing(program.trained(), trained) == [], "half a step"
            program.put_back(rest)
            del rest  # `put_back` read these copies, so they count in the budget until deleted
            loss = phase()
        self.losses.append(loss)


def tight(name: str, **how: Any) -> int:
    """Return a budget in which the program runs, below its peak without a limit if possible."""
    most = Run(name, ROOMY, NEVER, **how).peak
    for share in (0.7, 0.8, 0.9):
        try:
            Run(name, int(share * most), NEVER, **how)
        except rekindle.OutOfBudget:
            continue
        return int(share * most)
    return most


def runs_as_if_nothing_was(name: str, budget: int, step: int, **how: Any) -> int:
    """Run the program many times, and let another operator raise in each run.

    Only every `step`-th operator is tried.

    Assert that results and memory equal those of a run without an error.

    Returns:
        The number of runs in which `OutOfBudget` was raised.
    """
    whole = Run(name, budget, NEVER, **how)
    assert whole.peak <= budget
    gc.freeze()  # makes the garbage collections at the end of each of thousands of runs fast
    failures = 0
    for refused in range(0, whole.operators, step):
        again = Run(name, budget, refused, **how)
        failures += again.failed_in is not None
        assert differing(again.state, whole.state) == [], refused
        assert again.memory == whole.memory, refused
        most = budget + (again.largest if name in UNDONE else 0)
        assert again.peak <= most, refused
    gc.unfreeze()
    return failures


@pytest.mark.parametrize("name", SAMPLE)
def test_step_repeated_after_some_out_of_budget_matches_pytorch(name: str) -> None:
    with cores.fixed_prices():
        assert runs_as_if_nothing_was(name, ROOMY, 61) >= 2


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("evict", ["auto", "anything"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_step_repeated_after_any_out_of_budget_matches_pytorch(name: str, evict: Any) -> None:
    with cores.fixed_prices():
        assert runs_as_if_nothing_was(name, ROOMY, STEP, evict=evict) > 10 // STEP


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("evict", ["auto", "anything"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_tight_step_repeated_after_out_of_budget_matches_pytorch(name: str, evict: Any) -> None:
    """The budget is small, so that `OutOfBudget` is also raised in recomputations."""
    with cores.fixed_prices():
        runs_as_if_nothing_was(name, tight(name, evict=evict), 3 * STEP, evict=evict)

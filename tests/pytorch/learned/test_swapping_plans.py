"""Tests of learned plans that swap values to the host (here to a file): the bits must be equal.

The tests give a bandwidth, which decides what plans copy. Rekindle does not correct a given
bandwidth, so the tests do not depend on the speed of this machine's disk.
"""

from __future__ import annotations

import errno
import os
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rekindle
from rekindle import Run
from rekindle.engine import Route
from rekindle.policies import Swap
from rekindle.pytorch.learned import _step_plans
from rekindle.pytorch.learned._step_plans import plans_for
from rekindle.report._data import Swapped
from rekindle.trace import Trace
from tests.pytorch.learned.conftest import AtOnce
from tests.pytorch.learned.test_learned_plans import Deep, Training, budget_of, six
from tests.pytorch.tracker import Tracker, measure

FAST = Swap(out_bytes_per_s=10**12, in_bytes_per_s=10**12)
SLOW = Swap(out_bytes_per_s=10**3, in_bytes_per_s=10**3)


def _alike(swap: Swap, folder: Path, budget: int | None = None) -> Run:
    """Train with learned plans that may swap, and assert that the bits equal plain PyTorch's."""
    plain = Training()
    six(plain)
    expected = [value.clone() for value in plain.left_behind()]
    budget = budget or budget_of()
    training = Training()
    with (
        Tracker(resized=True) as tracker,
        rekindle.budget(budget, learn="wait", swap=swap, swap_directory=folder) as run,
    ):
        six(training)
    assert tracker.peak <= budget
    got = training.left_behind()
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    run._driver.engine.check()
    return run


def _swapped(run: Run) -> Swapped:
    found = run.report().swapped
    assert found is not None
    return found


def test_learned_plan_swaps_and_matches_pytorch(tmp_path: Path) -> None:
    run = _alike(FAST, tmp_path)
    assert run._learner is not None
    assert run._learner.followed >= 2
    (plan,) = run._learner.plans.shapes
    assert plan.route is not None
    back = {~number for number in plan.route.copies if number < 0}
    assert back
    assert _swapped(run).back > 0


def test_learned_plan_on_slow_link_does_not_swap(tmp_path: Path) -> None:
    run = _alike(SLOW, tmp_path)
    assert run._learner is not None
    assert run._learner.followed >= 2
    assert _swapped(run).back == 0
    assert run.recomputations > 0


def test_operator_waits_for_swap_in_that_has_not_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the operator that needs the value waits. Other operators run during the swap-in."""
    plain = os.preadv

    def late(*arguments: Any) -> int:
        time.sleep(0.002)
        return plain(*arguments)

    monkeypatch.setattr(os, "preadv", late)
    run = _alike(FAST, tmp_path)
    assert _swapped(run).back > 0


@pytest.mark.parametrize("every", [1, 2, 3, 5, 7, 11])
def test_value_whose_planned_swap_in_fails_is_recomputed(
    every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, count = os.preadv, 0

    def failing(*arguments: Any) -> int:
        nonlocal count
        count += 1
        if count % every == 0:
            raise OSError(errno.EIO, "the disk is broken")
        return plain(*arguments)

    monkeypatch.setattr(os, "preadv", failing)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run = _alike(FAST, tmp_path)
    assert count >= every
    assert run.recomputations > 0
    assert any("the disk is broken" in str(warning.message) for warning in found)


@pytest.mark.slow
@pytest.mark.usefixtures("for_real")
def test_learned_plan_of_solver_swaps_and_matches_pytorch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step swaps the values that the solver's plan lists, and recomputes almost nothing."""
    monkeypatch.setattr(_step_plans, "SECONDS", 4.0)
    run = _alike(FAST, tmp_path)
    assert run._learner is not None
    assert run._learner.followed >= 2
    (plan,) = run._learner.plans.shapes
    assert plan.route is not None
    assert any(number < 0 for number in plan.route.copies)
    assert _swapped(run).back > 0


def test_plans_with_and_without_swap_are_cached_separately(tmp_path: Path) -> None:
    device = torch.device("cpu")
    alone, fast = plans_for(1, device), plans_for(1, device, swap=FAST)
    assert plans_for(1, device, swap=FAST) is fast
    assert fast is not alone
    assert fast is not plans_for(1, device, swap=SLOW)
    _alike(FAST, tmp_path)
    made = AtOnce.made
    _alike(FAST, tmp_path)
    assert AtOnce.made == made
    _alike(SLOW, tmp_path)
    assert AtOnce.made > made


class CopyOverwritten(AtOnce):
    """A plan that copies each value to the host before an operator overwrites it."""

    def __init__(self, trace: Trace, budget: int, seconds: float, swap: Swap | None = None) -> None:
        super().__init__(trace, budget, seconds, swap)
        stops, copies = list[int](), list[int]()
        for op in trace.ops:
            copies += [trace.values[source] for _, source in op.overwrites]
            stops.append(len(copies))
        stops.append(len(copies))
        moves = tuple(range(len(copies)))
        self.route = Route(tuple(stops), moves, (), copies=tuple(copies))


def _scaled(model: Deep, x: Tensor, depth: int | None = None) -> Tensor:
    """Return the loss of a forward pass in which only recomputations read overwritten contents."""
    for layer in model.layers:
        y = layer[0](x)
        y.mul_(3)
        x = torch.tanh(y) + x
    return x.square().mean()


def test_in_place_write_waits_for_planned_swap_out_of_old_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = os.pwrite

    def late(*arguments: Any) -> int:
        time.sleep(0.002)
        return plain(*arguments)

    monkeypatch.setattr(_step_plans, "Planning", CopyOverwritten)
    monkeypatch.setattr(os, "pwrite", late)
    monkeypatch.setattr(Deep, "forward", _scaled)
    budget = measure(lambda: six(Training())).budget(0.6)
    run = _alike(FAST, tmp_path, budget)
    assert run._learner is not None
    assert run._learner.followed >= 2
    assert run.recomputations > 0
    assert _swapped(run).back > 0

"""Tests of the time lost to recomputation: its count in reports and the warning about it."""

from __future__ import annotations

import pytest
import torch

import rekindle
from rekindle.pytorch.native import _driver
from tests.pytorch import cores

WIDTH = 64
VECTOR = 4 * WIDTH


def chain(weight: torch.Tensor) -> None:
    x = weight
    for _ in range(64):
        x = x.tanh()
    torch.autograd.grad(x.sum(), weight)


def test_time_lost_without_evictions_is_zero() -> None:
    weight = torch.ones(WIDTH, requires_grad=True)
    with rekindle.budget("1MiB") as run:
        chain(weight)
    assert run.lost_ns == run.report().time_lost == 0
    assert run.report().overhead == 0.0


def test_time_lost_exceeds_measured_time_of_recomputed_operators() -> None:
    """The time between recomputed operators is lost as well, such as time of bookkeeping."""
    weight = torch.ones(WIDTH, requires_grad=True)
    optimizer = torch.optim.SGD([weight])
    with cores.fixed_prices(1), rekindle.budget(12 * VECTOR, learn=False) as run:
        chain(weight)
        optimizer.step()
    report, step = run.report(), run.last_step
    assert step is not None
    assert run.recomputations > 64
    assert run.lost_ns == report.time_lost >= run.recompute_ns > 0
    assert report.overhead == run.lost_ns / run.compute_ns
    assert step.lost_ns <= run.lost_ns
    assert run.lost_ns > run.recompute_ns


def test_run_that_mostly_recomputes_warns_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_driver, "MUCH_LOST", 0)
    weight = torch.ones(WIDTH, requires_grad=True)

    def thrash() -> None:
        with cores.fixed_prices(1), rekindle.budget(12 * VECTOR, learn=False) as run:
            while run.recomputations < 50_000:
                chain(weight)

    with pytest.warns(
        UserWarning, match=r"is so small that training is slow.* write rekindle"
    ) as reported:
        thrash()
    assert len(reported) == 1
    named = int(str(reported[0].message).rpartition("rekindle.budget(")[2].split(")")[0])
    with cores.fixed_prices(1), rekindle.budget(named, learn=False) as better:
        chain(weight)
    assert better.recomputations < 64


def test_run_with_short_recomputation_does_not_warn() -> None:
    weight = torch.ones(WIDTH, requires_grad=True)
    with rekindle.budget(40 * VECTOR, learn=False) as run:
        for _ in range(20):
            chain(weight)
    assert run.recomputations > 0

"""Tests of generator positions: how far a random generator had advanced before an operator.

A recomputation draws the same numbers from there. Positions must be exact and take little memory.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import dropout

import rekindle
from tests.pytorch import cores
from tests.pytorch.cores import evicting_before_every_operator
from tests.pytorch.tracker import Tracker

DRAWS: tuple[Callable[[Tensor, torch.Generator], Tensor], ...] = (
    lambda x, g: x.bernoulli_(0.5, generator=g),
    lambda x, g: x.uniform_(generator=g),
    lambda x, g: x.normal_(generator=g),  # `randn` keeps a second number for the next call
    lambda x, g: torch.randperm(len(x), generator=g),
    lambda x, g: torch.normal(0.0, 1.0, (1,), generator=g),
)


@pytest.mark.parametrize("largest", [3, 500, 5_000, 60_000])
def test_recomputation_restores_random_generator_positions(largest: int) -> None:
    weight = torch.linspace(0, 1, largest, requires_grad=True)

    def gradient() -> Tensor:
        rng = random.Random(largest)
        generators = [torch.Generator().manual_seed(seed) for seed in range(2)]
        total = torch.zeros(())
        for _ in range(120):
            generator = generators[rng.random() < 0.1]
            if rng.random() < 0.02:
                generator.manual_seed(rng.randrange(9))
            numbers = rng.randint(1, largest)
            drawn = rng.choice(DRAWS)(torch.empty(numbers), generator)
            total = total + (weight[:numbers] * drawn).sin().sum()
        return torch.autograd.grad(total, [weight])[0]

    wanted = gradient()
    with evicting_before_every_operator(), rekindle.budget("1GiB") as run:
        assert torch.equal(gradient(), wanted)
    assert run.recomputations > 100


def test_thousand_dropouts_fit_into_budget() -> None:
    """Whole generator states of 5,056 bytes would take four times the budget."""
    torch.manual_seed(0)
    gc.collect()
    before = cores.bytes_of_positions()  # bytes that other tests left behind
    width = 1_000
    x = torch.ones(width, requires_grad=True)
    budget = 4 * width * 300
    with Tracker() as tracker, rekindle.budget(budget, device="cpu") as run:
        y = x
        for _ in range(1_000):
            y = dropout(y, 0.001)
        states = cores.bytes_of_positions() - before
    assert run.evictions > 500
    assert tracker.peak <= budget
    assert 0 < states < 250_000
    del y, run
    assert cores.bytes_of_positions() == before

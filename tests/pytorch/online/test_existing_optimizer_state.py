"""Tests that existing optimizer state counts as soon as a parameter is used."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from typing import Any, Literal

import pytest
import torch
from torch import nn

import rekindle
from rekindle.pytorch.online import OPTIMIZER
from rekindle.pytorch.online._warm import WarmOptimizers
from tests.pytorch.tracker import Tracker

Evict = Literal["saved", "anything"]


class Program:
    """A training program whose optimizer state has twice the bytes of the model."""

    def __init__(self, *, warm: bool = True) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6)])
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.batch = torch.rand(16, 32)
        if warm:
            self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.forward().backward()
        self.optimizer.step()

    def forward(self) -> torch.Tensor:
        return self.model(self.batch).square().mean()

    @property
    def bytes_of_state(self) -> int:
        states = self.optimizer.state.values()
        return sum(value.nbytes for state in states for value in state.values())


@pytest.mark.parametrize("evict", ["saved", "anything"])
def test_existing_optimizer_state_counts_before_first_step(evict: Evict) -> None:
    ours, cold = Program(), Program(warm=False)
    with rekindle.budget("1GiB", evict=evict) as run:
        cold.forward()
    before = run.peak
    with rekindle.budget("1GiB", evict=evict) as run:
        ours.forward()
        assert run.peak >= before + ours.bytes_of_state
        held = run.report().at_peak.categories
    assert held[OPTIMIZER] == ours.bytes_of_state
    with pytest.raises(rekindle.OutOfBudget), rekindle.budget(ours.bytes_of_state, evict=evict):
        ours.forward()


def test_too_small_budget_error_counts_whole_optimizer_state() -> None:
    """If only some tensors counted, each error would suggest a budget for only one more tensor."""
    ours = Program()
    known = ours.bytes_of_state + sum(p.nbytes for p in ours.model.parameters())
    budget, refusals = known // 2, 0
    while budget < known:
        refusals += 1
        with pytest.raises(rekindle.OutOfBudget) as refused, rekindle.budget(budget):
            ours.forward()
        assert refused.value.needed > 4096, refused.value  # 4096: the largest tensor
        budget = refused.value.worth_trying
    assert refusals <= 2


@pytest.mark.parametrize("evict", ["saved", "anything"])
def test_budget_around_each_step_counts_optimizer_state(evict: Evict) -> None:
    """The peak that the budget reports is at least the peak that a separate tracker measures."""
    ours = Program()
    budget = 1
    for _ in range(3):
        while True:
            with Tracker() as tracker:
                for each in (*ours.model.parameters(), *_state(ours)):
                    tracker.count(each)
                try:
                    with rekindle.budget(f"{budget}B", evict=evict) as run:
                        ours.step()
                    break
                except rekindle.OutOfBudget as error:
                    budget = error.smallest_budget
        assert tracker.peak <= run.peak <= budget


def _state(program: Program) -> list[Any]:
    return [value for state in program.optimizer.state.values() for value in state.values()]


@pytest.mark.parametrize("evict", ["saved", "anything"])
def test_loaded_optimizer_state_counts_before_first_step(evict: Evict) -> None:
    ours, cold = Program(warm=False), Program(warm=False)
    ours.optimizer.load_state_dict(Program().optimizer.state_dict())
    with rekindle.budget("1GiB", evict=evict) as run:
        cold.forward()
    before = run.peak
    with rekindle.budget("1GiB", evict=evict) as run:
        ours.forward()
    assert run.peak >= before + ours.bytes_of_state
    assert run.report().at_peak.categories[OPTIMIZER] == ours.bytes_of_state


def test_captured_trace_includes_existing_optimizer_state() -> None:
    ours, cold = Program(), Program(warm=False)
    more = rekindle.simulate(rekindle.capture(ours.forward)).peak
    less = rekindle.simulate(rekindle.capture(cold.forward)).peak
    assert more - less >= ours.bytes_of_state


def test_optimizer_state_of_other_model_does_not_count() -> None:
    other, cold = Program(), Program(warm=False)
    with rekindle.budget("1GiB") as run:
        cold.forward()
    assert run.peak < other.bytes_of_state + cold.bytes_of_state + 40_000
    assert OPTIMIZER not in run.report().at_peak.categories


def test_counted_optimizer_state_is_not_kept_alive() -> None:
    ours = Program()
    optimizer = weakref.ref(ours.optimizer)
    address = next(ours.model.parameters()).untyped_storage()._cdata
    assert WarmOptimizers().owner_of(address) is optimizer()
    with rekindle.budget("1GiB"):
        ours.step()
    del ours
    gc.collect()
    assert optimizer() is None


EARLIER = """
import torch, rekindle
model = torch.nn.Linear(100, 100)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.rand(1, 100)).sum().backward()
optimizer.step()
optimizer.zero_grad()
with rekindle.budget(None) as run:
    model(torch.rand(1, 100))
    print(run.memory)
"""


def test_optimizer_state_from_before_first_budget_counts() -> None:
    """The first budget of the process is entered after a step; the state counts at first use."""
    done = subprocess.run([sys.executable, "-c", EARLIER], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 3 * 4 * 100 * 100

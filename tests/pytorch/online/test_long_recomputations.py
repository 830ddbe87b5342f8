"""Tests that an LSTM of many steps trains within the memory of a few steps.

Each step needs two states (`hidden` and `cell`) of the step before. A depth-first recomputation of
one state would lock a value of each step in memory until it reaches the other. So recomputation
runs in the program's order.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import rekindle
from rekindle.engine import Engine
from rekindle.policies import DTR, LRU, Policy, Thrifty
from rekindle.schedule import verify
from rekindle.simulator import Run
from rekindle.trace import Trace, check_trace, keep_all_peak

STEPS = 120


class LSTM:
    """An LSTM of elementary operators, unrolled over `STEPS` inputs, with a loss at its end."""

    def __init__(self, batch: int = 16, hidden: int = 32) -> None:
        torch.manual_seed(0)
        self.hidden = hidden
        self.series = torch.randn(STEPS, batch, 8)
        self.weights = [
            (torch.randn(8, 4 * hidden) / 3).requires_grad_(),
            (torch.randn(hidden, 4 * hidden) / 6).requires_grad_(),
        ]

    def step(self) -> list[Tensor]:
        """Run the loop and its backward pass; return the gradients."""
        hidden = cell = torch.zeros(self.series.shape[1], self.hidden)
        for x in self.series:
            gates = x @ self.weights[0] + hidden @ self.weights[1]
            enter, forget, new, leave = gates.chunk(4, dim=1)
            cell = torch.sigmoid(forget) * cell + torch.sigmoid(enter) * torch.tanh(new)
            hidden = torch.sigmoid(leave) * torch.tanh(cell)
        hidden.square().mean().backward()
        gradients = [weight.grad for weight in self.weights if weight.grad is not None]
        for weight in self.weights:
            weight.grad = None
        return gradients


@pytest.fixture(scope="module")
def trace() -> Trace:
    """Return a trace of the LSTM with fixed times: an operator with n inputs takes n + 1 ns."""
    captured = rekindle.capture(LSTM().step)
    ops = tuple(replace(op, cost=len(op.inputs) + 1) for op in captured.ops)
    return check_trace(replace(captured, ops=ops))


@pytest.mark.parametrize("share", [0.12, 0.13])
def test_lstm_in_few_steps_of_memory_has_plain_gradients(share: float) -> None:
    program = LSTM()
    plain = program.step()
    with rekindle.budget(None) as run:
        program.step()
    budget = int(share * run.peak)
    with rekindle.budget(budget) as run:
        gradients = program.step()
    assert all(map(torch.equal, gradients, plain))
    assert run.peak <= budget


@pytest.mark.parametrize("share", [0.12, 0.125, 0.13])
@pytest.mark.parametrize("policy", [Thrifty(), DTR(), LRU()], ids=repr)
def test_engines_recompute_lstm_in_order_equally(
    trace: Trace, policy: Policy, share: float
) -> None:
    budget = int(share * keep_all_peak(trace))
    kept: set[int] = set()

    def watch(engine: Engine) -> None:
        kept.update(storage.id for storage in engine.checkpoints)
        if not engine.clock % 50:
            engine.check()

    in_python = Run(trace, budget, policy, core="python")
    in_python.go(watch)
    native = Run(trace, budget, policy, core="native")
    native.go()
    assert native.record() == in_python.record()
    verify(trace, native.record().schedule, budget)
    assert kept

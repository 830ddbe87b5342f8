"""Tests of operators that return a result and also write an argument.

A recomputation needs memory for both: for the result, and for a copy of the argument.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import rekindle
from tests.pytorch.allocations import allocated

#: Bytes by which the allocated memory may exceed the budget. PyTorch allocates scalars, such as the
#: factor of `mul` by a number, without an operator that Rekindle observes.
SCALARS = 64


def _batch_norm(budget: int, *, made: bool) -> Any:
    """Train a batch norm. If `made`, an operator made its running statistics, as in MAML."""
    torch.manual_seed(0)
    x = torch.randn(256, 32)
    a, b = (torch.randn(64, n).mul_(0.1).requires_grad_() for n in (32, 64))
    mean, variance = torch.zeros(64), torch.ones(64)

    def loss(w: Tensor, v: Tensor) -> Tensor:
        normal = F.batch_norm(F.linear(x, w), mean, variance, training=True)
        return F.softplus(F.linear(F.relu(normal), v)).square().mean()

    with rekindle.budget(budget, learn=False) as run:
        for each in (x, a, b, mean, variance):
            each.detach()
        if made:
            mean, variance = mean.clone(), variance.clone()
        for _ in range(3):
            gradients = torch.autograd.grad(loss(a, b), (a, b), create_graph=True)
            a, b = (p - 0.1 * g for p, g in zip((a, b), gradients, strict=True))
        loss(a, b).backward()
    return run


@torch.library.custom_op("rekindle_beside::normal", mutates_args=("state",))
def _normal(x: Tensor, state: Tensor) -> Tensor:
    state.add_(x.mean(0))
    return x - state


@_normal.register_fake
def _(x: Tensor, state: Tensor) -> Tensor:
    return torch.empty_like(x)


def _custom(budget: int, *, made: bool) -> Any:
    torch.manual_seed(0)
    w = torch.randn(256, 64, requires_grad=True)
    state = torch.zeros(64)
    with rekindle.budget(budget, learn=False, split="never") as run:
        w.detach()
        y = w
        for _ in range(4):
            y = (y * 1.01).sin()
            if made:
                state = state.clone() + 0
            seen = _normal(y.detach(), state)
            y = y * (state + 0) + seen.mean()
        y.sum().backward()
    return run


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("program", [_batch_norm, _custom])
def test_operator_with_result_and_write_stays_within_budget(
    program: Callable[..., Any], made: bool
) -> None:
    most = program(1 << 40, made=made).peak
    recomputed = 0
    for share in (0.9, 0.7, 0.6, 0.57, 0.54, 0.51, 0.49, 0.46, 0.44, 0.42):
        gc.collect()
        budget = int(most * share)
        runs: list[Any] = []
        try:
            taken = allocated(lambda: runs.append(program(budget, made=made)))  # noqa: B023
        except rekindle.OutOfBudget:
            break
        assert runs[0].peak <= budget
        assert taken.peak <= budget + SCALARS
        recomputed += runs[0].recomputations
    assert recomputed > 0

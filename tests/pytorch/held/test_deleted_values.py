"""Tests of tensors that the program deletes while another value is recomputed.

A garbage collection or another thread may delete a tensor at any time. Here the recomputed operator
`dropping` deletes it, so that it happens at the same moment each time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import rekindle
from rekindle.schedule import verify
from tests.pytorch import cores

WIDTH = 10_000
NBYTES = 4 * WIDTH
variables: list[Tensor] = []


@pytest.fixture(autouse=True)
def _prices() -> Iterator[None]:
    """Fix the costs of operators, so that each run evicts the same values."""
    with cores.fixed_prices():
        yield
    variables.clear()
    _Drops.wanted = _Drops.all = False


class _Drops:
    wanted = all = False
    count = 0


@torch.library.custom_op("rekindle_tests::dropping", mutates_args=())
def dropping(x: Tensor) -> Tensor:
    y = x.cos()
    if _Drops.wanted and variables:
        _Drops.count += 1
        del variables[: None if _Drops.all else 1]
    return y


def _save(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


dropping.register_fake(torch.empty_like)
dropping.register_autograd(
    lambda ctx, gradient: -gradient * ctx.saved_tensors[0].sin(), setup_context=_save
)


def vector() -> Tensor:
    torch.manual_seed(0)
    _Drops.wanted, _Drops.count = False, 0
    return torch.rand(WIDTH, requires_grad=True)


def test_operand_deleted_before_its_operator_runs_is_recomputed() -> None:
    """The recomputation of one operand deletes the variable that holds the other one."""

    def step() -> Tensor:
        weight = vector()
        variables.append(weight.sin())
        y = (variables[0] + dropping(weight)).cos()
        for _ in range(8):
            y = y.sigmoid()
        _Drops.wanted = True
        y.sum().backward()
        assert weight.grad is not None
        return weight.grad

    expected = step()
    variables.clear()
    with rekindle.budget(8 * NBYTES) as run:
        assert torch.equal(step(), expected)
        assert _Drops.count == 1
        run._driver.engine.check()


def test_operand_deleted_during_recomputation_matches_pytorch() -> None:
    """While one operand is recomputed, the last variable of the other one's input is deleted."""

    def step() -> Tensor:
        weight = vector()
        variables.extend((weight.sin(), weight.tan()))
        one, other = variables
        y = ((one + dropping(weight)).exp() + (other + dropping(weight))).cos()
        del one, other
        for _ in range(8):
            y = y.sigmoid()
        _Drops.wanted = True
        y.sum().backward()
        assert weight.grad is not None
        return weight.grad

    expected = step()
    variables.clear()
    with rekindle.budget(9 * NBYTES):
        assert torch.equal(step(), expected)
    assert _Drops.count == 2


def test_end_of_budget_does_not_recompute_deleted_value() -> None:
    """At its end, the budget recomputes evicted values that variables hold.

    The recomputation of `first` deletes the variable of the other value.
    """
    weight = vector()
    with rekindle.budget(4 * NBYTES, record=True) as run:
        first = dropping(weight)
        variables.append(weight.sin())
        torch.empty(3 * WIDTH)  # an allocation for which both values must be evicted
        _Drops.wanted = True
    assert _Drops.count == 1
    assert torch.equal(first, weight.cos())
    verify(run.trace, run.record.schedule, evicts_held=True)


def test_value_deleted_during_its_own_recomputation_is_freed() -> None:
    """The recomputation deletes the variables of its own result and of its other operand."""
    weight = vector()
    with rekindle.budget(5 * NBYTES):
        variables.append(weight.sin())
        variables[0].untyped_storage()  # pinned (not evicted) from now on
        variables.append(variables[0] + dropping(weight))
        torch.empty(3 * WIDTH)
        _Drops.wanted = _Drops.all = True
        del weight
    assert _Drops.count == 1

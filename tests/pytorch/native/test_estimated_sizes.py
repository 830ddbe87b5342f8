"""Tests of operators whose result size can only be estimated before they run.

An estimate above the budget is no reason to raise `OutOfBudget`; the real size is.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import rekindle
from tests.pytorch import cores

SCALE, ZERO = torch.ones(1), torch.zeros(1)


def quantized(x: Tensor) -> Tensor:
    """An operator without a meta kernel, so that its result size must be estimated."""
    return torch._fake_quantize_learnable_per_tensor_affine(x, SCALE, ZERO, -128, 127)


def distinct(x: Tensor) -> Tensor:
    """An operator whose result has at most as many elements as its input."""
    return torch.unique(x > 0)


def selected(x: Tensor) -> Tensor:
    """An operator whose result size depends on the values of its input."""
    return x[x > 100]


@pytest.mark.parametrize("operator", [quantized, distinct, selected])
def test_operator_with_overestimated_result_size_is_not_refused(
    operator: Callable[[Tensor], Tensor],
) -> None:
    x = torch.linspace(-1, 1, 12 * 6 * 16).reshape(12, 6, 16)
    with cores.fixed_prices(), rekindle.budget(None) as plain:
        wanted = operator(x)
    budget = plain.peak + 64
    with cores.fixed_prices(), rekindle.budget(budget) as run:
        made = operator(x)
    assert torch.equal(made, wanted)
    assert run.peak <= budget


def test_operator_with_estimated_size_evicts_before_it_runs() -> None:
    x = torch.linspace(-1, 1, 1_000, requires_grad=True)
    with cores.fixed_prices(), rekindle.budget(32_000) as run:
        hidden = x.sin().sin().sin().sin().sin()
        assert not run._driver.evictions
        quantized(hidden.detach())
        assert run._driver.evictions
    hidden.sum().backward()


def test_result_larger_than_budget_is_refused_with_real_size() -> None:
    x = torch.zeros(12, 6, 16)
    reported = pytest.raises(rekindle.OutOfBudget)
    with cores.fixed_prices(), rekindle.budget(x.nbytes + 64), reported as caught:
        quantized(x)
    result = x.nbytes
    assert result - 64 <= caught.value.needed <= result + 64
    assert caught.value.smallest_budget <= 2 * x.nbytes + 64


@torch.library.custom_op("rekindle_tests::counted_and_repeated", mutates_args={"count"})
def counted_and_repeated(x: Tensor, count: Tensor) -> Tensor:
    """Write `count`, and return 16 times the bytes of `x`. No fake kernel predicts that size."""
    count += 1
    return x.repeat(16)


def test_in_place_operator_with_large_result_evicts_after_it_ran() -> None:
    x, count = torch.linspace(-1, 1, 1_000, requires_grad=True), torch.zeros(1)
    with cores.fixed_prices(), rekindle.budget(96_000) as run:
        hidden = x
        for _ in range(8):
            hidden = hidden.sin()
        assert not run._driver.evictions
        made = counted_and_repeated(x.detach(), count)
        assert run._driver.engine.memory <= run.budget  # type: ignore[operator]
        assert run._driver.evictions
    hidden.sum().backward()
    assert (count.item(), made.numel()) == (1, 16_000)


def test_operator_after_in_place_result_above_budget_is_refused() -> None:
    x, count = torch.linspace(-1, 1, 1_000), torch.zeros(1)
    with cores.fixed_prices(), rekindle.budget(40_000):
        made = counted_and_repeated(x, count)
        with pytest.raises(rekindle.OutOfBudget):
            made.sum()
    assert count.item() == 1


def test_operator_with_sparse_result_evicts_after_it_ran() -> None:
    """As in steps of SparseAdam, the size of a sparse result is unknown before the operator ran."""
    state = torch.linspace(-1, 1, 1_000).reshape(100, 10)
    indices, values = torch.arange(50).reshape(1, 50), torch.ones(50, 10)
    mask = torch.sparse_coo_tensor(indices, values, (100, 10), check_invariants=True).coalesce()
    x = torch.linspace(-1, 1, 1_000, requires_grad=True)
    with cores.fixed_prices(), rekindle.budget(24_000) as run:
        hidden = x.sin().sin().sin()
        made = [state.sparse_mask(mask) for _ in range(3)]
        assert run._driver.engine.memory <= run.budget  # type: ignore[operator]
        assert run._driver.evictions
    assert all(torch.equal(each.to_dense()[:50], state[:50]) for each in made)
    assert hidden.shape == x.shape

"""Tests of values made under no_grad: their bytes count in the budget, but they have no recipe.

Rekindle cannot recompute such a value. It starts to track the value, as a source, when the recipe
of another value reads it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle import Run
from tests.pytorch.harsh import WIDTH, deeper, vector

VECTOR = 4 * WIDTH


def _priced(*operators: Callable[[], object]) -> None:
    """Call each operator until its cost is known: until then, its results always have a recipe."""
    with torch.no_grad():
        for operator in operators:
            for _ in range(4):
                operator()


def _unlisted(run: Run) -> int:
    assert run.memory == run._driver.engine.memory  # reading `memory` processes freed storages
    run._driver.engine.check()
    return run._driver.engine.unlisted


def test_no_grad_results_count_in_budget_but_have_no_recipe() -> None:
    batch = vector()
    with rekindle.budget(100 * VECTOR) as run:
        _priced(batch.sin)
        listed = len(list(run._driver.engine.storages))
        with torch.no_grad():
            results = [batch.sin() for _ in range(5)]
        assert _unlisted(run) == 5 * VECTOR
        assert len(list(run._driver.engine.storages)) == listed
        assert run.memory == 6 * VECTOR
        del results[1:]
        assert _unlisted(run) == VECTOR
        del results
        assert (_unlisted(run), run.memory) == (0, VECTOR)


def test_no_grad_operator_evicts_before_it_runs() -> None:
    """The core does not record such an operator, but must make room for its result."""
    weight, batch = vector(True), vector()
    with rekindle.budget(14 * VECTOR) as run:
        _priced(batch.sin)
        loss = deeper(weight, 8).sum()
        before = run.evictions
        with torch.no_grad():
            results = [batch.sin() for _ in range(8)]
        assert run.evictions > before
        assert run.peak <= 14 * VECTOR
        with pytest.raises(rekindle.OutOfBudget, match="aten::sin needs"), torch.no_grad():
            results += [batch.sin() for _ in range(20)]
        del results
        loss.backward()


def test_no_grad_value_that_recomputation_reads_is_kept() -> None:
    """The program deletes the mask, but the recipe of `x` reads it."""
    weight, batch = vector(True), vector()

    def loss_of(weight: Tensor) -> Tensor:
        with torch.no_grad():
            mask = batch.sin()
        x = (weight + mask).sin() * weight
        del mask
        return x.square().sum() + deeper(weight, 10).sum()

    loss_of(weight).backward()
    plain, weight.grad = weight.grad, None
    with rekindle.budget(16 * VECTOR) as run:
        _priced(batch.sin)
        loss_of(weight).backward()
        assert run.recomputations > 0
        assert _unlisted(run) >= 0
    assert weight.grad is not None
    assert plain is not None
    assert torch.equal(weight.grad, plain)


def test_error_for_write_to_saved_no_grad_value_names_operator() -> None:
    weight, batch = vector(True), vector()
    with rekindle.budget(100 * VECTOR):
        _priced(batch.sin)
        with torch.no_grad():
            mask = batch.sin()
        loss = (weight * mask).sum()
        mask.add_(1)
        with pytest.raises(RuntimeError, match=r"which is output of aten::sin, is at version 1"):
            loss.backward()


@pytest.mark.parametrize("foreach", [False, True])
def test_budget_with_record_true_counts_same_memory(foreach: bool) -> None:
    """With `record=True` every operator is recorded as an event of the trace."""

    def peaks(*, record: bool) -> list[int]:
        torch.manual_seed(3)
        network = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4)])
        optimizer = torch.optim.AdamW(network.parameters(), foreach=foreach)
        batch = torch.rand(50, 16)
        seen = []
        with rekindle.budget("1GiB", record=record) as run:
            for _ in range(6):
                optimizer.zero_grad()
                network(batch).square().mean().backward()
                seen.append(run.memory)
                optimizer.step()
                seen += [run.memory, run.peak]
            assert _unlisted(run) == 0 or not record
        return seen

    assert peaks(record=False) == peaks(record=True)

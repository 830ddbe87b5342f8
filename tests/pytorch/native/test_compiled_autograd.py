"""Tests of compiled autograd within a budget. It unpacks saved tensors from Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd

import rekindle
from rekindle.pytorch.native import core

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute"
)  # a warning of PyTorch itself, also without a budget

SIDE = 64
NBYTES = 4 * SIDE * SIDE


@pytest.fixture(autouse=True)
def _reset() -> None:
    torch._dynamo.reset()


def _step() -> Tensor:
    torch.manual_seed(0)
    w = torch.rand(SIDE, SIDE).div_(SIDE).requires_grad_()
    y = w
    for _ in range(6):
        y = (y @ w).sin()
    y.sum().backward()
    assert w.grad is not None
    return w.grad


def _memory(run: Any) -> int:
    return run._driver.engine.memory


def _compiled() -> Tensor:
    with compiled_autograd._enable(lambda module: module):
        return _step()


@pytest.mark.parametrize("evict", ["saved", "auto", "anything"])
def test_compiled_autograd_inside_budget_matches_pytorch(evict: Any) -> None:
    assert core() is not None
    plain = _compiled()
    with rekindle.budget(10 * NBYTES, evict=evict, learn=False) as run:
        found = _compiled()
        again = _compiled()
    assert torch.equal(found, plain)
    assert torch.equal(again, plain)
    assert run.recomputations > 0
    assert run.peak <= 10 * NBYTES


def test_saved_tensors_are_freed_after_compiled_backward() -> None:
    with rekindle.budget("1GiB", learn=False) as run:
        for _ in range(3):
            _compiled()
        before = _memory(run)
        _compiled()
        assert _memory(run) == before

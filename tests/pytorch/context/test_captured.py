"""Tests of programs that keep a reference to a PyTorch function that a budget had replaced.

The function must work after that budget, and must not keep the budget alive.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.function import BackwardCFunction

import rekindle

Evict = Literal["saved", "auto", "anything"]
MODES: list[Evict] = ["saved", "auto", "anything"]


class Doubled(torch.autograd.Function):
    """A custom function. A budget replaces its `apply`."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def replaced() -> dict[str, Callable[..., Any]]:
    """Return the functions of PyTorch that the active budget replaces."""
    found: dict[str, Callable[..., Any]] = {
        "apply": Doubled.apply,
        "swap": torch.utils.swap_tensors,
        "resize": UntypedStorage.resize_,
        "fill": UntypedStorage.fill_,
        "backward": BackwardCFunction.apply,
    }
    for name in ("numpy", "data_ptr", "untyped_storage", "tolist", "__repr__"):
        found[name] = getattr(Tensor, name)
    return found


@pytest.mark.parametrize("evict", MODES)
def test_torch_functions_saved_in_budget_do_not_keep_it_alive(evict: Evict) -> None:
    with rekindle.budget("1GiB", evict=evict, learn=False) as run:
        kept = replaced()
        driver = weakref.ref(run._driver)
    del run
    gc.collect()
    assert driver() is None
    x = torch.ones(3, requires_grad=True)
    assert kept["apply"](x).tolist() == [2, 2, 2]
    assert kept["numpy"](x.detach()).tolist() == [1, 1, 1]
    assert kept["tolist"](x) == [1, 1, 1]
    assert kept["data_ptr"](x) == x.data_ptr()
    one, other = torch.zeros(1), torch.ones(2)
    kept["swap"](one, other)
    assert one.tolist() == [1, 1]
    home = kept["untyped_storage"](one)
    kept["resize"](home, 4)
    kept["fill"](home, 0)
    assert home.tolist() == [0] * 4


@pytest.mark.parametrize("evict", MODES)
def test_function_saved_in_one_budget_has_right_results_in_next(evict: Evict) -> None:
    with rekindle.budget("1GiB", evict=evict, learn=False):
        kept = replaced()
    x = torch.ones(1_000, requires_grad=True)
    with rekindle.budget("1GiB", evict=evict, learn=False):
        y = kept["apply"](x.sin())
        kept["numpy"](y.detach())
        y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * torch.ones(1_000).cos())


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("evict", MODES)
def test_compiled_model_with_budget_per_step_has_same_gradients(evict: Evict) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model: Any = torch.compile(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)))
    x = torch.randn(32, 64)
    gradients = []
    for _ in range(3):
        with rekindle.budget("1GiB", evict=evict):
            model(x).square().mean().backward()
        gradients.append([each.grad.clone() for each in model.parameters()])
        model.zero_grad()
    torch._dynamo.reset()
    for found in gradients[1:]:
        assert all(map(torch.equal, found, gradients[0]))

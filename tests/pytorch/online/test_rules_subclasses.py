"""Tests of subclasses of tensors and parameters that do not override operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import rekindle
from tests.pytorch.harsh import WIDTH, harshest, vector

evict_modes = pytest.mark.parametrize("evict", ["saved", "anything"])
Evict = Literal["saved", "anything"]


class Image(Tensor):
    """A tensor subclass like those of torchvision, MONAI or fastai."""


class Weight(nn.Parameter):
    """A parameter with an additional attribute, such as a name."""


class Heard(Tensor):
    """A tensor subclass that counts the functions called with it."""

    calls: ClassVar[Counter[str]] = Counter()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.calls[getattr(func, "__name__", str(func))] += 1
        return super().__torch_function__(func, types, args, kwargs)


@evict_modes
def test_in_place_write_through_tensor_subclass_matches_pytorch(evict: Evict) -> None:
    def program() -> Callable[[], Any]:
        weight, start = vector(requires_grad=True), vector()

        def step() -> object:
            x = start.sin()
            x.as_subclass(Image).mul_(2)
            for _ in range(6):
                y = x * weight
                x = y.sin()
                x.as_subclass(Image).mul_(2)
            x.sum().backward()
            return weight

        return step

    harshest(program, evict=evict)


@evict_modes
def test_optimizer_of_subclass_parameters_matches_pytorch(evict: Evict) -> None:
    def program() -> Callable[[], Any]:
        weights = [Weight(vector()) for _ in range(4)]
        optimizer = torch.optim.SGD(weights, 0.1)

        def step() -> object:
            for _ in range(3):
                x: Any = 0.5
                for weight in weights:
                    y = (weight * x).sin()
                    x = (y * y.exp()).cos()
                x.sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            return weights

        return step

    harshest(program, evict=evict)


def test_memory_of_tensor_subclass_counts_in_budget() -> None:
    image, weight = vector().as_subclass(Image), Weight(vector())
    with rekindle.budget(1_000_000) as run:
        result = image * weight
        assert run.memory == 3 * 4 * WIDTH
    with pytest.raises(rekindle.OutOfBudget), rekindle.budget(2 * 4 * WIDTH, split="never"):
        result = image * weight
    assert type(result) is Image


def test_tensor_subclass_sees_only_functions_that_program_calls() -> None:
    def train() -> Counter[str]:
        torch.manual_seed(0)
        Heard.calls.clear()
        leaf = vector(requires_grad=True)
        x = leaf.as_subclass(Heard)
        for _ in range(4):
            x = (x.sin() * x).exp()
        x.sum().backward()
        return Heard.calls.copy()

    wanted = train()
    with rekindle.budget(1_000_000):
        assert train() == wanted


def test_fake_tensor_device_is_read_without_operator() -> None:
    """An `OutOfBudget` raised by an operator that reads the device would end the process."""
    with FakeTensorMode():
        network = nn.Linear(8, 8)
        with rekindle.budget.unlimited() as run:
            network(torch.randn(4, 8)).sum().backward()
    assert network.weight.grad is not None
    assert run.peak == 0  # fake tensors have no memory

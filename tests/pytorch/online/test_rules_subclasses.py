"""Tests of subclasses of tensors and parameters that handle no operators."""

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
    """As those of torchvision, MONAI or fastai."""


class Weight(nn.Parameter):
    """A parameter that carries a name, say."""


class Heard(Tensor):
    """Counts what is called with it."""

    calls: ClassVar[Counter[str]] = Counter()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.calls[getattr(func, "__name__", str(func))] += 1
        return super().__torch_function__(func, types, args, kwargs)


@evict_modes
def test_a_write_through_a_subclass(evict: Evict) -> None:
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
def test_an_optimizer_of_parameters_of_a_subclass(evict: Evict) -> None:
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


def test_memory_of_subclasses_is_counted() -> None:
    image, weight = vector().as_subclass(Image), Weight(vector())
    with rekindle.budget(1_000_000) as run:
        result = image * weight
        assert run.memory == 3 * 4 * WIDTH
    with pytest.raises(rekindle.OutOfBudget), rekindle.budget(2 * 4 * WIDTH):
        result = image * weight
    assert type(result) is Image


def test_subclass_sees_only_calls_of_program() -> None:
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
    """By an operator that the dispatcher does not have, where an error would end the process."""
    with FakeTensorMode():
        network = nn.Linear(8, 8)
        with rekindle.budget.unlimited() as run:
            network(torch.randn(4, 8)).sum().backward()
    assert network.weight.grad is not None
    assert run.peak == 0  # they have no memory
